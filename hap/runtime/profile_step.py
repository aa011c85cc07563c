"""What a step takes beside the calls that it makes: the program around them, and caches that are not warm.

*Overhead*: whole steps of two tiny programs (forward, backward, update; few and many parameters), less their calls:

    overhead = step_s + parameters * per_parameter_s

*In a step* a call is slower than when it is repeated alone, since others have used the caches meanwhile: the seconds
of a whole graph, run as one device runs it, over the sum of its calls, is the kind's ``in_step`` factor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

import hap
from hap.capture import capture
from hap.codegen.lowering import lower
from hap.conversion import find_needs
from hap.cost_models.compute import split_work
from hap.cost_models.work import node_work
from hap.graph import Graph
from hap.plan import Plan, Prediction, Provenance, Strategy
from hap.rules.choices import replicated
from hap.runtime.collectives import Communicator
from hap.runtime.profile_ops import Clock, Layout, time_calls
from hap.runtime.program import HapProgram
from hap.runtime.step import Step

FEW, MANY = 2, 14  # parameters of the two tiny programs
STEPS = 8

MakeOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def one_device_plan(graph: Graph) -> Plan:
    """Everything whole on one rank."""
    strategies = {n.name: replicated(n) for n in graph.nodes}
    assert not find_needs(graph, strategies)
    return Plan(
        provenance=Provenance(
            model=graph.name,
            model_fingerprint=graph.fingerprint,
            parameters=sum(n.meta.numel for n in graph.sources("parameter")),
            cluster="one device",
            cluster_fingerprint="",
            world_size=1,
            backend="gloo",
            rules_fingerprint="",
            hap_version=hap.__version__,
            torch_version=torch.__version__,
            optimizer="sgd",
        ),
        groups={},
        strategies={name: str(s) for name, s in strategies.items()},
        conversions=(),
        predicted=Prediction(
            step_s=1.0, compute_s=(1.0,), communication_s=0.0, memory_bytes=(0,), memory_by_kind=({},)
        ),
        devices=("one",),
    )


def whole_calls(graph: Graph) -> Mapping[str, tuple[Strategy]]:
    return {n.name: (replicated(n),) for n in graph.nodes}


def calls_seconds(graph: Graph, seconds: Mapping[str, float]) -> float:
    """The sum of a graph's calls on one device; ``seconds`` by call."""
    total = 0.0
    for node in graph.nodes:
        if not node.is_source and (parts := split_work(node_work(graph, node), replicated(node))).op_class != "view":
            total += seconds[parts.call]
    return total


def graph_seconds(graph: Graph, clock: Clock) -> float:
    """Seconds of forward and backward of the whole graph on this device, on random tensors."""
    program = lower(graph, one_device_plan(graph))
    step = Step(program, Communicator(None, clock.device))
    nodes = {n.target: n for n in graph.nodes if n.is_source}
    sources = {}
    for source in program.forward_sources:
        meta = nodes[source.target].meta
        order = Layout(tuple(range(len(meta.shape))))
        made = order.make(meta.shape, meta.dtype, clock.device)
        sources[source.name] = program.constants.get(source.target, made).to(clock.device)

    def run() -> None:
        loss, _, saved = step.forward(sources)
        step.backward(saved, torch.ones_like(loss))

    return clock.seconds(run, repeats=STEPS)[0]


class _Chain(nn.Module):
    """``count`` parameters of one element."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(count)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).sum()


def overheads(clock: Clock, make: MakeOptimizer) -> tuple[float, float]:
    """(step_s, per_parameter_s) with this optimizer's update of parameters of one element."""
    few, many = (_overhead(count, clock, make) for count in (FEW, MANY))
    each = max(0.0, (many - few) / (MANY - FEW))
    return max(0.0, few - FEW * each), each


def _overhead(count: int, clock: Clock, make: MakeOptimizer) -> float:
    model, x = _Chain(count).to(clock.device), torch.ones(2, 1, device=clock.device)
    graph = capture(model, x)
    plan = one_device_plan(graph)
    program = HapProgram(lower(graph, plan), plan, Communicator(None, clock.device), model, x)
    optimizer = make(list(program.parameters()))

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        program(x).backward()
        optimizer.step()

    run()
    calls = {t.call: t.seconds for t in time_calls(graph, whole_calls(graph), clock)}
    return max(0.0, clock.seconds(run, repeats=STEPS)[0] - calls_seconds(graph, calls))
