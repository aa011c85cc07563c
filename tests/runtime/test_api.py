"""``hap.plan`` and ``hap.compile`` on real ranks: the planner's plan trains, and disagreements reach every rank."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hap
from hap import api
from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.runtime import p2p
from hap.runtime.collectives import Communicator
from hap.search.pins import check_pins
from hap.together import join
from tests._support import gpt2
from tests._support.lab import LAB, lab
from tests._support.plans import replicated_plan
from tests._support.ranks import run_ranks
from tests.report.test_mesh import of_two

ONE = """
name: one
backend: gloo
hosts: [{name: a, devices: [{tflops: {float32: 1, float64: 1}, memory: 8GB, memory_bandwidth: 9GB/s}]}]
"""


def arguments(**changes: Any) -> dict[str, Any]:
    return {
        "example_inputs": (gpt2.batch(),),
        "example_targets": gpt2.batch(),
        "loss_fn": gpt2.lm_loss,
        "effort": "quick",
    } | changes


PLANNED = (4, 2, 2)


@cache
def pinned_plan() -> hap.Plan:
    """Data parallel: the batch in given shares."""
    pins = hap.Pins(placements={"*": "R", "args.0": "S(0)"}, sizes={"batch": PLANNED})
    return hap.plan(bigram(), lab(), **arguments(pins=pins))


def refusal(work: Any) -> str:
    """What ``work`` is refused with, as ``TypeName: message``."""
    try:
        work()
    except ValueError as e:
        return f"{type(e).__name__}: {e}"
    return "accepted"


def compile_and_compare(rank: int) -> dict[str, Any]:
    """The planner's own choice against one process, then everything that must be refused."""
    program = hap.compile(gpt2.build(seed=rank), lab(), **arguments())
    model, ids = gpt2.build(), gpt2.batch(1)
    share, target = program.shard_batch((ids,), ids)
    loss = program(*share, targets=target)
    loss.backward()
    expected = gpt2.lm_loss(model(ids), ids)
    expected.backward()
    whole = program.full_gradients()
    worst = max(
        float((whole[name] - p.grad).abs().max() / p.grad.abs().max())
        for name, p in model.named_parameters()
        if p.grad is not None
    )
    return {
        "sizes": dict(program.plan.sizes),
        "checksum": program.plan.checksum,
        "loss": abs(loss.item() - expected.item()) / expected.item(),
        "gradient": worst,
    } | refusals(rank)


def bigram(width: int = 8) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Embedding(gpt2.VOCABULARY, width), torch.nn.Linear(width, gpt2.VOCABULARY))


def refusals(rank: int) -> dict[str, str]:
    """What each way of disagreeing is refused with on this rank; a small model, since each captures anew."""
    plan = hap.compile(bigram(), lab(), **arguments()).plan
    mine = plan.model_copy(update={"devices": ("a", "b", "c")}) if rank == 2 else plan
    four = ClusterSpec.from_yaml(LAB.replace("{name: slow,", "{name: slow, count: 2,"))
    gpus = lab().model_copy(update={"backend": "nccl"})
    renamed = ClusterSpec.from_yaml(LAB.replace("name: lab", "name: attic"))
    pins = hap.Pins(placements={"no.such": "R"}) if rank == 0 else None
    file = "no/such.plan" if rank == 0 else plan
    ways: dict[str, tuple[torch.nn.Module, ClusterSpec | None, dict[str, Any]]] = {
        "nothing": (bigram(), lab(), {"plan": plan}),
        "other model": (bigram(8 + (rank == 1)), lab(), {}),
        "other plan": (bigram(), None, {"plan": mine}),
        "other cluster": (bigram(), renamed, {"plan": plan}),
        "too many devices": (bigram(), four, {}),
        "GPUs on CPUs": (bigram(), gpus, {}),
        "GPUs on CPUs, asked for": (bigram(), gpus, {"device": "cpu"}),
        "rank 0's file": (bigram(), None, {"plan": file}),
        "one rank's optimizer": (bigram(), None, {"plan": plan, "optimizer": "sgd" if rank == 1 else None}),
        "rank 0's pins": (bigram(), lab(), {"pins": pins}),
        "one rank's bug": (bigram(), lab(), {"loss_fn": broken_on_rank_one}),
    }
    return {
        name: refusal(lambda m=model, c=cluster, x=changes: hap.compile(m, c, **arguments(**x)))
        for name, (model, cluster, changes) in ways.items()
    }


