"""One step of a model on hosts of one device each, in one process: every host interprets its own graph, in lockstep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from benchmarks.zoo_models.case import Case
from benchmarks.zoo_models.reference import Outcome, kept, one_device, worst_error
from hap.capture import source_values
from hap.capture.interpret import run_node
from hap.cost_models.work import op_class
from hap.graph import Graph, Value
from hap.hosts_sum import HOSTS_SUM
from hap.placement import GroupSizes, Shard, take_shard
from hap.plan import Strategy
from hap.rules.choices import Choices
from hap.rules.host_graph import batch_group, deal_batch, host_graph
from tests.zoo.lockstep import SEED, possible

CPU = torch.device("cpu")


def hosts_error(case: Case, ratios: Sequence[int]) -> tuple[float, str]:
    """The worst relative error, of any host, against one device with the batch dealt to hosts by ``ratios``, each at
    least one."""
    found = possible(case)
    graph, strategies, sizes = found.graph, deal_batch(found), batch_sizes(found, ratios)
    assert _shared(graph, strategies), "a product of activations runs whole on every host: nothing is compared"
    graphs = [host_graph(graph, strategies, sizes, host, 1) for host in range(len(ratios))]
    values = source_values(graph, case.model, case.inputs, case.targets, seed=SEED)
    envs = [_part(graph, strategies, sizes, values, host) for host in range(len(ratios))]
    run(graphs, envs)
    expected, before = one_device(case, SEED), kept(case.model)
    return max(worst_error(_outcome(own, env, before), expected) for own, env in zip(graphs, envs, strict=True))


def _shared(graph: Graph, strategies: Mapping[str, Strategy]) -> bool:
    """Whether hosts deal out all that is heavy and made of an input."""
    reached = {n.name for n in graph.sources("input")}
    for node in graph.nodes:
        if any(v.node in reached for v in node.inputs):
            reached.add(node.name)
            heavy = op_class(node.op) in ("matmul", "conv", "attention")
            if heavy and not any(isinstance(p, Shard) for p in strategies[node.name].inputs):
                return False
    return True


def _outcome(graph: Graph, env: Mapping[Value, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> Outcome:
    gradients, updates = ({t: env[v] for t, v in found.items()} for found in (graph.gradients, graph.updates))
    return Outcome(env[graph.loss], gradients, {**buffers, **updates})


def batch_sizes(found: Choices, ratios: Sequence[int]) -> GroupSizes:
    """What the group of the batch is dealt in."""
    group = batch_group(found)
    spare = group.n - len(ratios)
    sizes = [1 + spare * r // sum(ratios) for r in ratios]
    sizes[0] += group.n - sum(sizes)
    return {group.name: tuple(sizes)}


def run(graphs: Sequence[Graph], envs: Sequence[dict[Value, torch.Tensor]]) -> None:
    """All values of all hosts, into ``envs``."""
    for together in zip(*(g.nodes for g in graphs), strict=True):
        if together[0].op == HOSTS_SUM:
            total = sum(env[node.inputs[0]] for node, env in zip(together, envs, strict=True))
            for node, env in zip(together, envs, strict=True):
                env[Value(node.name)] = total
            continue
        for node, graph, env in zip(together, graphs, envs, strict=True):
            if node.op == "constant":
                env.setdefault(Value(node.name), graph.constants[node.target])
            elif not node.is_source:
                env.update(run_node(node, env, CPU))
                for index, meta in enumerate(node.outputs):
                    assert meta is None or env[Value(node.name, index)].shape == meta.shape, node


def _part(
    graph: Graph, strategies: dict[str, Strategy], sizes: GroupSizes, values: dict[Value, torch.Tensor], host: int
) -> dict[Value, torch.Tensor]:
    found = {}
    for value, tensor in values.items():
        placement = strategies[value.node].outputs[0]
        sharded = isinstance(placement, Shard)
        found[value] = take_shard(tensor, placement, sizes[placement.group], host) if sharded else tensor
    return found
