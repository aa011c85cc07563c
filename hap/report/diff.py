"""``hap diff``: what changed from one plan to another, in words and numbers, the weightiest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hap.plan import Plan
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


def diff(a: Plan, b: Plan) -> Difference:
    """From ``a`` to ``b``."""
    return Difference(
        same=a.checksum == b.checksum,
        made_for=tuple(_made_for(a, b)),
        numbers=tuple(_figures(a, b)),
        decisions=tuple(_decisions(a, b)),
    )


def _made_for(a: Plan, b: Plan) -> Iterator[str]:
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


def _figures(a: Plan, b: Plan) -> Iterator[Number]:
    """Those that changed."""
    x, y = a.predicted, b.predicted
    pairs = [
        Number("predicted step", x.as_run_s, y.as_run_s, "s"),
        Number("busiest rank's compute", max(x.compute_s), max(y.compute_s), "s"),
        Number("communication", x.communication_s, y.communication_s, "s"),
        Number("lower bound", x.lower_bound_s or 0.0, y.lower_bound_s or 0.0, "s"),
        Number("fullest rank's memory", max(x.memory_bytes), max(y.memory_bytes), "B"),
        Number("memory of all ranks", sum(x.memory_bytes), sum(y.memory_bytes), "B"),
    ]
    if x.overlapped_s is not None or y.overlapped_s is not None:
        pairs.insert(1, Number("with nothing overlapped", x.step_s, y.step_s, "s"))
    for kind in sorted({c.collective for p in (a, b) for c in p.conversions if c.collective != "slice"}):
        found = [[c for c in p.conversions if c.collective == kind] for p in (a, b)]
        pairs.append(Number(f"number of {kind}", len(found[0]), len(found[1]), ""))
        pairs.append(Number(f"bytes in {kind}", sum(c.nbytes for c in found[0]), sum(c.nbytes for c in found[1]), "B"))
    yield from (n for n in pairs if n.before != n.after)


def _numbers(numbers: tuple[Number, ...]) -> list[str]:
    rows = []
    for n in numbers:
        show = seconds if n.unit == "s" else lambda value, unit=n.unit: quantity(value, unit)
        change = "" if n.change is None else f"{n.change:+.1%}"
        rows.append([n.name, show(n.before), "->", show(n.after), change])
    return table(rows, right=(1, 3, 4)) if rows else []


def _decisions(a: Plan, b: Plan) -> Iterator[str]:
    yield from _shares(a, b)
    yield from _uses(a, b)
    yield from _calls(a, b)
    if a.recomputed != b.recomputed:
        yield f"computed again in the backward pass: {_repeated(a)}; now {_repeated(b)}"
    if a.devices != b.devices:
        gone = [d for d in a.devices if d not in b.devices]
        new = [d for d in b.devices if d not in a.devices]
        yield (
            f"devices: {_listed(gone, 'gone')}{'; ' if gone and new else ''}{_listed(new, 'new')}"
            if gone or new
            else ("devices: in another order")
        )


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
