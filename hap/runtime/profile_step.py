"""What a step takes beside the calls that it makes: the program around them, and caches that are not warm.

*Overhead*: whole steps of two tiny programs (forward, backward, update; few and many parameters), less their calls:

    overhead = step_s + parameters * per_parameter_s

*In a step* a call is slower than when it is repeated alone, since others have used the caches meanwhile, and a view,
which does nothing, is still a call. Whole graphs are run as one device runs them, all ranks at once as in a real step,
and so are the calls of a small share of each, one after another on tensors of their own: there what a call costs beside
its work is most of it. Fitted over both:

    forward and backward = in_step * (sum of the calls) + nodes * node_s
    update               = parameters * per_parameter_s + bytes * s_per_byte

*After a wait* for the other ranks a CPU's caches hold what ran meanwhile: the calls of a share once more, cut by
waits, take ``resume_s`` longer for each.

Before each of these runs a CPU rests as it does while collectives are on the wire (``rested``). What a step reads,
parameters and the optimizer's states, was last used a step ago. Where a machine's last cache is shared with others it
has left the cache by then, and repeated at once the same update takes much less time.

*On nothing*, where a rank has no share, a CPU still makes every call: ``empty_s`` each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

import hap
from hap.capture import capture
from hap.codegen.lowering import lower
from hap.codegen.program import Program, Source
from hap.conversion import find_needs
from hap.cost_models.compute import split_work
from hap.cost_models.fit import Timing
from hap.cost_models.work import node_work
from hap.graph import Graph
from hap.plan import Plan, Prediction, Provenance, Strategy
from hap.rules.choices import replicated
from hap.runtime.collectives import Communicator
from hap.runtime.profile_ops import SHARES, Clock, Layout, local_call, local_sizes, memory_layouts, time_calls
from hap.runtime.program import HapProgram
from hap.runtime.step import Step

FEW, MANY = 2, 14  # parameters of the two tiny programs
STEPS = 8
SHARE_BYTES = 8e9  # read and written by a share's calls
CUTS = 8  # waits in a share's calls
REST_S = 0.064  # of a CPU before a step: by then what was used before has left a cache that others use, too
# Of a parameter's entries, about as large as initialisations make them. With larger ones activations grow from layer to
# layer until a softmax's results are denormal numbers, with which CPUs take twice as long.
INITIAL = 0.02

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


@dataclass(frozen=True)
class GraphTiming:
    """A whole graph on one device: seconds of forward and backward, of each optimizer's update; what it consists of."""

    seconds: float
    calls_s: float
    nodes: int
    parameters: int
    nbytes: int
    updates: dict[str, float]


def time_graph(
    graph: Graph,
    calls: Mapping[str, float],
    clock: Clock,
    optimizers: Mapping[str, MakeOptimizer],
    together: Callable[[float], object],
) -> GraphTiming:
    """Run steps on random tensors; ``calls`` are seconds by call, ``together`` lets all ranks begin at once,
    after so many seconds of rest (``rested``)."""
    program = lower(graph, one_device_plan(graph))
    step = Step(program, Communicator(None, clock.device))
    sources = {s.name: random_source(graph, program, s, clock.device) for s in program.forward_sources}
    parameters = {
        s.target: torch.nn.Parameter(sources[s.name])
        for s in program.sources_of("parameter")
        if s.target in program.gradients
    }
    samples: list[float] = []
    updates: dict[str, float] = {}
    for name, make in optimizers.items():
        optimizer, updating = make(list(parameters.values())), []

        def run() -> None:
            loss, _, saved = step.forward(sources)
            for target, gradient in step.backward(saved, torch.ones_like(loss)).items():
                parameters[target].grad = gradient

        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            factor = clock.factor()
            together(REST_S)
            samples.append(clock.once(run) * factor)
            together(REST_S)
            updating.append(clock.once(optimizer.step) * factor)
        updates[name] = clock.of(updating[1:])
    held = list(parameters.values())
    return GraphTiming(
        seconds=clock.of(samples[1:]),
        calls_s=calls_seconds(graph, calls),
        nodes=sum(not n.is_source for n in graph.nodes),
        parameters=len(held),
        nbytes=sum(p.numel() * p.itemsize for p in held),
        updates=updates,
    )


