"""What the search asks about a graph again and again: the work of every option, and who is alive when.

``Facts`` depends on the graph, the candidates and the cluster alone; ``hap.search.tables`` adds sizes.

**Memory as linear terms.** The cost model follows every allocation; a linear program cannot, since lifetimes depend on
the choice. It sees a few *moments* of the step instead: the fullest of the forward part and of every piece of the
backward part, and the end (every gradient is alive). At a moment a value counts, in the
placement it was produced in, if it was produced before and is read later, by itself or through views (one that is made
again in the backward phase: read later in the same phase); a converted copy counts between the first and the last
reader of the value; a final gradient counts in its parameter's placement. Of what is not converted this is what the
ledger of ``hap.cost_models.memory`` finds; with what is, an estimate. What calls hold while they run alone is left out.
The ledger stays the judge: the planner tightens ``capacity_bytes`` by what it finds above it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import chain, pairwise
from typing import cast

import numpy as np

from hap.cluster import ClusterSpec
from hap.conversion import collective_kind
from hap.cost_models.compute import Calls, ComputeTable, Parts
from hap.cost_models.evaluate import Evaluator, UpdateTable
from hap.cost_models.optimizers import optimizer_state_bytes, update_flops
from hap.cost_models.pieces import local_bytes
from hap.cost_models.work import is_view
from hap.deferral import ONE, Batches
from hap.fabric import Array
from hap.graph import Graph, Node, Phase, Value
from hap.placement import GroupSizes, Placement
from hap.plan import Recomputed, Strategy
from hap.search.classes import NUMBERED, Candidates, Reads, find_colours, find_reads
from hap.search.wires import Wires

MOMENTS = 9


@dataclass(frozen=True, eq=False)
class Facts:
    """What does not depend on sizes."""

    graph: Graph
    candidates: Candidates
    cluster: ClusterSpec
    optimizer: str
    recomputed: tuple[Recomputed, ...] = ()
    batches: Batches = ONE
    _held: dict[str, list[tuple[int, int, Array]]] = field(default_factory=dict, repr=False)
    _alive: dict[tuple[Value, str], Array] = field(default_factory=dict, repr=False)
    found: dict[str, object] = field(default_factory=dict, repr=False)  # by others, of graph and candidates alone
    here: dict[str, object] = field(default_factory=dict, repr=False)  # by others, of the cluster as well

    def on(self, cluster: ClusterSpec) -> Facts:
        """The same on another cluster; what is known of the graph is handed on."""
        other = replace(self, cluster=cluster, here={})._knowing(self)
        other.__dict__["evaluator"] = self.evaluator.on(cluster)
        return other

    def repeating(self, recomputed: tuple[Recomputed, ...]) -> Facts:
        """The same with these calls made again in the backward pass; nothing else that is known depends on it."""
        other = replace(self, recomputed=recomputed, _held={}, _alive={})
        for name in ("evaluator", "compute", "wires", "updates"):
            other.__dict__[name] = getattr(self, name)
        return other._knowing(self)

    def _knowing(self, other: Facts) -> Facts:
        names = ("calls", "colours", "every_read", "running", "position", "reads", "homes")
        for name in (*names, "moments") if self.recomputed == other.recomputed else names:
            self.__dict__[name] = getattr(other, name)
        return self

    @cached_property
    def repeated(self) -> frozenset[str]:
        """The nodes whose calls are made twice."""
        return frozenset(name for r in self.recomputed for name in r.calls)

    def times(self, names: Iterable[str]) -> int:
        """How many calls these nodes are."""
        return sum(2 if name in self.repeated else 1 for name in names)

    def parts(self, name: str, strategy: Strategy) -> Parts:
        """The work of a node as the strategy divides it."""
        return self.calls.parts(name, strategy)

    @cached_property
    def calls(self) -> Calls:
        return Calls(self.graph, self.batches)

    @cached_property
    def evaluator(self) -> Evaluator:
        return Evaluator(self.graph, self.cluster, self.optimizer, self.calls, batches=self.batches)

    @cached_property
    def compute(self) -> ComputeTable:
        return ComputeTable(self.cluster.devices)

    @cached_property
    def wires(self) -> Wires:
        return Wires(self.cluster)

    @cached_property
    def colours(self) -> tuple[Mapping[str, int], ...]:
        return find_colours(self.graph, self.candidates, reads=self.every_read)

    def timed_alike(self, colour: Mapping[str, int]) -> Mapping[str, int]:
        """The colours, where calls of one may take different times a finer partition: what was measured of a call goes
        by all of its literals, of which a colour leaves serial numbers out. Views are not measured each."""
        if not self.compute.is_measured:
            return colour
        numbers, found = dict[object, int](), dict[str, int]()
        for n in self.graph.nodes:
            serial = () if is_view(n) else (a for i, a in enumerate(n.args) if (n.op, i) in NUMBERED)
            found[n.name] = numbers.setdefault((colour[n.name], *serial), len(numbers))
        return found

    @cached_property
    def every_read(self) -> Reads:
        """Of every value, in program order."""
        return find_reads(self.graph, self.candidates)

    @cached_property
    def running(self) -> frozenset[str]:
        """Nodes that nobody needs do not run: they make nothing, and read nothing."""
        return frozenset(n.name for part in self.evaluator.parts for n in part)

    @cached_property
    def position(self) -> Mapping[str, int]:
        """In the program's order; nodes that do not run come last."""
        runs = {n.name: t for t, n in enumerate(chain(*self.evaluator.parts))}
        return runs | {n.name: len(runs) for n in self.graph.nodes if n.name not in runs}

    @cached_property
    def moments(self) -> Array:
        """(MOMENTS,) positions in the program: of the forward part and of each of so many equal pieces of the backward
        part the call at which most bytes are there, and the end."""
        sources, forward, _ = self.evaluator.parts
        boundary, end = max(self.position[n.name] for n in (*sources, *forward)), len(self.running) - 1
        change = np.zeros(end + 2)
        for node in self.graph.nodes:
            for _, nbytes, spans in self._lives(node.name):
                for first, last in spans:
                    change[first] += nbytes
                    change[last + 1] -= nbytes
        for gradient in self.homes:
            change[self.position[gradient.node]] += self.graph.meta(gradient).nbytes
        there = change.cumsum()
        edges = np.linspace(boundary, end + 1, MOMENTS - 1).round().astype(int).tolist()
        pieces = [(0, boundary + 1), *pairwise(edges)]
        fullest = [first + int(there[first:last].argmax()) if last > first else first for first, last in pieces]
        return np.array([*fullest, end], dtype=np.float64)

    @cached_property
    def reads(self) -> Mapping[Value, Mapping[Phase, tuple[int, int]]]:
        """Value -> phase -> positions of the first and the last node that reads it, by itself or through a view of that
        phase."""
        return self._find_reads({n.name: n.phase for n in self.graph.nodes}, through_views=False)

    @property
    def reads_by_part(self) -> Mapping[Value, Mapping[Phase, tuple[int, int]]]:
        """The same by the part of the program in which nodes run, through views or not: one of the forward phase that
        only the backward phase reads runs there."""
        if "reads by part" not in self.found:
            late = {n.name for n in self.evaluator.parts[2]}
            phases: dict[str, Phase] = {n.name: "backward" if n.name in late else "forward" for n in self.graph.nodes}
            self.found["reads by part"] = self._find_reads(phases, through_views=True)
        return cast(Mapping[Value, Mapping[Phase, tuple[int, int]]], self.found["reads by part"])

    def _find_reads(
        self, phases: Mapping[str, Phase], *, through_views: bool
    ) -> dict[Value, dict[Phase, tuple[int, int]]]:
        """``through_views``: what a view's readers read counts in their phase, otherwise in the view's."""
        found: dict[Value, dict[Phase, tuple[int, int]]] = {}
        for node in sorted(self.graph.nodes, key=lambda n: self.position[n.name], reverse=True):
            for index in range(len(node.outputs)):
                value = Value(node.name, index)
                spans: dict[Phase, list[int]] = {}
                for user, place in self.graph.users.get(value, ()):
                    if user.name not in self.running:
                        continue
                    phase = phases[user.name]
                    spans.setdefault(phase, []).append(self.position[user.name])
                    if place == 0 and self._is_view(user):
                        for i in range(len(user.outputs)):
                            for other, times in found.get(Value(user.name, i), {}).items():
                                spans.setdefault(other if through_views else phase, []).extend(times)
                found[value] = {phase: (min(times), max(times)) for phase, times in spans.items()}
        return found

    def _is_view(self, node: Node) -> bool:
        """Whether what it makes lies where its first input does: not where that must be copied."""
        return is_view(node) and node.name not in self.evaluator.strides.copying

    @cached_property
    def homes(self) -> Mapping[Value, str]:
        """Final gradient -> its parameter's node."""
        nodes = {n.target: n.name for n in self.graph.sources("parameter")}
        return {value: nodes[target] for target, value in self.graph.gradients.items()}

    def alive(self, born: int, last: int) -> Array:
        """(MOMENTS, 1) of 0 and 1: the moments from born to last. Many are equal, and are made once."""
        moments = self._sorted_moments
        key = bisect_left(moments, born), bisect_right(moments, last)
        if key not in self._masks:
            mask = ((self.moments >= born) & (self.moments <= last)).astype(np.float64)[:, None]
            mask.flags.writeable = False
            self._masks[key] = mask
        return self._masks[key]

    @cached_property
    def _sorted_moments(self) -> list[float]:
        found: list[float] = np.sort(self.moments).tolist()
        return found

    @cached_property
    def _masks(self) -> dict[tuple[int, int], Array]:
        return {}

    def held(self, name: str, strategy: Strategy) -> list[tuple[Placement, int, Array]]:
        """What a node keeps: (placement, bytes of the whole, moments) for each of its allocations."""
        placed = ((strategy.outputs[index], nbytes, moments) for index, nbytes, moments in self.allocations(name))
        return [(placement, nbytes, moments) for placement, nbytes, moments in placed if placement is not None]

    def allocations(self, name: str) -> list[tuple[int, int, Array]]:
        """(output, bytes of the whole, moments) of each, in whatever placement the output is."""
        if name not in self._held:
            self._held[name] = self._find_held(name)
        return self._held[name]

    def _find_held(self, name: str) -> list[tuple[int, int, Array]]:
        node = self.graph.by_name[name]
        if node.is_source:
            kept = [(0, node.meta.nbytes, np.ones((MOMENTS, 1)))]
            if node.op == "parameter" and node.target in self.graph.gradients:
                gradient = self.graph.gradients[node.target]
                state = optimizer_state_bytes(self.optimizer, node.meta.nbytes)
                kept.append((0, state, np.ones((MOMENTS, 1))))
                born = 0 if self.batches.count > 1 else self.position[gradient.node]
                kept.append((0, self.graph.meta(gradient).nbytes, self.alive(born, len(self.graph.nodes))))
            return kept
        return [
            (index, nbytes, reduce(np.maximum, [self.alive(*span) for span in spans]))
            for index, nbytes, spans in self._lives(name)
        ]

    def _lives(self, name: str) -> Iterator[tuple[int, int, Sequence[tuple[int, int]]]]:
        """(output, bytes, first and last position) of what a call makes: there from the call to its last reader, or in
        each pass for its own readers if it is made twice (what only repeated calls read then is gone at once)."""
        node, born = self.graph.by_name[name], self.position[name]
        if node.is_source or self._is_view(node) or name not in self.running:
            return
        for index, meta in enumerate(node.outputs):
            value = Value(name, index)
            spans = self.reads_by_part[value] if name in self.repeated else self._spans(value)
            if meta is None or not spans or value in self.homes:
                continue
            if name in self.repeated and "backward" in spans:
                yield index, meta.nbytes, ((born, spans.get("forward", (born, born))[1]), spans["backward"])
            else:
                yield index, meta.nbytes, ((born, max(last for _, last in spans.values())),)

    def _spans(self, value: Value) -> Mapping[Phase, tuple[int, int]]:
        """``reads`` with those by calls that are made again."""
        spans = self.reads.get(value, {})
        again = [self.again_at[user.name] for user, _ in self.graph.users.get(value, ()) if user.name in self.again_at]
        if not again:
            return spans
        times = (*again, *spans.get("backward", ()))
        return {**spans, "backward": (min(times), max(times))}

    @cached_property
    def again_at(self) -> Mapping[str, int]:
        """Call that is made again -> the position before which it is: where the backward phase first needs it."""
        found: dict[str, int] = {}
        for node in reversed(self.graph.nodes if self.repeated else ()):
            if node.name in self.repeated:
                values = [Value(node.name, index) for index in range(len(node.outputs))]
                reads = [self.reads_by_part.get(v, {}) for v in values]
                times = [spans["backward"][0] for spans in reads if "backward" in spans]
                users = (user.name for v in values for user, _ in self.graph.users.get(v, ()))
                times += [found[name] for name in users if name in found]
                if times:
                    found[node.name] = min(times)
        return found

    @cached_property
    def allocated(self) -> tuple[tuple[str, int, int, Array], ...]:
        """``allocations`` of all nodes, with their names."""
        return tuple((n.name, *held) for n in self.graph.nodes for held in self.allocations(n.name))

    def left(self, value: Value, source: Placement, target: Placement) -> Array:
        """The moments at which there is what earlier batches left of a value for one exchange in its placement."""
        is_left = value in self.batches.once and collective_kind(source, target) != "slice"
        return np.full((MOMENTS, 1), float(is_left))

    def copy_alive(self, value: Value, copy: str) -> Array:
        """The moments at which a converted copy lives; ``copy`` is a phase, or "" for one copy shared by both."""
        if (value, copy) not in self._alive:
            self._alive[value, copy] = self._find_alive(value, copy)
        return self._alive[value, copy]

    def _find_alive(self, value: Value, copy: str) -> Array:
        spans = self._spans(value)
        spans = {phase: span for phase, span in spans.items() if copy in ("", phase)}
        if not spans:
            return np.zeros((MOMENTS, 1))
        return self.alive(min(first for first, _ in spans.values()), max(last for _, last in spans.values()))

    def update_s(self, name: str, strategy: Strategy, sizes: GroupSizes) -> Array:
        """A batch's part of the optimizer's seconds for one parameter on every rank (N,); zeros for any other node."""
        node, n = self.graph.by_name[name], self.cluster.world_size
        placement = strategy.outputs[0]
        if node.op != "parameter" or node.target not in self.graph.gradients or placement is None:
            return np.zeros(n)
        own = local_bytes(node.meta.nbytes, placement, sizes, n)
        return self.updates.seconds(own, update_flops(self.optimizer, self.graph, node)) / self.batches.count

    @cached_property
    def updates(self) -> UpdateTable:
        return UpdateTable(self.cluster, self.optimizer)
