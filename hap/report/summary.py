"""A plan in a few lines: who holds what share, why, which parallelism came out, what it costs.

Everything is read off the plan; nothing is solved again. The planner knows no modes, so the words come last, from the
placements of parameters and from what is done to them before use:

===============  =====================================  ==========================================
at rest          before use                             in words
===============  =====================================  ==========================================
replicated       nothing                                copied on every rank (as data parallel does)
sharded          all-gathered                           sharded, gathered for use (ZeRO, FSDP)
sharded          nothing                                used in shards (tensor parallel)
whole on one     all-gathered                           of one rank each, gathered for use
sharded          moved to another shard                 sharded, dealt out anew for use
replicated       sliced                                 copied, used in shards
===============  =====================================  ==========================================
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hap.cluster import ClusterSpec
from hap.placement import Shard
from hap.plan import Plan, Prediction
from hap.report.held import Held, held_parameters
from hap.report.words import (
    FEW_RANKS,
    LEDGER,
    MANY,
    counted,
    listed,
    percent,
    quantity,
    ranks_in_words,
    seconds,
    sizes_in_words,
    starred,
    table,
)
from hap.starting import how_to_start, in_words, left_out, with_all

COPIED = "copied on every rank"
GATHERED = "sharded, gathered for use (ZeRO, FSDP)"
OWNED = "of one rank each, gathered for use"
SPLIT = "used in shards (tensor parallel)"
MOVED = "sharded, dealt out anew for use"
SLICED = "copied, used in shards"
FULL = 0.9  # of a device's memory: worth a word
REPEATED = {"all": "", "products": "all but attention and convolutions of ", "cheap": "what is cheap of "}


@dataclass(frozen=True)
class Use:
    """One parameter: its pattern of names (layer numbers starred), its placement at rest and its use in words."""

    name: str
    pattern: str
    words: str
    group: str | None


def summarize(
    plan: Plan,
    cluster: ClusterSpec | None = None,
    parameters: Mapping[str, int] | None = None,
    ranks: Sequence[Sequence[int]] | None = None,
) -> str:
    """The plan as plain text, some 25 lines. ``cluster`` adds what only it knows: memory and speed; ``parameters``,
    bytes of the model's by their names, who holds what part of them. ``ranks``: of the job, by the plan's own, where
    the plan is for one of its hosts, or for several that are alike."""
    held = None if parameters is None else held_parameters(plan, parameters)
    blocks = [
        list(headline(plan)),
        _ranks(plan, cluster, held, ranks or [[rank] for rank in range(plan.world_size)]),
        ["what is dealt out:", *_indented(_dealt(plan))],
        ["parameters:", *_indented(parameter_lines(plan))],
        list(_reasons(plan, cluster, held)),
        list(_costs(plan)),
        who_is_left_out(plan),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


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
            gathered = OWNED if max(plan.groups[home.group].sizes) == home.n else GATHERED
            words = gathered if "all_gather" in kinds else MOVED if "all_to_all" in kinds else SPLIT
        else:
            words = SLICED if "slice" in kinds else COPIED
        pattern = re.sub(r"_\d+(?=_|$)", ".*", node.removeprefix("p_"))
        found.append(Use(node, pattern, words, home.group if isinstance(home, Shard) else None))
    return tuple(found)


def batch_group(plan: Plan) -> str | None:
    """The group that shards the batch, or None if no part of the step is dealt so."""
    return next((name for name, group in plan.groups.items() if group.label == "batch"), None)


def batches_in_words(batches: int) -> list[str]:
    if batches == 1:
        return []
    return [f"a step has {batches} batches, whose gradients are added up; times are of one batch, their mean"]


def headline(plan: Plan) -> Iterator[str]:
    """What the plan is for and how fast, and all that a reader must know of it beside its tables."""
    made, predicted = plan.provenance, plan.predicted
    yield (
        f"{made.model}: {quantity(made.parameters)} parameters, {made.optimizer}, "
        f"on {counted(plan.world_size, 'device')} of cluster {made.cluster!r} ({made.backend})"
    )
    yield from batches_in_words(plan.gradient_accumulation_steps)
    if made.reduce_dtype is not None:
        yield f"gradients are exchanged in {made.reduce_dtype}"
    proof = ""
    if predicted.gap is not None and predicted.lower_bound_s is not None:
        bound = seconds(predicted.lower_bound_s)
        proof = f"; no plan of one axis can take less than {bound} (proved, gap {predicted.gap:.1%})"
    if predicted.overlapped_s is None:
        yield f"predicted step: {seconds(predicted.step_s)}{proof}"
    else:
        yield f"predicted step: {seconds(predicted.overlapped_s)} as it is run{_proof_as_run(predicted)}"
        yield f"nothing overlapped: {seconds(predicted.step_s)}{proof}"
        if (least := shortest(plan)) is not None:
            yield f"by that clock another plan that was found is shorter, {least}; this one was chosen as it is run"
    if repeated := what_is_repeated(plan):
        yield repeated
    if late := what_is_postponed(plan):
        yield late
    if ended := how_it_ended(plan):
        yield ended


def _proof_as_run(predicted: Prediction) -> str:
    if predicted.overlapped_bound_s is None or predicted.gap_as_run is None:
        return ""
    least = seconds(predicted.overlapped_bound_s)
    return f"; no plan of one axis runs in less than {least} on these devices (proved, gap {predicted.gap_as_run:.1%})"


def shortest(plan: Plan) -> str | None:
    """The shortest step with nothing overlapped that the search found, and its gap, where that is another plan's."""
    least_s, bound_s = plan.provenance.solver.get("least_step_s"), plan.predicted.lower_bound_s
    if not isinstance(least_s, float) or not 0 < least_s < plan.predicted.step_s:
        return None
    return seconds(least_s) if bound_s is None else f"{seconds(least_s)} (gap {max(0.0, 1 - bound_s / least_s):.1%})"


