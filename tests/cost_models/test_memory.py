"""Live bytes of ``relu_step``, moment by moment on paper."""

from dataclasses import replace

import pytest
import torch

from hap.capture import capture
from hap.codegen.lowering import lower
from hap.codegen.program import Call
from hap.conversion import find_needs
from hap.cost_models.evaluate import evaluate
from hap.cost_models.memory import MemoryUse, Walk, memory_use, usable_bytes
from hap.cost_models.optimizers import optimizer_state_bytes
from hap.deferral import Batches
from hap.errors import PlanError
from hap.graph import Graph, Value, with_inputs
from hap.hosts_sum import HOSTS_SUM, SITE
from hap.mesh import graph_of, sums_in_order
from hap.order import program_order
from hap.plan import Strategy
from hap.rules.choices import choices, replicated
from tests._support import gpt2
from tests._support.mesh import make_mesh
from tests._support.plans import greedy_strategies, replicated_plan, sizes_for
from tests.cost_models.build import R, cluster, data_parallel, relu_step


def use(
    sizes: dict[str, tuple[int, ...]], world_size: int, *, optimizer: str = "adamw", regather: bool = False
) -> MemoryUse:
    graph = relu_step()
    strategies = data_parallel(sharded_parameter="kept" in sizes)
    needs = find_needs(graph, strategies)
    return memory_use(graph, strategies, sizes, needs, world_size, optimizer)


def test_one_device() -> None:
    """x 128, w 64, tangent 4 for good; AdamW 2 x 64. At the backward of relu: b 128, its gradient 128, loss 4 (e is a
    view of the tangent; a went after relu). Later g 128, loss 4 and the gradient of w 64 make only 196."""
    graph = relu_step()
    strategies = {n.name: Strategy((R,) * len(n.inputs), (R,)) for n in graph.nodes}
    (kinds,) = memory_use(graph, strategies, {}, (), 1, "adamw").by_kind
    assert kinds == {
        "parameters": 196,
        "optimizer": 128,
        "gradients": 0,
        "activations": 260,
        "gathered": 0,
        "temporary": 0,
    }


def test_uneven_data_parallel() -> None:
    """Shares 5 and 3 of 8. Rank 0 peaks at the backward of relu: b 80, g 80, loss 4. Rank 1, where those make 100, when
    the gradient is summed: partial 64, sum 64, loss 4; g is gone by then."""
    rank0, rank1 = use({"batch": (5, 3)}, 2).by_kind
    assert rank0 == {
        "parameters": 80 + 64 + 4,
        "optimizer": 128,
        "gradients": 0,
        "activations": 80 + 80 + 4,
        "gathered": 0,
        "temporary": 0,
    }
    assert (rank1["parameters"], rank1["activations"], rank1["gradients"]) == (48 + 64 + 4, 64 + 4, 64)


def test_a_rank_with_no_share_still_holds_what_is_replicated() -> None:
    rank1 = use({"batch": (8, 0)}, 2).by_kind[1]
    assert rank1["parameters"] == 64 + 4 and rank1["activations"] == 64 + 4 and rank1["gradients"] == 64


def test_a_sharded_parameter_is_gathered_and_its_gradient_scattered() -> None:
    """w 3:1. At the end rank 0 has loss 4, partial 64, its gradient 48; the scatter packs 64 and receives 48 from each
    of two ranks. The gathered w (64) was read last by the forward matmul."""
    rank0, rank1 = use({"batch": (5, 3), "kept": (3, 1)}, 2).by_kind
    assert rank0 == {
        "parameters": 80 + 48 + 4,
        "optimizer": 96,
        "gradients": 48,
        "activations": 4 + 64,
        "gathered": 0,
        "temporary": 64 + 2 * 48,
    }
    assert (rank1["parameters"], rank1["optimizer"], rank1["gradients"]) == (48 + 16 + 4, 32, 16)


def test_a_gathered_parameter_is_kept_for_the_backward_or_gathered_again() -> None:
    """A graph whose gradient is gw @ w: kept, the copy of w is there when gw is made; regathered, it is not."""
    graph, strategies = relu_step(), dict(data_parallel(sharded_parameter=True))
    last = replace(graph.by_name["gw"], name="last", args=(Value("gw"), Value("w")))
    graph = Graph(graph.name, (*graph.nodes, last), graph.loss, {"w": Value("last")})
    strategies["last"] = Strategy((R, R), (R,))
    sizes = {"batch": (4, 4), "kept": (2, 2)}

    def gathered(regather: bool) -> int:
        needs = find_needs(graph, strategies, regather=regather)
        assert len(needs) == (5 if regather else 4)
        walk = Walk(graph, strategies, needs)
        return int(walk.held(sizes, 2, "sgd")["gathered"][walk.moments["gw"], 0])

    assert gathered(False) == 64 and gathered(True) == 0


def test_the_peak_is_the_sum_of_its_kinds() -> None:
    found = use({"batch": (5, 3)}, 2)
    assert found.peak_bytes == (440, 376)


@pytest.mark.parametrize(
    ("optimizer", "factor"), [("sgd", 0), ("sgd+momentum", 1), ("adam", 2), ("adamw", 2), ("muon", 2)]
)
def test_optimizer_state(optimizer: str, factor: int) -> None:
    assert optimizer_state_bytes(optimizer, 100) == factor * 100
    assert use({"batch": (5, 3)}, 2, optimizer=optimizer).by_kind[0]["optimizer"] == factor * 64


