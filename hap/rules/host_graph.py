"""A mesh of two axes, first half: from the whole step to the step of one host, as a graph of its own.

Between the hosts the batch is dealt out and parameters are whole in each (data parallel), by strategies from the same
rules as everywhere, with a host in the place of a rank. What a host then runs is again a training step: the calls on
its part of the batch, with literals as the rows say, and ``hap.hosts_sum`` where a partial sum of the hosts becomes
whole. So all that is known of one axis (choices, prices, search, codegen) goes for the axis inside the host, too.

    deal_batch(choices)                          -> every node's strategy between hosts
    host_graph(graph, strategies, sizes, ...)    -> Graph of one host

Outputs beside the loss are whole on every host: each adds its part, among zeros. Hosts are to have the same parameters
to the last bit, and each computes in pieces of its own; so a gradient of which more is made than a sum, after it, is
host 0's: summed once more, with nothing from the others. Refused, with ``PlanError``: what else needs conversions
between hosts other than sums and slices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hap.conversion import Need, find_needs
from hap.deferral import deferrable_values, is_linear
from hap.errors import PlanError
from hap.graph import CAST, Graph, Node, TensorMeta, Value, map_values, verify_graph
from hap.hosts_sum import HOSTS_SUM, SITE
from hap.placement import PARTIAL, REPLICATE, GroupSizes, LocalSize, Placement, Shard, concrete_shape
from hap.plan import Strategy
from hap.rules.choices import Choices, Group
from hap.rules.localize import Arguments, localize


def deal_batch(choices: Choices) -> dict[str, Strategy]:
    """Every node's strategy between the hosts: whole parameters, the batch dealt out, and whatever follows from that.

    In program order, each node takes the strategy that needs nothing but sums and slices and leaves the least to sum:
    the bytes that it needs summed, and those that it leaves partial. Of a gradient the sum over hosts is the last thing
    that is done, where that can be: what each host makes, and rounds, of a sum in its own way is not alike on all, and
    a step's batches can have one sum together. What an operator needs whole, and is small, is given whole to every
    host, and cut where others need a part. PlanError if an operator mixes samples otherwise, or if there is no batch to
    deal out.
    """
    whole: set[str] = set()
    while True:
        dealing = _Dealing(choices, whole)
        blocked = next((n for n in choices.graph.nodes if not dealing.place(n)), None)
        if blocked is None:
            return dealing.found
        more = dealing.dealt_freely(blocked) or dealing.small_ancestors(blocked)
        if not more:
            raise PlanError(
                f"{blocked.op} in module {blocked.module!r} mixes the samples of a batch, so hosts cannot each run a "
                "part of it; plan on one axis"
            )
        whole |= more


class _Dealing:
    """One pass of ``deal_batch``, in which the nodes ``whole`` are made whole in every host."""

    def __init__(self, choices: Choices, whole: Collection[str]) -> None:
        self.choices, self.whole = choices, whole
        self.graph, self.batch = choices.graph, batch_group(choices).name
        self.found: dict[str, Strategy] = {}
        self.summed: set[Value] = set()
        # Of these nothing but gradients is made, which are to be summed after them, and after they are rounded.
        made = {v.node for v in deferrable_values(self.graph)}
        self.before_sums = frozenset(name for name in made if not widens(self.graph, self.graph.by_name[name]))

    def place(self, node: Node) -> bool:
        """Whether the node has a strategy that is possible."""
        options = self.choices.strategies[node.name]
        if node.name in self.whole:
            options = options[:1]
        elif node.op == "input":
            options = tuple(s for s in options if isinstance(s.outputs[0], Shard))[:1] or options[:1]
        elif node.is_source:
            options = options[:1]
        able = [(cost, i) for i, s in enumerate(options) if (cost := self._cost(node, s)) is not None]
        if not able:
            return False
        self.found[node.name] = strategy = options[min(able)[1]]
        wanted = zip(node.inputs, strategy.inputs, strict=True)
        self.summed |= {v for v, want in wanted if want == REPLICATE and self._held(v) == PARTIAL}
        return True

    def dealt_freely(self, node: Node) -> set[str]:
        """Of what the node's sharded arguments are made of what is sharded though nothing that it reads is: it might be
        cut in another way, or not at all."""
        found = set()
        for name in self._sharded_ancestors(node):
            made = self.graph.by_name[name]
            if not made.is_source and not any(isinstance(self._held(v), Shard) for v in made.inputs):
                found.add(name)
        return found

    def small_ancestors(self, node: Node) -> set[str]:
        """All that the node's sharded arguments are made of, if none of it is larger than the largest input, or
        partial: an index or a mask, which every host may as well have whole. Else nothing."""
        room = max(n.meta.nbytes for n in self.graph.sources("input"))
        found = self._sharded_ancestors(node)
        for name in found:
            sizes = [meta.nbytes for meta in self.graph.by_name[name].outputs if meta is not None]
            if PARTIAL in self.found[name].outputs or max(sizes) > room:
                return set()
        return found

    def _sharded_ancestors(self, node: Node) -> set[str]:
        pending, found = [v.node for v in node.inputs if isinstance(self._held(v), Shard)], set[str]()
        while pending:
            name = pending.pop()
            if name not in found:
                found.add(name)
                inputs = self.graph.by_name[name].inputs
                pending.extend(v.node for v in inputs if isinstance(self._held(v), Shard))
        return found

    def _held(self, value: Value) -> Placement | None:
        return self.found[value.node].outputs[value.index]

    def _cost(self, node: Node, strategy: Strategy) -> tuple[int, int, int, int, int] | None:
        """(arguments to sum before a gradient is made; bytes to sum, of arguments and of what is left partial; bytes
        that every host makes whole; arguments to cut; of the second those of arguments, as what is summed late may be
        summed with more); None if sums and slices of the batch are not enough."""
        shards = [p for p in (*strategy.inputs, *strategy.outputs) if isinstance(p, Shard)]
        if any(p.group != self.batch for p in shards):
            return None
        early = nbytes = sliced = 0
        for value, want in zip(node.inputs, strategy.inputs, strict=True):
            have = self._held(value)
            if want == have:
                continue
            if have == REPLICATE and isinstance(want, Shard) and want.outer == 1:
                sliced += 1
            elif have == PARTIAL and want == REPLICATE:
                nbytes += 0 if value in self.summed else self.graph.meta(value).nbytes
                early += node.name in self.before_sums
            else:
                return None
        made = zip(node.outputs, strategy.outputs, strict=True)
        whole = [(meta.nbytes, p) for meta, p in made if meta is not None and not isinstance(p, Shard)]
        later = sum(size for size, p in whole if p == PARTIAL)
        return early, nbytes + later, sum(size for size, _ in whole), sliced, nbytes


def widens(graph: Graph, node: Node) -> bool:
    """Whether the node casts back what was rounded to the dtype that gradients are exchanged in."""
    return node.op == CAST and graph.meta(node.inputs[0]).dtype == graph.reduce_dtype


def batch_group(choices: Choices) -> Group:
    """The group that inputs are dealt out by."""
    inputs = choices.graph.sources("input")
    placements = [s.outputs[0] for n in inputs for s in choices.strategies[n.name]]
    for placement in placements:
        if isinstance(placement, Shard):
            return choices.groups[placement.group]
    raise PlanError(
        f"{choices.graph.name}: no input has a batch of two or more, so there is nothing to deal out to hosts"
    )


def host_graph(graph: Graph, strategies: Mapping[str, Strategy], sizes: GroupSizes, host: int, ranks: int) -> Graph:
    """The step of ``host``, which has so many ``ranks``; ``sizes`` has one number per host. PlanError for a strategy
    that is no row of its operator's rule."""
    return _HostGraph(graph, strategies, sizes, host, ranks).run()


