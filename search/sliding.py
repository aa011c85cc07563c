"""Where a value is converted, on a chain of calls that do as much either way; sooner or later, by the step as run.

A view can be made of what lies one way or of what lies the other, and so can a partial sum over a number, so that
between the call that makes a value and the one that reads it a conversion has several places. Nothing overlapped all of
them take the same, and the program of strategies takes any. As run they do not: what is sent sooner has longer to come,
and what stands elsewhere is in another bundle, or lets other calls be postponed.

    sooner     against the program's order: where all want a call's result one way, and it is there in another, the call
               makes it that way of an argument that is converted instead
    later      in the program's order: where an argument is converted for one call alone, that takes it as it lies, and
               the result is converted, if that is wanted one way

A conversion slides past a call as the same kind of collective, of as many bytes. Conversions of parameters, and of
views of them, stay: ``gathers`` asks about these. The shortest is taken, and where that is as good, all are sooner:
what makes no difference should not depend on how the plan was found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hap.conversion import collective_kind, required_results
from hap.cost_models.work import is_view
from hap.graph import Node, Value
from hap.placement import Partial, Placement
from hap.plan import Strategy
from hap.search.changed import Change
from hap.search.found import Found
from hap.search.problem import Problem
from hap.search.tempo import played_s

if TYPE_CHECKING:
    from hap.search.planner import Search

Ends = tuple[Placement | None, Placement]  # how a value lies, and how it is wanted

SAME = 1e-4  # of the step: it makes no difference


def or_slid(search: Search, best: Found, overlapped_s: float | None) -> tuple[Found, float | None]:
    """``best`` with its conversions sooner, or later, or as they are, by the step as run."""
    if overlapped_s is None or not search.limits.mixtures:
        return best, overlapped_s
    tried: list[tuple[Found, float]] = []
    for later in (False, True):
        if strategies := slid(search.problem, best.strategies, later=later):
            search.progress.say("asking where values should be converted")
            search.progress.check()
            change = Change.of(search.problem, best, strategies)
            if (change_s := played_s(search.problem, change)) <= overlapped_s * (1 + SAME) and change.found.fits:
                tried.append((change.found, change_s))
        elif not later:
            tried.append((best, overlapped_s))  # they are as soon as can be
    tried.append((best, overlapped_s))
    least_s = min(seconds for _, seconds in tried)
    return next((found, seconds) for found, seconds in tried if seconds <= least_s * (1 + SAME))


def slid(problem: Problem, strategies: Mapping[str, Strategy], *, later: bool) -> Mapping[str, Strategy]:
    """The strategies that change if all conversions that can be are sooner, or ``later``."""
    sliding = _Sliding(problem, dict(strategies))
    nodes = problem.choices.graph.nodes
    for node in nodes if later else reversed(nodes):
        sliding.slide(node, later=later)
    return {name: strategy for name, strategy in sliding.strategies.items() if strategy is not strategies[name]}


@dataclass(eq=False)
class _Sliding:
    """``strategies``: of every node, as they are by now."""

    problem: Problem
    strategies: dict[str, Strategy]

    def __post_init__(self) -> None:
        self.graph = self.problem.choices.graph
        self.required: dict[Value, list[Placement]] = {}
        for value, placement in required_results(self.graph, self.strategies):
            self.required.setdefault(value, []).append(placement)
        self.of_sources = set[str]()  # sources, and views of them
        for node in self.graph.nodes:
            if node.is_source or (is_view(node) and node.inputs[0].node in self.of_sources):
                self.of_sources.add(node.name)

    def slide(self, node: Node, *, later: bool) -> None:
        """Past one call, if that can be."""
        if node.name not in self.of_sources and len(node.outputs) == 1:
            options = self._later(node) if later else self._sooner(node)
            self.strategies[node.name] = next(options, self.strategies[node.name])

    def _lies(self, value: Value) -> Placement:
        placement = self.strategies[value.node].outputs[value.index]
        assert placement is not None, "somebody reads it"
        return placement

    def _wanted(self, value: Value) -> list[Placement]:
        """As what it is read, each once."""
        reads = (self.strategies[user.name].inputs[place] for user, place in self.graph.users.get(value, ()))
        return list(dict.fromkeys((*reads, *self.required.get(value, ()))))

    def _later(self, node: Node) -> Iterator[Strategy]:
        now, made = self.strategies[node.name], Value(node.name)
        converted = [self._lies(value) != wanted for value, wanted in zip(node.inputs, now.inputs, strict=True)]
        for place, option in self._options(node) if any(converted) else ():
            value, wanted, then = node.inputs[place], now.inputs[place], option.outputs[0]
            lies = self._lies(value)
            alone = sum(self.strategies[u.name].inputs[p] == wanted for u, p in self.graph.users[value]) == 1
            if lies != option.inputs[place] or not alone or wanted in self.required.get(value, ()):
                continue
            asked = [target for target in self._wanted(made) if target != then]
            if len(asked) == 1 and self._is_alike(value, (lies, wanted), made, (then, asked[0])):
                yield option

    def _sooner(self, node: Node) -> Iterator[Strategy]:
        now, made = self.strategies[node.name], Value(node.name)
        wanted, there = self._wanted(made), now.outputs[0]
        for place, option in self._options(node) if len(wanted) == 1 and wanted[0] != there else ():
            value = node.inputs[place]
            lies = self._lies(value)
            if option.outputs[0] != wanted[0] or lies != now.inputs[place]:
                continue
            if self._is_alike(made, (there, wanted[0]), value, (lies, option.inputs[place])):
                yield option

    def _options(self, node: Node) -> Iterator[tuple[int, Strategy]]:
        """Strategies that take one argument another way, and do as much work; and which argument."""
        now, facts = self.strategies[node.name], self.problem.facts
        for option in facts.candidates[node.name]:
            differ = [i for i, (one, other) in enumerate(zip(now.inputs, option.inputs, strict=True)) if one != other]
            if len(differ) != 1 or node.inputs[differ[0]].node in self.of_sources:
                continue
            if is_view(node) or facts.parts(node.name, now) == facts.parts(node.name, option):
                yield differ[0], option

    def _is_alike(self, one: Value, ends: Ends, other: Value, others: Ends) -> bool:
        """Whether two conversions are of one kind and of as many bytes."""
        kinds = set[str]()
        for lies, wanted in (ends, others):
            if lies is None or isinstance(wanted, Partial):
                return False
            kinds.add(collective_kind(lies, wanted))
        return len(kinds) == 1 and self.graph.meta(one).nbytes == self.graph.meta(other).nbytes
