"""Rules of linear algebra on batches of matrices, and of distances between rows.

A matrix stays whole; the dims before its two, along which matrices are many, may be sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hap.rules.notation import Call, Dim, Row, Rule, Slot, partial_rows


def batched(*inputs: int, linear: str = "") -> Rule:
    """Each tensor argument has so many dims of its own, and the same dims before them, or fewer, which are broadcast.
    ``linear``: a pattern of the arguments that may be partial."""

    def rule(call: Call) -> Iterator[Row]:
        leads = [len(m.shape) - own for m, own in zip(call.inputs, inputs, strict=True)]
        most = max(leads)
        for dim in range(most):
            slots = tuple(_lead(call, i, dim - (most - lead)) for i, lead in enumerate(leads))
            sizes = {call.inputs[i].shape[s.dim] for i, s in enumerate(slots) if isinstance(s, Dim)}
            if len(sizes) == 1:
                yield Row(slots, tuple(None if o is None else Dim(dim) for o in call.outputs))
        if linear:
            yield from partial_rows(call, (linear,))

    return rule


def _lead(call: Call, position: int, dim: int) -> Slot:
    return Dim(dim) if dim >= 0 and call.inputs[position].shape[dim] > 1 else "R"


def solve(call: Call) -> Iterator[Row]:
    """``_linalg_solve_ex(a (..., n, n), b (..., n, k) | b (..., n)) -> (x, LU, pivots, info)``."""
    a, b = (len(m.shape) for m in call.inputs)
    return iter(batched(2, 1 if b == a - 1 else 2)(call))


def pseudo_inverse(call: Call) -> Iterator[Row]:
    """``linalg_pinv(x (..., m, n), atol=, rtol=)``, tolerances for each matrix or for all."""
    return iter(batched(2, *(0 for _ in call.inputs[1:]))(call))


def diagonal_scatter(call: Call) -> Iterator[Row]:
    """``diagonal_scatter(x, src, offset, dim1, dim2)``: dims that are not the diagonal's, first in src."""
    ndim = len(call.output.shape)
    diagonal = (call.dim_argument(3, ndim, "dim1", 0), call.dim_argument(4, ndim, "dim2", 1))
    for place, dim in enumerate(d for d in range(ndim) if d not in diagonal):
        yield Row((Dim(dim), Dim(place)), (Dim(dim),))
    yield from partial_rows(call, ("PP",))


def distances(call: Call) -> Iterator[Row]:
    """``_cdist_forward(a (..., P, M), b (..., R, M), p, mode) -> (..., P, R)``, ``_euclidean_dist(a, b)``."""
    last = len(call.output.shape) - 1
    for dim in range(last - 1):
        yield Row((_broadcast(call, 0, dim), _broadcast(call, 1, dim)), (Dim(dim),))
    a, b = (len(m.shape) for m in call.inputs)
    yield Row((Dim(a - 2), "R"), (Dim(last - 1),))
    yield Row(("R", Dim(b - 2)), (Dim(last),))


def distances_backward(call: Call) -> Iterator[Row]:
    """``_cdist_backward(grad (..., P, R), a, b, p, distances) -> (..., P, M)``, the gradient of a; linear in grad.

    The gradient is of a as broadcast; where a rank has nothing, it has the shape of a as it is. So where these are two
    shapes, nothing is sharded: capture broadcasts a before the call.
    """
    last, b = len(call.output.shape) - 1, len(call.inputs[2].shape)
    if call.inputs[1].shape == call.output.shape:
        for dim in range(last - 1):
            yield Row((Dim(dim), Dim(dim), _broadcast(call, 2, dim), Dim(dim)), (Dim(dim),))
        yield Row((Dim(last - 1), Dim(last - 1), "R", Dim(last - 1)), (Dim(last - 1),))
        yield Row((Dim(last), "R", Dim(b - 2), Dim(last)), ("P",))
    yield from partial_rows(call, ("PRRR",))


def _broadcast(call: Call, position: int, dim: int) -> Slot:
    """The slot of an argument where this dim of the output is sharded, with which its dims are aligned from the right:
    whole if it lacks the dim, or has it once for all."""
    shape, whole = call.inputs[position].shape, call.output.shape
    own = dim - (len(whole) - len(shape))
    return Dim(own) if own >= 0 and shape[own] == whole[dim] else "R"


RULES: Mapping[str, Rule] = {
    "aten.linalg_inv_ex.default": batched(2),
    "aten.linalg_cholesky_ex.default": batched(2),
    "aten.cholesky_inverse.default": batched(2),
    "aten.cholesky_solve.default": batched(2, 2, linear="PR"),
    "aten.linalg_qr.default": batched(2),
    "aten._linalg_eigh.default": batched(2),
    "aten._linalg_svd.default": batched(2),
    "aten._linalg_det.default": batched(2),
    "aten._linalg_slogdet.default": batched(2),
    "aten.linalg_matrix_exp.default": batched(2),
    "aten.linalg_householder_product.default": batched(2, 1),
    "aten.linalg_pinv.atol_rtol_tensor": pseudo_inverse,
    "aten.linalg_lu_solve.default": batched(2, 1, 2, linear="RRP"),
    "aten.linalg_solve_triangular.default": batched(2, 2, linear="RP"),
    "aten._linalg_solve_ex.default": solve,
    "aten.diagonal_scatter.default": diagonal_scatter,
    "aten._cdist_forward.default": distances,
    "aten._euclidean_dist.default": distances,
    "aten._cdist_backward.default": distances_backward,
}
