"""What ``benchmarks/accuracy.py`` counts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import accuracy
from benchmarks.accuracy_steps import Call, Row, distinct, kendall_tau

ONE = Row("equal", "mlp", "planner", 1.0, (1.1, 1.2, 1.3), 0.0, (Call("all_reduce", "ring", 8, 0.1, 0.2),))


def test_a_plan_under_two_names_is_one() -> None:
    """Another model's, another prediction's and other collectives' plans are plans of their own, however measured."""
    twin = replace(ONE, plan="data parallel", steps_s=(2.0, 2.0, 2.0))
    others = [replace(ONE, model="gpt"), replace(ONE, predicted_s=1.0 + 1e-15), replace(ONE, calls=())]
    others += [replace(ONE, calls=(replace(ONE.calls[0], decomposition="owners[0]"),))]
    assert distinct([ONE, twin, *others]) == [ONE, *others]


def test_tau_counts_pairs() -> None:
    """Of three pairs two agree, the one that does not is closer than half; what is predicted alike is not agreed on."""
    predicted, measured = [1.0, 2.0, 3.0], [1.0, 2.5, 2.0]
    assert kendall_tau(predicted, measured) == (pytest.approx(1 / 3), 3)
    assert kendall_tau(predicted, measured, tolerance=0.5) == (1.0, 2)
    assert kendall_tau([1.0, 1.0], [1.0, 2.0]) == (-1.0, 1)


def test_a_slice_tells_its_commit_and_cpu_and_tables_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the beginning of the run; made again, they are of the run that measured."""
    held = [{"predicted_s": 1.0 + n / 10, "measured_s": 1.0} for n in range(11)]
    public = [{"name": "theirs", "fitted": 5, "held": held, "left_out": 0}]
    monkeypatch.setattr(accuracy, "measure", lambda name, quick: public)
    monkeypatch.setattr(accuracy, "machine", lambda: {"cpu": "this CPU"})
    commits = iter(("first", "second"))
    monkeypatch.setattr("benchmarks.common.commit", lambda: next(commits))

    def ask(only: str) -> dict[str, Any]:
        accuracy.main(["--only", only, "--out", str(tmp_path)])
        return json.loads((tmp_path / "accuracy.json").read_text())  # type: ignore[no-any-return]

    assert ask("public")["figures"]["public_data_90_percent_below"] == pytest.approx(0.9)
    kept = json.loads((tmp_path / "accuracy" / "public.json").read_text())
    assert (kept["commit"], kept["cpu"]) == ("first", "this CPU")
    again = ask("")
    assert (again["commit"], again["command"]) == ("first", "python benchmarks/accuracy.py --only public")
    assert "this CPU" in (tmp_path / "accuracy.md").read_text()
