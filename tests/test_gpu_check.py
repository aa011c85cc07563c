"""``benchmarks/gpu_check.py``: rehearsed on the CPU, its items judged, and its word where there is no GPU."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check_cost as cost
from benchmarks import gpu_check_fork as fork
from benchmarks import gpu_check_ranks as ranks
from benchmarks.gpu_check import CHECKS, main
from benchmarks.gpu_check_cost import Item, Setting
from benchmarks.gpu_check_ranks import relative
from benchmarks.gpu_check_record import FAULTS, out_of_order, told_of
from hap.diagnosis.run import Run
from hap.run_record import PLAN
from tests._support.jobs import job, plan_of, steady
from tests.test_run_record import write

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@without_gpu
def test_without_a_gpu_it_says_so_and_exits_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 3
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("no GPU here: nothing was checked") and err.count("\n") == 1


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_whole_rehearsal(tmp_path: Path) -> None:
    assert main(["--cpu", "--out", str(tmp_path)]) == 0
    items = json.loads((tmp_path / "gpu_check_rehearsal.json").read_text())["items"]
    assert [i["name"] for i in items] == [
        "one-rank",
        "collectives",
        "ranks",
        "acco",
        "hosts",
        "fork",
        "recorded",
        "mesh-record",
        "mesh-acco",
        "reduce-dtype",
        "attention",
        "random",
        "overhead",
        "compiled",
        "both",
        "no-sync",
        "memory",
        "curves",
        "step",
    ]
    assert [i["verdict"] for i in items[:12]] == ["pass"] * 12 and {i["verdict"] for i in items[12:]} == {"ran"}


def test_the_rehearsal_of_what_runs_in_one_process(tmp_path: Path) -> None:
    only = [f"--only={name}" for name in ("one-rank", "attention", "random", "overhead", "no-sync")]
    assert main(["--cpu", *only, "--out", str(tmp_path)]) == 0
    body = json.loads((tmp_path / "gpu_check_rehearsal.json").read_text())
    judged, timed = ("one-rank", "attention", "random"), ("overhead", "compiled", "both", "no-sync")
    assert {i["name"]: i["verdict"] for i in body["items"]} == dict.fromkeys(judged, "pass") | dict.fromkeys(
        timed, "ran"
    )
    assert 0 < body["items"][0]["figures"]["relative_difference"] < 1e-10


def test_a_check_that_breaks_has_failed_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(setting: Setting) -> Item:
        raise ValueError("two\nlines")

    monkeypatch.setitem(CHECKS, "ranks", broken)
    monkeypatch.setitem(CHECKS, "curves", lambda setting: Item("curves", "ran", "fine"))
    assert main(["--cpu", "--only", "ranks", "--only", "curves", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "FAIL  ranks" in out and "ValueError: two lines" in out and "ran  curves" in out


def test_items_that_are_not_checked_stay_with_their_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``compiled`` is found by the check of ``overhead``. No item joins those of other GPUs."""
    made = ("overhead", "compiled", "both")
    monkeypatch.setitem(CHECKS, "overhead", lambda setting: [Item(name, "ran", "fine") for name in made])
    monkeypatch.setitem(CHECKS, "random", lambda setting: Item("random", "ran", "fine"))
    given, path = ["--cpu", "--out", str(tmp_path)], tmp_path / "gpu_check_rehearsal.json"
    assert main([*given, "--only", "random", "--commit", "old"]) == 0
    assert main([*given, "--only", "compiled", "--commit", "new", "--rounds", "2"]) == 0
    body = json.loads(path.read_text())
    assert [(i["name"], i["commit"]) for i in body["items"]] == [("random", "old"), *((name, "new") for name in made)]
    assert body["command"] == "python benchmarks/gpu_check.py --cpu --only compiled --commit new --rounds 2"
    assert body["items"][0]["command"] == "python benchmarks/gpu_check.py --cpu --only random --commit old"
    path.write_text(json.dumps(body | {"machine": {"gpus": ["Another, 1.2"]}}))
    with pytest.raises(SystemExit, match="another folder"):
        main([*given, "--only", "random"])


