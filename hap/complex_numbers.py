"""Complex numbers where PyTorch's kernels refuse what a rank may hold: pairs that do not lie together, and nothing.

PyTorch reads (..., 2) as complex only where a pair lies together at an even place; a graph has no strides, and what
lies so in the capture may be a slice or a transposed tensor on a rank. And a rank with a share of zero has an empty
tensor to transform, of which the kernels for CPUs make an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def view_as_complex(x: torch.Tensor) -> torch.Tensor:
    """(..., 2) -> (...); a copy where PyTorch would refuse."""
    together = x.stride(-1) == 1 and x.storage_offset() % 2 == 0 and all(s % 2 == 0 for s in x.stride()[:-1])
    return torch.view_as_complex(x if together else x.clone(memory_format=torch.contiguous_format))


def view_as_real(x: torch.Tensor) -> torch.Tensor:
    """(...) -> (..., 2)."""
    return torch.view_as_real(x.resolve_conj())


def fft_r2c(x: torch.Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> torch.Tensor:
    """``aten._fft_r2c``, of nothing too."""
    if x.numel():
        return torch.ops.aten._fft_r2c.default(x, dim, normalization, onesided)
    shape = list(x.shape)
    if onesided:
        shape[dim[-1]] = shape[dim[-1]] // 2 + 1
    return x.new_empty(shape, dtype=x.dtype.to_complex())


def fft_c2r(x: torch.Tensor, dim: Sequence[int], normalization: int, last_dim_size: int) -> torch.Tensor:
    """``aten._fft_c2r``, of nothing too."""
    if x.numel():
        return torch.ops.aten._fft_c2r.default(x, dim, normalization, last_dim_size)
    shape = list(x.shape)
    shape[dim[-1]] = last_dim_size
    return x.new_empty(shape, dtype=x.dtype.to_real())


def fft_c2c(x: torch.Tensor, dim: Sequence[int], normalization: int, forward: bool) -> torch.Tensor:
    """``aten._fft_c2c``, of nothing too."""
    return torch.ops.aten._fft_c2c.default(x, dim, normalization, forward) if x.numel() else x.clone()
