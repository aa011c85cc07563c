"""``Graph`` + ``Plan`` -> ``Program``; what is refused on the way is in ``codegen/program.py``'s docstring."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hap.codegen.program import (
    Call,
    Convert,
    Held,
    Instruction,
    Program,
    RankDevice,
    Source,
    group_labels,
    is_decomposition,
    placement_suffix,
    verify_program,
)
from hap.conversion import Need, collective_kind, find_needs, required_results
from hap.errors import PlanError
from hap.graph import Graph, Node, Phase, TensorMeta, Value, map_values
from hap.hosts_sum import HOSTS_SUM
from hap.ops import takes_device
from hap.order import NONE, Parts, Postponed, program_parts, repeats
from hap.placement import REPLICATE, Partial, Placement, parse_placement
from hap.plan import Conversion, GroupPlan, Plan, Strategy
from hap.rules.localize import Arguments, localize
from hap.same_model import check_model

_Made = tuple[tuple[Value, TensorMeta] | None, ...]
RESERVED = ("aten", "backward", "comm", "forward", "hap", "inputs", "main", "p", "rank", "saved", "self", "torch", "x")
_NO_NAME = re.compile("[^A-Za-z0-9]")


def lower(graph: Graph, plan: Plan) -> Program:
    """The program that ``plan`` stands for. PlanError where plan and graph do not belong together or are unsound."""
    strategies = _strategies(graph, plan)
    ways = {key: c.decomposition for key, c in _conversions(graph, plan, strategies).items()}
    _check_postponed(graph, plan)
    program = _Lowering(graph, plan.groups, plan.world_size, strategies, ways, postponed=plan.postponed).run()
    verify_program(program)
    return replace(program, recomputed=_recomputed(graph, plan))


@dataclass
class Drafts:
    """What all drafts of one graph have in common. ``calls``: by their node and the names of what they read.
    ``made``: of nodes, what of it is needed. ``order``: of the program. ``names``: of the graph's values."""

    calls: dict[object, Call] = field(default_factory=dict)
    made: dict[str, _Made] = field(default_factory=dict)
    order: Parts | None = None
    names: _Names | None = None


def draft(
    graph: Graph,
    groups: Mapping[str, GroupPlan],
    world_size: int,
    strategies: Mapping[str, Strategy],
    conversions: Iterable[tuple[Need, str]],
    known: Drafts | None = None,
    postponed: Postponed = NONE,
) -> Program:
    """The program of strategies that the search made itself, and of its needs with their decompositions: only to be
    timed. As ``lower`` makes it, but nothing is checked and literals keep the sizes of the whole. ``known``: what other
    drafts of this graph have found: its calls are taken again where they read the same names. ``postponed``: see
    ``order``."""
    ways = {_key(need): how for need, how in conversions}
    drafted = Drafts() if known is None else known
    return _Lowering(graph, groups, world_size, strategies, ways, drafted, postponed).run()


def _strategies(graph: Graph, plan: Plan) -> dict[str, Strategy]:
    """Every node's strategy, if the plan is for this graph and gives each tensor one placement."""
    check_model(plan, graph)
    if missing := [n.name for n in graph.nodes if n.name not in plan.strategies]:
        raise PlanError(f"the plan has no strategy for {missing[0]} and {len(missing) - 1} other nodes; plan again")
    if len(plan.strategies) != len(graph.nodes):
        raise PlanError(f"the plan has {len(plan.strategies)} strategies for {len(graph.nodes)} nodes; plan again")
    found = {n.name: plan.strategy(n.name) for n in graph.nodes}
    for node in graph.nodes:
        strategy = found[node.name]
        if (len(strategy.inputs), len(strategy.outputs)) != (len(node.inputs), len(node.outputs)):
            raise PlanError(f"{node.name}: strategy {strategy} does not fit a call of {node.op}")
        if node.is_source and isinstance(strategy.outputs[0], Partial):
            raise PlanError(f"{node.name}: a {node.op} cannot be a partial sum")
    return found


def _recomputed(graph: Graph, plan: Plan) -> tuple[str, ...]:
    """The calls that the plan repeats, if they are of the forward pass."""
    for name in plan.repeated:
        node = graph.by_name.get(name)
        if node is None or node.is_source or node.phase != "forward":
            raise PlanError(f"the plan repeats {name}, which is no call of the forward pass; plan again")
    return plan.repeated


