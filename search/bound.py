"""What computing takes at least, over all strategies and all share vectors, by the cost model.

For weights w >= 0 of the ranks that sum to 1, a step takes at least the weighted mean of the ranks' compute times:

    T >= max_r sum_n t[n,r] >= sum_n sum_r w[r] t[n,r]

whatever the strategies, since ``evaluate`` adds up, stage by stage, the slowest rank, and communication is not
negative. Under strategy s a rank with share rho of the sharded group needs at least ``fixed[n,s,r] + rho slope[n,s,r]``
seconds (a side of the roofline; a rank that is idle without a share needs at least rho times its seconds for
everything, because a launch and reading the replicated operands cost the same for any share). As the shares of a group
sum to 1,

    sum_r w[r] t[n,r] >= min_s ( sum_r w[r] fixed[n,s,r] + min_r w[r] slope[n,s,r] )                        (node_bound)

Every node may have its own shares, so one ratio vector per group, per segment or per node all obey it. The weights that
make the bound largest are found by an LP (``best_weights``, GLOP); any weights are valid, so nothing rests on the
solver: ``node_bound`` is evaluated anew in plain arithmetic. With one op class and equal intercepts the best weights
are proportional to speed, and the bound is ``(A + n B) / sum(speed)``.

Communication is not in it: ``relaxation`` adds what it can prove, with these weights and lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from ortools.math_opt import model_pb2

from hap.cluster import ClusterSpec
from hap.cost_models.compute import Parts, parts_seconds
from hap.cost_models.floors import floor_line, floor_slope
from hap.fabric import Array
from hap.hosts import Device
from hap.placement import Shard
from hap.plan import Strategy
from hap.rules.choices import replicated
from hap.search.prices import Facts
from hap.search.protos import fill_matrix, solve_once


@dataclass(frozen=True)
class Line:
    """Seconds of a node under one strategy: at least ``fixed[c] + share * slope[c]`` on a device of class c."""

    fixed: tuple[float, ...]
    slope: tuple[float, ...]


@dataclass(frozen=True)
class Bound:
    """``menus``: the distinct nodes as the lines of their strategies, with how many nodes are so; ``counts``: devices
    per class."""

    menus: tuple[tuple[tuple[Line, ...], int], ...]
    counts: tuple[int, ...]

    def seconds(self, weights: Sequence[float]) -> float:
        """The bound for any weights (one per device class, >= 0; scaled here so that all devices' weights sum to 1)."""
        total = sum(w * c for w, c in zip(weights, self.counts, strict=True))
        assert total > 0 and min(weights) >= 0, f"not weights: {tuple(weights)}"
        scaled = np.array(weights) / total
        many = scaled * np.array(self.counts)
        return float(
            sum(count * min(line_seconds(line, scaled, many) for line in lines) for lines, count in self.menus)
        )


def line_seconds(line: Line, weight: Array, many: Array) -> float:
    """What a line takes at least: ``weight`` (C,) of one device of a class, ``many`` (C,) of all of them together."""
    return float(many @ np.array(line.fixed) + (weight * np.array(line.slope)).min())


def best_weights(bound: Bound) -> tuple[float, ...]:
    """Weights that make ``bound.seconds`` largest: the LP's, or those in proportion to speed or equal ones, if they are
    better, as where the solver gives up for want of precision. Any weights prove a bound."""
    return max((w for w in (_solved(bound), by_speed(bound), (1.0,) * len(bound.counts)) if w), key=bound.seconds)


def by_speed(bound: Bound) -> tuple[float, ...]:
    """One over the seconds that one device of a class needs for everything."""
    lines = [(min(lines, key=lambda line: sum(line.fixed + line.slope)), count) for lines, count in bound.menus]
    alone = [sum(count * (line.fixed[c] + line.slope[c]) for line, count in lines) for c in range(len(bound.counts))]
    return tuple(1.0 / max(s, 1e-12) for s in alone)


def _solved(bound: Bound) -> tuple[float, ...] | None:
    """By an LP; None if the solver ends without a point. Times are measured in the longest of the bound's own lines, so
    that nanoseconds are not lost in its tolerances."""
    scale = 1.0 / max(max(line.fixed + line.slope) for lines, _ in bound.menus for line in lines)
    classes, width, rows = range(len(bound.counts)), len(bound.counts), 1
    entries, worth = [(0, c, float(bound.counts[c])) for c in classes], dict[int, float]()
    for lines, count in bound.menus:
        node, width = width, width + 1
        worth[node] = float(count)
        for line in lines:  # a row for what the node takes at most, and one for each class's part of it
            fixed = ((rows, c, -line.fixed[c] * bound.counts[c] * scale) for c in classes)
            entries += [(rows, node, 1.0), (rows, width, -1.0), *fixed]
            for c in classes:
                entries += [(rows + 1 + c, width, 1.0), (rows + 1 + c, c, -line.slope[c] * scale)]
            rows, width = rows + 1 + len(classes), width + 1
    proto = model_pb2.ModelProto(name="weights")
    proto.variables.ids.extend(range(width))
    proto.variables.lower_bounds.extend([0.0] * width)
    proto.variables.upper_bounds.extend([np.inf] * width)
    proto.variables.integers.extend([False] * width)
    proto.linear_constraints.ids.extend(range(rows))
    proto.linear_constraints.lower_bounds.extend([1.0] + [-np.inf] * (rows - 1))
    proto.linear_constraints.upper_bounds.extend([1.0] + [0.0] * (rows - 1))
    fill_matrix(proto, entries, np.zeros((0, width)), rows)
    proto.objective.maximize = True
    proto.objective.linear_coefficients.ids.extend(worth)
    proto.objective.linear_coefficients.values.extend(worth.values())
    solved = solve_once(proto)
    if solved is None:
        return None
    found = tuple(max(0.0, float(solved.values[c])) for c in classes)
    return found if sum(found) > 0 else None


def device_classes(cluster: ClusterSpec) -> tuple[tuple[Device, ...], tuple[int, ...]]:
    """One device of every kind that computes alike, and how many there are of each."""
    kinds: dict[object, list[Device]] = {}
    for d in cluster.devices:
        kinds.setdefault(computes_like(d), []).append(d)
    return tuple(same[0] for same in kinds.values()), tuple(len(same) for same in kinds.values())


def computes_like(device: Device) -> object:
    """Equal for devices that compute alike. A measured one is like no other."""
    if type(device) is not Device:
        return device.rank
    return tuple(device.tflops.items()), device.memory_bandwidth_bytes_per_s, device.launch_s


def make_bound(facts: Facts) -> Bound:
    """The bound's lines of every node under every strategy that was a candidate, on one device of every class; those of
    nodes of one class that take as long once."""
    devices, counts = device_classes(facts.cluster)
    menus: dict[tuple[Line, ...], int] = {}
    alike: dict[int, list[str]] = {}
    colour = facts.timed_alike(facts.colours[-1])
    for name in facts.candidates:
        alike.setdefault(colour[name], []).append(name)
    for name, *others in alike.values():
        lines = tuple(dict.fromkeys(node_line(facts, name, s, devices) for s in facts.candidates[name]))
        if not any(all(f == 0 for f in line.fixed) and all(s == 0 for s in line.slope) for line in lines):
            menus[lines] = menus.get(lines, 0) + 1 + len(others)
    return Bound(tuple(menus.items()), counts)


def weighted_bound(facts: Facts) -> tuple[Bound, tuple[float, ...]]:
    """The bound and its best weights (equal ones where nothing takes time), found once."""
    known = facts.here.get("weighted bound")
    if known is None:
        bound = make_bound(facts)
        known = facts.here["weighted bound"] = bound, best_weights(bound) if bound.menus else (1.0,) * len(bound.counts)
    assert isinstance(known, tuple)
    return known


def node_line(facts: Facts, name: str, strategy: Strategy, devices: Sequence[Device]) -> Line:
    """The line of one node under one strategy on one device of every class; of calls that take as long, once."""
    if facts.graph.by_name[name].is_source:
        return _update_line(facts, name, strategy, devices)
    known = cast(dict[int, Line], facts.here.setdefault("lines", {}))
    kind = facts.calls.kind(name, strategy, measured=facts.compute.is_measured)
    if kind not in known:
        known[kind] = _call_line(facts, facts.parts(name, strategy), devices)
    return known[kind]


def _call_line(facts: Facts, parts: Parts, devices: Sequence[Device]) -> Line:
    nothing = (0.0,) * len(devices)
    if parts.group is None:
        return Line(tuple(parts_seconds(parts, 1.0, d) for d in devices), nothing)
    if parts.idle_when_empty:
        return Line(nothing, tuple(floor_slope(parts, d) for d in devices))
    pairs = [floor_line(parts, d, at_share=1.0 / facts.cluster.world_size) for d in devices]
    return Line(tuple(p[0] for p in pairs), tuple(p[1] for p in pairs))


def _update_line(facts: Facts, name: str, strategy: Strategy, devices: Sequence[Device]) -> Line:
    """Of a source; whoever holds all of it takes as long, however it may be dealt out."""
    known = cast(dict[str, Line], facts.here.setdefault("updates of all", {}))
    if name not in known:
        seconds = facts.update_s(name, replicated(facts.graph.by_name[name]), {})
        known[name] = Line(tuple(float(seconds[d.rank]) for d in devices), (0.0,) * len(devices))
    whole = known[name]
    return Line(whole.slope, whole.fixed) if isinstance(strategy.outputs[0], Shard) else whole
