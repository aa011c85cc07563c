"""The plan: what search decides and codegen obeys, as one frozen, serialisable value.

A plan names, for every node of the graph, the *strategy* (placement of each tensor argument and of each output), for
every dimension group the whole-number sizes per rank, and for every conversion between two placements the collective
that performs it. It carries fingerprints of the model, the cluster and the rule table it was made for, the predicted
time and memory, and a checksum, so that a plan for something else, or one edited by hand, is refused. The
``explanation`` beside the decisions is for readers (``hap explain``, ``hap report``); no stage obeys it.

The file is described in ``hap/plan_file.py``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import pydantic

from hap import plan_file
from hap.errors import PlanError
from hap.graph import Value
from hap.placement import GroupSizes, Placement, Shard, parse_placement
from hap.plan_file import SCHEMA_VERSION
from hap.reduce_dtype import ReduceName

Collective = Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice"]


@dataclass(frozen=True)
class Strategy:
    """One way to run a node: the placement each tensor argument must have and the one each output then has."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """Those that it shards anything in, in order of first appearance."""
        return tuple(dict.fromkeys(p.group for p in (*self.inputs, *self.outputs) if isinstance(p, Shard)))

    def __str__(self) -> str:
        left = ", ".join(map(str, self.inputs))
        right = ", ".join("-" if p is None else str(p) for p in self.outputs)
        return f"{left} -> {right}".strip()

    @classmethod
    def parse(cls, text: str) -> Strategy:
        left, arrow, right = f" {text} ".partition(" -> ")
        if not arrow:
            raise ValueError(f"not a strategy: {text!r}")
        inputs = tuple(parse_placement(p.strip()) for p in left.split(",") if p.strip())
        outputs = tuple(None if p.strip() == "-" else parse_placement(p.strip()) for p in right.split(",") if p.strip())
        return cls(inputs, outputs)


Seconds = Annotated[float, pydantic.Field(ge=0)]
Bytes = Annotated[int, pydantic.Field(ge=0)]


class _Frozen(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


class Sparse(_Frozen):
    """A field in ``absent`` came after files of its version were written: where it says nothing it is not in a file."""

    absent: ClassVar[tuple[str, ...]] = ()

    @pydantic.model_serializer(mode="wrap")
    def _without_nothing(self, serialize: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        body: dict[str, Any] = serialize(self)
        nothing = {name for name in self.absent if getattr(self, name) == type(self).model_fields[name].default}
        return {name: value for name, value in body.items() if name not in nothing}


class GroupPlan(_Frozen):
    """One dimension group: its length in atoms, what it is in words, and each rank's whole-number size."""

    n: int = pydantic.Field(ge=1)
    label: str
    sizes: tuple[int, ...]


class Conversion(_Frozen):
    """One change of placement of one value, done once and shared by every consumer in ``phase`` that needs it."""

    value: str
    source: str
    target: str
    phase: Literal["forward", "backward"]
    collective: Collective
    decomposition: str
    nbytes: int = pydantic.Field(ge=0)  # of the whole value


