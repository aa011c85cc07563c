"""Golden plans: a plan made today against one kept in the repository.

Three things can be wrong: the predicted step got longer, some device's memory grew, or the two cannot be compared
(another cluster, or no golden plan). A changed model is compared all the same: that is what the guard is for. Used by
the ``hap_plan`` fixture (``hap.testing``) and by ``hap check``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pydantic

from hap.axes import Mesh, plan_axes
from hap.cluster import read_yaml
from hap.errors import HapError
from hap.mesh_plan import MeshPlan, load_plan
from hap.plan import Plan
from hap.reduce_dtype import ReduceName
from hap.report.diff import diff
from hap.report.facts import Facts
from hap.report.words import counted, listed, quantity, seconds
from hap.starting import in_words, left_out

if TYPE_CHECKING:
    from hap.build import BuiltModel

SAME = "the same plan"  # what diff says of equal plans
SLACK = 1e-9  # relative: the last bits of sums


@dataclass(frozen=True)
class Result:
    """One guarded plan. ``reasons`` is empty where all is well; ``words`` are those of ``hap diff``."""

    name: str
    reasons: tuple[str, ...]
    words: str
    written: bool = False

    @property
    def ok(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        if self.written:
            return f"{self.name}: written"
        if self.ok:
            return f"{self.name}: ok" + ("" if self.words == SAME else " (changed, within its limits)")
        indented = self.words.replace("\n", "\n    ")
        return "\n".join(
            [f"{self.name}: WORSE", *(f"  {r}" for r in self.reasons), *([f"    {indented}"] * bool(indented))]
        )

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "ok": self.ok, "reasons": self.reasons, "diff": self.words, "written": self.written}


def judge(
    name: str,
    golden: Plan | MeshPlan,
    found: Plan | MeshPlan,
    *,
    max_step_regression: float,
    max_memory_regression: float,
) -> Result:
    """``found`` against ``golden``, each of one axis or of two; the limits are relative (0.02 = 2%)."""
    return Result(
        name, tuple(_reasons(golden, found, max_step_regression, max_memory_regression)), str(diff(golden, found))
    )


def _reasons(golden: Plan | MeshPlan, found: Plan | MeshPlan, step: float, memory: float) -> list[str]:
    made, now = golden.provenance, found.provenance
    if _left_out(golden) != _left_out(found):
        old, new = (_in_words(p) or "nothing" for p in (golden, found))
        return [f"the golden plan leaves out {old} of cluster {made.cluster!r}, this one {new}; update it"]
    if (made.cluster_fingerprint, made.world_size) != (now.cluster_fingerprint, now.world_size):
        return [
            f"the golden plan is for cluster {made.cluster!r} ({made.cluster_fingerprint[:12]}), "
            f"this is {now.cluster!r} ({now.cluster_fingerprint[:12]}); update it"
        ]
    reasons = []
    before, after, what = golden.predicted.as_run_s, found.predicted.as_run_s, "the step"
    if (golden.predicted.overlapped_s is None) != (found.predicted.overlapped_s is None):  # of version 1 or 2
        before, after, what = golden.predicted.step_s, found.predicted.step_s, "the step with nothing overlapped"
    if after > before * (1 + step + SLACK):
        grown = f"by {after / before - 1:.1%}, " if before else ""
        reasons.append(f"{what} grew {grown}from {seconds(before)} to {seconds(after)} (at most {step:.1%} allowed)")
    reasons += _fuller(golden, found, memory)
    return reasons


def _left_out(plan: Plan | MeshPlan) -> tuple[str, ...]:
    """Names of devices, or of hosts."""
    return tuple(left_out(plan).values()) if isinstance(plan, Plan) else plan.left_out


def _in_words(plan: Plan | MeshPlan) -> str:
    return in_words(plan) if isinstance(plan, Plan) else listed([f"host {name}" for name in plan.left_out])


def _fuller(golden: Plan | MeshPlan, found: Plan | MeshPlan, allowed: float) -> list[str]:
    """A line for the device that grew most, where one grew more than ``allowed``. Each is held to its own golden
    figure: beside a full device a small one could double unseen."""
    held, holds = golden.memory_bytes, found.memory_bytes
    grown = [r for r in range(len(holds)) if holds[r] > held[r] * (1 + allowed + SLACK)]
    if not grown:
        return []
    most = max(grown, key=lambda r: holds[r] / held[r] if held[r] else float("inf"))
    by = f" by {holds[most] / held[most] - 1:.1%}" if held[most] else ""
    has = f" of its {quantity(capacity, 'B')}" if (capacity := _capacity(found, most)) else ""
    others = f", and {counted(len(grown) - 1, 'other device')} grew too" if len(grown) > 1 else ""
    figures = f"from {quantity(held[most], 'B')} to {quantity(holds[most], 'B')}{has}"
    return [f"memory of {found.devices[most]} grew{by}, {figures} (at most {allowed:.1%} allowed){others}"]


def _capacity(plan: Plan | MeshPlan, rank: int) -> int | None:
    """Bytes of a rank's device; None in plans of version 1."""
    if isinstance(plan, MeshPlan):
        host, inside = plan.host_of(rank)
        return _capacity(plan.inside_of(host), inside)
    cluster = Facts(plan).cluster
    return cluster.devices[rank].memory_bytes if cluster else None