def test_without_a_compiler_an_item_is_left_out_but_what_is_ours_must_run() -> None:
    def broken() -> None:
        raise torch._dynamo.exc.TorchDynamoException("no compiler here")

    fine = dict.fromkeys(("program", "eager", "compiled", "program.compile()"), lambda: None)
    assert cost._warm(dict(fine)) == ""
    steps = fine | {"compiled": broken}
    assert "no compiler here" in cost._warm(steps) and set(steps) == {"program", "eager"}
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        cost._warm(fine | {"program.compile()": broken})


def test_a_rehearsal_judges_no_timing_and_a_gpu_does() -> None:
    samples = {"program": [1.1, 1.2, 1.05], "eager": [1.0, 1.0, 1.0]}
    on_cpu, on_gpu = Setting(0, 2, 1, 1, 3), Setting(1, 3, 1, 1, 3)
    assert cost._beside(on_cpu, "overhead", samples, ("program", "eager"), 0.02).verdict == "ran"
    judged = cost._beside(on_gpu, "overhead", samples, ("program", "eager"), 0.02)
    assert judged.verdict == "FAIL" and judged.figures["overhead"] == pytest.approx(0.1)
    assert cost._beside(on_gpu, "overhead", samples, ("program", "eager"), 0.11).verdict == "pass"
    assert (on_cpu.on, on_gpu.on) == ("2 ranks", "3 ranks that share 1 GPU")


def test_a_difference_that_is_no_number_is_infinite() -> None:
    assert relative(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])) == 0.5
    assert relative(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")


def test_ranks_that_are_not_done_in_time_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[str] = []

    class Stuck:
        def is_alive(self) -> bool:
            return True

        def kill(self) -> None:
            killed.append("one")

    class Context:
        processes = (Stuck(), Stuck())

        def join(self, seconds: float) -> bool:
            return False

    monkeypatch.setattr(ranks.multiprocessing, "start_processes", lambda *_, **__: Context())
    with pytest.raises(TimeoutError, match=r"^of 2 ranks \[0, 1\] were not done after 0 s$"):
        ranks.start_ranks(2, False, ranks.tiny, limit_s=0.0)
    assert killed == ["one"] * 2


def test_what_is_wrong_beside_a_forked_process_is_told() -> None:
    fine = {"nodes": 570, "forked": 2, "left": 0, "plans": ["a", "a"], "difference": 1e-13}
    others = fine | {"forked": 0}
    assert fork._wrong([fine, others]) == ""
    assert fork._wrong([fine | {"forked": 0}]) == "570 nodes, and 0 forks"
    assert fork._wrong([fine, others | {"left": 1}]) == "1 left"
    assert fork._wrong([fine | {"plans": ["a", "b"]}, fine]) == (
        "a rank that does not plan forked, the plan is another one without"
    )
    assert fork._wrong([fine | {"difference": float("nan")}]) == "wrong results"


def test_what_a_recorded_run_tells_is_judged(tmp_path: Path) -> None:
    compute, outside = steady((0.1, 0.1, 0.1), steps=24)
    compute[12:, 1] *= 3
    run = job(compute, outside)
    write(tmp_path, run.ranks)
    plan_of((0.1, 0.1, 0.1)).save(tmp_path / PLAN)
    assert out_of_order(run) == 0
    assert told_of(tmp_path, FAULTS["slow stream"], [], shared=True)[0]
    assert not told_of(tmp_path, FAULTS["late host"], [], shared=True)[0]
    assert [told_of(tmp_path, FAULTS["well"], [], shared)[0] for shared in (True, False)] == [True, False]
    said = [{"standing": ""}, {"standing": "non-communication hang of 1"}]
    assert told_of(tmp_path, FAULTS["stands"], said, shared=True) == (True, "non-communication hang of 1")
    turned = [line.model_copy(update={"calls": ((1, 0, 5, 4),)}) for line in run.ranks[0].steps]
    broken = Run((run.ranks[0]._replace(steps=tuple(turned)), *run.ranks[1:]), None)
    assert out_of_order(broken) == len(broken.steps)
