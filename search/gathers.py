"""Where parameters in shards are gathered: as they are, or as views of them, where that makes the step as run shorter.

Nothing overlapped, both take the same: a view costs nothing, so the program of strategies takes either. As run they do
not. What is gathered as it is begins ahead of its turn (``hap.codegen.passes.overlap``), so that it has time to come;
a view stands before what reads it, and with it its gather. Where the wire has time, sooner is better. Where it also
carries what calls wait for, as a mixture's exchanges between its experts, what is sent ahead may hold that up.

    all that can be gathered as it is; all that can be as a view
    of the shorter one, as run, kind by kind, those with most bytes first, the other way; keep whatever is the shortest
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hap.cost_models.work import is_view
from hap.graph import Node, Value
from hap.placement import REPLICATE, Placement, Shard
from hap.plan import Strategy
from hap.search.changed import Change
from hap.search.found import Found
from hap.search.problem import Problem
from hap.search.tempo import played_s

if TYPE_CHECKING:
    from hap.search.planner import Search

KINDS = 4  # of parameters that are asked about one by one


def or_gathered(search: Search, best: Found, overlapped_s: float | None) -> tuple[Found, float | None]:
    """``best``, or if it is shorter as run, the same with parameters gathered elsewhere."""
    if overlapped_s is None or not search.limits.mixtures:
        return best, overlapped_s
    found, found_s = all_gathered(search, best, overlapped_s)
    kinds = _kinds(search.problem, best)
    for kind in kinds[:KINDS] if len(kinds) > 1 else ():
        for sooner in (True, False):
            found, found_s = _shorter(search, found, found, found_s, [kind], sooner)
    return found, found_s


def all_gathered(search: Search, best: Found, overlapped_s: float) -> tuple[Found, float]:
    """``best``, or if it is shorter as run, the same with all that can be gathered sooner, or later."""
    kinds, found, found_s = _kinds(search.problem, best), best, overlapped_s
    for sooner in (True, False):
        found, found_s = _shorter(search, best, found, found_s, kinds, sooner)
    return found, found_s


def _shorter(
    search: Search, start: Found, found: Found, found_s: float, kinds: list[list[Node]], sooner: bool
) -> tuple[Found, float]:
    """``found``, or ``start`` with these parameters gathered sooner, or later, where that is shorter."""
    strategies = dict[str, Strategy]()
    for node in (n for kind in kinds for n in kind):
        strategies.update(_moved(search.problem, start.strategies, node, sooner=sooner))
    if not strategies:
        return found, found_s
    search.progress.say("asking where parameters should be gathered")
    search.progress.check()
    tried = Change.of(search.problem, start, strategies)
    is_shorter = (tried_s := played_s(search.problem, tried)) < found_s and tried.found.fits
    return (tried.found, tried_s) if is_shorter else (found, found_s)


def _kinds(problem: Problem, best: Found) -> list[list[Node]]:
    """Parameters in shards that calls read whole, through views, alike ones together, those with most bytes first."""
    found: dict[int, list[Node]] = {}
    for node in problem.choices.graph.sources("parameter"):
        if isinstance(best.strategies[node.name].outputs[0], Shard) and _is_read_whole(problem, best.strategies, node):
            found.setdefault(problem.classes.of[node.name], []).append(node)
    return sorted(found.values(), key=lambda nodes: -sum(n.meta.nbytes for n in nodes))


def _is_read_whole(problem: Problem, strategies: Mapping[str, Strategy], node: Node) -> bool:
    users = problem.choices.graph.users.get(Value(node.name, 0), ())
    for user, place in users:
        if is_view(user) and place == 0 and len(user.outputs) == 1:
            if not _is_read_whole(problem, strategies, user):
                return False
        elif node.is_source or strategies[user.name].inputs[place] != REPLICATE:
            return False
    return bool(users)


def _moved(
    problem: Problem, strategies: Mapping[str, Strategy], node: Node, *, sooner: bool
) -> Iterator[tuple[str, Strategy]]:
    """The views that change if a parameter is gathered as it is, or as far behind as its shards are still shards, and
    one gather serves all that read them."""
    home = strategies[node.name].outputs[0]
    assert home is not None
    yield from _views(problem, strategies, node, REPLICATE if sooner else home)


def _views(
    problem: Problem, strategies: Mapping[str, Strategy], node: Node, placement: Placement
) -> Iterator[tuple[str, Strategy]]:
    users = problem.choices.graph.users.get(Value(node.name, 0), ())
    placement = placement if len(users) == 1 else REPLICATE
    for user, _ in users:
        if not is_view(user):
            continue
        options = problem.facts.candidates[user.name]
        option = next((s for s in options if s.inputs == (placement,) and _is_kept(s.outputs[0], placement)), None)
        option = option or next((s for s in options if s.inputs == (REPLICATE,) and s.outputs == (REPLICATE,)), None)
        if option is None:
            continue
        if option != strategies[user.name]:
            yield user.name, option
        made = option.outputs[0]
        assert made is not None
        yield from _views(problem, strategies, user, made)


def _is_kept(made: Placement | None, placement: Placement) -> bool:
    """Whether a view of a whole is whole, and of a shard a shard."""
    return made == REPLICATE if placement == REPLICATE else isinstance(made, Shard)
