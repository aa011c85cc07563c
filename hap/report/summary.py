"""A plan in a few lines: who holds what share, why, which parallelism came out, what it costs.

Everything is read off the plan; nothing is solved again. The planner knows no modes, so the words come last, from the
placements of parameters and from what is done to them before use:

===============  =====================================  ==========================================
at rest          before use                             in words
===============  =====================================  ==========================================
replicated       nothing                                a copy on every rank (data parallel)
sharded          all-gathered                           sharded, gathered for use (as ZeRO, FSDP)
sharded          nothing                                used in shards (tensor parallel)
sharded          moved to another shard                 sharded, dealt out anew for use
replicated       sliced                                 copied, used in shards
===============  =====================================  ==========================================
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from hap.cluster import ClusterSpec
from hap.placement import Shard, parse_placement
from hap.plan import Plan
from hap.report.words import counted, listed, percent, quantity, seconds, table

COPIED = "a copy on every rank"
GATHERED = "sharded, gathered for use (as ZeRO and FSDP do)"
SPLIT = "used in shards (tensor parallel)"
MOVED = "sharded, dealt out anew for use"
SLICED = "copied, used in shards"
FULL = 0.9  # of a device's memory: worth a word


@dataclass(frozen=True)
class Use:
    """One parameter: its pattern of names (layer numbers starred), its placement at rest and its use in words."""

    name: str
    pattern: str
    words: str
    group: str | None


def summarize(plan: Plan, cluster: ClusterSpec | None = None) -> str:
    """The plan as plain text, some 25 lines. ``cluster`` adds what only it knows: memory and speed."""
    uses = parameter_uses(plan)
    lines = [
        *_headline(plan),
        "",
        *_ranks(plan, cluster),
        "",
        *(f"* {line}" for line in (*_parallelism(plan, uses), *_reasons(plan, cluster, uses))),
        "",
        *_costs(plan),
    ]
    return "\n".join(lines)


def parameter_uses(plan: Plan) -> tuple[Use, ...]:
    """Every parameter in the plan's order."""
    converted: dict[str, set[str]] = {}
    for c in plan.conversions:
        converted.setdefault(c.value, set()).add(c.collective)
    found = []
    for node in plan.strategies:
        if not node.startswith("p_"):
            continue
        home = plan.strategy(node).outputs[0]
        kinds = converted.get(node, set())
        if isinstance(home, Shard):
            words = GATHERED if "all_gather" in kinds else MOVED if "all_to_all" in kinds else SPLIT
        else:
            words = SLICED if "slice" in kinds else COPIED
        pattern = re.sub(r"_\d+(?=_|$)", ".*", node.removeprefix("p_"))
        found.append(Use(node, pattern, words, home.group if isinstance(home, Shard) else None))
    return tuple(found)


def batch_group(plan: Plan) -> str | None:
    """The group over which the inputs are dealt, or None if every rank sees all of them."""
    for node in plan.strategies:
        placement = plan.strategy(node).outputs[0] if node.startswith("i_") else None
        if isinstance(placement, Shard):
            return placement.group
    for c in plan.conversions:
        target = parse_placement(c.target)
        if c.value.startswith("i_") and isinstance(target, Shard):
            return target.group
    return None


def _headline(plan: Plan) -> Iterator[str]:
    made, predicted = plan.provenance, plan.predicted
    yield (
        f"{made.model}: {quantity(made.parameters)} parameters, {made.optimizer}, "
        f"on {counted(plan.world_size, 'device')} of cluster {made.cluster!r} ({made.backend})"
    )
    proof = ""
    if predicted.gap is not None and predicted.lower_bound_s is not None:
        proof = f"; no plan can take less than {seconds(predicted.lower_bound_s)} (proved, gap {predicted.gap:.1%})"
    yield f"predicted step: {seconds(predicted.step_s)}{proof}"


def _ranks(plan: Plan, cluster: ClusterSpec | None) -> list[str]:
    group, predicted = batch_group(plan), plan.predicted
    rows = [["rank", "device", "batch", "computes", "parameters", "memory"]]
    whole = max(1, max(_kind(plan, r, "parameters") for r in range(plan.world_size)))
    if any(u.group is not None for u in parameter_uses(plan)):
        whole = max(whole, _parameter_bytes(plan))
    for rank, device in enumerate(plan.devices):
        batch = "all" if group is None else f"{plan.groups[group].sizes[rank]} of {plan.groups[group].n}"
        held = _kind(plan, rank, "parameters")
        memory = quantity(predicted.memory_bytes[rank], "B")
        if cluster is not None:
            memory += f" of {quantity(cluster.devices[rank].memory_bytes, 'B')}"
        busy = seconds(predicted.compute_s[rank])
        rows.append([str(rank), device, batch, busy, f"{quantity(held, 'B')} ({percent(held, whole)})", memory])
    return table(rows, right=(0, 2, 3, 4))