class Prediction(Sparse):
    """What the cost model expects. Seconds and bytes; one entry per rank where a tuple. ``step_s``, which the bound is
    for, has nothing overlap; ``overlapped_s`` is the step of the program as it is run, after its passes, and no plan of
    one axis for these devices is run in less than ``overlapped_bound_s``, which is in the file where it is known."""

    absent = ("overlapped_bound_s",)
    step_s: float = pydantic.Field(ge=0)
    overlapped_s: float | None = pydantic.Field(default=None, ge=0)
    compute_s: tuple[Seconds, ...]
    communication_s: float = pydantic.Field(ge=0)
    memory_bytes: tuple[Bytes, ...]
    memory_by_kind: tuple[dict[str, Bytes], ...]  # per rank: parameters, gradients, optimizer, activations, ...
    lower_bound_s: float | None = pydantic.Field(default=None, ge=0)  # proved, or absent
    overlapped_bound_s: float | None = pydantic.Field(default=None, ge=0)  # likewise, of plans for the same devices
    tight: str = ""  # the constraint that limits the step, in words

    @property
    def as_run_s(self) -> float:
        """What a clock should show: the step of the program as it is run, where it was worked out."""
        return self.step_s if self.overlapped_s is None else self.overlapped_s

    @property
    def gap(self) -> float | None:
        """(step - bound) / step, only where the bound was proved."""
        if self.lower_bound_s is None:
            return None
        return max(0.0, 1.0 - self.lower_bound_s / self.step_s) if self.step_s else 0.0

    @property
    def gap_as_run(self) -> float | None:
        """The same of the step as it is run, and the bound for that."""
        if self.overlapped_bound_s is None or self.overlapped_s is None:
            return None
        return max(0.0, 1.0 - self.overlapped_bound_s / self.overlapped_s) if self.overlapped_s else 0.0


class Provenance(Sparse):
    """What the plan was made for and by."""

    absent = ("reduce_dtype",)
    model: str
    model_fingerprint: str
    parameters: int
    cluster: str
    cluster_fingerprint: str
    world_size: int = pydantic.Field(ge=1)
    backend: str
    rules_fingerprint: str
    hap_version: str
    torch_version: str
    optimizer: str
    solver: dict[str, Any] = {}
    assumptions: tuple[str, ...] = ()
    profile_fingerprint: str | None = None  # of the measurements that the predictions rest on
    reduce_dtype: ReduceName | None = None  # of exchanged gradients; not in the file if their own

    def check_cluster(self, name: str, fingerprint: str) -> None:
        """PlanError unless the plan was made for this cluster."""
        if self.cluster_fingerprint != fingerprint:
            raise PlanError(
                f"the plan is for cluster {self.cluster!r} ({self.cluster_fingerprint[:12]}), "
                f"not for this {name!r} ({fingerprint[:12]}); plan again"
            )


class Stage(_Frozen):
    """What runs between two collectives: ``compute_s`` of each device class, then a collective of ``wire_s`` seconds
    (the conversion of that index), or nothing at the end. ``layer`` is where it ends."""

    compute_s: tuple[Seconds, ...]
    layer: str
    conversion: int | None = None
    wire_s: Seconds = 0.0


class Layer(_Frozen):
    """One layer of the user's model: seconds of its slowest rank, seconds of its collectives, bytes of its parameters,
    and how many operator calls work on shards of which group (by label; "" for whole values)."""

    name: str
    forward_s: Seconds
    backward_s: Seconds
    wire_s: Seconds
    parameter_bytes: Bytes
    calls: dict[str, int]


class Help(_Frozen):
    """One change to the cluster in words, and the step that is then predicted, shares dealt out anew."""

    change: str
    step_s: Seconds


class Sent(_Frozen):
    """One collective on the wire: how many values go together in it, the first one's name."""

    name: str
    values: int = pydantic.Field(ge=1)
    collective: str
    start_s: Seconds
    wire_s: Seconds


class AsRun(_Frozen):
    """The step as its program is run, after the passes: collectives bundled, and sent beside compute where nobody waits
    for them yet. ``busy_s``: for each device class start, end, start, end ... of compute without a pause."""

    step_s: Seconds
    wire: tuple[Sent, ...]
    busy_s: tuple[tuple[Seconds, ...], ...]


class Explanation(_Frozen):
    """What a reader wants beside the decisions. ``cluster`` is its description; ``classes`` the ranks that compute
    alike in every stage, ``conversion_s`` seconds of each of the plan's conversions. ``stages`` add up to the step in
    which nothing overlaps, which the bound is for; ``as_run`` is the step as it is run."""

    cluster: dict[str, Any]
    classes: tuple[tuple[int, ...], ...]
    stages: tuple[Stage, ...]
    conversion_s: tuple[Seconds, ...]
    layers: tuple[Layer, ...]
    helps: tuple[Help, ...] = ()
    as_run: AsRun | None = None


