"""Blocks of the forward pass, and which of their calls are worth making again in the backward pass.

**Blocks** are found by what is alive, never by names: a block may end after a call where a single value, and nothing
else of its size, goes on to later calls (the residual stream between two layers, the map between two stages). It does
end there once it has made ``WORTH`` times the bytes of that value for the backward pass: so the layers of a transformer
are blocks, and so are the stages of a convolutional network, but a lone ReLU is not. What many later calls read (a
mask, an encoder's output) goes on through blocks without ending up in the count.

**What to keep** of a block is a minimum cut. Every value v that a call of the block makes is an arc that costs its
bytes, and

    source -> call            infinite, if the call must not be made again (it would cost too much, or ends a block)
    call   -> v               infinite
    v in   -> v out           bytes of v; infinite for a view, of which its base is kept
    v out  -> a call's call   infinite, for every call that reads v
    v out  -> sink            infinite, if the backward pass reads v

The cut nearest to the sink is what to keep; the calls behind it are made again. What may be repeated has three levels:
``cheap`` are elementwise calls, norms and lookups, which memory bandwidth limits: kept is what products, attention and
convolutions made (selective recomputation, Korthikanti et al. 2022); ``products`` are these and matrix products: kept
is what attention and convolutions made; ``all`` is every call but those that end a block: kept is little more than what
enters it (Chen et al. 2016, Training deep nets with sublinear memory cost).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ortools.graph.python import max_flow

from hap.cost_models.strides import Strides, find_strides
from hap.cost_models.work import OpClass, is_view, op_class
from hap.graph import Graph, Node, Value
from hap.order import program_parts

WORTH = 8  # times the bytes of what goes on
SMALL = 0.1  # of what goes on: what else may go on with it
LASTING = 0.25  # of the forward calls: what is read for longer belongs to no block
LEAST = (
    0.05,
    0.2,
)  # of what a block keeps with nothing repeated, and at the level below: what spares less is not offered
What = Literal["cheap", "products", "all"]
_CHEAP: tuple[OpClass, ...] = ("elementwise", "reduction", "index", "view")
LEVELS: Mapping[What, tuple[OpClass, ...]] = {
    "cheap": _CHEAP,
    "products": (*_CHEAP, "matmul"),
    "all": (*_CHEAP, "matmul", "attention", "conv"),
}


@dataclass(frozen=True)
class Block:
    """``label`` names the first and the last module that made its calls. ``calls[what]``: what to repeat so that it
    keeps ``kept_bytes[what]`` (of whole values) where it kept ``plain_bytes``; without levels that spare nothing."""

    label: str
    plain_bytes: int
    calls: Mapping[What, tuple[str, ...]]
    kept_bytes: Mapping[What, int]


def find_blocks(graph: Graph, strides: Strides | None = None) -> tuple[Block, ...]:
    """The blocks of which something is worth repeating, in program order. Equal parts of a graph are cut alike.
    ``strides`` are the graph's, if known."""
    return _Forward(graph, find_strides(graph) if strides is None else strides).blocks()