def broken_on_rank_one(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == 1:
        raise KeyError("nothing\nhere")
    return gpt2.lm_loss(logits, labels)


@pytest.fixture(scope="module")
def compared() -> list[dict[str, Any]]:
    return run_ranks(3, compile_and_compare)


def test_the_planners_own_choice_equals_one_process(compared: list[dict[str, Any]]) -> None:
    for rank in compared:
        assert rank["loss"] < 1e-10 and rank["gradient"] < 1e-10
    assert compared[0]["sizes"], "with slow devices and a quick network the work is shared"
    assert len({rank["checksum"] for rank in compared}) == 1


EXPECTED = {
    "nothing": "accepted",
    "other model": "PlanError: the model of rank 1 differs from rank 0's",
    "other plan": "PlanError: the plan of rank 2 differs from rank 0's",
    "other cluster": "PlanError: the plan is for cluster 'lab' (",
    "too many devices": "ClusterError: 3 ranks, but cluster 'lab' describes 4 devices",
    "GPUs on CPUs": "ClusterError: the cluster's backend is nccl, and this job's process group is of cpu:gloo",
    "GPUs on CPUs, asked for": "accepted",
    "rank 0's file": "PlanError: no/such.plan: cannot read plan",
    "one rank's optimizer": "PlanError: the plan is for adamw, and optimizer is sgd; plan again, or leave that out",
    "rank 0's pins": "PlanError: pin 'no.such' matches no parameter and no input",
    "one rank's bug": "CaptureError: ",
}


@pytest.mark.parametrize("what", EXPECTED)
def test_every_rank_is_refused_in_the_same_words(what: str, compared: list[dict[str, Any]]) -> None:
    said = {rank[what] for rank in compared}
    assert len(said) == 1 and "\n" not in min(said)
    assert min(said).startswith(EXPECTED[what])


def compile_on_a_group_of_no_named_backend(rank: int, folder: str) -> tuple[str, str, float]:
    """What the group is, where the program runs, its loss. Messages go as on Gloo, which it is: not in rounds."""
    p2p._batch = None  # type: ignore[assignment]
    dist.barrier()  # others may still be joining the group that is left here
    dist.destroy_process_group()
    dist.init_process_group(init_method=f"file://{folder}/store", rank=rank, world_size=3)
    program = hap.compile(bigram(), lab(), **arguments())
    (ids,), targets = program.shard_batch((gpt2.batch(),), gpt2.batch())
    loss = program(ids, targets=targets)
    loss.backward()
    Communicator(dist.group.WORLD).all_reduce(loss.detach(), decomposition="owners")
    return dist.get_backend(), program.device.type, loss.item()


def test_a_process_group_may_have_been_made_without_naming_a_backend(tmp_path: Path) -> None:
    found = run_ranks(3, compile_on_a_group_of_no_named_backend, str(tmp_path))
    assert len(set(found)) == 1 and found[0][:2] == ("undefined", "cpu")


@pytest.mark.parametrize(
    ("served", "device", "expected"),
    [
        ("cuda:nccl", None, "cuda:2"),  # of a group that was made without a backend, on GPUs
        ("cpu:gloo,cuda:nccl", None, "cuda:2"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda", "cuda:2"),
        ("cpu:gloo,cuda:nccl", "cuda:1", "cuda:1"),
        ("cpu:gloo,cuda:gloo", None, "cpu"),
    ],
)
def test_a_rank_runs_where_its_process_group_takes_it(
    served: str, device: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    for name, value in (("is_initialized", True), ("get_backend", "undefined"), ("get_backend_config", served)):
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert str(join(None, device).device) == expected
    assert [str(one) for one in chosen] == ([expected] if expected != "cpu" else [])


def test_one_device_needs_no_launcher_and_no_process_group(tmp_path: Path) -> None:
    cluster = tmp_path / "one.yaml"
    cluster.write_text(ONE)
    program = hap.compile(gpt2.build(), cluster, **arguments())
    ids = gpt2.batch(1)
    loss = program(ids, targets=ids)
    loss.backward()
    expected = gpt2.lm_loss(gpt2.build()(ids), ids)
    torch.testing.assert_close(loss, expected)
    assert not dist.is_initialized()


def test_a_plan_file_serves_another_compile_and_names_what_it_is_not_for(tmp_path: Path) -> None:
    plan = hap.plan(gpt2.build(), ClusterSpec.from_yaml(ONE), **arguments())
    path = tmp_path / "one.plan.json"
    plan.save(path)
    assert hap.compile(gpt2.build(), plan=path, **arguments()).plan == plan
    with pytest.raises(hap.PlanError, match="the plan for model 'Logits' is not for this 'Logits': "):
        hap.compile(
            gpt2.build(),
            plan=path,
            **arguments(example_inputs=(gpt2.batch(size=4),), example_targets=gpt2.batch(size=4)),
        )
    three = replicated_plan(gpt2.graph(), world_size=3)
    with pytest.raises(hap.PlanError, match="the plan is for 3 ranks, this job has 1"):
        hap.compile(gpt2.build(), plan=three, **arguments())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "accepted"),
        ({"optimizer": "sgd+momentum", "gradient_accumulation_steps": 2}, "accepted"),
        ({"optimizer": "adamw"}, "the plan is for sgd+momentum, and optimizer is adamw; plan again, or leave that out"),
        (
            {"gradient_accumulation_steps": 1},
            "the plan's gradient_accumulation_steps are 2, not 1; plan again, or leave them out",
        ),
    ],
)
def test_what_is_said_beside_a_plan_must_be_the_plans(given: dict[str, Any], said: str) -> None:
    cluster = ClusterSpec.from_yaml(ONE)
    plan = hap.plan(bigram(), cluster, **arguments(optimizer="sgd+momentum", gradient_accumulation_steps=2))
    assert refusal(lambda: hap.compile(bigram(), plan=plan, **arguments(**given))).removeprefix("PlanError: ") == said


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        (hap.Pins(placements={"*": "R"}), "accepted"),
        (hap.Pins(placements={"*.weight": "S(0)"}), "the plan has 0.weight as R, and pins S(0); plan again with"),
        (hap.Pins(placements={"args.0": "S(0)"}, sizes={"batch": PLANNED}), "accepted"),
        (hap.Pins(ratios=(1, 0, 0)), "the plan deals out batch as "),
        (hap.Pins(ratios=(1, 2)), "pinned ratios (1, 2) must be 3 numbers"),
        (hap.Pins(placements={"no.such": "R"}), "pin 'no.such' matches no parameter and no input"),
    ],
)
def test_a_plan_has_what_is_pinned_beside_it(pins: hap.Pins, said: str) -> None:
    graph = capture(bigram(), (gpt2.batch(),), loss_fn=gpt2.lm_loss, example_targets=gpt2.batch())
    plan = pinned_plan()
    assert refusal(lambda: check_pins(plan, graph, pins)).removeprefix("PlanError: ").startswith(said)


