"""The local work of a step for many sizes: which call runs between which two collectives is found once.

A *stage* is what runs between two collectives (``evaluate``); its calls and slices, many of which are alike, are those
of ``sequence``, in its order, so that what is added up here is what that one yields, to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from hap.conversion import Need
from hap.cost_models.compute import Calls, ComputeModel, ComputeTable, Parts
from hap.cost_models.fold import Cluster
from hap.cost_models.sequence import ConversionCost, seconds_around, slice_seconds
from hap.fabric import Array
from hap.graph import Graph, Node, Phase
from hap.placement import GroupSizes, Placement
from hap.plan import Strategy


@dataclass(frozen=True, eq=False)
class Stages:
    """``calls``: the distinct ones. ``slices``: one conversion of each distinct kind, by its number. ``work`` (I,) and
    ``stage`` (I,): in program order which of these is done, what surrounds the step (0), calls, then slices, and in
    which of the ``count`` stages. ``between``: the conversion that ends each stage but the last, by its number."""

    calls: tuple[Parts, ...]
    slices: tuple[int, ...]
    work: NDArray[np.intp]
    stage: NDArray[np.intp]
    between: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.between) + 1

    def seconds(
        self, sizes: GroupSizes, cluster: Cluster, costs: Sequence[ConversionCost], model: ComputeModel
    ) -> tuple[Array, float, Array]:
        """(seconds of every rank (N,), seconds of the stages that a collective ended, the last stage by rank (N,)).
        ``costs``: those of the conversions."""
        n = cluster.world_size
        atoms = {group: np.array(s, dtype=np.float64) for group, s in sizes.items()}
        ones = np.ones(n)
        given = [ones if parts.group is None else atoms[parts.group] / parts.n for parts in self.calls]
        rows = [seconds_around(cluster)[None, :]]
        if self.calls:
            rows.append(ComputeTable(cluster.devices, model).of_many(self.calls, np.array(given)))
        rows += [slice_seconds(costs[number], sizes, cluster)[None, :] for number in self.slices]
        each = np.concatenate(rows)[self.work]
        places = self.stage[:, None] * n + np.arange(n)
        stages = np.bincount(places.ravel(), each.ravel(), self.count * n).reshape(self.count, n)
        ended = 0.0
        for slowest in stages[:-1].max(axis=1).tolist():
            ended += slowest
        total: Array = stages.cumsum(axis=0)[-1]
        return total, ended, stages[-1]


def find_stages(
    graph: Graph,
    strategies: Mapping[str, Strategy],
    needs: Sequence[Need],
    calls: Calls,
    again: Mapping[str, Sequence[Node]] = MappingProxyType({}),
    *,
    measured: bool = False,
) -> Stages:
    """Of the program of these strategies, with its ``needs`` and the calls that are made ``again``. ``measured``: calls
    of as much work may take different times."""
    before: dict[tuple[str, Phase], list[int]] = {}  # conversions by the call, made first or again, they come before,
    after: dict[str, list[int]] = {}  # or by the one they come after
    for number, need in enumerate(needs):
        if need.before:
            before.setdefault((need.before, need.phase), []).append(number)
        else:
            after.setdefault(need.value.node, []).append(number)
    known: dict[object, int] = {}  # the kind of a call, or a slice -> its place among either
    distinct: list[Parts] = []
    cut: list[int] = []
    done: list[tuple[bool, int, int]] = []  # whether a slice, its place, stage
    between: list[int] = []

    def convert(numbers: Sequence[int]) -> None:
        for number in numbers:
            need = needs[number]
            if need.collective != "slice":
                between.append(number)
                continue
            key: tuple[int, Placement, Placement] = (graph.meta(need.value).nbytes, need.source, need.target)
            if key not in known:
                known[key] = len(cut)
                cut.append(number)
            done.append((True, known[key], len(between)))

    def compute(name: str) -> None:
        key = calls.kind(name, strategies[name], measured=measured)
        if key not in known:
            known[key] = len(distinct)
            distinct.append(calls.parts(name, strategies[name]))
        done.append((False, known[key], len(between)))

    for node in graph.nodes:
        name = node.name
        for repeated in again.get(name, ()):
            convert(before.get((repeated.name, "backward"), ()))
            compute(repeated.name)
        convert(before.get((name, node.phase), ()))
        if not node.is_source:
            compute(name)
        if name in after:
            convert(after[name])
    work = [0, *(1 + place + (len(distinct) if is_slice else 0) for is_slice, place, _ in done)]
    stages = [0, *(number for _, _, number in done)]
    return Stages(tuple(distinct), tuple(cut), np.array(work), np.array(stages), tuple(between))
