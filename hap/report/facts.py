"""What there is to say about a plan, as rows of numbers: ``hap explain`` prints them, ``--json`` gives them as they
are, ``hap report`` draws them. Everything is read off the plan and its explanation; nothing is solved again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from hap.cluster import ClusterSpec
from hap.errors import PlanError
from hap.plan import Explanation, Plan
from hap.report.summary import batch_group
from hap.report.words import starred


@dataclass(frozen=True)
class DeviceRow:
    """Ranks that do the same: one row for each class. Seconds of one step, bytes at the peak of its fullest rank."""

    ranks: tuple[int, ...]
    kind: str
    names: tuple[str, ...]
    batch: int | None  # of each rank; None: the batch is not dealt out
    busy_s: float
    communication_s: float
    idle_s: float
    memory_bytes: int
    capacity_bytes: int | None
    memory_by_kind: Mapping[str, int]


@dataclass(frozen=True)
class CollectiveRow:
    """Conversions of one kind and phase; ``seconds`` of all of them, ``largest`` the longest one's value."""

    collective: str
    decomposition: str
    phase: str
    count: int
    nbytes: int
    seconds: float | None
    largest: str


@dataclass(frozen=True)
class LayerRow:
    """One layer, or ``count`` consecutive ones that are alike, as ``h.3-5``. The seconds are those of each."""

    name: str
    count: int
    forward_s: float
    backward_s: float
    wire_s: float
    parameter_bytes: int
    calls: Mapping[str, int]


@dataclass(frozen=True)
class Facts:
    """The rows of one plan."""

    plan: Plan

    @property
    def told(self) -> Explanation | None:
        return self.plan.explanation

    @cached_property
    def cluster(self) -> ClusterSpec | None:
        """The cluster that the plan describes; None in plans of version 1."""
        return None if self.told is None else described(self.told.cluster, self.plan.world_size)

    @property
    def batch(self) -> int | None:
        group = batch_group(self.plan)
        return None if group is None else self.plan.groups[group].n

    @cached_property
    def devices(self) -> tuple[DeviceRow, ...]:
        """One row for every class of ranks, in order of the first rank."""
        classes = self.told.classes if self.told else tuple((r,) for r in range(self.plan.world_size))
        return tuple(self._device(ranks) for ranks in classes)

    def _device(self, ranks: tuple[int, ...]) -> DeviceRow:
        plan, predicted, first = self.plan, self.plan.predicted, ranks[0]
        group = batch_group(plan)
        fullest = max(ranks, key=lambda r: predicted.memory_bytes[r])
        busy, wire = predicted.compute_s[first], predicted.communication_s
        device = self.cluster.devices[first] if self.cluster else None
        return DeviceRow(
            ranks=ranks,
            kind=device.gpu if device else plan.devices[first].rpartition("/")[2].partition("#")[0],
            names=tuple(plan.devices[r] for r in ranks),
            batch=None if group is None else plan.groups[group].sizes[first],
            busy_s=busy,
            communication_s=wire,
            idle_s=max(0.0, predicted.step_s - busy - wire),
            memory_bytes=predicted.memory_bytes[fullest],
            capacity_bytes=device.memory_bytes if device else None,
            memory_by_kind=dict(predicted.memory_by_kind[fullest]),
        )

    @cached_property
    def collectives(self) -> tuple[CollectiveRow, ...]:
        """What moves, the longest first. Slices move nothing."""
        times = self.told.conversion_s if self.told else None
        kinds: dict[tuple[str, str, str], list[int]] = {}
        for i, c in enumerate(self.plan.conversions):
            if c.collective != "slice":
                kinds.setdefault((c.collective, c.decomposition, c.phase), []).append(i)
        rows = []
        for (collective, decomposition, phase), members in kinds.items():
            conversions = [self.plan.conversions[i] for i in members]
            longest = max(members, key=lambda i: times[i] if times else self.plan.conversions[i].nbytes)
            rows.append(
                CollectiveRow(
                    collective=collective,
                    decomposition=decomposition,
                    phase=phase,
                    count=len(members),
                    nbytes=sum(c.nbytes for c in conversions),
                    seconds=sum(times[i] for i in members) if times else None,
                    largest=self.plan.conversions[longest].value,
                )
            )
        return tuple(sorted(rows, key=lambda r: -(r.seconds or r.nbytes)))

    @cached_property
    def layers(self) -> tuple[LayerRow, ...]:
        """Layers in the model's order; neighbours that differ in little but their number are one row."""
        runs: list[list[LayerRow]] = []
        for layer in self.told.layers if self.told else ():
            calls: dict[str, int] = {}
            for label, count in layer.calls.items():
                calls[starred(label)] = calls.get(starred(label), 0) + count
            row = LayerRow(layer.name, 1, layer.forward_s, layer.backward_s, layer.wire_s, layer.parameter_bytes, calls)
            if runs and _alike(runs[-1][0], row):
                runs[-1].append(row)
            else:
                runs.append([row])
        return tuple(_as_one(run) for run in runs)

    def to_json(self) -> dict[str, Any]:
        """All rows as plain data."""
        return {
            "devices": [asdict(row) for row in self.devices],
            "collectives": [asdict(row) for row in self.collectives],
            "layers": [asdict(row) for row in self.layers],
            "helps": [h.model_dump() for h in self.told.helps] if self.told else [],
        }


def described(body: Mapping[str, Any], ranks: int) -> ClusterSpec:
    """The cluster of a plan's explanation. PlanError if it is none, or of another number of devices than ranks."""
    try:
        found = ClusterSpec.model_validate(body)
    except ValueError as e:
        raise PlanError(f"the plan describes no cluster ({str(e).splitlines()[0]}); plan again") from None
    if found.world_size != ranks:
        raise PlanError(f"the plan describes {found.world_size} devices for {ranks} ranks; plan again")
    return found


def _as_one(run: list[LayerRow]) -> LayerRow:
    """The first of layers that are alike, named for all."""
    if len(run) == 1:
        return run[0]
    return replace(run[0], name=f"{run[0].name}-{run[-1].name.rpartition('.')[2]}", count=len(run))


def _alike(a: LayerRow, b: LayerRow) -> bool:
    """The same name but for numbers, the same parameters and groups, seconds within 2%."""
    if starred(a.name) != starred(b.name) or a.parameter_bytes != b.parameter_bytes or set(a.calls) != set(b.calls):
        return False
    pairs = ((a.forward_s, b.forward_s), (a.backward_s, b.backward_s), (a.wire_s, b.wire_s))
    return all(abs(x - y) <= 0.02 * max(x, y) for x, y in pairs)
