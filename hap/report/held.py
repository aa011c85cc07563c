"""Who holds what of a model's parameters. A plan has their placements; how large each is only the model knows, as the
plan's ledger counts them together with inputs and buffers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hap.placement import Shard
from hap.plan import Plan


@dataclass(frozen=True)
class Held:
    """Bytes of parameters: on each rank, and of the whole model once."""

    on: tuple[int, ...]
    whole: int


def held_parameters(plan: Plan, parameters: Mapping[str, int]) -> Held | None:
    """Of the model's parameters, by their names, what each rank holds between steps. None if the plan has others."""
    of = {f"p_{re.sub('[^0-9A-Za-z]', '_', name)}": nbytes for name, nbytes in parameters.items()}
    names = [node for node in plan.strategies if node.startswith("p_")]
    if not all(name in of for name in names):
        return None
    on = [0] * plan.world_size
    for name in names:
        home = plan.strategy(name).outputs[0]
        for rank in range(plan.world_size):
            part = (plan.groups[home.group].sizes[rank], home.n) if isinstance(home, Shard) else (1, 1)
            on[rank] += of[name] * part[0] // part[1]
    return Held(tuple(on), sum(of[name] for name in names))
