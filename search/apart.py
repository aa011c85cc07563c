"""Weights that are read twice: what is sent for one of both alone, where that makes the step as it is run shorter.

An embedding that is the last layer's weight, too, has a gradient of two terms. Both are partial sums, and with nothing
overlapped it takes least to add them and to send the sum. But that is complete only when the later term is, for an
embedding in the last call of the backward pass, and all of it is waited for. Taken apart, the earlier term is sent
beside the backward pass, and of the later one what it is made of: for an embedding the gradients of its outputs, of
which there are as many as tokens, and not as many as words.

    gradient = A + B,  P + P -> P, then P -> home         the sum
    A: P -> X when it is there;  what B reads is gathered, or exchanged, so that B is made in X;  X + X -> X   (terms)

for every X in which the terms may be added and B be made, and with the parameter as it lies or in X. Where terms are
rounded before they are added, and the sum is widened behind it (``hap.capture.narrow``), all that lies in X, too; of B
is sent what its maker reads, in whatever dtype that is. In shards it is
gathered for both of its readers once, and the first one, the first call of the forward pass, waits for all of it.
Taken apart, that reader computes with the shards, and what it makes is exchanged; for the other one the parameter is
gathered beside the forward pass.

    parameter: S -> R, reader: R -> Y                     gathered
    reader: S -> Z, then Z -> Y;  the others: S -> R                                                           (reads)

The one may be worth it only with the other: where terms go to shards in which the parameter is to lie, both are tried.
Where to send what is made, or made of, takes no less than to send the term or the parameter, nothing is tried. The
shortest as run is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from hap.conversion import collective_kind
from hap.cost_models.work import is_view
from hap.graph import CAST, Graph, Node, Value
from hap.placement import PARTIAL, REPLICATE, GroupSizes, Partial, Placement, Shard
from hap.plan import Strategy
from hap.search.changed import Change, sizes_with
from hap.search.found import Found
from hap.search.judge import TIE
from hap.search.problem import Problem
from hap.search.tempo import played_s

if TYPE_CHECKING:
    from hap.search.planner import Search


MOST_ASKED = 64  # parameters, the largest: each is drafted and played
MOST_READERS = 4  # of a parameter: of a recurrent network's, which every step in time reads, the others gain nothing


def or_apart(search: Search, best: Found, overlapped_s: float | None) -> tuple[Found, float | None]:
    """``best``, or if it is shorter as run, the same with terms of gradients sent apart."""
    if overlapped_s is None or not search.limits.mixtures:
        return best, overlapped_s
    problem, found, found_s = search.problem, best, overlapped_s
    parameters = problem.choices.graph.sources("parameter")
    largest = {n.name for n in sorted(parameters, key=lambda n: -n.meta.nbytes)[:MOST_ASKED]}
    for ways in (_terms, _reads):
        for node in (n for n in parameters if n.name in largest):
            start = found
            for strategies in ways(problem, start, node, TIE * overlapped_s):
                search.progress.say("asking whether a weight's readers should be served apart")
                search.progress.check()
                tried = Change.of(problem, start, strategies)
                if (tried_s := played_s(problem, tried)) < found_s and tried.found.fits:
                    found, found_s = tried.found, tried_s
    return (found, found_s) if found_s < overlapped_s * (1 - TIE) else (best, overlapped_s)


def _terms(problem: Problem, best: Found, node: Node, worth_s: float) -> Iterator[Mapping[str, Strategy]]:
    """The strategies that change if the terms of a parameter's gradient go apart; none where the gradient is no sum of
    partial sums, or that is sent in less than ``worth_s``."""
    graph, candidates = problem.choices.graph, problem.facts.candidates
    if node.target not in graph.gradients:
        return
    value, widened = _uncast(graph, graph.gradients[node.target])
    adds, home = graph.by_name[value.node], best.strategies[node.name].outputs[0]
    now = best.strategies[adds.name]
    if len(adds.inputs) < 2 or {*now.inputs, *now.outputs} != {PARTIAL}:
        return
    assert home is not None
    if _seconds(problem, best.sizes, value, PARTIAL, home) < worth_s:
        return
    for option in candidates[adds.name]:
        (to, *others) = {*option.inputs, *option.outputs}
        if others or to is None or isinstance(to, Partial):
            continue
        if (passing := _passing(problem, widened, to)) is None:
            continue
        for term in adds.inputs:
            for made in _made_in(problem, best, term, to):
                for placed in candidates[node.name]:
                    if placed.outputs[0] in (to, home):
                        apart = {adds.name: option, **made, **passing, node.name: placed}
                        yield apart
                        yield from ({**apart, **read} for read in _served(problem, best, node, placed, worth_s))


def _uncast(graph: Graph, value: Value) -> tuple[Value, tuple[Node, ...]]:
    """What a value is a cast of, through casts that alone read what they read; with them."""
    casts: list[Node] = []
    while (node := graph.by_name[value.node]).op == CAST and len(graph.users[node.inputs[0]]) == 1:
        casts.append(node)
        value = node.inputs[0]
    return value, tuple(casts)


def _passing(problem: Problem, casts: Sequence[Node], placement: Placement) -> dict[str, Strategy] | None:
    """The strategies with which casts take and give this, if all of them can."""
    found = dict[str, Strategy]()
    for node in casts:
        for option in problem.facts.candidates[node.name]:
            if option.inputs == option.outputs == (placement,):
                found[node.name] = option
    return found if len(found) == len(casts) else None


def _made_in(problem: Problem, best: Found, term: Value, to: Placement) -> Iterator[Mapping[str, Strategy]]:
    """The strategies by which a partial sum that nobody else reads is made in another placement, if to send what it is
    made of takes less than to send it."""
    graph = problem.choices.graph
    made, casts = _uncast(graph, term)
    maker = graph.by_name[made.node]
    passing = _passing(problem, casts, to)
    if maker.is_source or is_view(maker) or len(maker.outputs) > 1 or len(graph.users.get(made, ())) > 1:
        return
    if passing is None:
        return
    for option in problem.facts.candidates[maker.name]:
        if option.outputs[0] != to:
            continue
        sizes = sizes_with(problem, best, {maker.name: option})
        sent_s = _sent_s(problem, best, sizes, maker, option)
        if sent_s < _seconds(problem, sizes, term, PARTIAL, to):
            yield {maker.name: option, **passing}


def _reads(problem: Problem, best: Found, node: Node, worth_s: float) -> Iterator[Mapping[str, Strategy]]:
    """The strategies that change if one of a parameter's readers computes with shards."""
    for placed in problem.facts.candidates[node.name]:
        for read in _served(problem, best, node, placed, worth_s):
            yield {**read, node.name: placed}


