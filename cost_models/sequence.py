"""One step as a sequence: what every rank does by itself, and the collectives in between, in the program's order.

A conversion runs just before its first reader; that of a result (loss, gradient, buffer update) as soon as the value
exists. Slices are local, so they are work of each rank. The optimizer's update comes last. ``evaluate`` adds the
sequence up, ``timeline`` plays it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from hap.conversion import Need
from hap.cost_models.collective import Forms, collective_coefficients, shares
from hap.cost_models.compute import Calls, ComputeModel, ComputeTable
from hap.cost_models.fold import Cluster
from hap.cost_models.profile import MeasuredDevice
from hap.deferral import ONE, Batches
from hap.fabric import Array
from hap.graph import Graph, Node
from hap.placement import GroupSizes, Placement
from hap.plan import Strategy


class ConversionCost(NamedTuple):
    """One conversion as it would be performed. ``nbytes`` is the size of the whole value, ``seconds`` what a batch pays
    (``hap.deferral.Batches``)."""

    need: Need
    decomposition: str
    seconds: float
    nbytes: int


@dataclass(frozen=True, eq=False)
class Local:
    """Work that every rank does by itself: ``seconds`` (N,). ``kind``: forward, backward, slice, pack or update."""

    name: str
    kind: str
    seconds: Array


@dataclass(frozen=True)
class Pricer:
    """Prices conversions by their fastest decomposition; equal ones (a layer repeated) once."""

    graph: Graph
    sizes: GroupSizes
    cluster: Cluster
    forms: Forms | None = None
    batches: Batches = ONE
    _known: dict[tuple[int, Placement, Placement], tuple[str, float]] = field(default_factory=dict)

    def price(self, needs: Sequence[Need]) -> tuple[ConversionCost, ...]:
        return tuple(self._price(need) for need in needs)

    def _price(self, need: Need) -> ConversionCost:
        nbytes = self.graph.meta(need.value).nbytes
        key = (nbytes, need.source, need.target)
        if key not in self._known:
            forms = self.forms or Forms(self.cluster)
            self._known[key] = forms.best(need.collective, nbytes, need.source, need.target, self.sizes)
        way, seconds = self._known[key]
        return ConversionCost(need, way, seconds * self.batches.part(need.value), nbytes)


def sequence(
    graph: Graph,
    strategies: Mapping[str, Strategy],
    sizes: GroupSizes,
    cluster: Cluster,
    costs: Sequence[ConversionCost],
    model: ComputeModel,
    calls: Calls | None = None,
    again: Mapping[str, Sequence[Node]] = MappingProxyType({}),
) -> Iterator[Local | ConversionCost]:
    """The step without its update; what takes no time, as views do by default, is left out. What was measured of a step
    beside its calls comes first. ``again``: the calls that are repeated before a call (``order.repeats``), as part of
    the backward pass."""
    table, calls = ComputeTable(cluster.devices, model), calls or Calls(graph)
    atoms = {group: np.array(s, dtype=np.float64) for group, s in sizes.items()}
    ones, known = np.ones(cluster.world_size), dict[object, Array | None]()
    at: dict[str, list[ConversionCost]] = {}
    for cost in costs:
        need = cost.need
        at.setdefault(f"{need.phase} {need.before}" if need.before else f"after {need.value.node}", []).append(cost)

    def convert(moment: str) -> Iterator[Local | ConversionCost]:
        for cost in at.get(moment, ()):
            if cost.need.collective == "slice":
                yield Local(f"slice {cost.need.value}", "slice", slice_seconds(cost, sizes, cluster))
            else:
                yield cost

    def compute(node: Node, kind: str) -> Iterator[Local]:
        parts = calls.parts(node.name, strategies[node.name])
        key = (parts, parts.call) if table.is_measured else parts
        if key not in known:
            seconds = table.seconds(parts, ones if parts.group is None else atoms[parts.group] / parts.n)
            known[key] = seconds if seconds.any() else None
        if (found := known[key]) is not None:
            yield Local(node.name, kind, found)

    yield Local("step", "forward", seconds_around(cluster))
    for node in graph.nodes:
        for repeated in again.get(node.name, ()):
            yield from convert(f"backward {repeated.name}")
            yield from compute(repeated, "backward")
        yield from convert(f"{node.phase} {node.name}")
        if not node.is_source:
            yield from compute(node, node.phase)
        yield from convert(f"after {node.name}")


def seconds_around(cluster: Cluster) -> Array:
    """What was measured of a step beside its calls, by rank (N,)."""
    around = [d.kind.step_s * d.factor if isinstance(d, MeasuredDevice) else 0.0 for d in cluster.devices]
    return np.array(around)


def slice_seconds(cost: ConversionCost, sizes: GroupSizes, cluster: Cluster) -> Array:
    """Seconds of every rank (N,) for cutting its own piece out of a whole value."""
    need = cost.need
    form = collective_coefficients("slice", cost.decomposition, cost.nbytes, need.source, need.target, cluster)
    n = cluster.world_size
    return form.stages[0].rows(shares(need.source, sizes, n), shares(need.target, sizes, n))
