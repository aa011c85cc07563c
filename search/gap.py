"""What lies between a plan's step and the proved bound, term by term.

The bound is the minimum of a relaxed cost; the plan has a relaxed cost too. With weights w of the ranks,

    step - bound =  (stages and update - w . compute)            ranks wait for the slowest: shares that are whole
                                                                 numbers, or that no one vector makes equal everywhere
                  + (w . compute - relaxed compute)              launches and whole operands on every rank, which the
                                                                 relaxation lets the share scale
                  + (collectives - relaxed conversions)          shares that suit the compute, not each collective
                  + (relaxed cost of the plan - its bound)       other strategies would be cheaper, if relaxed
                  + (its bound - bound)                          other devices would, where some may be left out

with the plan's bound that of the devices it is for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hap.graph import Value
from hap.placement import parse_placement
from hap.plan import Plan
from hap.search.bound import computes_like, device_classes
from hap.search.prices import Facts
from hap.search.relaxation import around_s, lower_bound, relaxation


class GapTerms(NamedTuple):
    """Seconds; they add up to ``step_s`` less the bound."""

    waiting_s: float
    overhead_s: float
    wire_s: float
    choice_s: float
    devices_s: float


def gap_terms(facts: Facts, plan: Plan) -> GapTerms | None:
    """The terms of a plan for ``facts``, which are of the devices that it is for; None if nothing was proved for it."""
    p, n, own = plan.predicted, facts.cluster.world_size, lower_bound(facts)
    if p.lower_bound_s is None or n == 1:
        return None
    relaxed = relaxation(facts)
    kinds, _ = device_classes(facts.cluster)
    numbers = [computes_like(d) for d in kinds]
    of = [numbers.index(computes_like(d)) for d in facts.cluster.devices]
    weighted = float(relaxed.weight[of] @ np.array(p.compute_s))
    compute = around_s(facts, relaxed.weight.tolist())
    compute += sum(relaxed.node_s(name, facts.candidates[name].index(plan.strategy(name))) for name in plan.strategies)
    wire, slices = 0.0, 0.0
    for c in plan.conversions:
        source, target = parse_placement(c.source), parse_placement(c.target)
        value = Value.parse(c.value)
        seconds = facts.batches.part(value) * relaxed.conversion_s(facts.graph.meta(value).nbytes, source, target)
        if c.collective == "slice":
            slices += seconds
        else:
            wire += seconds
    return GapTerms(
        waiting_s=p.step_s - p.communication_s - weighted,
        overhead_s=weighted - compute - slices,
        wire_s=p.communication_s - wire,
        choice_s=compute + slices + wire - own.seconds,
        devices_s=own.seconds - p.lower_bound_s,
    )
