"""What benchmarks of planning do with rows that earlier runs left."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planning, planning_mesh, planning_proofs, planning_quick
from benchmarks.planning_cases import PER_DEVICE, SMALL
from benchmarks.planning_proofs import Row

EVERY = [f"{model}@{name}" for name in SMALL for model in PER_DEVICE]


def test_no_tables_are_made_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        planning.main(["--tables", "--out", str(tmp_path)])
    assert "has no result of this benchmark" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def row(case: str, **others: Any) -> planning.Row:
    return planning.Row(*case.split("@"), 4, 2.0, 1.0, **{"step_s": 1.0, "bound_s": 0.9, **others})


def test_rows_that_are_not_planned_again_stay_with_their_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of cases outside the usual ones, too; a run that is cut off has named its rows already."""
    monkeypatch.setattr(planning, "machine", lambda: {"cpu": "here"})
    monkeypatch.setattr(planning, "_timed", lambda case, batches: row(case))

    def ask(*given: str) -> dict[str, dict[str, Any]]:
        assert planning.main([*given, "--out", str(tmp_path)]) == 0
        return json.loads((tmp_path / "planning.json").read_text())["cases"]  # type: ignore[no-any-return]

    old = {
        case: {k: v for k, v in asdict(row(case)).items() if k not in ("commit", "cpu", "batches")} for case in EVERY
    }
    for model in ("mixtral_4_layers", "mixtral_8x7b"):
        old[f"{model}@mix-32"] = old["gpt2@mix-4"] | {"model": model, "cluster": "mix-32"}
    about = {"command": "python benchmarks/planning.py", "commit": "old", "machine": {"cpu": "there"}}
    (tmp_path / "planning.json").write_text(json.dumps(about | {"cases": old}))
    monkeypatch.setattr("benchmarks.common.commit", lambda: "new")
    found = ask("--only", "resnet50@mix-4,bert@mix-4")
    assert {case for case, kept in found.items() if kept["commit"] == "new"} == {"resnet50@mix-4", "bert@mix-4"}
    assert found["gpt2@mix-4"]["cpu"] == "there" and found["bert@mix-4"]["cpu"] == "here"
    assert {"mixtral_4_layers@mix-32", "mixtral_8x7b@mix-32"} < set(ask("--tables"))
    assert "Rows are of several runs: 21 at old on there, 2 at new on here." in (tmp_path / "planning.md").read_text()

    def cut(case: str, batches: int) -> planning.Row:
        if case == "vit@mix-4":
            raise KeyboardInterrupt
        return row(case)

    monkeypatch.setattr(planning, "_timed", cut)
    monkeypatch.setattr("benchmarks.common.commit", lambda: "third")
    with pytest.raises(KeyboardInterrupt):
        planning.main(["--out", str(tmp_path)])
    left = json.loads((tmp_path / "planning.json").read_text())["cases"]
    assert {case: kept["commit"] for case, kept in left.items() if kept["commit"] != "old"} == {
        "gpt2@mix-4": "third",
        "bert@mix-4": "third",
        "resnet50@mix-4": "new",
    }


@pytest.mark.parametrize("benchmark", [planning, planning_mesh, planning_proofs, planning_quick])
def test_a_case_that_there_is_not_is_refused_in_a_line(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(["--only", "gpt2@nowhere", "--out", str(tmp_path)])
    assert "--only: no such case: 'gpt2@nowhere' (known: bert" in capsys.readouterr().err.splitlines()[-1]


def test_a_report_is_made_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = []
    monkeypatch.setattr("benchmarks.common.commit", lambda: commits.append("taken"))
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)

    def compared(case: str) -> planning_mesh.Row:
        assert commits
        return planning_mesh.Row(case)

    monkeypatch.setattr(planning_mesh, "compare", compared)
    planning_mesh.main(["--only", "llama_7b/8@2x4", "--out", str(tmp_path)])


def test_quick_runs_follow_one_another_in_a_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the committed plans, or those that a quick ``planning.py`` has left, of which one may have failed."""
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    monkeypatch.setattr(planning_proofs, "proved", lambda case: Row(*case.split("@"), 60.0, 1.0, 0.98, "this CPU"))
    monkeypatch.setattr(
        planning_quick, "planned", lambda case: planning_quick.Row(*case.split("@"), 4, 2, 3.0, 2.2, 1.65, 1.005)
    )
    given = ["--quick", "--out", str(tmp_path)]
    assert planning_quick.main(given) == 0
    monkeypatch.setattr(planning, "_timed", lambda case, batches: row(case, failure="none fits" * ("vgg" in case)))
    assert planning.main(given) == planning_quick.main(given) == planning_proofs.main(given) == 0
    assert "vgg19@mix-16: left out, as planning.py has no plan of it" in capsys.readouterr().err
    assert list(json.loads((tmp_path / "planning_quick.json").read_text())["cases"]) == ["gpt2@mix-4"]
    with pytest.raises(SystemExit):
        planning_proofs.main(["--only", "vgg19@mix-16", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        planning_proofs.main(["--only", "llama_7b@mix-32", "--out", str(tmp_path)])
    err = capsys.readouterr().err
    assert "has no plan of vgg19@mix-16" in err and "llama_7b@mix-32: not one of the cases on up to 128" in err


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
