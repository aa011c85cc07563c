"""Random arguments on which an operator can be run to prove its rules: float64, and integers that index safely."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hap.ops import FROM_ONE
from hap.rules.notation import Call

_INTEGERS_BELOW = 4  # where an integer indexes nothing

_POSITIVE = (  # operators that are real only on positive numbers
    "aten.log.default",
    "aten.log2.default",
    "aten.log10.default",
    "aten.log1p.default",
    "aten.sqrt.default",
    "aten.rsqrt.default",
    "aten.pow.Tensor_Scalar",
    "aten.pow.Tensor_Tensor",
    "aten.acos.default",
    "aten.asin.default",
    "aten.atanh.default",
    "aten.erfinv.default",
    "aten.logit.default",
    "aten.logit_backward.default",
    "aten.special_entr.default",
    "aten.special_ndtri.default",
    "aten.polygamma.default",
    "aten.xlogy.Scalar_Other",
    "aten.xlogy.Scalar_Self",
    "aten.xlogy.Tensor",
    "aten.fractional_max_pool2d.default",
    "aten.fractional_max_pool3d.default",
)
_ABOVE_ONE = ("aten.acosh.default",)
_DEFINITE = ("aten.linalg_cholesky_ex.default",)


def _size_at_dim(position: int) -> Callable[[Call], int]:
    def bound(call: Call) -> int:
        shape = call.inputs[0].shape
        return shape[call.dim_argument(position, len(shape))]

    return bound


def _indexed_size(call: Call) -> int:
    indices = call.argument(1, "indices")
    return min(size for size, item in zip(call.inputs[0].shape, indices, strict=False) if item is not None)


_INDEX_BOUNDS: Mapping[str, Callable[[Call], int]] = {
    "aten.embedding.default": lambda call: call.inputs[0].shape[0],
    "aten.embedding_dense_backward.default": lambda call: int(call.argument(2, "num_weights")),
    "aten.gather.default": _size_at_dim(1),
    "aten.scatter.value": _size_at_dim(1),
    "aten.scatter.src": _size_at_dim(1),
    "aten.scatter_add.default": _size_at_dim(1),
    "aten.scatter_reduce.two": _size_at_dim(1),
    "aten.index_reduce.default": _size_at_dim(1),
    "aten.index_select.default": _size_at_dim(1),
    "aten.index.Tensor": _indexed_size,
    "aten.index_put.default": _indexed_size,
    "hap.expert_mm.default": lambda call: call.inputs[1].shape[0],
    "hap.expert_mm_weight.default": lambda call: int(call.argument(3, "experts")),
}


Sampler = Callable[[Call, torch.Generator], list[torch.Tensor]]


def sample_inputs(
    call: Call,
    generator: torch.Generator,
    scale: float = 1.0,
    positive: bool = False,
    dtype: torch.dtype = torch.float64,
) -> list[torch.Tensor]:
    """One tensor per tensor argument, in the global shape; floating point as ``dtype``, normal and ``scale`` wide, and
    complex numbers of two such each.

    ``positive``: between 0 and 1 times ``scale``, for operators that are real only there. Whole numbers index safely
    where ``_INDEX_BOUNDS`` knows how, and elsewhere if they index a dim of the call's own tensors.
    """
    least = min((size for meta in call.inputs for size in meta.shape if size > 1), default=_INTEGERS_BELOW)
    bound = _INDEX_BOUNDS.get(call.node.op, lambda _: min(least, _INTEGERS_BELOW))(call)
    least_integer = int(call.node.op == "aten.div.Tensor" and bound > 1)  # by zero it gives NaN, which proves nothing
    least_integer = max(least_integer, int(call.node.op in FROM_ONE))
    sampled = []
    for meta in call.inputs:
        if meta.dtype == torch.bool:
            x = torch.rand(meta.shape, generator=generator) < 0.5
        elif meta.dtype.is_floating_point:
            x = torch.randn(meta.shape, generator=generator, dtype=torch.float64)
            if positive or call.node.op in _POSITIVE:
                x = x.abs() / (1 + x.abs()) + 0.01
            x = (x * scale).to(dtype)
            if call.node.op in _ABOVE_ONE:
                x = 1 + x.abs()
            elif call.node.op in _DEFINITE:
                x = x @ x.mT + torch.eye(x.shape[-1], dtype=dtype)
        elif meta.dtype.is_complex:
            x = (torch.randn(meta.shape, generator=generator, dtype=torch.complex128) * scale).to(dtype.to_complex())
        else:
            x = torch.randint(least_integer, bound, meta.shape, generator=generator, dtype=meta.dtype)
        sampled.append(x)
    return sampled


def sampler(*, scale: float = 1.0, positive: bool = False, dtype: torch.dtype = torch.float64) -> Sampler:
    """``sample_inputs`` with these options."""
    return functools.partial(sample_inputs, scale=scale, positive=positive, dtype=dtype)


def split_sum(whole: torch.Tensor, count: int, generator: torch.Generator) -> list[torch.Tensor]:
    """``count`` random tensors whose sum is ``whole``."""
    if whole.dtype.is_floating_point or whole.dtype.is_complex:
        parts = [torch.randn(whole.shape, generator=generator, dtype=whole.dtype) for _ in range(count - 1)]
    else:
        parts = [torch.randint(-3, 4, whole.shape, generator=generator, dtype=whole.dtype) for _ in range(count - 1)]
    return [*parts, whole - sum(parts, torch.zeros_like(whole))]


def size_vectors(n: int, world_size: int) -> tuple[tuple[int, ...], ...]:
    """Uneven ways to deal n atoms: decreasing shares, everything on one rank, and a rank in the middle with none."""
    assert world_size >= 2, "one rank proves nothing"
    weights = [2 ** (world_size - rank) + 1 for rank in range(world_size)]
    uneven = _deal(n, weights)
    one = tuple(n if rank == 1 else 0 for rank in range(world_size))
    gap = _deal(n, [0 if rank == world_size // 2 else weight for rank, weight in enumerate(reversed(weights))])
    return tuple(dict.fromkeys((uneven, one, gap)))


def _deal(n: int, weights: list[int]) -> tuple[int, ...]:
    """n in proportion to ``weights``, cut at the rounded running totals."""
    total, running, cuts = sum(weights), 0, [0]
    for weight in weights:
        running += weight
        cuts.append(round(n * running / total))
    return tuple(b - a for a, b in itertools.pairwise(cuts))


def in_float64(literal: Any) -> Any:
    """A literal argument with every floating or complex dtype replaced by the widest, as sampled tensors have it."""
    if isinstance(literal, torch.dtype):
        return torch.float64 if literal.is_floating_point else torch.complex128 if literal.is_complex else literal
    if isinstance(literal, tuple):
        items = [in_float64(item) for item in literal]
        return type(literal)(*items) if hasattr(literal, "_fields") else tuple(items)
    return literal