def _served(
    problem: Problem, best: Found, node: Node, placed: Strategy, worth_s: float
) -> Iterator[Mapping[str, Strategy]]:
    """The strategy of one of a parameter's readers that computes with the shards in which it is ``placed``; none where
    it has no other, or the parameter is gathered in less than ``worth_s``."""
    graph, candidates = problem.choices.graph, problem.facts.candidates
    value, home = Value(node.name, 0), placed.outputs[0]
    users = graph.users.get(value, ())
    if not isinstance(home, Shard) or not 1 < len(users) <= MOST_READERS:
        return
    for reader, place in users:
        now = best.strategies[reader.name]
        if is_view(reader) or len(reader.outputs) > 1 or now.inputs[place] != REPLICATE:
            continue
        for option in candidates[reader.name]:
            if option.inputs[place] != home:
                continue
            made, wanted = option.outputs[0], now.outputs[0]
            assert made is not None and wanted is not None
            sizes = sizes_with(problem, best, {node.name: placed, reader.name: option})
            gathered_s = _seconds(problem, sizes, value, home, REPLICATE)
            sent_s = _sent_s(problem, best, sizes, reader, option, but=place)
            if max(worth_s, sent_s + _seconds(problem, sizes, Value(reader.name, 0), made, wanted)) < gathered_s:
                yield {reader.name: option}


def _sent_s(
    problem: Problem, best: Found, sizes: GroupSizes, node: Node, option: Strategy, *, but: int | None = None
) -> float:
    """Of what a call reads, as it lies now, to where it is read with this strategy; ``but`` for one argument."""
    total = 0.0
    for place, (value, wanted) in enumerate(zip(node.inputs, option.inputs, strict=True)):
        there = best.strategies[value.node].outputs[value.index]
        assert there is not None
        total += 0.0 if place == but else _seconds(problem, sizes, value, there, wanted)
    return total


def _seconds(problem: Problem, sizes: GroupSizes, value: Value, source: Placement, target: Placement) -> float:
    """Of a conversion, the fastest way; no end where there is none."""
    if source == target:
        return 0.0
    if isinstance(target, Partial):
        return float("inf")
    nbytes = problem.choices.graph.meta(value).nbytes
    return problem.facts.evaluator.forms.best(collective_kind(source, target), nbytes, source, target, sizes)[1]
