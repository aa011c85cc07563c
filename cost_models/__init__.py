"""What a plan costs: seconds of operators and collectives, bytes of memory, and the evaluation of a whole choice.

``work`` counts what an operator does, ``compute`` turns that into seconds on a device, ``collective`` gives seconds on
the cluster's links, ``memory`` follows the live bytes, ``evaluate`` puts them together, ``timeline`` plays the step.
"""

from hap.cost_models.collective import (
    CollectiveForm,
    best_decomposition,
    collective_coefficients,
    collective_seconds,
    decompositions,
)
from hap.cost_models.compute import (
    ComputeModel,
    node_coefficients,
    node_seconds,
    parts_coefficients,
    parts_seconds,
    split_work,
)
from hap.cost_models.evaluate import Evaluation, evaluate, update_seconds
from hap.cost_models.memory import MemoryUse, memory_use, usable_bytes
from hap.cost_models.optimizers import optimizer_state_bytes
from hap.cost_models.sequence import ConversionCost
from hap.cost_models.timeline import Span, Timeline, simulate
from hap.cost_models.work import Work, node_work

__all__ = [
    "CollectiveForm",
    "ComputeModel",
    "ConversionCost",
    "Evaluation",
    "MemoryUse",
    "Span",
    "Timeline",
    "Work",
    "best_decomposition",
    "collective_coefficients",
    "collective_seconds",
    "decompositions",
    "evaluate",
    "memory_use",
    "node_coefficients",
    "node_seconds",
    "node_work",
    "optimizer_state_bytes",
    "parts_coefficients",
    "parts_seconds",
    "simulate",
    "split_work",
    "update_seconds",
    "usable_bytes",
]