def _kind(plan: Plan, rank: int, kind: str) -> int:
    kinds = plan.predicted.memory_by_kind
    return kinds[rank].get(kind, 0) if rank < len(kinds) else 0


def _parameter_bytes(plan: Plan) -> int:
    """Bytes of all parameters once. Their dtypes are not in the plan; four bytes each is right but for mixed models."""
    return 4 * plan.provenance.parameters


def _parallelism(plan: Plan, uses: tuple[Use, ...]) -> Iterator[str]:
    group = batch_group(plan)
    if group is None:
        yield "every rank sees the whole batch"
    else:
        sizes = plan.groups[group].sizes
        yield f"data parallel: {plan.groups[group].label} dealt {' + '.join(map(str, sizes))}"
    counts = Counter(u.words for u in uses)
    for words, count in counts.most_common():
        which = "all" if count == len(uses) else str(count)
        patterns = list(dict.fromkeys(u.pattern for u in uses if u.words == words))
        where = "" if count == len(uses) else f": {listed(patterns, 3)}"
        yield f"{which} parameter{'s' if count > 1 else ''} {words}{where}"
    for name in dict.fromkeys(u.group for u in uses if u.words == SPLIT and u.group is not None):
        assert name is not None
        yield f"  {plan.groups[name].label} dealt {' + '.join(map(str, plan.groups[name].sizes))}"


def _reasons(plan: Plan, cluster: ClusterSpec | None, uses: tuple[Use, ...]) -> Iterator[str]:
    group = batch_group(plan)
    if group is not None:
        sizes, n = plan.groups[group].sizes, plan.groups[group].n
        idle = [plan.devices[r] for r, s in enumerate(sizes) if s == 0]
        most = max(range(len(sizes)), key=lambda r: sizes[r])
        if len(set(sizes)) > 1:
            role = _role(most, cluster)
            yield f"{plan.devices[most]}{role} takes {percent(sizes[most], n)} of the batch"
        if idle:
            yield f"{listed(idle)} get{'s' if len(idle) == 1 else ''} no part of the batch"
    if cluster is None:
        return
    for rank, device in enumerate(cluster.devices):
        used = plan.predicted.memory_bytes[rank]
        if used >= FULL * device.memory_bytes:
            yield f"{plan.devices[rank]} is full: {percent(used, device.memory_bytes)} of its memory"
    state = sum(_kind(plan, r, k) for r in range(plan.world_size) for k in ("parameters", "gradients", "optimizer"))
    least = min(cluster.devices, key=lambda d: d.memory_bytes)
    if uses and all(u.group is not None for u in uses) and state > least.memory_bytes:
        yield (
            f"no room for copies: parameters, gradients and optimizer state take {quantity(state, 'B')}, "
            f"{least.name} has {quantity(least.memory_bytes, 'B')}"
        )


def _role(rank: int, cluster: ClusterSpec | None) -> str:
    """ ", the fastest device," where the cluster says so by its best-known float32 rate."""
    if cluster is None or any("float32" not in d.tflops for d in cluster.devices):
        return ""
    rates = [d.tflops["float32"] for d in cluster.devices]
    if rates[rank] < max(rates):
        return ""
    return ", the fastest device," if rates.count(rates[rank]) == 1 else ", one of the fastest,"


def _costs(plan: Plan) -> Iterator[str]:
    predicted = plan.predicted
    counts: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for c in plan.conversions:
        if c.collective != "slice":
            counts[c.collective] += 1
            moved[c.collective] += c.nbytes
    if counts:
        kinds = [f"{n} {kind} ({quantity(moved[kind], 'B')})" for kind, n in sorted(counts.items())]
        yield f"collectives a step: {', '.join(kinds)}"
    else:
        yield "collectives a step: none"
    busiest = seconds(max(predicted.compute_s))
    yield f"time: {busiest} of compute on the busiest rank, {seconds(predicted.communication_s)} of communication"
    if predicted.tight:
        yield f"what limits it: {predicted.tight}"
    for assumption in plan.provenance.assumptions:
        yield f"assumed: {assumption}"
