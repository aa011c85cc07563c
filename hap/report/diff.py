"""``hap diff``: what changed from one plan to another, in words and numbers, the weightiest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hap.mesh_plan import MeshPlan
from hap.plan import Conversion, Plan, Prediction
from hap.report.summary import parameter_uses
from hap.report.words import counted, listed, quantity, seconds, sizes_in_words, starred, table

FEW = 12  # lines of one kind


@dataclass(frozen=True)
class Number:
    """One figure before and after. ``unit`` is ``s``, ``B`` or nothing."""

    name: str
    before: float
    after: float
    unit: str

    @property
    def change(self) -> float | None:
        """Relative; None where there was nothing before."""
        return self.after / self.before - 1 if self.before else None


@dataclass(frozen=True)
class Difference:
    """``made_for``: what is not the same about model, cluster or HAP; ``decisions``: what is dealt or placed
    otherwise."""

    same: bool
    made_for: tuple[str, ...]
    numbers: tuple[Number, ...]
    decisions: tuple[str, ...]

    def __str__(self) -> str:
        if self.same:
            return "the same plan"
        blocks = [list(self.made_for), _numbers(self.numbers), _cut(self.decisions)]
        if not self.decisions:
            blocks.append(["every decision is the same"])
        return "\n\n".join("\n".join(block) for block in blocks if block)

    def to_json(self) -> dict[str, Any]:
        numbers = [{**asdict(n), "change": n.change} for n in self.numbers]
        return {"same": self.same, "made_for": self.made_for, "numbers": numbers, "decisions": self.decisions}


def diff(a: Plan | MeshPlan, b: Plan | MeshPlan) -> Difference:
    """From ``a`` to ``b``, each of one axis or of two."""
    return Difference(
        same=a.checksum == b.checksum,
        made_for=tuple(_made_for(a, b)),
        numbers=tuple(n for n in _figures(a, b) if n.before != n.after),
        decisions=tuple(_decisions(a, b)),
    )


def _made_for(a: Plan | MeshPlan, b: Plan | MeshPlan) -> Iterator[str]:
    x, y = a.provenance, b.provenance
    for what, name, fingerprint in (
        ("model", "model", "model_fingerprint"),
        ("cluster", "cluster", "cluster_fingerprint"),
        ("rule table", "hap_version", "rules_fingerprint"),
    ):
        before, after = getattr(x, fingerprint), getattr(y, fingerprint)
        if before != after:
            yield f"another {what}: {getattr(x, name)} ({before[:12]}) became {getattr(y, name)} ({after[:12]})"
    if x.profile_fingerprint != y.profile_fingerprint:
        shown = [p[:12] if p else "none" for p in (x.profile_fingerprint, y.profile_fingerprint)]
        yield f"another profile: {shown[0]} became {shown[1]}"
    for what in ("world_size", "optimizer", "backend", "hap_version", "torch_version"):
        if getattr(x, what) != getattr(y, what):
            yield f"{what.replace('_', ' ')}: {getattr(x, what)} became {getattr(y, what)}"


def _figures(a: Plan | MeshPlan, b: Plan | MeshPlan) -> Iterator[Number]:
    x, y = a.predicted, b.predicted
    if (x.overlapped_s is None) == (y.overlapped_s is None):  # one that is not known cannot be compared
        yield Number("predicted step", x.as_run_s, y.as_run_s, "s")
    if x.overlapped_s is not None or y.overlapped_s is not None:
        yield Number("with nothing overlapped", x.step_s, y.step_s, "s")
    if isinstance(a, Plan) and isinstance(b, Plan):
        yield Number("busiest rank's compute", max(a.predicted.compute_s), max(b.predicted.compute_s), "s")
    yield Number("communication", _wire_s(a), _wire_s(b), "s")
    yield Number("sums over hosts", _sums_s(a), _sums_s(b), "s")
    if isinstance(a, MeshPlan) == isinstance(b, MeshPlan):  # no bound of one axis holds for two
        yield Number("lower bound", x.lower_bound_s or 0.0, y.lower_bound_s or 0.0, "s")
    if isinstance(x, Prediction) and isinstance(y, Prediction) and (x.overlapped_bound_s or y.overlapped_bound_s):
        yield Number("lower bound as run", x.overlapped_bound_s or 0.0, y.overlapped_bound_s or 0.0, "s")
    yield Number("fullest rank's memory", max(a.memory_bytes), max(b.memory_bytes), "B")
    yield Number("memory of all ranks", sum(a.memory_bytes), sum(b.memory_bytes), "B")
    moved = [[c for c in _conversions(plan) if c.collective != "slice"] for plan in (a, b)]
    for kind in sorted({c.collective for of_one in moved for c in of_one}):
        found = [[c for c in of_one if c.collective == kind] for of_one in moved]
        yield Number(f"number of {kind}", len(found[0]), len(found[1]), "")
        yield Number(f"bytes in {kind}", sum(c.nbytes for c in found[0]), sum(c.nbytes for c in found[1]), "B")


def _insides(plan: Plan | MeshPlan) -> tuple[Plan, ...]:
    """The plan of every host; one of one axis is a single one."""
    return (plan,) if isinstance(plan, Plan) else tuple(plan.inside_of(h) for h in range(len(plan.hosts)))


def _wire_s(plan: Plan | MeshPlan) -> float:
    """Of the host where it is longest."""
    return max(inside.predicted.communication_s for inside in _insides(plan))


def _sums_s(plan: Plan | MeshPlan) -> float:
    return plan.predicted.sums_s if isinstance(plan, MeshPlan) else 0.0


def _conversions(plan: Plan | MeshPlan) -> list[Conversion]:
    return [c for inside in _insides(plan) for c in inside.conversions]


def _numbers(numbers: tuple[Number, ...]) -> list[str]:
    rows = []
    for n in numbers:
        show = seconds if n.unit == "s" else lambda value, unit=n.unit: quantity(value, unit)
        change = "" if n.change is None else f"{n.change:+.1%}"
        rows.append([n.name, show(n.before), "->", show(n.after), change])
    return table(rows, right=(1, 3, 4)) if rows else []


def _decisions(a: Plan | MeshPlan, b: Plan | MeshPlan) -> Iterator[str]:
    if isinstance(a, Plan) and isinstance(b, Plan):
        yield from _of_one_axis(a, b)
    elif isinstance(a, MeshPlan) and isinstance(b, MeshPlan):
        yield from _of_two_axes(a, b)
    else:
        yield f"{_axes(a)} became {_axes(b)}"


def _axes(plan: Plan | MeshPlan) -> str:
    if isinstance(plan, Plan):
        return "a plan of one axis"
    return f"a plan of two, with {plan.batch.label} dealt out between {listed([h.name for h in plan.hosts])}"


def _of_two_axes(a: MeshPlan, b: MeshPlan) -> Iterator[str]:
    """The hosts and their parts, then what changed inside of them, of hosts where the same did together."""
    before, after = ({h.name: i for i, h in enumerate(plan.hosts)} for plan in (a, b))
    gone, new = [h for h in before if h not in after], [h for h in after if h not in before]
    yield from (f"hosts: {_listed(names, word)}" for names, word in ((gone, "gone"), (new, "new")) if names)
    parts = [dict(zip(found, plan.batch.sizes, strict=True)) for found, plan in ((before, a), (after, b))]
    if parts[0] != parts[1]:
        old, now = (listed([f"{size} on {name}" for name, size in found.items()]) for found in parts)
        yield f"{a.batch.label} between hosts: {old} became {now}"
    inside: dict[str, list[str]] = {}
    for name in (h for h in before if h in after):
        for line in _of_one_axis(a.inside_of(before[name]), b.inside_of(after[name])):
            inside.setdefault(line, []).append(name)
    yield from (f"inside {listed(names)}: {line}" for line, names in inside.items())


def _of_one_axis(a: Plan, b: Plan) -> Iterator[str]:
    yield from _shares(a, b)
    yield from _uses(a, b)
    yield from _calls(a, b)
    yield from _ways(a, b)
    if a.recomputed != b.recomputed:
        yield f"computed again in the backward pass: {_repeated(a)}; now {_repeated(b)}"
    if a.postponed != b.postponed:
        old, now = (counted(sum(map(len, plan.postponed.values())), "call") for plan in (a, b))
        yield f"postponed in the backward pass: {old}; now {now}" + (", or others" if old == now else "")
    if a.gradient_accumulation_steps != b.gradient_accumulation_steps:
        yield f"batches of a step: {a.gradient_accumulation_steps}; now {b.gradient_accumulation_steps}"
    if a.provenance.reduce_dtype != b.provenance.reduce_dtype:
        old, now = (plan.provenance.reduce_dtype or "their own dtype" for plan in (a, b))
        yield f"gradients are exchanged in {old}; now in {now}"
    if a.devices != b.devices:
        gone = [d for d in a.devices if d not in b.devices]
        new = [d for d in b.devices if d not in a.devices]
        yield (
            f"devices: {_listed(gone, 'gone')}{'; ' if gone and new else ''}{_listed(new, 'new')}"
            if gone or new
            else ("devices: in another order")
        )


def _ways(a: Plan, b: Plan) -> Iterator[str]:
    """Collectives that are in both plans and performed otherwise, a line for each kind and way."""
    before = {(c.value, c.source, c.target, c.phase): c.decomposition for c in a.conversions}
    changes: Counter[tuple[str, str, str]] = Counter()
    for c in b.conversions:
        old = before.get((c.value, c.source, c.target, c.phase), c.decomposition)
        if old != c.decomposition:
            changes[c.collective, old, c.decomposition] += 1
    for (kind, old, new), count in changes.items():
        yield f"{count} {kind} performed by {old}; now by {new}"


def _repeated(plan: Plan) -> str:
    kinds = Counter[str](r.what for r in plan.recomputed)
    calls = counted(len(plan.repeated), "call")
    return f"{calls} of {counted(sum(kinds.values()), 'block')}" if kinds else "nothing"


def _listed(devices: list[str], word: str) -> str:
    return f"{listed(devices)} {word}" if devices else ""


def _shares(a: Plan, b: Plan) -> Iterator[str]:
    """Sizes by label: layers alike in both plans share a line."""
    before = {group.label: group.sizes for group in a.groups.values()}
    after = {group.label: group.sizes for group in b.groups.values()}
    changes: Counter[tuple[str, str]] = Counter()
    for label in dict.fromkeys([*before, *after]):
        if before.get(label) != after.get(label):
            old, new = (_sizes(found.get(label)) for found in (before, after))
            changes[starred(label), f"{old} became {new}"] += 1
    for (label, words), count in changes.items():
        yield f"{label}{f' ({count} groups)' if count > 1 else ''}: {words}"


def _sizes(sizes: tuple[int, ...] | None) -> str:
    if sizes is None:
        return "not dealt"
    return sizes_in_words(sizes)


def _uses(a: Plan, b: Plan) -> Iterator[str]:
    """Parameters held or used otherwise, by pattern of their names."""
    before = {u.name: u for u in parameter_uses(a)}
    changed: dict[tuple[str, str], dict[str, None]] = {}
    for use in parameter_uses(b):
        old = before.get(use.name)
        if old is not None and old.words != use.words:
            changed.setdefault((old.words, use.words), {})[use.pattern] = None
    for (old_words, new_words), patterns in changed.items():
        yield f"{listed(list(patterns), 3)}: {old_words}; now {new_words}"


def _calls(a: Plan, b: Plan) -> Iterator[str]:
    """How many operator calls run otherwise, where group names stand for their labels."""
    if list(a.strategies) != list(b.strategies) and sorted(a.strategies) != sorted(b.strategies):
        return
    names = [{g: f"@{group.label})" for g, group in p.groups.items()} for p in (a, b)]
    moved = [n for n in a.strategies if _named(a.strategies[n], names[0]) != _named(b.strategies[n], names[1])]
    if moved:
        first = moved[0]
        yield (
            f"{counted(len(moved), 'node')} of {len(a.strategies)} placed otherwise, the first {first}: "
            f"{a.strategies[first]} became {b.strategies[first]}"
        )


def _named(strategy: str, labels: dict[str, str]) -> str:
    parts = strategy.split("@")
    return parts[0] + "".join(_label(part, labels) for part in parts[1:])


def _label(part: str, labels: dict[str, str]) -> str:
    group, _, rest = part.partition(")")
    return labels.get(group, group) + rest


def _cut(lines: tuple[str, ...]) -> list[str]:
    shown = list(lines[:FEW])
    return shown if len(lines) <= FEW else [*shown, f"and {len(lines) - FEW} more"]
