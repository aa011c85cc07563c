"""From an operator's name in a ``Graph`` to what runs it. The one table that interpreters, codegen and runtime ask."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from hap.attention import attention, attention_backward
from hap.batch_norm import batch_norm, batch_norm_backward, batch_norm_squares, batch_norm_sums
from hap.complex_numbers import fft_c2c, fft_c2r, fft_r2c, view_as_complex, view_as_real
from hap.convolution import convolution, convolution_backward
from hap.ctc import ctc, ctc_backward
from hap.determinant import det, slogdet
from hap.draws import bernoulli, rand, randint, randn
from hap.dropout import dropout
from hap.errors import ProgramError
from hap.experts import expert_mm, expert_mm_weight
from hap.group_norm import group_norm, group_norm_backward
from hap.hosts_sum import HOSTS_SUM, hosts_sum
from hap.linear import addmm
from hap.scattered import scatter_into_zeros

# A view runs as a reshape: a graph's values have shapes and no strides, and what resharding leaves is contiguous, so
# strides at run time are not those of the capture.
_OWN: dict[str, Callable[..., Any]] = {
    "hap.addmm.default": addmm,
    "hap.attention.default": attention,
    "hap.attention_backward.default": attention_backward,
    "hap.batch_norm.default": batch_norm,
    "hap.batch_norm_backward.default": batch_norm_backward,
    "hap.batch_norm_squares.default": batch_norm_squares,
    "hap.batch_norm_sums.default": batch_norm_sums,
    "hap.bernoulli.default": bernoulli,
    "hap.convolution.default": convolution,
    "hap.convolution_backward.default": convolution_backward,
    "hap.ctc.default": ctc,
    "hap.ctc_backward.default": ctc_backward,
    "hap.dropout.default": dropout,
    "hap.expert_mm.default": expert_mm,
    "hap.expert_mm_weight.default": expert_mm_weight,
    "hap.rand.default": rand,
    "hap.randint.default": randint,
    "hap.randn.default": randn,
    "hap.scatter_into_zeros.default": scatter_into_zeros,
    HOSTS_SUM: hosts_sum,
    "aten._fft_c2c.default": fft_c2c,
    "aten._fft_c2r.default": fft_c2r,
    "aten._fft_r2c.default": fft_r2c,
    "aten._linalg_det.default": det,
    "aten._linalg_slogdet.default": slogdet,
    "aten.native_group_norm.default": group_norm,
    "aten.native_group_norm_backward.default": group_norm_backward,
    "aten.view.default": torch.ops.aten.reshape.default,
    "aten.view_as_complex.default": view_as_complex,
    "aten.view_as_real.default": view_as_real,
}
FROM_ONE = frozenset({"aten.linalg_lu_solve.default"})  # whose whole numbers, pivots, count from one


def resolve(op: str) -> Callable[..., Any]:
    """The callable for ``namespace.name.overload``. ProgramError if this torch has no such operator."""
    if op in _OWN:
        return _OWN[op]
    try:
        namespace, name, overload = op.split(".")
        found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        return found
    except (AttributeError, ValueError):
        raise ProgramError(f"operator {op} does not exist in torch {torch.__version__}") from None


def draws_random(op: str) -> bool:
    """Whether two calls on the same arguments differ."""
    return torch.Tag.nondeterministic_seeded in getattr(resolve(op), "tags", ())


def why_untried(op: str) -> str | None:
    """Why ``op`` cannot be run to find a rule for it, None if it can."""
    try:
        found: Any = resolve(op)
    except ProgramError:
        return f"it does not exist in torch {torch.__version__}"
    schema, tags = getattr(found, "_schema", None), getattr(found, "tags", ())
    if schema is None:
        return "HAP's own operators have rules"
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return "it changes its arguments"
    if any(r.alias_info is not None for r in schema.returns):
        return "it returns a view of its arguments, and views have rules of their own"
    if draws_random(op):
        return "it draws random numbers"
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        return "its outputs depend on values, not on shapes alone"
    return None


@cache
def takes_device(op: str) -> bool:
    """Whether the operator has a ``device`` keyword: capture drops it, and whoever runs the graph gives its own."""
    return op not in _OWN and any(a.name == "device" for a in resolve(op)._schema.arguments)  # type: ignore[attr-defined]
