"""Which composite operators are taken apart at capture, so that each piece has an exact sharding rule.

An operator that adds a bias to a product would add it once per partial sum; one that divides by a count would divide by
the local count. After decomposition the divisor is a literal (a global constant) or a sum that is itself sharded.
Layer norm, softmax, attention, embedding and gelu stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hap.capture.torch_private import OpOverload, get_decompositions

aten = torch.ops.aten
_LOW_PRECISION = (torch.float16, torch.bfloat16)
_TORCHS = (  # losses with a mean inside, their backwards, and what the losses call; then what layers call
    aten.nll_loss_forward,
    aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
    aten.log_sigmoid_forward,
    aten.log_sigmoid_backward,
    aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
    aten.linalg_vector_norm,
    aten.norm,
    aten._weight_norm_interface,
    aten._prelu_kernel,
    aten._prelu_kernel_backward,
    aten.index_add,
    aten.pixel_shuffle,
    aten.pixel_unshuffle,
    aten.channel_shuffle,
    aten.rot90,
    aten.block_diag,
    aten.affine_grid_generator,
    aten.linalg_cross,
    aten.renorm,
    aten.hann_window,
)


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Operator overload -> what to trace instead."""
    table: dict[OpOverload, Callable[..., Any]] = {}
    for op, function in get_decompositions(_TORCHS).items():
        assert isinstance(op, OpOverload), op
        table[op] = function
    table[aten.addmm.default] = _addmm
    table[aten.addmv.default] = _addmv
    table[aten.baddbmm.default] = _baddbmm
    table[aten.nll_loss_backward.default] = _nll_loss_backward
    table[aten.mean.default] = _mean
    table[aten.mean.dim] = _mean_dim
    table[aten.index_copy.default] = _index_copy
    table[aten.index_fill.int_Scalar] = _index_fill
    table[aten.index_fill.int_Tensor] = _index_fill
    table[aten._trilinear.default] = _trilinear
    table[aten._weight_norm_interface_backward.default] = _weight_norm_backward
    table[aten.copy.default] = _copy
    table[aten.nansum.default] = _nansum
    table[aten.aminmax.default] = _aminmax
    table[aten.ldexp.Tensor] = _ldexp
    table[aten.round.decimals] = _round
    table[aten.diagonal_copy.default] = _diagonal_copy
    table[aten._cdist_backward.default] = _cdist_backward
    table[aten._linalg_det.default] = _det
    table[aten._linalg_slogdet.default] = _slogdet
    table[aten.empty.memory_format] = _empty
    table[aten.empty_like.default] = _empty_like
    table[aten.new_empty.default] = _new_empty
    return table


def _scaled_sum(bias: torch.Tensor, product: torch.Tensor, beta: float, alpha: float) -> torch.Tensor:
    product = product if alpha == 1 else product * alpha
    if beta == 0:  # torch then ignores the bias, NaN included
        return product
    return product + (bias if beta == 1 else bias * beta)


def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    return _scaled_sum(bias, torch.mm(a, b), beta, alpha)