def _check_postponed(graph: Graph, plan: Plan) -> None:
    """Only calls of the backward pass are postponed, and none in a host's part: hosts make their sums in one order."""
    if plan.postponed and any(node.op == HOSTS_SUM for node in graph.nodes):
        raise PlanError("the plan postpones calls inside a host, whose sums with others have one order; plan again")
    for until, names in plan.postponed.items():
        for name in (*names, *([until] if until else ())):
            node = graph.by_name[name]
            if node.is_source or node.phase != "backward":
                raise PlanError(f"the plan postpones {name}, or calls until it: none of the backward pass; plan again")


def _conversions(
    graph: Graph, plan: Plan, strategies: Mapping[str, Strategy]
) -> dict[tuple[Value, Placement, Phase], Conversion]:
    """The plan's conversions by (value, target, phase); PlanError unless they are those the strategies imply.

    A parameter may be gathered again for the backward pass (see ``find_needs``) or kept, each as the plan says.
    """
    try:
        least = {_key(n): n for n in find_needs(graph, strategies)}
        again = repeats(graph, strategies, plan.repeated)
        most = {**least, **{_key(n): n for n in find_needs(graph, strategies, regather=True, again=again)}}
        kinds = {key: need.collective for key, need in most.items()}
    except AssertionError as e:
        said = str(e).partition("\n")[0]  # pytest adds what was compared, also for its plugins' users
        raise PlanError(f"the plan asks for a conversion that does not exist: {said}") from None
    found: dict[tuple[Value, Placement, Phase], Conversion] = {}
    for c in plan.conversions:
        key = (Value.parse(c.value), parse_placement(c.target), c.phase)
        need = most.get(key)
        if need is None or key in found:
            raise PlanError(f"the plan converts {c.value} to {c.target} in {c.phase}, which its strategies do not need")
        if parse_placement(c.source) != need.source or c.collective != kinds[key]:
            raise PlanError(f"the plan converts {c.value} by {c.collective} from {c.source}, not as its strategies say")
        if not is_decomposition(c.collective, c.decomposition, plan.world_size):
            raise PlanError(f"{c.value}: {c.collective} has no decomposition {c.decomposition!r}")
        found[key] = c
    for key, need in least.items():
        if key not in found:
            raise PlanError(f"the plan lacks the conversion of {need.value} from {need.source} to {need.target}")
    return found


def _key(need: Need) -> tuple[Value, Placement, Phase]:
    return need.value, need.target, need.phase