class Entry(pydantic.BaseModel):
    """One plan of a ``check.yaml``. Paths are relative to the folder that the file stands in; ``batch`` and ``seq`` go
    with ``hf``."""

    model_config = pydantic.ConfigDict(extra="forbid")

    model: str | None = None
    hf: str | None = None
    batch: int | None = pydantic.Field(default=None, ge=1)
    seq: int | None = pydantic.Field(default=None, ge=1)
    cluster: str
    optimizer: str = "adamw"
    effort: Literal["quick", "normal", "thorough"] = "normal"
    leave_out: bool = False
    mesh: Mesh = "flat"
    gradient_accumulation_steps: int = pydantic.Field(default=1, ge=1)
    reduce_dtype: ReduceName | None = None
    max_step_regression: float = pydantic.Field(default=0.02, ge=0)
    max_memory_regression: float = pydantic.Field(default=0.0, ge=0)


def check_folder(folder: Path, *, update: bool) -> list[Result]:
    """Every plan that the folder's ``check.yaml`` names, planned again. HapError where something cannot be read."""
    return list(checked(folder, update=update))


def checked(folder: Path, *, update: bool) -> Iterator[Result]:
    """The same one by one: what is there, and written, before one of them fails."""
    entries = _entries(folder / "check.yaml")
    stray = sorted(p.name for p in folder.glob("*.plan.json") if p.name not in entries)
    if stray:
        raise HapError(f"{folder / 'check.yaml'}: {stray[0]} is in the folder and not named; nobody would guard it")
    yield from (_check(folder, name, entry, update) for name, entry in entries.items())


def _entries(path: Path) -> dict[str, Entry]:
    try:
        body = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise HapError(f"{path}: cannot read ({' '.join(str(e).split())})") from None
    if not isinstance(body, dict) or not body:
        raise HapError(f"{path}: expected X.plan.json: {{model: ..., cluster: ...}}")
    found = {}
    for name, entry in body.items():
        if not str(name).endswith(".plan.json") or "/" in str(name):
            raise HapError(f"{path}: {name!r} is no name such as gpt2.plan.json")
        try:
            found[str(name)] = Entry.model_validate(entry)
        except pydantic.ValidationError as e:
            first = e.errors()[0]
            raise HapError(f"{path}: {name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        if (found[str(name)].model is None) == (found[str(name)].hf is None):
            raise HapError(f"{path}: {name}: name one of model and hf")
        if found[str(name)].hf is None and (found[str(name)].batch, found[str(name)].seq) != (None, None):
            raise HapError(f"{path}: {name}: batch and seq go with hf; a model comes with its own example inputs")
    return found


def _check(folder: Path, name: str, entry: Entry, update: bool) -> Result:
    golden_path = folder / name
    golden = None if update else load_plan(golden_path) if golden_path.exists() else None
    found = _plan(folder, entry)
    if update:
        found.save(golden_path)
        return Result(name, (), "", written=True)
    if golden is None:
        return Result(name, (f"there is no golden plan {golden_path}; run: hap check {folder} --update",), "")
    return judge(
        name,
        golden,
        found,
        max_step_regression=entry.max_step_regression,
        max_memory_regression=entry.max_memory_regression,
    )


def _plan(folder: Path, entry: Entry) -> Plan | MeshPlan:
    """Today's plan of an entry."""
    from hap.build import beside, build_from, build_hugging_face

    if entry.model is None:
        local = folder / str(entry.hf)
        source = str(local if local.is_file() else entry.hf)
        return _plan_built(folder, entry, build_hugging_face(source, entry.batch, entry.seq))
    where, _, function = entry.model.rpartition(":")
    reference = f"{folder / where}:{function}" if where.endswith(".py") else entry.model
    with beside(reference):
        return _plan_built(folder, entry, build_from(reference))


def _plan_built(folder: Path, entry: Entry, built: BuiltModel) -> Plan | MeshPlan:
    return plan_axes(
        entry.mesh,
        built.model,
        folder / entry.cluster,
        example_inputs=built.example_inputs,
        example_targets=built.example_targets,
        loss_fn=built.loss_fn,
        optimizer=entry.optimizer,
        effort=entry.effort,
        leave_out=entry.leave_out,
        gradient_accumulation_steps=entry.gradient_accumulation_steps,
        reduce_dtype=entry.reduce_dtype,
    )