def _addmv(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    return _scaled_sum(bias, torch.mv(a, b), beta, alpha)


def _baddbmm(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return _scaled_sum(bias, torch.bmm(a, b), beta, alpha)


def _mean(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _mean_dim(x, None, dtype=dtype)


def _mean_dim(
    x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Sum over a literal count; in float32 where the dtype is narrower, as torch's own kernel does."""
    dims = list(range(x.dim())) if not dim else list(dim)
    count = math.prod(x.shape[d] for d in dims)
    result = dtype or x.dtype
    total = torch.sum(x, dims, keepdim, dtype=torch.float32 if result in _LOW_PRECISION else result)
    return (total / count).to(result)


def _nll_loss_backward(
    grad: torch.Tensor,
    log_probabilities: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    """One scatter into zeros. torch's own decomposition also multiplies the whole (rows, classes) tensor.

    ``log_probabilities`` is (rows, classes) or (classes,), ``target`` (rows,) or (); 0, 1, 2 reduce by none, mean, sum.
    """
    classes = log_probabilities.dim() - 1
    grad = -(grad / total_weight if reduction == 1 else grad)
    if reduction == 0 and classes == 1:
        grad = grad.unsqueeze(1)
    index = target.unsqueeze(classes)
    kept = index != ignore_index
    index = torch.where(kept, index, 0)
    if weight is not None:
        grad = grad * weight[index]
    return torch.zeros_like(log_probabilities).scatter(classes, index, torch.where(kept, grad, 0.0))


def _index_copy(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return x.scatter(dim, _spread(x, dim, index), source)


def _index_fill(x: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> torch.Tensor:
    index = _spread(x, dim, index)
    return x.scatter(dim, index, value.expand(index.shape) if isinstance(value, torch.Tensor) else value)


def _spread(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """The index of a scatter into x that says for whole slices along ``dim`` where they go."""
    dim %= x.dim()
    shape = [index.numel() if d == dim else size for d, size in enumerate(x.shape)]
    return index.reshape([-1 if d == dim else 1 for d in range(x.dim())]).expand(shape)


def _trilinear(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    expand_a: Sequence[int],
    expand_b: Sequence[int],
    expand_c: Sequence[int],
    summed: Sequence[int],
    unroll_dim: int = 1,
) -> torch.Tensor:
    """The product of the three, each with new dims at ``expand``, summed over ``summed``: ``nn.Bilinear``."""
    dims = range(a.dim() + len(expand_a))
    sides = [[d for d in dims if d not in missing] for missing in (expand_a, expand_b, expand_c)]
    return torch.einsum(a, sides[0], b, sides[1], c, sides[2], [d for d in dims if d not in summed])


def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of v and g, where the weight is ``v * g / norms``; g and norms keep ``dim`` alone."""
    others = [d for d in range(v.dim()) if d != dim % v.dim()]
    norms = norms.to(g.dtype)
    along = torch.sum(grad * v, others, keepdim=True)
    return (g / norms) * (grad - v * (along / (norms * norms))), along / norms


def _nansum(
    x: torch.Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    return torch.where(x.isnan(), 0, x).sum(None if dim is None else list(dim), keepdim, dtype=dtype)


def _aminmax(x: torch.Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    dims = () if dim is None else (dim,)
    return x.amin(dims, keepdim), x.amax(dims, keepdim)


def _ldexp(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return x * torch.pow(2.0, other)


def _round(x: torch.Tensor, *, decimals: int) -> torch.Tensor:
    power = 10.0 ** abs(decimals)
    return (x * power).round() / power if decimals >= 0 else (x / power).round() * power


def _diagonal_copy(x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    """What ``torch.diag`` makes of a matrix."""
    return torch.diagonal(x, offset, dim1, dim2).clone()


def _cdist_backward(grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, p: float, found: torch.Tensor) -> Any:
    """The gradient of ``a`` is as large as ``a`` broadcast, but for pieces with nothing in them: so it is broadcast
    before."""
    shape = (*grad.shape[:-2], *a.shape[-2:])
    return NotImplemented if a.shape == shape else aten._cdist_backward(grad, a.expand(shape), b, p, found)


def _det(a: torch.Tensor) -> Any:
    return aten._linalg_det(a.mT.contiguous()) if _factors_itself(a) else NotImplemented


def _slogdet(a: torch.Tensor) -> Any:
    return aten._linalg_slogdet(a.mT.contiguous()) if _factors_itself(a) else NotImplemented


def _factors_itself(a: torch.Tensor) -> bool:
    """Whether the gradient of the determinant takes the factors for those of ``a``, which lies so that PyTorch returns
    them. In a graph they are of what is the transpose of the argument: ``hap.determinant``."""
    return not a.is_contiguous() and not a.is_complex()


def _copy(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """In memory as ``x`` lies: what comes next may write a part of it in place, or view it."""
    made = source.to(x.dtype).expand(x.shape)
    if made.stride() == x.stride():
        return made
    order = sorted(range(x.dim()), key=x.stride().__getitem__, reverse=True)
    if order == list(range(x.dim())):
        return made.clone(memory_format=torch.contiguous_format)
    places = sorted(range(x.dim()), key=order.__getitem__)
    return made.permute(order).clone(memory_format=torch.contiguous_format).permute(places)


def _empty(size: Sequence[int], *, dtype: torch.dtype | None = None, **layout: Any) -> torch.Tensor:
    """What nobody has written yet is zero: any value is as good, and a graph has no values that are none."""
    return torch.zeros(size, dtype=dtype, device=layout.get("device"))


def _empty_like(x: torch.Tensor, *, dtype: torch.dtype | None = None, **layout: Any) -> torch.Tensor:
    return torch.zeros_like(x, dtype=dtype)


def _new_empty(
    x: torch.Tensor, size: Sequence[int], *, dtype: torch.dtype | None = None, **layout: Any
) -> torch.Tensor:
    return x.new_zeros(size, dtype=dtype)
