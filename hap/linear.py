"""A product with its bias in one call: what a capture has taken apart and eager PyTorch runs as one kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """``(a @ b).reshape(size) + bias`` for a (m, k), b (k, n), bias (n,) and a size that ends in n."""
    return torch.addmm(bias, a, b).reshape(size)