class _Lowering:
    """The state of one lowering: names given so far, instructions emitted so far."""

    def __init__(
        self,
        graph: Graph,
        groups: Mapping[str, GroupPlan],
        world_size: int,
        strategies: Mapping[str, Strategy],
        ways: Mapping[tuple[Value, Placement, Phase], str],
        drafted: Drafts | None = None,
        postponed: Postponed = NONE,
    ) -> None:
        """Literals become local, and strategies are checked on the way; not in a draft, of ``drafted``."""
        self.graph, self.world_size, self.strategies, self.ways = graph, world_size, strategies, ways
        self.drafted, self.postponed = drafted, postponed
        self.groups = _used_groups(groups, strategies.values())
        self.names = self._find_names()
        self.held: dict[str, Held] = {}
        self.parts: dict[Phase, list[Instruction]] = {"forward": [], "backward": []}
        self.made_in: dict[str, Phase] = {}  # name -> part; sources count as forward
        self.saved: dict[str, None] = {}
        self.converted: dict[tuple[Value, Placement, Phase], str] = {}
        self.required: dict[Value, list[Placement]] = {}
        for value, placement in required_results(graph, strategies):
            self.required.setdefault(value, []).append(placement)
        self.resulting = frozenset(value.node for value in self.required)

    def _find_names(self) -> _Names:
        """Those of a draft do not need to differ from its groups' labels."""
        if self.drafted is None:
            constants = group_labels({name: group.label for name, group in self.groups.items()})
            return _Names(self.graph, [name for _, name in constants])
        self.drafted.names = self.drafted.names or _Names(self.graph, ())
        return self.drafted.names.copy()

    def run(self) -> Program:
        graph = self.graph
        sources, forward, backward = self._order()
        made = tuple(map(self._source, sources))
        for node in forward:
            assert node.phase == "forward", f"{node.name} depends on the tangent and the loss on it"
            self._call(node, "forward")
        loss = self._read(graph.loss, REPLICATE, "forward", "")
        updates = {t: self._read(v, self._homes[t], "forward", "") for t, v in graph.updates.items()}
        for node in backward:
            self._call(node, "backward")
        gradients = {t: self._read(v, self._homes[t], "backward", "") for t, v in graph.gradients.items()}
        self.parts["backward"], read = [], self.parts["backward"]
        for key in [key for key in self.ways if key[2] == "backward" and key not in self.converted]:
            self._convert(*key, "backward", graph.by_name[key[0].node].module)  # for calls that are made again
        self.parts["backward"], unread = read, self.parts["backward"]
        return Program(
            name=graph.name,
            graph_fingerprint=graph.fingerprint,
            world_size=self.world_size,
            sizes={name: group.sizes for name, group in self.groups.items()},
            labels={name: group.label for name, group in self.groups.items()},
            sources=made,
            forward=tuple(self.parts["forward"]),
            backward=tuple(self.parts["backward"]),
            loss=loss,
            updates=updates,
            gradients=gradients,
            saved=tuple(self.saved),
            held=self.held,
            constants=graph.constants,
            gathered_again=tuple(i for i in unread if isinstance(i, Convert)),
        )

    def _order(self) -> Parts:
        """Sources, the calls of the forward part, those of the backward part."""
        if self.drafted is None or self.postponed:
            return program_parts(self.graph, self.postponed)
        self.drafted.order = self.drafted.order or program_parts(self.graph)
        return self.drafted.order

    @cached_property
    def _homes(self) -> Mapping[str, Placement]:
        """Where parameters and buffers lie."""
        nodes = (*self.graph.sources("parameter"), *self.graph.sources("buffer"))
        return {n.target: _placed(self.strategies[n.name], 0) for n in nodes}

    def _source(self, node: Node) -> Source:
        self._arguments(node)
        name = self._define(Value(node.name), _placed(self.strategies[node.name], 0), node.meta)
        part: Phase = "backward" if node.op == "tangent" else "forward"
        self.made_in[name] = part
        return Source(name, node.op, node.target)  # type: ignore[arg-type]

    def _call(self, node: Node, part: Phase) -> None:
        strategies, given, made_in = self.strategies, self.names.given, self.made_in
        strategy, in_backward, names = strategies[node.name], part == "backward", list[str]()
        for value, target in zip(node.inputs, strategy.inputs, strict=True):
            if strategies[value.node].outputs[value.index] is target:  # as of most that is read, in fewer calls
                names.append(name := given[value])
                if in_backward and made_in[name] == "forward":
                    self.saved[name] = None
            else:
                names.append(self._read(value, target, part, node.module))
        for index, made in enumerate(self._made(node)):
            if made is not None:
                made_in[self._define(made[0], _placed(strategy, index), made[1])] = part
        self.parts[part].append(self._called(node, tuple(names)))
        if node.name in self.resulting:
            for index in range(len(node.outputs)):
                for placement in self.required.get(Value(node.name, index), ()):
                    self._read(Value(node.name, index), placement, part, node.module)

    def _called(self, node: Node, names: tuple[str, ...]) -> Call:
        """The node's call, which reads these names; of drafts that read the same ones the same."""
        known = None if self.drafted is None else self.drafted.calls.get((node.name, names))
        if known is not None:
            return known
        args, kwargs = self._arguments(node)
        outputs = tuple(None if made is None else self.names.of(made[0]) for made in self._made(node))
        following = iter(names)
        args = map_values(args, lambda _: Value(next(following)))
        kwargs = tuple((k, map_values(v, lambda _: Value(next(following)))) for k, v in kwargs)
        call = Call(outputs, node.op, args, kwargs + _device(node), node.module)
        if self.drafted is not None:
            self.drafted.calls[node.name, names] = call
        return call

    def _made(self, node: Node) -> _Made:
        """Of every output what somebody needs, if somebody does; of drafts of one graph the same."""
        known = {} if self.drafted is None else self.drafted.made
        if node.name not in known:
            values = ((Value(node.name, index), meta) for index, meta in enumerate(node.outputs))
            known[node.name] = tuple(
                None
                if meta is None or (value not in self.graph.users and value not in self.required)
                else (value, meta)
                for value, meta in values
            )
        return known[node.name]

    def _arguments(self, node: Node) -> Arguments:
        """PlanError unless the node's strategy is sound, if that is asked."""
        return (
            localize(node, self.strategies[node.name], self.graph) if self.drafted is None else (node.args, node.kwargs)
        )

    def _read(self, value: Value, target: Placement, part: Phase, module: str) -> str:
        """The name under which ``part`` finds ``value`` in ``target``, converted for ``module`` if it must be."""
        source = self.strategies[value.node].outputs[value.index]
        if source is target or source == target:
            name = self.names.given[value]
            return name if part == "forward" else self._cross(name, part)
        phases: tuple[Phase, ...] = ("forward",) if part == "forward" else ("backward", "forward")
        key = next((value, target, phase) for phase in phases if (value, target, phase) in self.ways)
        if key not in self.converted:
            self.converted[key] = self._convert(*key, part, module)
        return self._cross(self.converted[key], part)

    def _convert(self, value: Value, target: Placement, phase: Phase, part: Phase, module: str) -> str:
        source = _placed(self.strategies[value.node], value.index)
        original = self._cross(self.names.of(value), part)
        again = (value, target, "forward") in self.converted and phase == "backward"
        name = self.names.fresh(f"{self.names.of(value)}__{placement_suffix(target)}{'_again' if again else ''}")
        self.held[name] = Held(value, self.graph.meta(value), target)
        self.made_in[name] = part
        self.parts[part].append(
            Convert(
                output=name,
                input=original,
                kind=collective_kind(source, target),
                decomposition=self.ways[value, target, phase],
                source=source,
                target=target,
                phase=phase,
                module=module,
            )
        )
        return name

    def _cross(self, name: str, part: Phase) -> str:
        """Record that ``name`` must be saved if the backward part reads what the forward part (or a source) made."""
        if part == "backward" and self.made_in[name] == "forward":
            self.saved[name] = None
        return name

    def _define(self, value: Value, placement: Placement, meta: TensorMeta) -> str:
        name = self.names.of(value)
        self.held[name] = Held(value, meta, placement)
        return name