def what_is_repeated(plan: Plan) -> str:
    """Which blocks are computed again in the backward pass, and what that saves; nothing of a plan that keeps all."""
    kinds = Counter[str](r.what for r in plan.recomputed)
    parts = [f"{words}{counted(kinds[what], 'block')}" for what, words in REPEATED.items() if kinds[what]]
    if not parts:
        return ""
    text = f"computed again in the backward pass instead of being kept: {listed(parts)}"
    kept = plan.provenance.solver.get("kept_memory_bytes")
    if not isinstance(kept, list) or len(kept) != plan.world_size or not all(isinstance(n, int) for n in kept):
        return text
    saved = [then - now for then, now in zip(kept, plan.predicted.memory_bytes, strict=True)]
    rank = saved.index(max(saved))
    now = quantity(plan.predicted.memory_bytes[rank], "B")
    return f"{text} ({plan.devices[rank]} needs {now}, otherwise {quantity(kept[rank], 'B')})"


def what_is_postponed(plan: Plan) -> str:
    """How much of the backward pass runs later than autograd has it, or sooner; nothing where all is in its order."""
    count = sum(map(len, plan.postponed.values()))
    if not count:
        return ""
    runs = "runs" if count == 1 else "run"
    return f"{counted(count, 'call')} of the backward pass {runs} out of turn, so that the wire has work early"


def how_it_ended(plan: Plan) -> str:
    """What a reader must know of a search that did not come to its end; nothing of one that did."""
    solver = plan.provenance.solver
    if not solver.get("stopped"):
        return ""
    budget = solver.get("budget_s")
    if isinstance(budget, int | float):
        return f"the search was stopped by its budget of {seconds(budget)}, so another run may find another plan"
    return "the search was interrupted, so another run may find another plan"


def who_is_left_out(plan: Plan) -> list[str]:
    """The devices that the plan leaves out, what a step of all would take, and how the job is started on the others."""
    if not left_out(plan):
        return []
    return [
        f"left out: {in_words(plan)}; {with_all(plan)}",
        "start the job on the others:",
        *_indented(how_to_start(plan)),
    ]


def _ranks(plan: Plan, cluster: ClusterSpec | None, held: Held | None, of_job: Sequence[Sequence[int]]) -> list[str]:
    group, predicted = batch_group(plan), plan.predicted
    head = ["rank", "device", "batch", "busy", LEDGER["parameters"] if held is None else "parameters", "memory"]
    told: dict[tuple[str, ...], list[int]] = {}  # ranks by what is said of them
    for rank, device in enumerate(plan.devices):
        batch = "all" if group is None else f"{plan.groups[group].sizes[rank]} of {plan.groups[group].n}"
        if held is None:
            holds = quantity(_kind(plan, rank, "parameters"), "B")
        else:
            holds = f"{quantity(held.on[rank], 'B')} ({percent(held.on[rank], held.whole)})"
        memory = quantity(predicted.memory_bytes[rank], "B")
        if cluster is not None:
            memory += f" of {quantity(cluster.devices[rank].memory_bytes, 'B')}"
        name = device if plan.world_size <= FEW_RANKS else _model(device)
        cells = batch, seconds(predicted.compute_s[rank]), holds, memory
        told.setdefault((name, *cells), []).extend(of_job[rank])
    rows = [
        [ranks_in_words(sorted(ranks)), name if len(ranks) == 1 else f"{len(ranks)} x {_model(name)}", *cells]
        for (name, *cells), ranks in told.items()
    ]
    return table([head, *rows], right=(0, 2, 3, 4))


def _model(device: str) -> str:
    """``host3/V100-16GB#2`` without its host and number."""
    return device.rpartition("/")[2].partition("#")[0]


def _kind(plan: Plan, rank: int, kind: str) -> int:
    kinds = plan.predicted.memory_by_kind
    return kinds[rank].get(kind, 0) if rank < len(kinds) else 0


