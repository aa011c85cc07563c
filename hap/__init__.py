"""HAP: a compiler that trains PyTorch models on GPUs that are not all alike.

    cluster = hap.ClusterSpec.load("cluster.yaml")
    plan    = hap.plan(model, cluster, example_inputs=batch)     # offline: no GPU, no weights, no process group
    program = hap.compile(model, cluster, example_inputs=batch)  # on every rank, under torchrun

Names are imported when they are first used, so that ``import hap`` and ``hap --help`` do not wait for torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hap.api import compile, plan, plan_mesh, python_source
    from hap.cluster import ClusterSpec
    from hap.errors import (
        CaptureError,
        ClusterError,
        HapError,
        InfeasibleError,
        MissingRuleError,
        PlanError,
        ProgramError,
        RuleError,
    )
    from hap.mesh_plan import MeshPlan
    from hap.plan import Plan
    from hap.rules.discover import discover_rule
    from hap.rules.register import register_rule
    from hap.runtime.acco import Acco
    from hap.runtime.program import HapProgram
    from hap.search.pins import Pins

__version__ = "0.1.0"
__all__ = [
    "Acco",
    "CaptureError",
    "ClusterError",
    "ClusterSpec",
    "HapError",
    "HapProgram",
    "InfeasibleError",
    "MeshPlan",
    "MissingRuleError",
    "Pins",
    "Plan",
    "PlanError",
    "ProgramError",
    "RuleError",
    "compile",
    "discover_rule",
    "plan",
    "plan_mesh",
    "python_source",
    "register_rule",
]

_HOMES = {
    "Acco": "hap.runtime.acco",
    "ClusterSpec": "hap.cluster",
    "HapProgram": "hap.runtime.program",
    "MeshPlan": "hap.mesh_plan",
    "Pins": "hap.search.pins",
    "Plan": "hap.plan",
    "compile": "hap.api",
    "discover_rule": "hap.rules.discover",
    "plan_mesh": "hap.api",
    "python_source": "hap.api",
    "register_rule": "hap.rules.register",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name) or ("hap.errors" if name in __all__ else None)
    if home is None:
        raise AttributeError(f"module 'hap' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """``hap.plan`` is the function, although the import system would set it to the module ``hap/plan.py``."""

    @property
    def plan(self) -> Any:
        return importlib.import_module("hap.api").plan

    @plan.setter
    def plan(self, module: ModuleType) -> None:
        assert module is sys.modules["hap.plan"], "hap.plan is the function hap.api.plan"


sys.modules[__name__].__class__ = _Package