class Recomputed(_Frozen):
    """One block of the model, what of it is made again in the backward pass instead of being kept, and those calls by
    their nodes. ``what``: ``cheap`` are elementwise calls, norms and lookups, ``products`` these and matrix products,
    ``all`` is everything but what the block hands on."""

    block: str
    what: Literal["cheap", "products", "all"]
    calls: tuple[str, ...]


class Plan(Sparse):
    """See the module docstring. ``strategies`` maps a node's name to the text of its ``Strategy``. ``recomputed`` is
    not in the file where nothing is, nor ``gradient_accumulation_steps`` where a step has one batch. Where it has more,
    what is predicted is of one batch, the mean over a step's. ``postponed``: a call of the backward pass, or "" for its
    end -> the calls that run just before it, out of turn; ``step_s`` is of the order without that."""

    absent = ("recomputed", "gradient_accumulation_steps", "postponed")
    schema_version: int = SCHEMA_VERSION
    provenance: Provenance
    groups: dict[str, GroupPlan]
    strategies: dict[str, str]
    conversions: tuple[Conversion, ...]
    predicted: Prediction
    devices: tuple[str, ...]  # rank -> "host3/V100-16GB" in the user's words
    explanation: Explanation | None = None
    recomputed: tuple[Recomputed, ...] = ()
    gradient_accumulation_steps: int = pydantic.Field(default=1, ge=1)
    postponed: dict[str, tuple[str, ...]] = {}

    @property
    def repeated(self) -> tuple[str, ...]:
        """The nodes whose calls are made again in the backward pass."""
        return tuple(name for block in self.recomputed for name in block.calls)

    @property
    def world_size(self) -> int:
        return self.provenance.world_size

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Of all ranks, at their peaks."""
        return self.predicted.memory_bytes

    @property
    def sizes(self) -> GroupSizes:
        return {name: group.sizes for name, group in self.groups.items()}

    def strategy(self, node: str) -> Strategy:
        return Strategy.parse(self.strategies[node])

    @property
    def checksum(self) -> str:
        """SHA-256 of the canonical JSON; what ranks compare and what the file carries."""
        return plan_file.checksum(self.model_dump(mode="json"))

    def to_json(self) -> str:
        return plan_file.render(self.model_dump(mode="json"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """PlanError if it cannot be written."""
        plan_file.write_text(path, self.to_json())

    @classmethod
    def from_json(cls, text: str, origin: str = "plan") -> Plan:
        """Parse and check. PlanError: not JSON, unknown version, unknown or missing field, changed content."""
        body, checksum = plan_file.parse(text, origin)
        if "inside" in body:
            raise PlanError(f"{origin}: a plan of a mesh of two axes; MeshPlan and load_plan of hap.mesh_plan read it")
        try:
            plan = cls.model_validate(body)
        except pydantic.ValidationError as e:
            first = e.errors()[0]
            where = ".".join(str(p) for p in first["loc"])
            raise PlanError(f"{origin}: {where or 'plan'}: {first['msg']}") from None
        if checksum is not None and checksum != plan.checksum:
            raise PlanError(plan_file.edited(origin))
        verify_plan(plan, origin)
        return plan

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        return cls.from_json(plan_file.read_text(path), str(path))


def verify_plan(plan: Plan, origin: str = "plan") -> None:
    """Raise PlanError unless sizes sum exactly, every placement parses and names a group of the right length, and what
    is told per rank is told of every rank."""
    from hap.conversion import collective_kind  # which itself needs this module

    try:
        for group in plan.groups.values():
            _verify_sizes(group, plan.world_size)
        lengths = {name: group.n for name, group in plan.groups.items()}
        for name, text in plan.strategies.items():
            strategy = Strategy.parse(text)
            if str(strategy) != text:
                raise ValueError(f"{name}: {text!r} is not written as {strategy}")
            for placement in (*strategy.inputs, *strategy.outputs):
                _check_group(placement, lengths, name)
        for name in plan.repeated:
            if name not in plan.strategies:
                raise ValueError(f"{name!r} is computed again, and has no strategy")
        _verify_postponed(plan)
        for c in plan.conversions:
            if str(Value.parse(c.value)) != c.value:
                raise ValueError(f"{c.value!r} names no value")
            for text in (c.source, c.target):
                placement = parse_placement(text)
                if str(placement) != text:
                    raise ValueError(f"{c.value}: {text!r} is not written as {placement}")
                _check_group(placement, lengths, c.value)
            if collective_kind(parse_placement(c.source), parse_placement(c.target)) != c.collective:
                raise ValueError(f"{c.value}: {c.collective} does not turn {c.source} into {c.target}")
        _verify_lengths(plan)
    except (ValueError, AssertionError) as e:
        raise PlanError(f"{origin}: {' '.join(str(e).split())}") from None


def _verify_postponed(plan: Plan) -> None:
    late = [name for names in plan.postponed.values() for name in names]
    for name in (*late, *plan.postponed):
        if name and name not in plan.strategies:
            raise ValueError(f"{name!r} is postponed, or waited for, and has no strategy")
    if len({*late, *plan.postponed}) < len(late) + len(plan.postponed):
        raise ValueError("a call is postponed twice, or until one that is postponed")


def _verify_sizes(group: GroupPlan, world_size: int) -> None:
    """What ``placement.verify_sizes`` asserts, also where Python drops assertions."""
    if len(group.sizes) != world_size:
        raise ValueError(f"{len(group.sizes)} sizes for {world_size} ranks")
    if min(group.sizes) < 0:
        raise ValueError(f"sizes must be whole and non-negative: {group.sizes}")
    if sum(group.sizes) != group.n:
        raise ValueError(f"sizes {group.sizes} sum to {sum(group.sizes)}, not {group.n}")


def _verify_lengths(plan: Plan) -> None:
    n, predicted, told = plan.world_size, plan.predicted, plan.explanation
    for what, length in (
        ("devices", len(plan.devices)),
        ("compute times", len(predicted.compute_s)),
        ("memories", len(predicted.memory_bytes)),
        ("memories by kind", len(predicted.memory_by_kind)),
    ):
        if length != n:
            raise ValueError(f"{length} {what} for {n} ranks")
    if told is None:
        return
    if sorted(rank for ranks in told.classes for rank in ranks) != list(range(n)) or not all(told.classes):
        raise ValueError("the explanation's device classes are not the ranks, each once")
    if len(told.conversion_s) != len(plan.conversions):
        raise ValueError(f"{len(told.conversion_s)} conversion times for {len(plan.conversions)} conversions")
    for stage in told.stages:
        if len(stage.compute_s) != len(told.classes):
            raise ValueError(f"a stage with {len(stage.compute_s)} times for {len(told.classes)} device classes")
        if stage.conversion is not None and not 0 <= stage.conversion < len(plan.conversions):
            raise ValueError(f"a stage ends with conversion {stage.conversion} of {len(plan.conversions)}")
    if told.as_run is None:
        return
    if len(told.as_run.busy_s) != len(told.classes):
        raise ValueError(f"{len(told.as_run.busy_s)} rows of compute for {len(told.classes)} device classes")
    for row in told.as_run.busy_s:
        if len(row) % 2 or list(row) != sorted(row):
            raise ValueError("compute does not begin and end in turns")


def _check_group(placement: Placement | None, lengths: Mapping[str, int], where: str) -> None:
    if not isinstance(placement, Shard):
        return
    if lengths.get(placement.group) != placement.n:
        raise ValueError(f"{where}: placement {placement} does not match group {placement.group!r}")
    if placement.outer < 1 or placement.unit < 1:
        raise ValueError(f"{where}: placement {placement} is of nothing")