def test_pins_beside_a_plan_are_not_ignored() -> None:
    plan = hap.plan(bigram(), ClusterSpec.from_yaml(ONE), **arguments())
    pins = hap.Pins(placements={"no.such": "R"})
    said = refusal(lambda: hap.compile(bigram(), plan=plan, **arguments(pins=pins)))
    assert said == "PlanError: pin 'no.such' matches no parameter and no input"


def test_a_plan_of_two_axes_takes_no_pins() -> None:
    said = refusal(lambda: api._check_given(of_two(2, 1), None, None, hap.Pins()))
    assert said == "PlanError: pins are for plans of one axis, and this one is of two; leave them out"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"effort": "fast"}, "PlanError: effort 'fast' is none of quick, normal, thorough"),
        ({"method": "x"}, "PlanError: method 'x' is none of milp, astar"),
        ({"gradient_accumulation_steps": 1.5}, "PlanError: a step has a whole number of batches, not 1.5; hap.plan "),
        ({"gradient_accumulation_steps": "most"}, "PlanError: a step has a whole number of batches, not 'most'; hap."),
    ],
)
def test_what_is_asked_for_is_looked_at_before_anything_is_done(given: dict[str, Any], said: str) -> None:
    def unread(*_: Any) -> torch.Tensor:
        raise AssertionError("the model was captured")

    assert refusal(lambda: hap.plan(bigram(), lab(), **arguments(loss_fn=unread, **given))).startswith(said)
    if "method" not in given:
        assert refusal(lambda: hap.plan_mesh(bigram(), lab(), **arguments(loss_fn=unread, **given))).startswith(said)


def test_what_is_planned_without_them_is_for_adamw_and_steps_of_one_batch() -> None:
    plan = hap.compile(bigram(), ClusterSpec.from_yaml(ONE), **arguments()).plan
    assert (plan.provenance.optimizer, plan.gradient_accumulation_steps) == ("adamw", 1)


def test_without_cluster_and_plan_there_is_nothing_to_compile_for() -> None:
    with pytest.raises(hap.ClusterError, match="needs a cluster, or a plan"):
        hap.compile(gpt2.build(), **arguments())


def test_a_model_on_meta_is_planned_like_the_real_one() -> None:
    with torch.device("meta"):
        meta = bigram()
    assert hap.plan(meta, lab(), **arguments()) == hap.plan(bigram(), lab(), **arguments())


def test_python_source_is_that_of_the_program(tmp_path: Path) -> None:
    program = hap.compile(bigram(), ClusterSpec.from_yaml(ONE), **arguments(), passes_off=("fuse",))
    example = {key: value for key, value in arguments().items() if key != "effort"}
    assert hap.python_source(bigram(), program.plan, **example) == program.python_source()


def test_a_compiled_program_tells_what_each_pass_changed() -> None:
    program = hap.compile(bigram(), ClusterSpec.from_yaml(ONE), **arguments(), passes_off=("overlap",))
    changes = {change.name: change for change in program.passes}
    assert list(changes) == ["renames", "dead_code", "recompute", "fuse", "hoist", "sink", "bucket", "prefetch"]
    assert all(change.seconds > 0 for change in program.passes)
    assert "+    " in changes["fuse"].diff and "= aten.addmm.default(" in changes["fuse"].diff
    assert changes["bucket"].diff == "", "one device sends nothing"


def test_hap_plan_is_the_function_and_hap_plan_the_module_is_still_importable() -> None:
    import importlib

    assert callable(hap.plan)
    assert importlib.import_module("hap.plan").Plan is hap.Plan
    assert set(hap.__all__) <= set(dir(hap))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        hap.nonsense  # noqa: B018
