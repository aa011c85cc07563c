"""What benchmarks of planning do with rows that earlier runs left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import planning, planning_proofs, planning_quick
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


def test_a_quick_search_s_plan_is_compared_with_the_one_that_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As run; where that is not known of both, with nothing overlapped."""
    known = {"step_s": 2.0, "overlapped_s": 1.0, "wall_s": 9.0, "failure": ""}
    normal = {"gpt2@mix-4": known, "bert@mix-4": known | {"overlapped_s": None}}
    (tmp_path / "planning.json").write_text(json.dumps({"cases": normal}))
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    monkeypatch.setattr(
        planning_quick, "planned", lambda case: planning_quick.Row(*case.split("@"), 4, 2, 3.0, 2.2, 1.65, 1.005)
    )
    assert planning_quick.main(["--only", "gpt2@mix-4,bert@mix-4", "--out", str(tmp_path)]) == 0
    body = json.loads((tmp_path / "planning_quick.json").read_text())
    assert [case["longer"] for case in body["cases"].values()] == pytest.approx([0.005, 0.1])
    figures = body["figures"]
    assert figures["cases_to_128_within_1_percent"] == 1 and figures["worst_longer_to_128"] == pytest.approx(0.1)
    assert figures["worst_seconds_to_16"] == 3.0 and figures["worst_gap_to_128"] == pytest.approx(0.25)
    with pytest.raises(SystemExit):
        planning_quick.main(["--only", "vit@mix-4", "--out", str(tmp_path)])
    assert "planning.py has no plan of vit@mix-4" in capsys.readouterr().err
