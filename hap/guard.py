"""Golden plans: a plan made today against one kept in the repository.

Three things can be wrong: the predicted step got longer, the fullest device got fuller, or the two cannot be compared
(another cluster, or no golden plan). A changed model is compared all the same: that is what the guard is for. Used by
the ``hap_plan`` fixture (``hap.testing``) and by ``hap check``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pydantic
import yaml

from hap.errors import HapError
from hap.plan import Plan
from hap.report.diff import diff
from hap.report.facts import Facts
from hap.report.words import quantity, seconds

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


def judge(name: str, golden: Plan, found: Plan, *, max_step_regression: float, max_memory_regression: float) -> Result:
    """``found`` against ``golden``; the limits are relative (0.02 = 2%)."""
    return Result(
        name, tuple(_reasons(golden, found, max_step_regression, max_memory_regression)), str(diff(golden, found))
    )


def _reasons(golden: Plan, found: Plan, step: float, memory: float) -> list[str]:
    made, now = golden.provenance, found.provenance
    if made.cluster_fingerprint != now.cluster_fingerprint:
        return [
            f"the golden plan is for cluster {made.cluster!r} ({made.cluster_fingerprint[:12]}), "
            f"this is {now.cluster!r} ({now.cluster_fingerprint[:12]}); update it"
        ]
    reasons = []
    before, after = golden.predicted.step_s, found.predicted.step_s
    if after > before * (1 + step + SLACK):
        grown = f"by {after / before - 1:.1%}, " if before else ""
        reasons.append(f"the step grew {grown}from {seconds(before)} to {seconds(after)} (at most {step:.1%} allowed)")
    (_, was), (rank, now_is) = _fullest(golden), _fullest(found)
    if now_is > was * (1 + memory + SLACK):
        grown = f"by {now_is / was - 1:.1%}, " if was else ""
        held, holds = max(golden.predicted.memory_bytes), found.predicted.memory_bytes[rank]
        words = (
            f"from {100 * was:.3g}% to {100 * now_is:.3g}% of its memory"
            if found.explanation
            else (f"from {quantity(held, 'B')} to {quantity(holds, 'B')}")
        )
        reasons.append(
            f"the fullest device, now {found.devices[rank]}, is fuller {grown}{words} (at most {memory:.1%} allowed)"
        )
    return reasons


def _fullest(plan: Plan) -> tuple[int, float]:
    """(rank, how full) of the device that comes closest to its memory; of the largest use where the plan does not say
    what devices have."""
    cluster = Facts(plan).cluster
    used = plan.predicted.memory_bytes
    full = [u / (cluster.devices[r].memory_bytes if cluster else 1) for r, u in enumerate(used)]
    rank = max(range(len(full)), key=lambda r: full[r])
    return rank, full[rank]


class Entry(pydantic.BaseModel):
    """One plan of a ``check.yaml``. Paths are relative to the folder that the file stands in."""

    model_config = pydantic.ConfigDict(extra="forbid")

    model: str | None = None
    hf: str | None = None
    batch: int = pydantic.Field(default=8, ge=1)
    seq: int | None = pydantic.Field(default=None, ge=1)
    cluster: str
    optimizer: str = "adamw"
    effort: Literal["quick", "normal"] = "normal"
    max_step_regression: float = pydantic.Field(default=0.02, ge=0)
    max_memory_regression: float = pydantic.Field(default=0.0, ge=0)


def check_folder(folder: Path, *, update: bool) -> list[Result]:
    """Every plan that the folder's ``check.yaml`` names, planned again. HapError where something cannot be read."""
    entries = _entries(folder / "check.yaml")
    stray = sorted(p.name for p in folder.glob("*.plan.json") if p.name not in entries)
    if stray:
        raise HapError(f"{folder / 'check.yaml'}: {stray[0]} is in the folder and not named; nobody would guard it")
    return [_check(folder, name, entry, update) for name, entry in entries.items()]


def _entries(path: Path) -> dict[str, Entry]:
    try:
        body = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
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
    return found


def _check(folder: Path, name: str, entry: Entry, update: bool) -> Result:
    from hap import api
    from hap.build import build_from, build_hugging_face

    golden_path = folder / name
    golden = None if update else Plan.load(golden_path) if golden_path.exists() else None
    if entry.model is not None:
        where, _, function = entry.model.rpartition(":")
        built = build_from(f"{folder / where}:{function}" if where.endswith(".py") else entry.model)
    else:
        local = folder / str(entry.hf)
        built = build_hugging_face(str(local if local.is_file() else entry.hf), entry.batch, entry.seq)
    found = api.plan(
        built.model,
        folder / entry.cluster,
        example_inputs=built.example_inputs,
        example_targets=built.example_targets,
        loss_fn=built.loss_fn,
        optimizer=entry.optimizer,
        effort=entry.effort,
    )
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
