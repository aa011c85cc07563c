"""The plan: what search decides and codegen obeys, as one frozen, serialisable value.

A plan names, for every node of the graph, the *strategy* (placement of each tensor argument and of each output), for
every dimension group the whole-number sizes per rank, and for every conversion between two placements the collective
that performs it. It carries fingerprints of the model, the cluster and the rule table it was made for, the predicted
time and memory, and a checksum, so that a plan for something else, or one edited by hand, is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pydantic

from hap.errors import PlanError
from hap.placement import GroupSizes, Placement, parse_placement, verify_sizes

SCHEMA_VERSION = 1
Collective = Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice"]


@dataclass(frozen=True)
class Strategy:
    """One way to run a node: the placement each tensor argument must have and the one each output then has."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]

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


class _Frozen(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=False)


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
    nbytes: int  # of the whole value


class Prediction(_Frozen):
    """What the cost model expects. Seconds and bytes; one entry per rank where a tuple."""

    step_s: float
    compute_s: tuple[float, ...]
    communication_s: float
    memory_bytes: tuple[int, ...]
    memory_by_kind: tuple[dict[str, int], ...]  # per rank: parameters, gradients, optimizer, activations, ...
    lower_bound_s: float | None = None  # proved, or absent
    tight: str = ""  # the constraint that limits the step, in words

    @property
    def gap(self) -> float | None:
        """(step - bound) / step, only where the bound was proved."""
        return None if self.lower_bound_s is None else max(0.0, 1.0 - self.lower_bound_s / self.step_s)


class Provenance(_Frozen):
    """What the plan was made for and by."""

    model: str
    model_fingerprint: str
    parameters: int
    cluster: str
    cluster_fingerprint: str
    world_size: int
    backend: str
    rules_fingerprint: str
    hap_version: str
    torch_version: str
    optimizer: str
    solver: dict[str, Any] = {}
    assumptions: tuple[str, ...] = ()


class Plan(_Frozen):
    """See the module docstring. ``strategies`` maps a node's name to the text of its ``Strategy``."""

    schema_version: int = SCHEMA_VERSION
    provenance: Provenance
    groups: dict[str, GroupPlan]
    strategies: dict[str, str]
    conversions: tuple[Conversion, ...]
    predicted: Prediction
    devices: tuple[str, ...]  # rank -> "host3/V100-16GB" in the user's words

    @property
    def world_size(self) -> int:
        return self.provenance.world_size

    @property
    def sizes(self) -> GroupSizes:
        return {name: group.sizes for name, group in self.groups.items()}

    def strategy(self, node: str) -> Strategy:
        return Strategy.parse(self.strategies[node])

    @property
    def checksum(self) -> str:
        """SHA-256 of the canonical JSON; what ranks compare and what the file carries."""
        return hashlib.sha256(_canonical(self.model_dump(mode="json")).encode()).hexdigest()

    def to_json(self) -> str:
        body = self.model_dump(mode="json")
        return json.dumps({**body, "checksum": self.checksum}, indent=1, sort_keys=True) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(self.to_json())

    @classmethod
    def from_json(cls, text: str, origin: str = "plan") -> Plan:
        """Parse and check. PlanError: not JSON, wrong schema version, unknown or missing field, changed content."""
        try:
            body = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as e:
            raise PlanError(f"{origin}: not a complete plan file ({e})") from None
        if not isinstance(body, dict) or "schema_version" not in body:
            raise PlanError(f"{origin}: not a plan file (no schema_version)")
        if body["schema_version"] != SCHEMA_VERSION:
            found = body["schema_version"]
            raise PlanError(f"{origin}: schema version {found!r}, this HAP reads {SCHEMA_VERSION}; plan again")
        checksum = body.pop("checksum", None)
        try:
            plan = cls.model_validate(body)
        except pydantic.ValidationError as e:
            first = e.errors()[0]
            where = ".".join(str(p) for p in first["loc"])
            raise PlanError(f"{origin}: {where or 'plan'}: {first['msg']}") from None
        if checksum != plan.checksum:
            raise PlanError(f"{origin}: content does not match its checksum (edited by hand or damaged); plan again")
        verify_plan(plan, origin)
        return plan

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise PlanError(f"{path}: cannot read plan ({e})") from None
        return cls.from_json(text, str(path))


def verify_plan(plan: Plan, origin: str = "plan") -> None:
    """Raise PlanError unless sizes sum exactly and every placement parses and names a group of the right length."""
    try:
        for group in plan.groups.values():
            verify_sizes(group.sizes, group.n, plan.world_size)
        lengths = {name: group.n for name, group in plan.groups.items()}
        for name, text in plan.strategies.items():
            strategy = Strategy.parse(text)
            for placement in (*strategy.inputs, *strategy.outputs):
                _check_group(placement, lengths, name)
        for c in plan.conversions:
            for text in (c.source, c.target):
                _check_group(parse_placement(text), lengths, c.value)
        if len(plan.devices) != plan.world_size:
            raise ValueError(f"{len(plan.devices)} devices for {plan.world_size} ranks")
    except (ValueError, AssertionError) as e:
        raise PlanError(f"{origin}: {e}") from None


def _check_group(placement: Placement | None, lengths: Mapping[str, int], where: str) -> None:
    group = getattr(placement, "group", None)
    if group is not None and lengths.get(group) != placement.n:  # type: ignore[union-attr]
        raise ValueError(f"{where}: placement {placement} does not match group {group!r}")


def _canonical(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"))
