"""Which operators make the planner keep values whole, in words that a plan's explanation carries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hap.graph import Node
from hap.placement import Shard
from hap.rules.choices import Choices
from hap.rules.discover import DiscoveredRule
from hap.rules.notation import make_call
from hap.rules.table import DEFAULT_TABLE, RuleTable

BATCH = "batch"  # the label of the group that holds the batch
_CONSTANTS = ("aten.new_", "aten.full_like", "aten.zeros_like", "aten.ones_like", "aten.empty_like")


@dataclass(frozen=True)
class Forced:
    """An operator that takes whole what its producers could give in pieces: all of it, or along the batch."""

    op: str
    calls: int
    modules: tuple[str, ...]
    batch_only: bool
    reason: str

    def __str__(self) -> str:
        times = "1 call" if self.calls == 1 else f"{self.calls} calls"
        where = f", first in module {self.modules[0]!r}" if self.modules[0] else ""
        what = "takes the whole batch" if self.batch_only else "runs whole"
        return f"{self.op} ({times}{where}) {what} on every device: {self.reason}"


def find_forced(choices: Choices, table: RuleTable = DEFAULT_TABLE) -> tuple[Forced, ...]:
    """Every such operator, in order of its first call; one line each for all calls that end alike."""
    found: dict[tuple[str, bool, str], list[str]] = {}
    for node in choices.graph.nodes:
        if node.is_source or not any(_groups(choices, node)):
            continue
        if len(choices.strategies[node.name]) == 1:
            key = node.op, False, _reason(node, choices, table)
        elif _stops_batch(choices, node):
            key = node.op, True, _reason(node, choices, table)
        else:
            continue
        found.setdefault(key, []).append(node.module)
    return tuple(Forced(op, len(m), tuple(dict.fromkeys(m)), only, why) for (op, only, why), m in found.items())


def _groups(choices: Choices, node: Node) -> Iterator[tuple[int, str]]:
    """(number of an argument, name of a group by which its producer could give it).

    Of arguments whose values are read, and are floating: ids and masks are small, and a constant's argument is a shape.
    """
    if node.op.startswith(_CONSTANTS):
        return
    for position, value in enumerate(node.inputs):
        if not choices.graph.meta(value).dtype.is_floating_point:
            continue
        for strategy in choices.strategies[value.node]:
            placement = strategy.outputs[value.index]
            if isinstance(placement, Shard):
                yield position, placement.group


def _stops_batch(choices: Choices, node: Node) -> bool:
    offered = {(i, g) for i, g in _groups(choices, node) if choices.groups[g].label == BATCH}
    taken = {
        (i, placement.group)
        for strategy in choices.strategies[node.name]
        for i, placement in enumerate(strategy.inputs)
        if isinstance(placement, Shard)
    }
    return bool(offered) and not offered & taken


def _reason(node: Node, choices: Choices, table: RuleTable) -> str:
    rule = table.find(node.op)
    if isinstance(rule, DiscoveredRule):
        return rule.discovery(make_call(node, choices.graph)).detail
    return "its rule has no sound way to cut this call"