class _Names:
    """Python identifiers for values: the node's name, with the output's index where a node has several outputs."""

    def __init__(self, graph: Graph, reserved: Iterable[str]) -> None:
        self.taken = {*RESERVED, *keyword.kwlist, *reserved}
        self.given: dict[Value, str] = {}
        for node in graph.nodes:
            several = sum(meta is not None for meta in node.outputs) > 1
            for index, meta in enumerate(node.outputs):
                if meta is not None:
                    self.given[Value(node.name, index)] = self.fresh(f"{node.name}_{index}" if several else node.name)

    def copy(self) -> _Names:
        other = copy(self)
        other.taken = set(self.taken)
        return other

    def of(self, value: Value) -> str:
        return self.given[value]

    def fresh(self, wanted: str) -> str:
        """``wanted`` made an identifier, with a number appended if it is taken."""
        base = _NO_NAME.sub("_", wanted)
        base = f"v_{base}" if not base or base[0].isdigit() else base
        name, count = base, 1
        while name in self.taken:
            count += 1
            name = f"{base}_{count}"
        self.taken.add(name)
        return name


def _placed(strategy: Strategy, index: int) -> Placement:
    placement = strategy.outputs[index]
    if placement is None:
        raise PlanError(f"strategy {strategy} gives output {index} no placement")
    return placement


def _used_groups(groups: Mapping[str, GroupPlan], strategies: Iterable[Strategy]) -> dict[str, GroupPlan]:
    """The groups that some strategy shards, in the given order."""
    used = {group for s in strategies for group in s.groups}
    return {name: group for name, group in groups.items() if name in used}


def _device(node: Node) -> tuple[tuple[str, Any], ...]:
    """The ``device=`` that capture dropped from a factory."""
    return (("device", RankDevice()),) if takes_device(node.op) else ()
