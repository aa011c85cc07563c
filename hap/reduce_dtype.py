"""In which dtype gradients are exchanged: ``reduce_dtype``, narrower than that of parameters and updates.

It is what FSDP2 calls ``MixedPrecisionPolicy(reduce_dtype=)`` and DDP's ``bf16_compress_hook`` does (survey: arXiv
2404.06114, section IV): half of what travels, for the rounding of every rank's part and of their sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from hap.errors import HapError

ReduceName = Literal["bfloat16", "float16"]
ReduceDtype = torch.dtype | str | None
REDUCE_DTYPES: Mapping[ReduceName, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def read_reduce_dtype(given: ReduceDtype) -> torch.dtype | None:
    """The dtype that is meant: one of ``REDUCE_DTYPES``, or its name with or without ``torch.``; None, the gradient's
    own. HapError for any other."""
    if given is None:
        return None
    said = str(given).removeprefix("torch.")
    for name, dtype in REDUCE_DTYPES.items():
        if said == name:
            return dtype
    raise HapError(f"reduce_dtype {said}: expected {' or '.join(REDUCE_DTYPES)}")


def reduce_name(dtype: torch.dtype | None) -> ReduceName | None:
    """As plans and commands say it."""
    return next((name for name, known in REDUCE_DTYPES.items() if known == dtype), None)
