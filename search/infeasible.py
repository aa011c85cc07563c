"""Why nothing fits, in one line with numbers."""

from __future__ import annotations

from collections import Counter

from hap.cluster import ClusterSpec
from hap.cost_models.evaluate import Evaluation
from hap.cost_models.memory import usable_bytes
from hap.cost_models.optimizers import optimizer_state_bytes, update_bytes
from hap.cost_models.work import is_view
from hap.graph import Graph, Value
from hap.search.prices import Facts
from hap.units import format_size


def why_infeasible(facts: Facts, closest: Evaluation | None, *, pinned: bool) -> str:
    """The model's state against all memory together; else the device that overflows most in the closest plan."""
    devices = facts.cluster.devices
    usable = [usable_bytes(d.memory_bytes) for d in devices]
    parameters = [n for n in facts.graph.sources("parameter") if n.target in facts.graph.gradients]
    numbers = sum(n.meta.numel for n in parameters)
    state = state_bytes(facts.graph, facts.optimizer)
    update = updated_bytes(facts.graph, facts.optimizer, facts.cluster.backend) - state
    all_of_them = "the device holds" if len(usable) == 1 else f"the {len(usable)} devices hold"
    total = f"{all_of_them} {format_size(sum(usable))} after the reserve ({_kinds(facts.cluster)})"
    needs = f"{_count(numbers)} parameters, their gradients and {facts.optimizer} state need {format_size(state)}"
    if state <= sum(usable) < state + update:
        needs += f", and its update {format_size(update)}"
    if state + update > sum(usable):
        return f"{needs}; {total}"
    if closest is None:
        pins = " with these pins" if pinned else ""
        return f"no choice of placements fits{pins}: {needs}, activations come on top; {total}"
    over = [used - room for used, room in zip(closest.memory_bytes, usable, strict=True)]
    worst = over.index(max(over))
    return (
        f"{devices[worst].name} would need {format_size(closest.memory_bytes[worst])} and has "
        f"{format_size(usable[worst])} in the closest plan found; {needs}; {total}; a smaller batch needs less"
    )


def state_bytes(graph: Graph, optimizer: str) -> int:
    """What all devices together hold at the end of a step at least: parameters that are trained, their gradients, and
    the optimizer's state."""
    trained = [n.meta.nbytes for n in graph.sources("parameter") if n.target in graph.gradients]
    state = sum(nbytes + optimizer_state_bytes(optimizer, nbytes) for nbytes in trained)
    return state + round(sum(gradient_bytes(graph).values()))


def updated_bytes(graph: Graph, optimizer: str, backend: str) -> int:
    """The same, with the tensors that the optimizer makes of all parameters at once."""
    trained = [n.meta.nbytes for n in graph.sources("parameter") if n.target in graph.gradients]
    return state_bytes(graph, optimizer) + sum(update_bytes(optimizer, backend, nbytes) for nbytes in trained)


def gradient_bytes(graph: Graph) -> dict[str, float]:
    """Parameter -> what its gradient takes at least for every copy of the parameter. A gradient that several parameters
    have, or views of it, is there once in each placement that one of them has: so for each at least its part of one."""
    made = {target: _viewed(graph, value) for target, value in graph.gradients.items()}
    shared = Counter(made.values())
    return {target: graph.meta(value).nbytes / shared[value] for target, value in made.items()}


def _viewed(graph: Graph, value: Value) -> Value:
    """What a value is a view of, where that is no larger."""
    while is_view(node := graph.by_name[value.node]):
        if graph.meta(node.inputs[0]).nbytes > graph.meta(value).nbytes:
            break
        value = node.inputs[0]
    return value


def _kinds(cluster: ClusterSpec) -> str:
    """The devices in the user's words: "8 A100-40GB, 16 V100-16GB and 4 T4"."""
    kinds = [f"{count} {gpu}" for gpu, count in Counter(d.gpu for d in cluster.devices).items()]
    return kinds[0] if len(kinds) == 1 else f"{', '.join(kinds[:-1])} and {kinds[-1]}"


def _count(numbers: int) -> str:
    """6738415616 -> "6.7B"."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if numbers >= unit:
            return f"{numbers / unit:.3g}{name}"
    return str(numbers)