def summed(graph: Graph) -> tuple[Node, ...]:
    """The sums over hosts of one host's graph: node number i has site i."""
    found = tuple(n for n in graph.nodes if n.op == HOSTS_SUM)
    assert [n.args[SITE] for n in found] == list(range(len(found))), "sites are numbered in program order"
    return found


@dataclass
class _HostGraph:
    graph: Graph
    strategies: Mapping[str, Strategy]
    sizes: GroupSizes
    host: int
    ranks: int

    def run(self) -> Graph:
        graph = self.graph
        self.arguments = {n.name: self._arguments(n) for n in graph.nodes}
        needs: dict[str, list[Need]] = {}
        for need in self._needs():
            needs.setdefault(need.value.node, []).append(need)
        self.hosts = len(next(iter(self.sizes.values())))
        self.sites = 0
        self.converted: dict[tuple[Value, Placement], Value] = {}
        nodes: list[Node] = []
        for node in graph.nodes:
            nodes.append(self._local(node))
            nodes += self._conversions(node, needs.get(node.name, ()))
        homes = {n.target: self.strategies[n.name].outputs[0] for n in graph.nodes if n.op in ("parameter", "buffer")}
        gradients = {t: self._read(v, homes[t]) for t, v in graph.gradients.items()}
        made = {n.name: n for n in nodes}
        of_host_0 = {v: self._of_host_0(made[v.node], v) for v in gradients.values() if not _is_alike(made, v)}
        nodes += [node for both in of_host_0.values() for node in both]
        found = replace(
            graph,
            nodes=tuple(nodes),
            loss=self._read(graph.loss, REPLICATE),
            gradients={t: Value(of_host_0[v][-1].name) if v in of_host_0 else v for t, v in gradients.items()},
            updates={t: self._read(v, homes[t]) for t, v in graph.updates.items()},
        )
        verify_graph(found)
        return found

    def _arguments(self, node: Node) -> Arguments:
        strategy = self.strategies[node.name]
        if (len(strategy.inputs), len(strategy.outputs)) != (len(node.inputs), len(node.outputs)):
            raise PlanError(f"{node.name}: strategy {strategy} does not fit a call of {node.op}")
        if any((p is None) != (meta is None) for p, meta in zip(strategy.outputs, node.outputs, strict=True)):
            raise PlanError(f"{node.name}: strategy {strategy} does not fit the outputs of {node.op}")
        return localize(node, strategy, self.graph)

    def _needs(self) -> tuple[Need, ...]:
        try:
            needs = find_needs(self.graph, self.strategies)
            for need in needs:
                need.collective  # noqa: B018  (raises where there is none)
        except AssertionError as e:
            raise PlanError(f"between hosts the plan asks for a conversion that does not exist: {e}") from None
        return needs

    def _read(self, value: Value, wanted: Placement | None) -> Value:
        assert wanted is not None
        held = self.strategies[value.node].outputs[value.index]
        return value if held == wanted else self.converted[value, wanted]

    def _local(self, node: Node) -> Node:
        strategy = self.strategies[node.name]
        args, kwargs = self.arguments[node.name]
        wanted = iter(strategy.inputs)
        read = lambda value: self._read(value, next(wanted))  # noqa: E731
        args = tuple(map_values(self._numbers(a), read) for a in args)
        kwargs = tuple((k, map_values(self._numbers(a), read)) for k, a in kwargs)
        return replace(node, args=args, kwargs=kwargs, outputs=tuple(self._metas(node, strategy)))

    def _metas(self, node: Node, strategy: Strategy) -> Iterator[TensorMeta | None]:
        for meta, placement in zip(node.outputs, strategy.outputs, strict=True):
            if meta is None or placement is None:
                yield meta
            else:
                yield replace(meta, shape=concrete_shape(meta.shape, placement, self.sizes, self.host))

    def _numbers(self, tree: Any) -> Any:
        if isinstance(tree, LocalSize):
            return tree.at(self.sizes, self.host)
        if isinstance(tree, Value) or not isinstance(tree, (tuple, list)):
            return tree
        return type(tree)(self._numbers(item) for item in tree)

    def _conversions(self, node: Node, needs: Sequence[Need]) -> Iterator[Node]:
        for need in needs:
            key = (need.value, need.target)
            if key not in self.converted:
                made = self._convert(node, need)
                self.converted[key] = Value(made[-1].name)
                yield from made

    def _convert(self, node: Node, need: Need) -> tuple[Node, ...]:
        """Nodes of their own for the sum, or the slice, of one output of ``node``. Of a result that hosts have parts of
        each makes a whole one, with zeros elsewhere, to be summed."""
        value, meta = need.value, self.graph.meta(need.value)
        name = f"{value.node}_{value.index}" if value.index else value.node
        like = replace(node, kwargs=(), target="")
        source, target = need.source, need.target
        if need.collective == "all_gather" and isinstance(source, Shard) and source.outer == 1:
            args: tuple[Any, ...] = (value, tuple(meta.shape), source.dim, *self._range(source), 1)
            spread = replace(
                like, name=f"{name}_among_zeros", op="aten.slice_backward.default", args=args, outputs=(meta,)
            )
            return spread, self._sum(like, name, Value(spread.name), meta)
        if need.collective == "all_reduce":
            return (self._sum(like, name, value, meta),)
        if need.collective != "slice" or not isinstance(target, Shard) or target.outer > 1:
            raise PlanError(
                f"{self.graph.name}: {value} of module {node.module!r} would need {need.collective} between hosts, "
                f"from {need.source} to {need.target}; only sums and slices are made there: plan on one axis"
            )
        part = replace(meta, shape=concrete_shape(meta.shape, target, self.sizes, self.host))
        ways = sum(v == value for v, _ in self.converted)
        args = (value, target.dim, *self._range(target))
        return (replace(like, name=f"{name}_here{ways or ''}", op="aten.slice.Tensor", args=args, outputs=(part,)),)

    def _of_host_0(self, maker: Node, value: Value) -> tuple[Node, Node]:
        """Nodes for what host 0 has of a value that all hosts have, to rounding."""
        like, meta = replace(maker, kwargs=(), target=""), maker.outputs[value.index]
        assert meta is not None
        name = f"{maker.name}_{value.index}_of_host_0" if value.index else f"{maker.name}_of_host_0"
        args = (value, 1.0 if self.host == 0 else 0.0)
        part = replace(like, name=name, op="aten.mul.Tensor", args=args, outputs=(meta,))
        return part, self._sum(like, name, Value(name), meta)

    def _sum(self, like: Node, name: str, value: Value, meta: TensorMeta) -> Node:
        args = (value, self.sites, self.hosts, self.ranks)
        self.sites += 1
        return replace(like, name=f"{name}_over_hosts", op=HOSTS_SUM, args=args, outputs=(meta,))

    def _range(self, shard: Shard) -> tuple[int, int]:
        """What this host has of the dim."""
        held = self.sizes[shard.group]
        start = sum(held[: self.host]) * shard.unit
        return start, start + held[self.host] * shard.unit


def _is_alike(made: Mapping[str, Node], value: Value) -> bool:
    """Whether a value is a sum over hosts, or made of such ones element by element."""
    node = made[value.node]
    if node.op == HOSTS_SUM:
        return True
    return is_linear(node.op, len(node.inputs)) and all(_is_alike(made, v) for v in node.inputs)
