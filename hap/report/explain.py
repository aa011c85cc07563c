"""``hap explain``: a paragraph for somebody who decides about money, then tables for somebody who reads plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hap.cluster import ClusterSpec
from hap.plan import Plan
from hap.report.facts import DeviceRow, Facts
from hap.report.summary import (
    how_it_ended,
    nothing_is_dealt_out,
    parameter_lines,
    shortest,
    what_is_postponed,
    what_is_repeated,
    who_is_left_out,
)
from hap.report.words import LEDGER, counted, listed, percent, quantity, ranks_in_words, seconds, starred, table
from hap.starting import in_words, left_out, with_all


def explain(plan: Plan) -> str:
    """The whole text: paragraph, devices, collectives, layers, parameters, assumptions."""
    facts = Facts(plan)
    blocks = [[paragraph(facts)], _devices(facts), _collectives(facts), _layers(facts)]
    blocks.append(["parameters:", *_indented(parameter_lines(plan))])
    blocks.append(_helps(facts))
    blocks.append(who_is_left_out(plan))
    blocks.append([f"assumed: {a}" for a in plan.provenance.assumptions])
    if facts.told is None:
        blocks.append(["this plan was made by an older HAP: times of layers and collectives are not in it; plan again"])
    return "\n\n".join("\n".join(block) for block in blocks if block)


def paragraph(facts: Facts) -> str:
    """What was chosen, how fast, what limits it, what would help most."""
    return " ".join(_sentences(facts))


def _sentences(facts: Facts) -> Iterator[str]:
    plan = facts.plan
    made, predicted = plan.provenance, plan.predicted
    kinds = Counter[str]()
    for row in facts.devices:
        kinds[row.kind] += len(row.ranks)
    yield (
        f"{made.model} ({quantity(made.parameters)} parameters) is trained on {counted(plan.world_size, 'device')} of "
        f"cluster {made.cluster!r}: {listed([f'{n} {kind}' for kind, n in kinds.items()], 6)}."
    )
    step = predicted.as_run_s
    rate = f", {quantity(facts.batch / step)} samples a second" if facts.batch and step else ""
    if (batches := plan.gradient_accumulation_steps) > 1:
        yield f"A step has {batches} batches; each is predicted to take {seconds(step)} on average{rate}."
    else:
        yield f"One step is predicted to take {seconds(step)}{rate}."
    if predicted.overlapped_s is not None and predicted.step_s > 1.005 * step:
        plain = seconds(predicted.step_s)
        yield f"That is with collectives bundled and sent beside compute; with nothing overlapped it would be {plain}."
    if made.reduce_dtype is not None:
        yield f"Gradients are exchanged in {made.reduce_dtype}."
    if repeated := what_is_repeated(plan):
        yield f"{repeated[0].upper()}{repeated[1:]}."
    if late := what_is_postponed(plan):
        yield f"{late[0].upper()}{late[1:]}."
    if ended := how_it_ended(plan):
        yield f"{ended[0].upper()}{ended[1:]}."
    if left_out(plan):
        yield f"It leaves out {in_words(plan)}: {with_all(plan)}."
    if price := hourly_price(facts.cluster):
        per = f", {price / 3600 * step / facts.batch * 1e6:.3g} per million samples" if facts.batch else ""
        yield f"The cluster costs {price:.2f} an hour{per}."
    yield _dealt(facts)
    yield _limit(facts)
    if facts.told and facts.told.helps and predicted.step_s:
        best = facts.told.helps[0]
        gain = 1 - best.step_s / predicted.step_s
        if gain > 0.005:
            yield f"What would help most: {best.change}, by {gain:.0%} of a step."
        else:
            yield "No single improvement of the hardware that was tried would shorten it by half a percent."
    if predicted.overlapped_bound_s:
        bound = seconds(predicted.overlapped_bound_s)
        yield f"By the same cost model no plan of one axis runs in less than {bound} on these devices."
    if predicted.gap is not None and predicted.lower_bound_s:
        bound = seconds(predicted.lower_bound_s)
        how = "" if predicted.overlapped_s is None else ", nothing overlapped,"
        them = "these devices, for all, or for all but the slowest kinds" if left_out(plan) else "all of these devices"
        yield f"By the same cost model{how} no plan of one axis for {them} can take less than {bound}."
        if (least := shortest(facts.plan)) is not None:
            yield f"The shortest found by that clock takes {least}, and this one was chosen by its step as it is run."


def hourly_price(cluster: ClusterSpec | None) -> float | None:
    """What all hosts cost together; None unless every host has a price."""
    prices = [h.price_per_hour for h in cluster.hosts] if cluster else [None]
    return None if any(p is None for p in prices) else sum(p for p in prices if p is not None)


def _dealt(facts: Facts) -> str:
    if (alone := nothing_is_dealt_out(facts.plan)) is not None:
        return f"{alone[0].upper()}{alone[1:]}."
    if facts.batch is None:
        return "Every device sees the whole batch; what is dealt out are the model's own dims (see the layers)."
    shares: dict[str, list[int]] = {}
    for row in facts.devices:
        shares.setdefault(row.kind, []).append(row.batch or 0)
    words = []
    for kind, found in shares.items():
        low, high = min(found), max(found)
        amount = f"{low}" if low == high else f"{low} to {high}"
        words.append(f"{amount} to each {kind}")
    return f"Of a batch of {facts.batch} go {listed(words, 6)}."


def _limit(facts: Facts) -> str:
    predicted = facts.plan.predicted
    busiest = max(facts.devices, key=lambda d: d.busy_s)
    fullest = max(facts.devices, key=_fullness)
    words = f"Communication takes {seconds(predicted.communication_s)}"
    if predicted.overlapped_s is None:
        words += f" of it ({percent(predicted.communication_s, predicted.step_s)})"
    if facts.collectives:
        longest = facts.collectives[0]
        words += f", most of all {counted(longest.count, longest.collective)} in the {longest.phase} pass"
    words += f"; the busiest device, {busiest.names[0]}, computes for {seconds(busiest.busy_s)}."
    if fullest.capacity_bytes:
        filled = f"{quantity(fullest.memory_bytes, 'B')} of its {quantity(fullest.capacity_bytes, 'B')} of memory"
        words += f" The fullest, {fullest.names[0]}, uses {filled}."
    return words


def _fullness(row: DeviceRow) -> float:
    return row.memory_bytes / row.capacity_bytes if row.capacity_bytes else 0.0


def _devices(facts: Facts) -> list[str]:
    rows = [["ranks", "device", "batch", "busy", "collectives", "waits", "memory", "most of it"]]
    for row in facts.devices:
        memory = quantity(row.memory_bytes, "B")
        if row.capacity_bytes:
            memory += f" of {quantity(row.capacity_bytes, 'B')}"
        largest = sorted(row.memory_by_kind.items(), key=lambda kind: -kind[1])[:2]
        rows.append(
            [
                ranks_in_words(row.ranks),
                row.names[0] if len(row.ranks) == 1 else f"{len(row.ranks)} x {row.kind}",
                "all" if row.batch is None else str(row.batch),
                seconds(row.busy_s),
                seconds(row.communication_s),
                seconds(row.idle_s),
                memory,
                ", ".join(f"{LEDGER.get(kind, kind)} {quantity(n, 'B')}" for kind, n in largest if n),
            ]
        )
    head = "devices (those that do the same are one row; seconds are with nothing overlapped):"
    return [head, *_indented(table(rows, right=(2, 3, 4, 5)))]


def _collectives(facts: Facts) -> list[str]:
    if not facts.collectives:
        return ["collectives: none"]
    rows = [["collective", "performed as", "pass", "number", "bytes", "time", "longest"]]
    for row in facts.collectives:
        time = "-" if row.seconds is None else seconds(row.seconds)
        number, nbytes = str(row.count), quantity(row.nbytes, "B")
        rows.append([row.collective, row.decomposition, row.phase, number, nbytes, time, row.largest])
    return ["collectives of one step:", *_indented(table(rows, right=(3, 4, 5)))]


def _layers(facts: Facts) -> list[str]:
    if not facts.layers:
        return []
    rows = [["layer", "", "parameters", "forward", "backward", "collectives", "calls dealt by"]]
    for row in facts.layers:
        dealt = sorted(row.calls.items(), key=lambda item: -item[1])
        words = listed([f"{starred(label) or 'not dealt'} {count}" for label, count in dealt], 3)
        numbers = [quantity(row.parameter_bytes, "B"), *map(seconds, (row.forward_s, row.backward_s, row.wire_s))]
        rows.append([row.name, f"x {row.count}" if row.count > 1 else "", *numbers, words])
    return ["layers (each; seconds of its slowest rank):", *_indented(table(rows, right=(2, 3, 4, 5)))]


def _helps(facts: Facts) -> list[str]:
    if facts.told is None or not facts.told.helps:
        return []
    step = facts.plan.predicted.step_s
    rows = [[h.change, seconds(h.step_s), f"{h.step_s / step - 1:+.1%}" if step else ""] for h in facts.told.helps]
    return [
        "what would help (same placements, shares dealt out anew, nothing overlapped):",
        *_indented(table(rows, right=(1, 2))),
    ]


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
