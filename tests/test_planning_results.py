"""What benchmarks of planning do with rows that earlier runs left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import planning, planning_proofs
from benchmarks.planning_cases import PER_DEVICE, SMALL
from benchmarks.planning_proofs import Row

EVERY = [f"{model}@{name}" for name in SMALL for model in PER_DEVICE]


def test_no_tables_are_made_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        planning.main(["--tables", "--out", str(tmp_path)])
    assert "has no result of this benchmark" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_proof_counts_only_for_the_plan_that_there_still_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    normal = {case: {"step_s": 1.0, "gap": 0.1} for case in EVERY}
    (tmp_path / "planning.json").write_text(json.dumps({"cases": normal}))
    monkeypatch.setattr(planning_proofs, "proved", lambda case: Row(*case.split("@"), 60.0, 1.0, 0.98, "this CPU"))
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)

    def ask(*cases: str) -> dict[str, dict[str, dict[str, object]]]:
        assert planning_proofs.main(["--only", ",".join(cases), "--out", str(tmp_path)]) == 0
        return json.loads((tmp_path / "planning_proofs.json").read_text())  # type: ignore[no-any-return]

    both = ask("gpt2@mix-4", "bert@mix-4")
    assert list(both["cases"]) == ["gpt2@mix-4", "bert@mix-4"] and not both["absent"]
    normal["gpt2@mix-4"]["step_s"], normal["bert@mix-4"]["gap"] = 0.9, 0.2
    (tmp_path / "planning.json").write_text(json.dumps({"cases": normal}))
    after = ask("vit@mix-4")
    assert list(after["cases"]) == ["bert@mix-4", "vit@mix-4"] and list(after["absent"]) == ["gpt2@mix-4"]
    assert after["cases"]["bert@mix-4"]["normal_gap"] == 0.2 and after["cases"]["vit@mix-4"]["cpu"] == "this CPU"
    text = (tmp_path / "planning_proofs.md").read_text()
    assert "Not measured: `gpt2@mix-4`: planning.py has another plan by now" in text
    for row in normal.values():
        row["step_s"] = 0.9
    (tmp_path / "planning.json").write_text(json.dumps({"cases": normal}))
    with pytest.raises(SystemExit):
        ask("gpt2@mix-4")
