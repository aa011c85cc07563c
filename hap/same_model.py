"""Whether a plan was made for a graph, and what differs where it was not."""

from __future__ import annotations

from collections.abc import Mapping

from hap.errors import PlanError
from hap.graph import Graph
from hap.mesh_plan import MeshPlan
from hap.placement import Shard
from hap.plan import Plan, Strategy


def check_model(plan: Plan | MeshPlan, graph: Graph) -> None:
    """PlanError unless the plan was made for this model and batch, or for one of a step's batches."""
    made, batches = plan.provenance, plan.gradient_accumulation_steps
    if made.model_fingerprint == graph.fingerprint:
        return
    part = "" if batches == 1 else f"give one of a step's {batches} batches, as it was planned, or "
    told = what_differs(plan.strategies if isinstance(plan, Plan) else plan.between, graph)
    raise PlanError(
        f"the plan for model {made.model!r} is not for this {graph.name!r}: {told} "
        f"({made.model_fingerprint[:12]}, not {graph.fingerprint[:12]}); {part}plan again"
    )


def what_differs(strategies: Mapping[str, str], graph: Graph) -> str:
    """In words, as far as the plan tells: it has the nodes' names, and the sizes of dims that are in shards."""
    extra = [name for name in strategies if name not in graph.by_name]
    new = [node.name for node in graph.nodes if node.name not in strategies]
    both = [f"only {whose} has {_listed(names)}" for whose, names in (("the plan's", extra), ("this", new)) if names]
    if both:
        return ", and ".join(both)
    for node in graph.nodes:
        for meta, placed in zip(node.outputs, Strategy.parse(strategies[node.name]).outputs, strict=False):
            if (
                meta is not None
                and isinstance(placed, Shard)
                and meta.shape[placed.dim : placed.dim + 1] != (placed.extent,)
            ):
                return f"{node.name} is {tuple(meta.shape)}, and its dim {placed.dim} was {placed.extent}"
    return "with other shapes, operators, outputs or constants, of which the plan does not tell more"


def _listed(names: list[str]) -> str:
    """An input if there is one: it says most."""
    first = next((name for name in names if name.startswith("i_")), names[0])
    return first if len(names) == 1 else f"{first} and {len(names) - 1} more"
