"""Decisions taken out of the search's hands: data parallel, ZeRO or tensor parallel on demand.

Pins(placements={"*": "R", "args.0": "S(0)"})         # data parallel: whole parameters, batch split
Pins(placements={"*": "S(0)"})                        # ZeRO: every parameter sharded on its first dim
Pins(placements={"*.mlp.c_fc.weight": "S(1)"})        # tensor parallel
Pins(ratios=(5, 2, 1))                                # every group split 5 : 2 : 1
Pins(sizes={"batch": (5, 2, 1)})                      # one group, exactly
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from hap.errors import InfeasibleError, PlanError
from hap.graph import Graph, Node
from hap.placement import Placement, Shard, Sizes, parse_placement
from hap.plan import Plan, Strategy
from hap.rules.choices import Choices, Group, choices
from hap.search.rounding import round_shares

_SHARD = re.compile(r"S\((\d+)\)")
_WILD = re.compile(r"[*?\[]")
AGAIN = "plan again with the pins, or leave them out"
INPUT_ROOTS = ("args", "kwargs", "targets")


@dataclass(frozen=True)
class Pins:
    """What is fixed. All of it is optional.

    ``sizes``: group name, or label (shell patterns allowed), to one whole number per rank. ``placements``: qualified
    name of a parameter, or path of an input (``args.0``), to ``R``, ``S(dim)`` or a placement's full text. Shell
    patterns are allowed; a pattern speaks of inputs only if it begins like an input's path, and applies to what can
    take the placement. An exact name beats a pattern, a later pattern an earlier one. ``ratios``: one positive-or-zero
    number per rank, for all groups that ``sizes`` does not name.
    """

    sizes: Mapping[str, Sizes] = field(default_factory=dict)
    placements: Mapping[str, str] = field(default_factory=dict)
    ratios: tuple[float, ...] | None = None


def pinned_candidates(possible: Choices, pins: Pins) -> dict[str, tuple[Strategy, ...]]:
    """The strategies of every node that agree with the pins. PlanError: a pin matches nothing or cannot be read.
    InfeasibleError: a named tensor cannot lie so."""
    candidates = {name: tuple(strategies) for name, strategies in possible.strategies.items()}
    for name, placement in _decided(possible, pins).items():
        candidates[name] = _allowed(possible.strategies[name], placement)
    return candidates


def check_pins(plan: Plan, graph: Graph, pins: Pins | None) -> None:
    """PlanError if the plan, which is for ``graph``, has something otherwise than pinned."""
    if pins is None:
        return
    possible = choices(graph)
    for name, wanted in _decided(possible, pins).items():
        if not _allowed((found := plan.strategy(name),), wanted):
            what = graph.by_name[name].target
            raise PlanError(f"the plan has {what} as {found.outputs[0]}, and pins {wanted}; {AGAIN}")
    for name, sizes in fixed_sizes(possible.groups, pins, plan.world_size).items():
        if name in plan.groups and plan.groups[name].sizes != sizes:
            what = possible.groups[name].label or name
            raise PlanError(f"the plan deals out {what} as {plan.groups[name].sizes}, and pins as {sizes}; {AGAIN}")


def _decided(possible: Choices, pins: Pins) -> dict[str, str]:
    """Name of a node -> the placement that it is pinned to."""
    exact = [key for key in pins.placements if not _WILD.search(key)]
    wild = [key for key in pins.placements if _WILD.search(key)]
    decided: dict[str, str] = {}
    for key in wild + exact:
        matched = _matching(possible.graph, key)
        if not matched:
            raise PlanError(f"pin {key!r} matches no parameter and no input")
        able = [n for n in matched if _allowed(possible.strategies[n.name], pins.placements[key])]
        if not able:
            offered = ", ".join(str(s.outputs[0]) for s in possible.strategies[matched[0].name])
            raise InfeasibleError(
                f"pin {key!r}: {matched[0].target} cannot be {pins.placements[key]}; it can be {offered}"
            )
        decided.update((n.name, pins.placements[key]) for n in able)
    return decided


def _matching(graph: Graph, key: str) -> list[Node]:
    nodes = [n for n in graph.nodes if n.op in ("parameter", "input")]
    if not _WILD.search(key):
        return [n for n in nodes if n.target == graph.tied.get(key, key)]
    about_inputs = key.split(".")[0] in INPUT_ROOTS
    return [n for n in nodes if (n.op == "input") == about_inputs and fnmatchcase(n.target, key)]


def _allowed(strategies: Sequence[Strategy], text: str) -> tuple[Strategy, ...]:
    if match := _SHARD.fullmatch(text):
        dim = int(match[1])
        return tuple(s for s in strategies if isinstance(s.outputs[0], Shard) and s.outputs[0].dim == dim)
    try:
        wanted: Placement = parse_placement(text)
    except ValueError:
        raise PlanError(f"pinned placement {text!r} is none of R, S(dim), S(dim:outer x n x unit@group)") from None
    return tuple(s for s in strategies if s.outputs[0] == wanted)


def pinned_sizes(groups: Mapping[str, Group], pins: Pins, world_size: int) -> dict[str, Sizes]:
    """Group name -> its pinned sizes. PlanError if a pin matches no group, or has the wrong length or sum."""
    if pins.ratios is not None and (len(pins.ratios) != world_size or min(pins.ratios) < 0 or sum(pins.ratios) <= 0):
        raise PlanError(f"pinned ratios {pins.ratios} must be {world_size} numbers >= 0 with a positive sum")
    found: dict[str, Sizes] = {}
    for key, sizes in pins.sizes.items():
        matched = [g for g in groups.values() if g.name == key or fnmatchcase(g.label, key)]
        if not matched:
            raise PlanError(f"pin {key!r} matches no dimension group; there are {_names(groups)}")
        for group in matched:
            if len(sizes) != world_size or min(sizes) < 0 or sum(sizes) != group.n:
                raise PlanError(
                    f"pinned sizes {tuple(sizes)} of {key!r} must be {world_size} whole numbers >= 0 "
                    f"that sum to {group.n}"
                )
            found[group.name] = tuple(sizes)
    return found


def fixed_sizes(groups: Mapping[str, Group], pins: Pins, world_size: int) -> dict[str, Sizes]:
    """Group name -> the sizes that it has by what is pinned for it, or for all. PlanError as of ``pinned_sizes``."""
    fixed = pinned_sizes(groups, pins, world_size)
    if pins.ratios is not None:
        fixed = {name: round_shares(pins.ratios, g.n) for name, g in groups.items()} | fixed
    return fixed


def _names(groups: Mapping[str, Group]) -> str:
    shown = [f"{g.name} ({g.label})" for g in list(groups.values())[:6]]
    return ", ".join(shown) + (", ..." if len(groups) > len(shown) else "")
