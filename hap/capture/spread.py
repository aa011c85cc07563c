"""What a model does because it knows of several ranks: collectives, and norms over the batches of all.

The batch of a step is the global one, and a program's ranks exchange what it takes to compute as one device would. So
``SyncBatchNorm`` is a batch norm, and a collective of the model's own, which would add up what is whole already, or
gather the batch several times, is refused.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_DISTRIBUTED = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "distributed", "")
_FILES = tuple(_DISTRIBUTED + name for name in ("distributed_c10d.py", "nn", "_functional_collectives.py"))


def is_of_collective(error: Exception) -> bool:
    """Whether one raised it: while a model is traced, each does (``torch_private.Fakes``)."""
    return any(os.path.abspath(f.filename).startswith(_FILES) for f in traceback.extract_tb(error.__traceback__))


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """The module's own, but of a ``SyncBatchNorm``, which is for GPUs alone, a batch norm's."""
    if isinstance(module, nn.SyncBatchNorm) and type(module).forward is nn.SyncBatchNorm.forward:
        forward: Callable[..., Any] = nn.BatchNorm1d.forward.__get__(module)
        return forward
    return module.forward