def test_unknown_optimizer() -> None:
    with pytest.raises(
        PlanError, match=r"unknown optimizer 'lion' \(known: sgd, sgd\+momentum, adam, adamw, muon, adaf"
    ):
        optimizer_state_bytes("lion", 100)


def test_a_tenth_is_reserved() -> None:
    assert usable_bytes(1000) == 900


def test_the_order_is_the_programs() -> None:
    """Calls of a lowered program, part by part, are ``program_order``: on a graph with masks and tied weights."""
    graph = gpt2.graph()
    program = lower(graph, replicated_plan(graph))
    ran = [i for i in (*program.forward, *program.backward) if isinstance(i, Call)]
    ordered = [n for n in program_order(graph) if not n.is_source]
    assert [(i.op, i.module) for i in ran] == [(n.op, n.module) for n in ordered]


def test_what_only_the_backward_reads_is_computed_there() -> None:
    """b2 = relu(a), read by g alone, runs just before it: a is kept and not b2."""
    graph = relu_step()
    late = replace(graph.by_name["b"], name="b2")
    reader = with_inputs(graph.by_name["g"], lambda v: Value("b2") if v.node == "b" else v)
    nodes = tuple(n for old in graph.nodes for n in {"b": (old, late), "g": (reader,)}.get(old.name, (old,)))
    found = [n.name for n in program_order(Graph(graph.name, nodes, graph.loss, graph.gradients)) if not n.is_source]
    assert found == ["a", "b", "loss", "e", "b2", "g", "xt", "gw"]


def test_what_is_summed_over_hosts_meanwhile_is_held_until_the_update() -> None:
    """At the end of a host's backward pass there are the sums, what those that nobody waits for are the sums of, and
    what is sent and received of these."""
    with torch.device("meta"):
        model, x = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)), torch.empty(8, 4)
    graph = capture(model, x, loss_fn=torch.sum)
    plan = make_mesh(graph, (1, 1), (5, 3))
    host, inside = graph_of(graph, plan, 0), plan.inside_of(0)
    strategies = {name: inside.strategy(name) for name in inside.strategies}
    walk = Walk(host, strategies, find_needs(host, strategies))
    held = {kind: int(row[-2, 0]) for kind, row in walk.held(inside.sizes, 1, "sgd").items()}
    sums = [n for n in host.nodes if n.op == HOSTS_SUM]
    _, late = sums_in_order(lower(host, inside))
    nbytes = sum(n.meta.nbytes for n in sums if n.args[SITE] in late)
    assert 0 < len(late) < len(sums) and nbytes > 0
    assert held["temporary"] == 2 * nbytes  # all in one bundle
    loss = 4
    assert held["gradients"] == 4 * (4 * 6 + 6 + 6 * 2 + 2) and held["activations"] == nbytes + loss
    update = {kind: int(row[-1, 0]) for kind, row in walk.held(inside.sizes, 1, "sgd").items()}
    assert update == {**held, "temporary": 0, "activations": loss}


@pytest.mark.parametrize(
    ("optimizer", "backend", "made"), [("adamw", "nccl", 64), ("adamw", "gloo", 0), ("sgd", "nccl", 0)]
)
def test_an_update_on_gpus_makes_the_roots_of_all_second_moments_at_once(
    optimizer: str, backend: str, made: int
) -> None:
    """Behind the last call there are w, its gradient, the optimizer's state and, of Adam, one tensor more."""
    graph = relu_step()
    strategies = {n.name: Strategy((R,) * len(n.inputs), (R,)) for n in graph.nodes}
    held = Walk(graph, strategies, ()).held({}, 1, optimizer, backend=backend)
    assert {kind: int(row[-1, 0]) for kind, row in held.items()} == {
        "parameters": 196,
        "optimizer": optimizer_state_bytes(optimizer, 64),
        "gradients": 64,
        "activations": 4,
        "gathered": 0,
        "temporary": made,
    }


def test_a_step_may_be_fullest_in_its_update() -> None:
    """Of few samples: parameters, gradients, AdamW's two states and its temporary tensors, and hardly anything else."""
    with torch.device("meta"):
        model, x = torch.nn.Linear(512, 512), torch.empty(2, 512)
    graph = capture(model, x, loss_fn=torch.sum)
    whole, state = {n.name: replicated(n) for n in graph.nodes}, 4 * (512 * 512 + 512)
    on_gpu = cluster([1000], tflops=[1])
    (on_a_gpu,) = evaluate(graph, whole, {}, on_gpu).memory_bytes
    (on_a_cpu,) = evaluate(graph, whole, {}, on_gpu.model_copy(update={"backend": "gloo"})).memory_bytes
    assert 5 * state < on_a_gpu < 5.1 * state and on_a_cpu < 4.1 * state


@pytest.mark.parametrize("batches", [1, 4])
def test_nor_does_a_step_of_several_batches_hold_more_in_its_update(batches: int) -> None:
    """What was left of earlier batches for the sums is added by then."""
    with torch.device("meta"):
        graph = capture(torch.nn.Linear(512, 512), torch.empty(8, 512), loss_fn=torch.sum)
    made = choices(graph)
    strategies = greedy_strategies(made, {"args.0": (0, 8)})
    needs = find_needs(graph, strategies)
    walk = Walk(graph, strategies, needs, batches=Batches.of(graph, batches))
    held = walk.held(sizes_for(made, (5, 3), {8: (5, 3)}), 2, "adamw", backend="nccl")
    state = 4 * (512 * 512 + 512)
    assert held["gradients"][-1].tolist() == [state] * 2 and held["temporary"][-1].tolist() == [state] * 2
    assert (held["gradients"][-2] > state).all() == (batches > 1)
