"""Which parameters every rank keeps whole and which lie in shards, one by one, by the step as it is run.

Nothing overlapped, it takes as long to sum a gradient onto every rank as to sum it into shards and to gather the
parameter that it is for: as many bytes. As run it does not. What is gathered for a call of the forward pass is sent
beside that pass, and what is summed beside the backward pass. With F and B the seconds of their calls, and where the
wire does nothing else, W those of the wire, G of these for gathers, it is at best

    step  =  max(F, G) + max(B, W - G)

so where the wire is what takes long, a part of the parameters lies in shards at best, and neither all nor none do.
The program of strategies takes one decision for all that is alike, and by the other clock. Here kinds of parameters,
of alike layers, are gone through once, those with most bytes first:

    all that are of small kinds the other way, where the wire is busy throughout
    half of a kind the other way, every second layer; if that is shorter as run, all of it; if not, a quarter
    keep whatever is the shortest so far; end after ``PATIENCE`` kinds that were worth nothing, of a small graph never

A parameter is turned where the calls read it whole and a call makes partial sums of its gradient: whole, they are
summed onto every rank; in shards, into the shards that are cheapest to sum into and to gather from, even ones or not.
Views and casts on the way take what comes as it is, and the sum is made of what a last cast widens. Asked where the
wire has something to do and the step as run is longer than the compute of the busiest rank; where the wire is busy
throughout, too, as the one way or the other may have fewer bundles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hap.cost_models.work import is_view
from hap.graph import CAST, Graph, Node, Value
from hap.placement import PARTIAL, REPLICATE, Placement, Shard
from hap.plan import Strategy
from hap.search.changed import Change, sizes_of, sizes_with
from hap.search.found import Found
from hap.search.judge import TIE
from hap.search.limits import SMALL
from hap.search.problem import Problem
from hap.search.starts import storing_shares
from hap.search.tempo import played_s, played_wire_s

if TYPE_CHECKING:
    from hap.search.planner import Search

WAITING = 0.1  # of the busiest rank's compute, and of all collectives
SENT = 0.2  # of the busiest rank's compute: of less little is gained
MUCH = 0.03  # of the bytes of all trained parameters: smaller kinds go together
PATIENCE = 2  # kinds in turn that are worth less than ...
WORTH = 2e-3  # ... of the step
HALF, ALL, QUARTER = 0.5, 1.0, 0.25
TOGETHER = -1  # the small kinds, as if they were one before the first


def or_mixed(search: Search, best: Found, overlapped_s: float | None) -> tuple[Found, float | None]:
    """``best``, or if it is shorter as run, the same with other parameters whole or in shards."""
    most = search.limits.mixtures
    if overlapped_s is None or not most or best.regather:
        return best, overlapped_s
    busy_s, sent_s = max(best.evaluation.compute_s), played_wire_s(search.problem, best)
    if sent_s <= SENT * busy_s or overlapped_s <= (1 + WAITING) * busy_s:
        return best, overlapped_s
    search.progress.say("asking which parameters should be whole")
    mixture, parts, found, found_s = _Mixture.of(search.problem, best), dict[int, float](), best, overlapped_s
    kinds = list(enumerate(mixture.kinds))
    if mixture.small and overlapped_s <= (1 + WAITING) * sent_s:
        kinds.insert(0, (TOGETHER, mixture.small))
    patience = PATIENCE if len(search.problem.choices.graph.nodes) > SMALL else most
    gained_by = -1  # the last kind that was worth it
    for kind, members in kinds:
        pending = [HALF if kind != TOGETHER and len(members) > 1 else ALL]
        while pending and most and kind - gained_by <= patience:
            search.progress.check()
            part, most = pending.pop(), most - 1
            is_shorter, before_s = False, found_s
            for tried in mixture.turned({**parts, kind: part}):
                if (tried_s := played_s(search.problem, tried)) < found_s and tried.found.fits:
                    is_shorter, found, found_s = True, tried.found, tried_s
            if is_shorter:
                gained_by = kind if found_s < before_s * (1 - WORTH) else gained_by
                parts[kind] = part
            if part == HALF and (is_shorter or len(members) >= 4):
                pending.append(ALL if is_shorter else QUARTER)
    return (found, found_s) if found_s < overlapped_s * (1 - TIE) else (best, overlapped_s)


@dataclass(frozen=True, eq=False)
class _Mixture:
    """``best``, and what its parameters are the other way. ``kinds``: of parameters, in the order of their bytes, most
    first; each with the strategies of its members, in the order in which they are read, that turn them. ``small``:
    those of all smaller kinds."""

    problem: Problem
    best: Found
    kinds: tuple[tuple[Mapping[str, Strategy], ...], ...]
    small: tuple[Mapping[str, Strategy], ...]

    @classmethod
    def of(cls, problem: Problem, best: Found) -> _Mixture:
        graph, position = problem.choices.graph, problem.facts.position
        trained = [n for n in graph.sources("parameter") if n.target in graph.gradients]
        read = {n.name: min((position[r.name] for r in _readers(graph, n)), default=-1) for n in trained}
        kinds: dict[tuple[int, bool], list[Node]] = {}
        for node in sorted(trained, key=lambda n: read[n.name]):
            sharded = isinstance(best.strategies[node.name].outputs[0], Shard)
            kinds.setdefault((problem.classes.of[node.name], sharded), []).append(node)
        total = sum(n.meta.nbytes for n in trained)
        sizes = {kind: sum(n.meta.nbytes for n in nodes) for kind, nodes in kinds.items()}
        order = sorted(kinds, key=lambda kind: -sizes[kind])
        large = [kinds[kind] for kind in order if sizes[kind] >= MUCH * total]
        small = [node for kind in order if sizes[kind] < MUCH * total for node in kinds[kind]]
        together, *turned = (
            tuple(t for node in nodes if (t := _turned(problem, best, node)) is not None) for nodes in (small, *large)
        )
        return cls(problem, best, tuple(filter(None, turned)), together)

    def turned(self, parts: Mapping[int, float]) -> Iterator[Change]:
        """The plan with these parts of its kinds the other way, every so many-th member of a kind: new shards even, and
        by what takes least to gather and to sum into, where that is another way."""
        strategies = dict[str, Strategy]()
        for kind, part in parts.items():
            for i, other in enumerate(self.small if kind == TOGETHER else self.kinds[kind]):
                if int((i + 1) * part) > int(i * part):
                    strategies.update(other)
        yield (even := Change.of(self.problem, self.best, strategies))
        storing = storing_shares(self.problem)
        if storing is not None and sizes_with(self.problem, self.best, strategies, storing) != even.sizes:
            yield Change.of(self.problem, self.best, strategies, storing)


def _turned(problem: Problem, best: Found, node: Node) -> Mapping[str, Strategy] | None:
    """The strategies that change if a parameter is whole instead of in shards, or in shards instead of whole; None
    where its calls do not read it whole, or do not make partial sums."""
    graph, candidates = problem.choices.graph, problem.facts.candidates
    value, found = graph.gradients[node.target], dict[str, Strategy | None]()
    maker = graph.by_name[value.node]
    widened = maker if _widens(graph, maker) else None
    if widened is not None:
        value = widened.inputs[0]
        maker = graph.by_name[value.node]
    sent = graph.meta(value).nbytes
    while is_view(maker) or maker.op == CAST:
        found[maker.name] = _passing(candidates[maker.name], PARTIAL)
        value = maker.inputs[0]
        maker = graph.by_name[value.node]
    if maker.is_source or best.strategies[maker.name].outputs[value.index] != PARTIAL:
        return None
    for reader, place in _reads(graph, node):
        if is_view(reader) and place == 0:
            found[reader.name] = _passing(candidates[reader.name], REPLICATE)
        elif best.strategies[reader.name].inputs[place] != REPLICATE:
            return None
    in_shards = isinstance(best.strategies[node.name].outputs[0], Shard)
    home = REPLICATE if in_shards else _cheapest(problem, best, node, sent)
    if widened is not None and home is not None:
        found[widened.name] = _passing(candidates[widened.name], home)
    if None in found.values():
        return None
    option = next((s for s in candidates[node.name] if s.outputs[0] == home), None)
    return None if option is None else {node.name: option, **{name: s for name, s in found.items() if s is not None}}


def _widens(graph: Graph, node: Node) -> bool:
    return node.op == CAST and graph.meta(node.inputs[0]).nbytes < node.meta.nbytes


def _passing(options: Sequence[Strategy], placement: Placement) -> Strategy | None:
    """A view's or a cast's strategy that takes and gives this."""
    return next((s for s in options if s.inputs == (placement,) and set(s.outputs) == {placement}), None)


def _cheapest(problem: Problem, best: Found, node: Node, summed: int) -> Shard | None:
    """The shards of a parameter into which a sum of so many bytes takes least, and a gather from them, together."""
    forms, used = problem.facts.evaluator.forms, frozenset(best.groups)
    priced: list[tuple[float, int, Shard]] = []
    for i, option in enumerate(problem.facts.candidates[node.name]):
        placement = option.outputs[0]
        if isinstance(placement, Shard):
            sizes = {placement.group: sizes_of(problem, best, placement.group, used)}
            _, sum_s = forms.best("reduce_scatter", summed, PARTIAL, placement, sizes)
            _, gather_s = forms.best("all_gather", node.meta.nbytes, placement, REPLICATE, sizes)
            priced.append((sum_s + gather_s, i, placement))
    return min(priced)[2] if priced else None


def _readers(graph: Graph, node: Node) -> Iterator[Node]:
    """The calls that read what a node makes, by itself or through views."""
    return (reader for reader, place in _reads(graph, node) if not (is_view(reader) and place == 0))


def _reads(graph: Graph, node: Node) -> Iterator[tuple[Node, int]]:
    """All that read what a node makes, or a view of it, and views; at which of their arguments."""
    for index in range(len(node.outputs)):
        for user, place in graph.users.get(Value(node.name, index), ()):
            yield user, place
            if is_view(user) and place == 0:
                yield from _reads(graph, user)
