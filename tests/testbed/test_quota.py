"""The cross-check of deadlines by quotas: who wins, who ties, in what order, and how runs of some cases are merged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import testbed_quota
from benchmarks.common import parse
from benchmarks.testbed_quota import Case, CasesReport, Played, known_cases, merged, middle_half, tau, tell, verdict


def played(**steps: Sequence[float]) -> Played:
    return Played({who: tuple(seconds) for who, seconds in steps.items()}, 0.0, None, 0, 0.0)


def around(middle: float, half: float = 0.5) -> tuple[float, ...]:
    """Five steps with this median whose middle half is ``half`` wide."""
    return (middle - half, middle - half / 2, middle, middle + half / 2, middle + half)


def case(model: str, cluster: str, deadline: Played, quota: Played | None, commit: str = "a") -> Case:
    return Case(model, cluster, commit, dict.fromkeys(deadline.steps_s, 1.0), (0.5, 0.5), deadline, quota)


CLEAR = played(a=around(1), b=around(3), c=around(5))


def test_the_spread_is_the_middle_half_and_no_outlier_counts() -> None:
    assert middle_half((1.0, 2.0, 3.0, 4.0, 100.0)) == 2.0


def test_plans_are_apart_by_more_than_the_greater_spread() -> None:
    run = played(a=around(1.0, 0.1), b=around(2.0, 1.0), c=around(2.1, 1.0))
    assert not run.apart("a", "b")  # 1.0 is not more than 1.0
    assert run.apart("a", "c") and not run.apart("b", "c")


def test_the_ranking_is_by_median_and_says_who_ties() -> None:
    run = played(slow=around(4), fast=around(1), near=around(1.25))
    assert run.ranking == ("fast", "near", "slow")
    assert run.said == "fast = near < slow"
    assert run.winners == ("fast", "near")


def test_a_verdict_needs_one_winner_in_each_mode() -> None:
    assert verdict(CLEAR, played(a=around(2), b=around(9), c=around(8))) == "same"
    assert verdict(CLEAR, played(a=around(3), b=around(1), c=around(8))) == "different"
    assert verdict(CLEAR, played(a=around(1), b=around(1.2), c=around(8))) == "tie"
    assert verdict(played(a=around(1), b=around(1.2), c=around(8)), CLEAR) == "tie"


def test_tau_counts_pairs_that_agree_less_those_that_do_not() -> None:
    assert tau(CLEAR, CLEAR, clear=False) == (1.0, 3)
    swapped = played(a=around(1), b=around(5), c=around(3))
    assert tau(CLEAR, swapped, clear=False) == (pytest.approx(1 / 3), 3)
    assert tau(CLEAR, played(a=around(5), b=around(3), c=around(1)), clear=False) == (-1.0, 3)


def test_clear_pairs_tie_in_neither_mode() -> None:
    close = played(a=around(1), b=around(3.2), c=around(3.0))
    assert tau(CLEAR, close, clear=False) == (pytest.approx(1 / 3), 3)
    assert tau(CLEAR, close, clear=True) == (1.0, 2)
    assert tau(CLEAR, played(a=around(1), b=around(1.1), c=around(1.2)), clear=True) is None


def test_new_cases_replace_those_of_their_name_in_a_fixed_order() -> None:
    old = [case("VGG", "both", CLEAR, CLEAR), case("GPT-2", "compute", CLEAR, CLEAR)]
    new = [case("GPT-2", "both", CLEAR, CLEAR, "b"), case("VGG", "both", CLEAR, CLEAR, "b")]
    found = [(c.name, c.commit) for c in merged(old, new)]
    assert found == [("GPT-2, compute", "a"), ("GPT-2, both", "b"), ("VGG, both", "b")]


def test_figures_and_cases_are_written_and_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = parse(testbed_quota.NAME, "", ["--out", str(tmp_path)])
    assert known_cases(options) == []
    other = played(a=around(3), b=around(1), c=around(8))
    cases = [
        case("GPT-2", "compute", CLEAR, CLEAR),
        case("VGG", "compute", CLEAR, other),
        case("ViT", "compute", CLEAR, played(a=around(1), b=around(1.2), c=around(8))),
    ]
    tell(CasesReport(testbed_quota.NAME, "", options), cases, None)
    body = json.loads((tmp_path / "testbed_quota.json").read_text())
    assert {k: v for k, v in body["figures"].items() if not k.startswith("tau")} == {
        "cases": 3,
        "same_winner": 1,
        "tied_winner": 1,
        "other_winner": 1,
        "clear_pairs": 8,  # all three, all three, and in the last case those with c
        "clear_pairs_alike": 7,
    }
    assert body["figures"]["tau_worst_case"] == pytest.approx(1 / 3)  # of VGG: a and b have changed places
    assert body["figures"]["tau_GPT-2_compute"] == 1.0
    assert [asdict(c) for c in known_cases(options)] == [asdict(c) for c in cases] and known_cases(options) == cases
    assert "a < b < c" in capsys.readouterr().out


def test_without_a_quota_the_figures_are_absent_with_the_reason(tmp_path: Path) -> None:
    options = parse(testbed_quota.NAME, "", ["--out", str(tmp_path)])
    tell(CasesReport(testbed_quota.NAME, "", options), [case("GPT-2", "both", CLEAR, None)], "needs root")
    body = json.loads((tmp_path / "testbed_quota.json").read_text())
    assert body["figures"] == {} and "needs root" in body["absent"].values()
