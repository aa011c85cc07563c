"""The plan of a mesh of two axes: the batch dealt out between the hosts, and inside each host a plan of one axis.

``between`` has every node's strategy with hosts in the place of ranks: they shard ``batch`` and what follows from it.
``inside`` has the plans of hosts that differ, each for the graph of such a host's part
(``hap.rules.host_graph``) and its devices; ``hosts[h].inside`` says which one host h runs. Hosts may have different
numbers of devices, parts of the batch, shares inside, and strategies.

The file is a plan file (``hap.plan_file``) with ``inside`` in it; ``load_plan`` reads either kind.
"""

from __future__ import annotations

import os
from typing import Any

import pydantic

from hap import plan_file
from hap.errors import PlanError
from hap.placement import GroupSizes, Shard
from hap.plan import GroupPlan, Plan, Provenance, Seconds, Sparse, Strategy, verify_plan
from hap.plan_file import SCHEMA_VERSION

BATCH = "batch"  # the group of all shards between hosts


class _Frozen(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class HostPart(_Frozen):
    """One host: how many ranks it has, its part of the batch, and which of the plans inside it runs."""

    name: str
    ranks: int = pydantic.Field(ge=1)
    batch: int = pydantic.Field(ge=1)
    inside: int = pydantic.Field(ge=0)


class MeshPrediction(_Frozen):
    """Seconds. ``step_s`` is the slowest host's step with nothing overlapped, without what hosts wait for each other;
    ``overlapped_s`` all hosts' step as it is run, with that; ``sums_s`` what sums over hosts take of the first.
    ``lower_bound_s``: what the first takes at least on these two axes, however the batch is dealt out to these hosts.
    ``arithmetic_s``: all arithmetic, perfectly dealt out; no plan of any mesh is faster."""

    step_s: float = pydantic.Field(ge=0)
    overlapped_s: float | None = pydantic.Field(default=None, ge=0)
    sums_s: float = pydantic.Field(ge=0)
    arithmetic_s: float = pydantic.Field(ge=0)
    lower_bound_s: float = pydantic.Field(ge=0)

    @property
    def gap(self) -> float:
        """(step - bound) / step."""
        return max(0.0, 1.0 - self.lower_bound_s / self.step_s) if self.step_s else 0.0

    @property
    def as_run_s(self) -> float:
        """What a clock should show: the step as it is run, where it was worked out."""
        return self.step_s if self.overlapped_s is None else self.overlapped_s


class MeshExplanation(_Frozen):
    """What a reader wants beside the decisions, and the plans inside do not tell. ``cluster`` is the description of the
    whole one, without the hosts left out; ``sums_s`` what of each rank's predicted compute are sums over hosts."""

    cluster: dict[str, Any]
    sums_s: tuple[Seconds, ...]


class MeshPlan(Sparse):
    """See the module docstring. ``provenance`` is about the whole model and cluster; without the hosts ``left_out``.
    ``explanation`` is not in the file where there is none."""

    absent = ("explanation",)
    schema_version: int = SCHEMA_VERSION
    provenance: Provenance
    hosts: tuple[HostPart, ...]
    batch: GroupPlan
    between: dict[str, str]
    inside: tuple[Plan, ...]
    predicted: MeshPrediction
    left_out: tuple[str, ...] = ()
    explanation: MeshExplanation | None = None

    @property
    def world_size(self) -> int:
        return self.provenance.world_size

    @property
    def gradient_accumulation_steps(self) -> int:
        """The batches of a step, alike in all plans inside; times are of one."""
        return self.inside[0].gradient_accumulation_steps

    @property
    def sizes(self) -> GroupSizes:
        """Those between hosts."""
        return {BATCH: self.batch.sizes}

    def host_of(self, rank: int) -> tuple[int, int]:
        """(the host of a rank, its number inside)."""
        first = 0
        for number, host in enumerate(self.hosts):
            if first <= rank < first + host.ranks:
                return number, rank - first
            first += host.ranks
        raise IndexError(f"no rank {rank}")

    def inside_of(self, host: int) -> Plan:
        return self.inside[self.hosts[host].inside]

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of all ranks. Hosts that share a plan have devices that are alike."""
        names = [(host, name) for h, host in enumerate(self.hosts) for name in self.inside_of(h).devices]
        return tuple(f"{host.name}/{name.partition('/')[2]}" for host, name in names)

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Of all ranks, at their peaks."""
        return tuple(held for h in range(len(self.hosts)) for held in self.inside_of(h).predicted.memory_bytes)

    @property
    def checksum(self) -> str:
        return plan_file.checksum(self.model_dump(mode="json"))

    def to_json(self) -> str:
        return plan_file.render(self.model_dump(mode="json"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """PlanError if it cannot be written."""
        plan_file.write_text(path, self.to_json())


def parse_plan(text: str, origin: str = "plan") -> Plan | MeshPlan:
    """A plan of either kind, checked. PlanError as ``Plan.from_json`` says."""
    body, checksum = plan_file.parse(text, origin)
    if "inside" not in body:
        return Plan.from_json(text, origin)
    try:
        plan = MeshPlan.model_validate(body)
    except pydantic.ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        raise PlanError(f"{origin}: {where or 'plan'}: {first['msg']}") from None
    if checksum != plan.checksum:
        raise PlanError(plan_file.edited(origin))
    verify_mesh_plan(plan, origin)
    return plan


def load_plan(path: str | os.PathLike[str]) -> Plan | MeshPlan:
    """``parse_plan`` of a file."""
    return parse_plan(plan_file.read_text(path), str(path))


def verify_mesh_plan(plan: MeshPlan, origin: str = "plan") -> None:
    """PlanError unless its parts fit together."""
    for part in plan.inside:
        verify_plan(part, origin)
    if len({part.gradient_accumulation_steps for part in plan.inside}) != 1:
        raise PlanError(f"{origin}: hosts' plans are for steps of different numbers of batches, or there are none")
    if sum(h.ranks for h in plan.hosts) != plan.world_size:
        raise PlanError(f"{origin}: hosts of {[h.ranks for h in plan.hosts]} ranks for {plan.world_size}")
    if plan.batch.sizes != tuple(h.batch for h in plan.hosts) or sum(plan.batch.sizes) != plan.batch.n:
        raise PlanError(f"{origin}: the hosts' parts {[h.batch for h in plan.hosts]} are not a batch of {plan.batch.n}")
    for host in plan.hosts:
        if host.inside >= len(plan.inside) or plan.inside[host.inside].world_size != host.ranks:
            raise PlanError(f"{origin}: host {host.name} of {host.ranks} ranks has no plan inside")
    if plan.explanation is not None and len(plan.explanation.sums_s) != plan.world_size:
        raise PlanError(f"{origin}: {len(plan.explanation.sums_s)} sums over hosts for {plan.world_size} ranks")
    for name, text in plan.between.items():
        _verify_between(name, text, plan.batch.n, origin)


def _verify_between(name: str, text: str, n: int, origin: str) -> None:
    try:
        strategy = Strategy.parse(text)
    except ValueError as e:
        raise PlanError(f"{origin}: {name}: {e}") from None
    if any(isinstance(p, Shard) and (p.group, p.n) != (BATCH, n) for p in (*strategy.inputs, *strategy.outputs)):
        raise PlanError(f"{origin}: {name}: between hosts {text} shards something else than the batch of {n}")
