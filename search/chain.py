"""Calls that no two groups can share a stage with: where ranks wait for each other.

A step is the sum, over the stages that collectives cut the program into, of the slowest rank's time (``evaluate``). Let
c[1], c[2], ... be a path of calls, each reading what the one before makes. Between two of them is a collective unless
the value is read as it was made, or is a slice of a replicated one: so in one stage are some that follow each other,
and if one of them is dealt out by a group g, what it makes is a shard of g, or partial; what is partial is read by
calls that make partial values only; so all others of them in this stage are dealt out by g, too, or by no group.

    T >= sum over stages k of max_r sum_{n in k} t[n,r] >= sum over stages k of sum_{n in k} sum_r w[g(k)][r] t[n,r]

with weights w[g] for every group, each set adding up to one, and g(k) the group of the path in stage k. A call of the
path that is dealt out by g is paid for with w[g], any other call with the least of all w. So where groups lie on
different ranks, the path takes as long as one after the other.

``find_chain`` takes the path with most work, among calls of which every strategy obeys the above.
"""

from __future__ import annotations

from collections.abc import Sequence

from hap.cost_models.compute import parts_seconds
from hap.graph import Node
from hap.hosts import Device
from hap.placement import REPLICATE, Partial, Shard
from hap.plan import Strategy
from hap.search.bound import computes_like
from hap.search.prices import Facts


def find_chain(facts: Facts) -> frozenset[str]:
    """The calls of the path; found once for a graph, its candidates and a first device of this kind."""
    device = facts.cluster.devices[0]
    kept = facts.found if type(device) is Device else facts.here  # a measured one is like no other
    key = f"chain, {computes_like(device)}"
    if key not in kept:
        kept[key] = _find_chain(facts)
    found = kept[key]
    assert isinstance(found, frozenset)
    return found


def _find_chain(facts: Facts) -> frozenset[str]:
    device = facts.cluster.devices[0]
    best_s: dict[str, float] = {}  # of a path that ends in the call
    before: dict[str, str | None] = {}
    for node in facts.graph.nodes:
        if node.is_source or not is_eligible(node, facts.candidates[node.name]):
            continue
        last = max((v.node for v in node.inputs if v.node in best_s), key=lambda name: best_s[name], default=None)
        own_s = parts_seconds(facts.parts(node.name, facts.candidates[node.name][0]), 1.0, device)
        best_s[node.name] = own_s + (0.0 if last is None else best_s[last])
        before[node.name] = last
    name, found = max(best_s, key=lambda n: best_s[n], default=None), set[str]()
    while name is not None:
        found.add(name)
        name = before[name]
    return frozenset(found)


def is_eligible(node: Node, strategies: Sequence[Strategy]) -> bool:
    """Whether under every strategy what is dealt out by a group, or partial, stays so."""
    return all(_keeps_apart(s) for s in strategies)


def _keeps_apart(strategy: Strategy) -> bool:
    groups = {p.group for p in (*strategy.inputs, *strategy.outputs) if isinstance(p, Shard)}
    made = [p for p in strategy.outputs if p is not None]
    partial = any(isinstance(p, Partial) for p in strategy.inputs)
    if groups:
        return len(groups) == 1 and not partial and REPLICATE not in made
    return not partial or REPLICATE not in made
