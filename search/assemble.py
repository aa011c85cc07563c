"""From the decisions to the ``Plan``: provenance, groups in use, conversions in order, prediction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

import hap
from hap.cluster import ClusterSpec
from hap.cost_models.collective_nccl import priced_by
from hap.cost_models.evaluate import Evaluation
from hap.order import NONE, Postponed
from hap.placement import GroupSizes
from hap.plan import GroupPlan, Plan, Provenance, Recomputed, Strategy, verify_plan
from hap.reduce_dtype import reduce_name
from hap.rules.choices import Choices
from hap.rules.table import rules_fingerprint
from hap.search.found import used_groups
from hap.search.subsets import Advice, LeftOut
from hap.units import format_size

FEW = 8  # devices that are named one by one
ASSUMPTIONS = (
    "device and link numbers come from the cluster description and the GPU catalogue, not from measurement",
    "step and bound: compute and communication do not overlap; the overlapped step is the program's as it is run",
    "the lower bounds hold for this cost model; they count communication at its least for any shares",
)


def assemble_plan(
    choices: Choices,
    cluster: ClusterSpec,
    strategies: Mapping[str, Strategy],
    sizes: GroupSizes,
    evaluation: Evaluation,
    *,
    optimizer: str,
    model_name: str,
    lower_bound_s: float | None,
    solver: Mapping[str, Any],
    advice: Advice | LeftOut | None = None,
    overlapped_s: float | None = None,
    overlapped_bound_s: float | None = None,
    recomputed: tuple[Recomputed, ...] = (),
    batches: int = 1,
    postponed: Postponed = NONE,
) -> Plan:
    """The plan of one choice and its evaluation. Only groups that some placement shards are in it. ``advice``: which
    devices would better be left out, or were; it goes beside what limits the step. ``recomputed``: what is repeated.
    ``batches``: of a step of the optimizer. ``postponed``: see ``hap.order``."""
    graph, groups = choices.graph, choices.groups
    limits = tightest(evaluation) if advice is None else f"{tightest(evaluation)}; {advice}"
    left_out = {} if advice is None else advice.figures()
    trained = sum(n.meta.numel for n in graph.sources("parameter"))
    plan = Plan(
        provenance=Provenance(
            model=model_name,
            model_fingerprint=graph.fingerprint,
            parameters=trained,
            cluster=cluster.name,
            cluster_fingerprint=cluster.fingerprint,
            world_size=cluster.world_size,
            backend=cluster.backend,
            rules_fingerprint=rules_fingerprint(),
            hap_version=hap.__version__,
            torch_version=torch.__version__.partition("+")[0],
            optimizer=optimizer,
            solver={**solver, **left_out},
            assumptions=(*ASSUMPTIONS, *priced_by(cluster)),
            reduce_dtype=reduce_name(graph.reduce_dtype),
        ),
        groups={
            name: GroupPlan(n=groups[name].n, label=groups[name].label, sizes=tuple(sizes[name]))
            for name in used_groups(strategies.values())
        },
        strategies={node.name: str(strategies[node.name]) for node in graph.nodes},
        conversions=evaluation.to_conversions(),
        predicted=evaluation.to_prediction(lower_bound_s).model_copy(
            update={"tight": limits, "overlapped_s": overlapped_s, "overlapped_bound_s": overlapped_bound_s}
        ),
        devices=tuple(d.name for d in cluster.devices),
        recomputed=recomputed,
        gradient_accumulation_steps=batches,
        postponed=dict(postponed),
    )
    verify_plan(plan)
    return plan


def tightest(evaluation: Evaluation, *, full: float = 0.97) -> str:
    """What limits the step, in words: links or the busiest device; and the devices whose memory is ``full``, of many
    how many of each kind."""
    columns = zip(evaluation.devices, evaluation.memory_bytes, evaluation.usable_bytes, strict=True)
    filled = [(name, used, usable) for name, used, usable in columns if used > full * usable]
    if len(filled) <= FEW:
        said = [f"memory of {name} ({used / usable:.1%} of {format_size(usable)})" for name, used, usable in filled]
    else:
        kinds = Counter((name.rpartition("/")[2].partition("#")[0], usable) for name, _, usable in filled)
        said = [
            f"memory of {count} x {kind} (more than {full:.0%} of {format_size(usable)})"
            for (kind, usable), count in kinds.items()
        ]
    return "; ".join([evaluation.tight, *said])
