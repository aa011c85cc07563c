"""README's tables are those of the results, by the one command that makes them."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import readme
from benchmarks.diagnose import Row
from benchmarks.diagnose_rank import Fault
from benchmarks.readme import README, SECTIONS, filled

ABOUT = {"command": "python benchmarks/x.py", "commit": "abc", "machine": {"cores": 2, "cpu": "CPU"}}


def written(folder: Path, name: str, cases: object = None, **figures: float) -> str:
    (folder / f"{name}.json").write_text(json.dumps({**ABOUT, "figures": figures, "cases": cases}))
    return filled(f"before\n<!-- {name} -->\nold\n<!-- /{name} -->\nafter\n", folder)


def test_readme_is_in_step_with_the_results() -> None:
    assert readme.main(["--check"]) == 0, "run: make readme"


def test_readme_shows_every_benchmark_once() -> None:
    assert sorted(re.findall(r"<!-- (\w+) -->", README.read_text())) == sorted(SECTIONS)


def test_the_race(tmp_path: Path) -> None:
    text = written(
        tmp_path,
        "race",
        over_best_baseline_A_weak_host=1.5,
        over_best_baseline_A_equal=0.904,
        over_best_baseline_B_equal=2.0,
        geomean_over_best_baseline_unequal=1.5,
        best_over_equal_ddp=11.42,
    )
    assert (
        "old" not in text and text.startswith("before\n<!-- race -->\n|") and text.endswith("<!-- /race -->\nafter\n")
    )
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == ["", "weak host", "equal"] and lines[2:] == [["A", "1.50", "0.90"], ["B", "-", "2.00"]]
    assert "Slower than the best baseline in 1 of 3 cases, at worst 0.90 times as fast." in text
    assert "Geometric mean of the unequal clusters: 1.50." in text and "up to 11.4." in text
    assert "(benchmarks/results/race.md); `python benchmarks/x.py` at abc, 2 cores of CPU)" in text


def test_what_is_of_several_commits_says_which(tmp_path: Path) -> None:
    (tmp_path / "accuracy").mkdir()
    for name, commit in (("equal", "abc"), ("memory", "abc"), ("public", "abc")):
        (tmp_path / "accuracy" / f"{name}.json").write_text(json.dumps({"commit": commit}))
    assert "several runs" not in written(tmp_path, "accuracy", step_time_median_error=0.05)
    (tmp_path / "accuracy" / "public.json").write_text(json.dumps({"commit": "def"}))
    text = written(tmp_path, "accuracy", step_time_median_error=0.05)
    assert "--only ... --cluster ...`: equal, memory at abc; public at def." in text
    entries = {who: {"steps_s": [s]} for who, s in (("HAP", 1.0), ("DDP", 3.0), ("FSDP2", 4.0))}
    before = {"commit": "abc", "cluster": "links", "entries": entries, "shape": ""}
    alone = {"one device": {"steps_s": [1.1]}}
    now = {"commit": "def", "cluster": "both", "entries": entries | alone, "shape": "batch on one, 100%, without a"}
    text = written(tmp_path, "race", [before, now])
    assert "--clusters ...`: links at abc; both at def." in text
    assert "keep all devices, where the others took part, too: 3.00 to 3.00, geometric mean 3.00." in text
    assert "HAP leaves devices out in 1 of 1 cases, in 1 of these all but one. Links: raced before one device" in text


def test_the_others(tmp_path: Path) -> None:
    counts = {"models_total": 30, "models_planned": 29, "models_equal": 28, "models_wrong": 0, "rules_missing": 1}
    text = written(tmp_path, "zoo", **counts, worst_relative_error=3e-12)
    assert "Of 30 models 29 are planned" in text and "28 are equal" in text and "3.0e-12" in text
    case = {"wall_s": 1.26, "gap": 0.031, "step_s": 0.1, "overlapped_s": 0.08, "bound_s": 0.0969, "failure": ""}
    case |= {"overlapped_bound_s": 0.06, "gap_as_run": 0.25}
    text = written(tmp_path, "planning", {"a@b": case, "c@d": case | {"failure": "too large"}})
    row = r"\| a@b +\| +1\.3 \| +80 ms \| +60 ms \| 25\.0% \| +100 ms \| +97 ms \| +3\.1% \|"
    assert re.search(row, text) and "no bound can close" not in text
    assert not re.search(r"\| c@d", text) and "Not planned: c@d (too large)." in text and "of several runs" not in text
    at = [{"commit": commit, "cpu": "CPU"} for commit in ("abc", "def")]
    text = written(tmp_path, "planning", {"a@b": case | at[0], "c@d": case | at[1]})
    assert "`python benchmarks/planning.py --only ...`: a@b at abc on CPU; c@d at def on CPU." in text
    gaps = {"that_no_bound_can_close": 0.211, "of_the_shortest_found": 0.181}
    text = written(tmp_path, "planning", {"a@b": case}, **{f"worst_gap_to_128_{k}": v for k, v in gaps.items()})
    assert "by up to 21.1%, which" in text and "at most 18.1% below" in text
    case = {"wall_s": 2.94, "normal_wall_s": 6.28, "longer": 0.062, "gap": 0.151}
    counts = {"cases_to_128": 20, "cases_to_128_within_1_percent": 16, "worst_longer_to_128": 0.44}
    counts |= {"worst_seconds_to_16": 5.0, "worst_seconds_to_128": 7.04}
    text = written(tmp_path, "planning_quick", {"a@b": case}, **counts)
    assert re.search(r"\| a@b +\| +2\.9 \| +6\.3 \| +\+6\.2% \| 15\.1% \|", text)
    assert "At most 5.0 s to 16 devices and 7.0 s to 128. Of 20 steps as run 16 are within 1% of" in text
    case = {"wall_s": 41.2, "cpu": "CPU", "normal_gap": 0.066, "step_s": 0.1, "bound_s": 0.0972}
    counts = {"cases_to_128": 20, "cases_to_128_within_3_percent": 11, "the_same_by_planning_alone": 9}
    text = written(tmp_path, "planning_proofs", {"a@b": case}, **counts)
    assert re.search(r"\| a@b +\| +41 \| CPU \| +6\.6% \| +2\.8% \|", text)
    assert "Of 20 cases to 128 devices 11 are proved" in text
    text = written(tmp_path, "accuracy", step_time_median_error=0.0903, kendall_tau_worst_cluster=0.78)
    assert re.search(r"step time with all passes off, median error +\| +9\.0% ", text) and "| 0.78 |" in text
    assert "at most 1.03 times" in written(tmp_path, "collectives", worst_chosen_over_bound=1.03)


def test_steps_as_run_are_those_of_the_race(tmp_path: Path) -> None:
    """Beside those with passes off, which a profile predicts best."""
    entries = {"HAP": {"steps_s": [1.0, 2.0, 9.0]}}
    cases = [{"overlapped_s": s, "entries": entries} for s in (1.9, 2.5, 2.2)]
    (tmp_path / "race.json").write_text(json.dumps({"cases": cases}))
    figures = {"step_time_median_error": 0.05, "public_data_median_error": 0.07, "public_data_90_percent_below": 0.4}
    text = written(tmp_path, "accuracy", **figures)
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")][1:]
    assert [(words.strip(), value.strip()) for words, value in rows[1:]] == [
        ("step time with all passes off, median error", "5.0%"),
        ("step time as run, passes on (the 3 cases of `benchmarks/race.py`), median error", "10.0%"),
        ("step time as run, passes on (the 3 cases of `benchmarks/race.py`), worst error", "25.0%"),
        (
            "public GPU measurements (fitted on a third of each group, forms chosen on the same data), median error",
            "7.0%",
        ),
        ("the same, 90 % are below", "40.0%"),
    ]


def test_families_of_several_commits_say_how_many_are_of_which(tmp_path: Path) -> None:
    counts = {"families": 4, "families_built": 3, "families_equal": 3, "families_not_equal": 0, "worst_error": 1e-9}
    cases = [{"name": str(i), "refused": "", "failed": "", "commit": "old" if i else "abc"} for i in range(4)]
    text = written(tmp_path, "families", cases, **counts)
    assert "Of 4 model families of Hugging Face transformers 3 could be built and run at small sizes" in text
    assert "`python benchmarks/x.py`, rows: 3 at old, 1 at abc; the last run on 2 cores of CPU)" in text


def test_what_was_found_with_one_rank_with_two_and_with_all() -> None:
    def row(what: str, rank: int, found: str, *ranks: int) -> Row:
        return Row("job", Fault(what, rank), (found,), ranks, None, None)

    found = [
        row("computes slowly", 1, "compute straggler", 1),
        row("sends slowly", 1, "slow link", 1, 0),
        row("sends slowly", 0, "slow link", 1, 0),
        row("link cut", 2, "communication hang", 0, 1, 2, 3),
    ]
    assert [one.names for one in found] == ["rank", "link", "", "several"]


def test_what_was_not_run_is_said(tmp_path: Path) -> None:
    text = filled("<!-- zoo -->\n<!-- /zoo -->\n", tmp_path)
    assert text == "<!-- zoo -->\nNot measured yet: `python benchmarks/zoo.py`.\n<!-- /zoo -->\n"


@pytest.mark.parametrize("text", ["<!-- race -->\n", "<!-- nothing -->\n<!-- /nothing -->\n"])
def test_marks_that_make_no_sense(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not closed|no such section"):
        filled(text, tmp_path)
