"""Why nothing fits, in one line with numbers."""

from __future__ import annotations

from hap.cost_models.evaluate import Evaluation
from hap.cost_models.memory import optimizer_state_bytes, usable_bytes
from hap.search.prices import Facts
from hap.units import format_size


def why_infeasible(facts: Facts, closest: Evaluation | None, *, pinned: bool) -> str:
    """The model's state against all memory together; else the device that overflows most in the closest plan."""
    devices = facts.cluster.devices
    usable = [usable_bytes(d.memory_bytes) for d in devices]
    parameters = [n for n in facts.graph.sources("parameter") if n.target in facts.graph.gradients]
    state = sum(n.meta.nbytes + optimizer_state_bytes(facts.optimizer, n.meta.nbytes) for n in parameters)
    total = f"the {len(usable)} devices hold {format_size(sum(usable))} after the reserve"
    if state > sum(usable):
        return f"parameters and {facts.optimizer} state need {format_size(state)}; {total}"
    if closest is None:
        pins = " with these pins" if pinned else ""
        return (
            f"no choice of placements fits{pins}: parameters and {facts.optimizer} state take {format_size(state)}, "
            f"activations and gradients come on top; {total}"
        )
    over = [used - room for used, room in zip(closest.memory_bytes, usable, strict=True)]
    worst = over.index(max(over))
    return (
        f"{devices[worst].name} would need {format_size(closest.memory_bytes[worst])} and has "
        f"{format_size(usable[worst])} in the closest plan found; {total}; a smaller batch needs less"
    )
