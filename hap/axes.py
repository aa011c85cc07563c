"""``plan_axes``: a plan of one axis, of two, or the faster of both; for doors that leave the choice to their user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from hap import api
from hap.errors import HapError, InfeasibleError, PlanError
from hap.mesh_plan import MeshPlan
from hap.plan import Plan

Mesh = Literal["flat", "hosts", "best"]


def plan_axes(mesh: Mesh, model: torch.nn.Module, cluster: api.Cluster, **given: Any) -> Plan | MeshPlan:
    """``hap.plan`` for ``flat``, ``hap.plan_mesh`` for ``hosts``, and for ``best`` of both plans the one with the
    shortest step as run, or the only one that there is. ``given``: the arguments that all of them take. The errors are
    theirs, of ``best`` the first one's if there is no plan."""
    doors: dict[Mesh, list[Callable[..., Plan | MeshPlan]]] = {
        "flat": [api.plan],
        "hosts": [api.plan_mesh],
        "best": [api.plan, api.plan_mesh],
    }
    found: list[Plan | MeshPlan] = []
    refusals: list[HapError] = []
    for door in doors[mesh]:
        try:
            found.append(door(model, cluster, **given))
        except (InfeasibleError, PlanError) as e:
            refusals.append(e)
    if not found:
        raise refusals[0]
    return min(found, key=lambda plan: plan.predicted.as_run_s * plan.gradient_accumulation_steps)
