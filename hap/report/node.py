"""``hap explain --node``: why a node lies as it does, and what each of its other placements would cost.

Each alternative is judged by ``hap.cost_models.evaluate`` with every other decision as the plan has it: the conversions
around the node change, nothing else adapts. The search did better where it moved neighbours together, so a difference
is what this one change alone would cost, an upper bound of what the placement costs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any

from hap.cluster import ClusterSpec
from hap.conversion import Need, find_needs, kept_parameters
from hap.cost_models.evaluate import Evaluation, evaluate
from hap.errors import HapError
from hap.graph import Graph, Node
from hap.order import repeats
from hap.placement import Shard
from hap.plan import Plan, Strategy
from hap.report.explanation import needs_of, strategies_of
from hap.report.words import quantity, seconds, table

MOST = 24  # alternatives that are printed


@dataclass(frozen=True)
class Alternative:
    """One strategy of the node. ``step_s`` is None where its neighbours, as they are, cannot feed it; ``new`` are the
    conversions that come, ``gone`` those that go."""

    strategy: str
    groups: tuple[str, ...]
    chosen: bool
    step_s: float | None
    fits: bool
    memory_bytes: int
    new: tuple[str, ...]
    gone: tuple[str, ...]
    why_not: str = ""


@dataclass(frozen=True)
class NodeReport:
    """One node and all its strategies, the cheapest first."""

    name: str
    op: str
    module: str
    phase: str
    shapes: tuple[tuple[int, ...], ...]
    alternatives: tuple[Alternative, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        chosen = next(a for a in self.alternatives if a.chosen)
        where = f" in {self.module}" if self.module else ""
        head = [
            f"{self.name}: {self.op}{where}, {self.phase}, {', '.join(map(str, self.shapes))}",
            f"chosen: {chosen.strategy}{_groups(chosen)}",
            self._verdict(chosen),
        ]
        rows = [["strategy", "step", "difference", "fits", "what changes"]]
        for a in self.alternatives[:MOST]:
            if a.step_s is None:
                rows.append([a.strategy, "-", "", "", a.why_not])
                continue
            assert chosen.step_s is not None
            changes = [f"+ {c}" for c in a.new] + [f"- {c}" for c in a.gone]
            shown = "; ".join(changes[:3]) + (f" and {len(changes) - 3} more" if len(changes) > 3 else "")
            step = seconds(a.step_s), f"{(a.step_s - chosen.step_s) * 1e3:+.3g} ms"
            words = "the plan" if a.chosen else shown or "nothing moves"
            rows.append([a.strategy, *step, "yes" if a.fits else "no", words])
        more = len(self.alternatives) - MOST
        tail = [f"and {more} more"] if more > 0 else []
        note = "every other decision stays as it is, so each difference is that of this one change alone"
        return "\n".join([*head, "", *table(rows, right=(1, 2)), *tail, "", note])

    def _verdict(self, chosen: Alternative) -> str:
        others = [a for a in self.alternatives if not a.chosen and a.step_s is not None]
        fitting = [a for a in others if a.fits]
        if not others:
            return "why: nothing else fits between its neighbours as they are placed"
        if not fitting:
            return "why: every other placement overfills some device"
        best = min(fitting, key=lambda a: a.step_s or 0.0)
        assert best.step_s is not None and chosen.step_s is not None
        more = best.step_s - chosen.step_s
        if more <= 0:
            return (
                f"why: {best.strategy} alone would do as well or better, by {seconds(-more)}: within the search's gap"
            )
        return f"why: the next best, {best.strategy}, would add {seconds(more)} to a step"


def _groups(a: Alternative) -> str:
    return f" (dealt by {', '.join(a.groups)})" if a.groups else ""


def explain_node(
    plan: Plan, graph: Graph, cluster: ClusterSpec, strategies: Sequence[Strategy], name: str
) -> NodeReport:
    """Every one of the node's ``strategies`` judged. HapError if the graph has no such node."""
    node = find_node(graph, name)
    chosen = strategies_of(plan)
    regather, own = bool(plan.provenance.solver.get("regather", False)), needs_of(plan, graph, chosen)
    kept = kept_parameters(graph, ((n.value, n.target, n.phase) for n in own))
    present = [n for n in strategies if all(p.group in plan.groups for p in _shards(n))]
    if chosen[node.name] not in present:
        present.append(chosen[node.name])
    found = [_judge(plan, graph, cluster, chosen, node, s, own, regather, kept) for s in present]
    found += [
        Alternative(str(s), (), False, None, False, 0, (), (), "shards a group that the plan does not deal out")
        for s in strategies
        if s not in present
    ]
    ranked = sorted(found, key=lambda a: (a.step_s is None, not a.fits, a.step_s or 0.0))
    shapes = tuple(m.shape for m in node.outputs if m is not None)
    return NodeReport(node.name, node.op, node.module or node.target, node.phase, shapes, tuple(ranked))


def find_node(graph: Graph, name: str) -> Node:
    """By the node's name, or a parameter's or an input's own. HapError with what comes close."""
    for node in graph.nodes:
        if name in (node.name, node.target):
            return node
    names = [n.name for n in graph.nodes] + [n.target for n in graph.nodes if n.target]
    close = get_close_matches(name, names, n=3)
    raise HapError(f"no node {name!r} in the graph{'; perhaps ' + ' or '.join(close) if close else ''}")


def _shards(strategy: Strategy) -> list[Shard]:
    return [p for p in (*strategy.inputs, *strategy.outputs) if isinstance(p, Shard)]


def _judge(
    plan: Plan,
    graph: Graph,
    cluster: ClusterSpec,
    chosen: dict[str, Strategy],
    node: Node,
    strategy: Strategy,
    own: Sequence[Need],
    regather: bool,
    kept: Collection[str],
) -> Alternative:
    groups = tuple(dict.fromkeys(plan.groups[p.group].label for p in _shards(strategy)))
    trial = {**chosen, node.name: strategy}
    is_chosen = strategy == chosen[node.name]
    try:
        again = repeats(graph, trial, plan.repeated)
        needs = find_needs(graph, trial, regather=regather, kept=kept, again=again)
        for need in needs:
            need.collective  # noqa: B018  (raises where nothing turns one placement into the other)
    except AssertionError as e:
        return Alternative(str(strategy), groups, is_chosen, None, False, 0, (), (), str(e))
    judged: Evaluation = evaluate(
        graph,
        trial,
        plan.sizes,
        cluster,
        needs=needs,
        optimizer=plan.provenance.optimizer,
        recomputed=plan.repeated,
        postponed=plan.postponed,
        batches=plan.gradient_accumulation_steps,
    )
    before, after = ([(n.value, n.target, n.phase) for n in found] for found in (own, needs))
    new = tuple(_words(graph, n) for n in needs if (n.value, n.target, n.phase) not in before)
    gone = tuple(_words(graph, n) for n in own if (n.value, n.target, n.phase) not in after)
    return Alternative(
        str(strategy), groups, is_chosen, judged.step_s, judged.fits, max(judged.memory_bytes), new, gone
    )


def _words(graph: Graph, need: Need) -> str:
    return f"{need.collective} of {need.value} ({quantity(graph.meta(need.value).nbytes, 'B')})"
