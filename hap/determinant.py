"""Determinants as PyTorch has them, on contiguous tensors: by the strides of its argument PyTorch decides whether the
factors that it returns beside a determinant, for the gradient, are of the matrix or of its transpose.

A graph has no strides, so there the factors are of the transpose, always; of a complex matrix they are of itself.
"""

from __future__ import annotations

import torch


def det(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``aten._linalg_det``: (determinants, factors, pivots) of a (..., n, n)."""
    found: tuple[torch.Tensor, ...] = torch.ops.aten._linalg_det.default(a.contiguous())
    return found


def slogdet(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``aten._linalg_slogdet``: (signs, logarithms, factors, pivots) of a (..., n, n)."""
    found: tuple[torch.Tensor, ...] = torch.ops.aten._linalg_slogdet.default(a.contiguous())
    return found