@dataclass(frozen=True)
class ShareTiming:
    """The calls of a small share of a graph, views apart, one after another: seconds, as the sum of the calls timed
    alone, and how many; what each wait among them adds, and what a call on nothing takes (both 0 on a GPU, whose
    kernels wait for others in its queue, and which launches none for nothing)."""

    seconds: float
    calls_s: float
    nodes: int
    resume_s: float
    empty_s: float


def time_share(
    graph: Graph,
    candidates: Mapping[str, Sequence[Strategy]],
    timings: Sequence[Timing],
    clock: Clock,
    together: Callable[[float], object],
) -> ShareTiming:
    """The least share that was timed of the group that most nodes can be sharded by; other calls whole. The first of
    the calls that move ``SHARE_BYTES`` together, as the tensors of all are there at once."""
    alone = {(t.call, t.share): t.seconds for t in timings}
    nodes = [n for n in graph.nodes if not n.is_source]
    ways = {n.name: [(s, split_work(node_work(graph, n), s)) for s in candidates[n.name]] for n in nodes}
    groups = [g for found in ways.values() for g in dict.fromkeys(p.group for _, p in found if p.group is not None)]
    group = max(dict.fromkeys(groups), key=groups.count, default=None)
    layouts = memory_layouts(graph)
    calls_s, moved = 0.0, 0.0
    runs: list[Callable[[], object]] = []
    empty: list[Callable[[], object]] = []
    for node in nodes:
        strategy, parts = next((w for w in ways[node.name] if w[1].group == group), ways[node.name][0])
        if parts.op_class == "view":
            continue
        share, sizes = next(local_sizes(parts, SHARES))
        moved += parts.fixed_bytes + share * parts.shared_bytes
        if runs and moved > SHARE_BYTES:
            break
        calls_s += alone[parts.call, share]
        runs.append(local_call(graph, node, strategy, sizes, layouts, clock.device))
        if parts.idle_when_empty and parts.group is not None:
            empty.append(local_call(graph, node, strategy, {parts.group: (0,)}, layouts, clock.device))

    samples, cut, nothing = [], [], []
    pieces = [runs[i * len(runs) // CUTS : (i + 1) * len(runs) // CUTS] for i in range(CUTS)]
    for _ in range(STEPS):
        factor = clock.factor()
        together(REST_S)
        samples.append(clock.once(lambda: _all(runs)) * factor)
        seconds = 0.0
        for piece in pieces:
            together(REST_S / CUTS)
            seconds += clock.once(lambda piece=piece: _all(piece))  # type: ignore[misc]
        cut.append(seconds * factor)
        nothing.append(clock.once(lambda: _all(empty)) * factor)
    whole_s, cut_s = clock.of(samples[1:]), clock.of(cut[1:])
    if clock.device.type == "cuda":
        return ShareTiming(whole_s, calls_s, len(runs), 0.0, 0.0)
    resume_s = max(0.0, cut_s - whole_s) / (CUTS - 1)
    return ShareTiming(whole_s, calls_s, len(runs), resume_s, clock.of(nothing[1:]) / max(len(empty), 1))


def rested(device: torch.device, seconds: float) -> None:
    """All ranks begin at once, on a CPU after doing nothing for so long: a GPU's caches are its own, and hold little of
    a step anyway. Collective."""
    if device.type != "cuda":
        time.sleep(seconds)
    dist.barrier()


def _all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def random_source(graph: Graph, program: Program, source: Source, device: torch.device) -> torch.Tensor:
    """What stands in for a parameter, an input or a buffer; a constant is itself."""
    if source.kind == "constant":
        return program.constants[source.target].to(device)
    meta = graph.by_name[program.held[source.name].value.node].meta
    made = Layout(tuple(range(len(meta.shape)))).make(meta.shape, meta.dtype, device)
    return made * INITIAL if source.kind == "parameter" and meta.dtype.is_floating_point else made


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
