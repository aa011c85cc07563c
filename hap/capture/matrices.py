"""Functions of matrices that look at values, in terms that do not.

- Covariances, and correlations, look whether there are observations enough, which is a matter of shapes where none is
  weighted. With weights they are left, and refused.
- Decompositions, inverses and solutions of linear systems look whether the matrix has one, and raise an error if not.
  Here what there is none of is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch


def _covariance(
    input: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """``input`` (variables, observations), or the observations of one variable."""
    if fweights is not None or aweights is not None or input.dim() > 2 or not input.numel():
        return None
    rows = input.view(1, -1) if input.dim() < 2 else input
    apart = rows - rows.sum(1, keepdim=True) / rows.shape[1]
    return (apart @ apart.mH / max(rows.shape[1] - correction, 0)).squeeze()


def _correlation(input: torch.Tensor) -> torch.Tensor | None:
    found = _covariance(input)
    if found is None or found.is_complex():
        return None
    if not found.dim():
        return found / found
    deviation = found.diag().sqrt()
    return (found / deviation[:, None] / deviation).clip(-1, 1)


def _cholesky(A: torch.Tensor, *, upper: bool = False, out: torch.Tensor | None = None) -> torch.Tensor | None:
    return _or_nan(*torch.linalg.cholesky_ex(A, upper=upper)) if out is None else None


def _inverse(input: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor | None:
    return _or_nan(*torch.linalg.inv_ex(input)) if out is None else None


def _solution(
    A: torch.Tensor, B: torch.Tensor, *, left: bool = True, out: torch.Tensor | None = None
) -> torch.Tensor | None:
    return _or_nan(*torch.linalg.solve_ex(A, B, left=left)) if out is None else None


def _or_nan(found: torch.Tensor, failed: torch.Tensor) -> torch.Tensor:
    """``failed`` (...) says of every matrix of ``found`` (..., n, m), or vector (..., n), where there is none."""
    return torch.where(failed.view(*failed.shape, *(1,) * (found.dim() - failed.dim())) == 0, found, math.nan)


OF_MATRICES: Mapping[Any, Callable[..., torch.Tensor | None]] = {  # None: as it is
    torch.Tensor.cov: _covariance,
    torch.cov: _covariance,
    torch.Tensor.corrcoef: _correlation,
    torch.corrcoef: _correlation,
    torch.linalg.cholesky: _cholesky,
    torch.linalg.inv: lambda A, *, out=None: _inverse(A, out=out),
    torch.inverse: _inverse,
    torch.Tensor.inverse: _inverse,
    torch.linalg.solve: _solution,
}