@dataclass
class _Forward:
    """The forward part: which storage every value lies in, and until when it is read."""

    graph: Graph
    strides: Strides

    def __post_init__(self) -> None:
        _, self.calls, self.backward = program_parts(self.graph)
        self.at = {node.name: t for t, node in enumerate(self.calls)}
        self.base: dict[Value, Value] = {}  # value -> the value whose memory it is
        for node in self.calls:
            for index in range(len(node.outputs)):
                value = Value(node.name, index)
                self.base[value] = self.base.get(node.inputs[0], value) if self._shares(node) else value

    def _shares(self, node: Node) -> bool:
        return is_view(node) and node.name not in self.strides.copying

    @cached_property
    def needed(self) -> frozenset[Value]:
        """Values of the forward part that the backward part reads."""
        return frozenset(v for node in self.backward for v in node.inputs if v.node in self.at)

    @cached_property
    def last(self) -> dict[Value, int]:
        """Base -> the last forward call that reads it, by itself or through views; its own call if none does."""
        found = {base: self.at[base.node] for base in self.base.values() if base.node in self.at}
        for t, node in enumerate(self.calls):
            for value in node.inputs:
                base = self.base.get(value, value)
                if base in found:
                    found[base] = max(found[base], t)
        return found

    def blocks(self) -> tuple[Block, ...]:
        parts = self._parts()
        ends = frozenset(end for _, end in parts)
        cuts = {what: self._cut(what, ends) for what in LEVELS}
        return tuple(b for part, _ in parts if (b := self._block(part, cuts)) is not None)

    # -- where blocks end --------------------------------------------------------------------------------------------

    def _parts(self) -> list[tuple[Sequence[Node], str]]:
        """(calls, the call whose value goes on) of each; the last part ends with the loss."""
        found: list[tuple[Sequence[Node], str]] = []
        first, inside = 0, 0
        kept = {self.base[v] for v in self.needed}
        for t, end in enumerate(self._ends()):
            node = self.calls[t]
            values = [Value(node.name, i) for i, meta in enumerate(node.outputs) if meta is not None]
            inside += sum(self.graph.meta(v).nbytes for v in values if v in kept and self.base[v] == v)
            if end is not None and inside >= WORTH * self.graph.meta(end).nbytes and self.at[end.node] >= first:
                found.append((self.calls[first : t + 1], end.node))
                first, inside = t + 1, 0
        found.append((self.calls[first:], self.graph.loss.node))
        return found

    def _ends(self) -> list[Value | None]:
        """After each call the one value that goes on, if there is one."""
        lasting = LASTING * len(self.calls)
        spans = [(base, self.at[base.node], last) for base, last in self.last.items()]
        starts: dict[int, list[Value]] = {}
        stops: dict[int, list[Value]] = {}
        for base, born, last in spans:
            if born < last <= born + lasting:
                starts.setdefault(born, []).append(base)
                stops.setdefault(last, []).append(base)
        going: dict[Value, int] = {}
        found: list[Value | None] = []
        for t in range(len(self.calls)):
            going.update((base, self.graph.meta(base).nbytes) for base in starts.get(t, ()))
            for base in stops.get(t, ()):
                del going[base]
            largest = max(going, key=going.__getitem__, default=None)
            alone = largest is not None and sum(going.values()) <= (1 + SMALL) * going[largest]
            found.append(largest if alone else None)
        return found

    # -- what to keep ------------------------------------------------------------------------------------------------

    def _cut(self, what: What, ends: frozenset[str]) -> tuple[frozenset[str], frozenset[Value]]:
        """(calls to make again, bases to keep) of the whole forward part."""
        flow, nodes = max_flow.SimpleMaxFlow(), dict[object, int]()
        never = 1 + sum(self.graph.meta(base).nbytes for base in self.last)

        def number(what: object) -> int:
            return nodes.setdefault(what, len(nodes))

        source, sink = number("source"), number("sink")
        for node in self.calls:
            call = number(node.name)
            if node.name in ends or op_class(node.op) not in LEVELS[what]:
                flow.add_arc_with_capacity(source, call, never)
            for value in dict.fromkeys(v for v in node.inputs if v.node in self.at):
                flow.add_arc_with_capacity(number((value, "out")), call, never)
            for index, meta in enumerate(node.outputs):
                value = Value(node.name, index)
                if meta is not None:
                    into, out = number((value, "in")), number((value, "out"))
                    flow.add_arc_with_capacity(call, into, never)
                    flow.add_arc_with_capacity(into, out, never if self._shares(node) else meta.nbytes)
                    if value in self.needed:
                        flow.add_arc_with_capacity(out, sink, never)
        status = flow.solve(source, sink)
        assert status == max_flow.SimpleMaxFlow.OPTIMAL, status
        behind = frozenset(flow.get_sink_side_min_cut())
        return self._repeated(lambda value: nodes[value, "in"] in behind)

    def _repeated(self, is_made_again: Callable[[Value], bool]) -> tuple[frozenset[str], frozenset[Value]]:
        """What the backward part needs, followed back to what is kept."""
        waiting, seen = sorted(self.needed), set(self.needed)
        calls, kept = set[str](), set[Value]()
        while waiting:
            value = waiting.pop()
            if not is_made_again(value):
                kept.add(self.base[value])
                continue
            calls.add(value.node)
            new = [v for v in self.graph.by_name[value.node].inputs if v.node in self.at and v not in seen]
            seen.update(new)
            waiting.extend(new)
        return frozenset(calls), frozenset(kept)

    def _block(
        self, part: Sequence[Node], cuts: Mapping[What, tuple[frozenset[str], frozenset[Value]]]
    ) -> Block | None:
        mine = frozenset(node.name for node in part)
        found = {what: tuple(n.name for n in part if n.name in again) for what, (again, _) in cuts.items()}
        plain = least = self._bytes(mine, (self.base[v] for v in self.needed))
        calls: dict[What, tuple[str, ...]] = {}
        bytes_: dict[What, int] = {}
        for what, (_, kept) in cuts.items():
            nbytes = self._bytes(mine, kept)
            worth = least - nbytes > min(LEAST[0] * plain, LEAST[1] * least)
            if worth and (what == "all" or found[what] != found["all"]):
                calls[what], bytes_[what], least = found[what], nbytes, nbytes
        if not calls:
            return None
        modules = [n.module for n in part if n.module] or [""]
        label = modules[0] if modules[0] == modules[-1] else f"{modules[0]} to {modules[-1]}"
        return Block(label, plain, calls, bytes_)

    def _bytes(self, mine: frozenset[str], bases: Iterable[Value]) -> int:
        return sum(self.graph.meta(v).nbytes for v in dict.fromkeys(bases) if v.node in mine)