def _dealt(plan: Plan) -> list[str]:
    """One line for each kind of dim: who gets how much of it, and how many operator calls work on such shards."""
    calls: Counter[tuple[str, tuple[int, ...]]] = Counter()
    layers: dict[tuple[str, tuple[int, ...]], dict[str, None]] = {}
    whole = 0
    for node in plan.strategies:
        strategy = plan.strategy(node)
        if not strategy.inputs:
            continue
        placements = (*strategy.inputs, *strategy.outputs)
        group = next((p.group for p in placements if isinstance(p, Shard)), None)
        if group is None:
            whole += 1
            continue
        key = starred(plan.groups[group].label), plan.groups[group].sizes
        calls[key] += 1
        layers.setdefault(key, {})[group] = None
    rows = []
    for (label, sizes), count in calls.most_common():
        alike = len(layers[label, sizes])
        rows.append([label, sizes_in_words(sizes), counted(count, "call") + (f" in {alike} groups" * (alike > 1))])
    if whole:
        rows.append(["not dealt: done by every rank", "", counted(whole, "call")])
    return table(rows)


def parameter_lines(plan: Plan) -> list[str]:
    """One line for each way that parameters are held and used, the commonest first. Of a name that several layers have,
    how many of them."""
    uses = parameter_uses(plan)
    of_name, so_used = Counter(u.pattern for u in uses), Counter((u.pattern, u.words) for u in uses)
    prefix = os.path.commonprefix([u.pattern for u in uses])  # noqa: RUF071 (characters are meant)
    prefix = prefix[: prefix.rfind("_") + 1]
    rows = []
    for words, count in Counter(u.words for u in uses).most_common():
        names = []
        for name in dict.fromkeys(u.pattern for u in uses if u.words == words):
            some, each = so_used[name, words], of_name[name]
            names.append(name.removeprefix(prefix) if some == each else f"{some} of {each} {name.removeprefix(prefix)}")
        which = "all" if count == len(uses) else listed(names, 3)
        rows.append([f"{count} {words}:", which])
    return table(rows)


def nothing_is_dealt_out(plan: Plan) -> str | None:
    """What to know of a plan by which every device does everything, None for any other."""
    strategies = (plan.strategy(node) for node in plan.strategies)
    if plan.world_size == 1 or any(isinstance(p, Shard) for s in strategies for p in (*s.inputs, *s.outputs)):
        return None
    least = min(range(plan.world_size), key=lambda rank: plan.predicted.compute_s[rank])
    alone = seconds(plan.predicted.compute_s[least])
    return f"nothing is dealt out: every device computes the whole step; {plan.devices[least]} alone would take {alone}"


def _reasons(plan: Plan, cluster: ClusterSpec | None, held: Held | None) -> Iterator[str]:
    if (words := nothing_is_dealt_out(plan)) is not None:
        yield words
    group = batch_group(plan)
    if group is not None:
        yield from _batch_shares(plan, plan.groups[group].sizes, cluster)
    if cluster is None:
        return
    full = [r for r, d in enumerate(cluster.devices) if plan.predicted.memory_bytes[r] >= FULL * d.memory_bytes]
    if plan.world_size > FEW_RANKS and full:
        kinds = Counter(_model(plan.devices[r]) for r in full)
        yield f"full, or nearly: {listed([f'{n} of {kind}' for kind, n in kinds.items()])}"
    else:
        for rank in full:
            used = percent(plan.predicted.memory_bytes[rank], cluster.devices[rank].memory_bytes)
            yield f"{plan.devices[rank]} is full: {used} of its memory"
    state = sum(_kind(plan, r, k) for r in range(plan.world_size) for k in ("gradients", "optimizer"))
    state += sum(_kind(plan, r, "parameters") for r in range(plan.world_size)) if held is None else sum(held.on)
    uses = parameter_uses(plan)
    least = min(cluster.devices, key=lambda d: d.memory_bytes)
    if uses and all(u.group is not None for u in uses) and state > least.memory_bytes:
        yield (
            f"no room for copies: {LEDGER['parameters'] if held is None else 'parameters'}, gradients and optimizer "
            f"state take {quantity(state, 'B')}, "
            f"{least.name} has {quantity(least.memory_bytes, 'B')}"
        )


def _batch_shares(plan: Plan, sizes: Sequence[int], cluster: ClusterSpec | None) -> Iterator[str]:
    """Who gets most of the batch and who nothing; of many ranks what each kind of device gets."""
    n = sum(sizes)
    if plan.world_size > FEW_RANKS:
        held: Counter[str] = Counter()
        for device, size in zip(plan.devices, sizes, strict=True):
            held[_model(device)] += size
        count = Counter(map(_model, plan.devices))
        shares = [f"{percent(size, n)} to {count[kind]} {kind}" for kind, size in held.most_common()]
        yield f"of the batch go {listed(shares, MANY)}"
        return
    idle = [plan.devices[r] for r, s in enumerate(sizes) if s == 0]
    most = max(range(len(sizes)), key=lambda r: sizes[r])
    if len(set(sizes)) > 1:
        yield f"{plan.devices[most]}{_role(most, cluster)} takes {percent(sizes[most], n)} of the batch"
    if idle:
        yield f"{listed(idle)} get{'s' if len(idle) == 1 else ''} no part of the batch"


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
