"""Determinants and their gradients, however matrices lie in memory: PyTorch's factors are of the matrix or of its
transpose by that, and a graph has no strides."""

import pytest
import torch

from hap.determinant import det, slogdet
from tests.capture.equality import assert_equals_eager
from tests.zoo.layers import WIDTH, Model, case, worst
from tests.zoo.lockstep import TOLERANCE, drawn


def matrices(y):
    """Of every row a matrix that has an inverse, and is not its own transpose."""
    return y.unsqueeze(2) * y.tanh().flip(1).unsqueeze(1) * 0.1 + torch.diag(torch.linspace(1, 2, WIDTH, dtype=y.dtype))


def turned(y):
    return matrices(y).mT.contiguous()


def slope(of, y):
    with torch.enable_grad():
        a = turned(y) if y.requires_grad else turned(y).requires_grad_()
        return torch.autograd.grad(of(a).sum(), a, create_graph=True)[0]


def complex_ones(y):
    return matrices(y) * (1 + 0.3j)


FUNCTIONS = {
    "as it lies": lambda y: torch.linalg.det(matrices(y)),
    "of a transpose": lambda y: torch.linalg.det(matrices(y).mT),
    "of a transpose that was copied": lambda y: torch.det(turned(y)),
    "logarithm of a transpose": lambda y: torch.slogdet(matrices(y).mT)[1],
    "logarithm of a transpose that was copied": lambda y: torch.linalg.slogdet(turned(y)).logabsdet,
    "logdet": lambda y: torch.logdet(turned(y)),
    "of one matrix": lambda y: torch.slogdet(turned(y).sum(0))[1] * y,
    "of matrices that are columns": lambda y: matrices(y).movedim(0, -1).contiguous().movedim(-1, 0).det(),
    "complex": lambda y: torch.linalg.det(complex_ones(y)).abs() + torch.linalg.det(complex_ones(y).mT).real,
    "complex that was copied": lambda y: torch.slogdet(complex_ones(y).mT.contiguous())[1],
    "slopes": lambda y: slope(torch.linalg.det, y),
    "along a direction": lambda y: torch.func.jvp(lambda a: torch.linalg.det(a.mT), (turned(y),), (matrices(y),))[1],
    "of each": lambda y: torch.func.vmap(lambda a: torch.slogdet(a.T.contiguous())[1])(matrices(y)),
    "solutions by a transpose that was copied": lambda y: torch.linalg.solve_ex(turned(y), y)[0],
    "inverses of a transpose that was copied": lambda y: torch.linalg.inv_ex(turned(y))[0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_loss_and_gradients_equal_one_device(name):
    torch.manual_seed(0)
    assert worst(case(Model(FUNCTIONS[name])), plans=2) <= TOLERANCE


class Determinants(torch.nn.Module):
    """Of singular matrices, too: one that lacks a rank, and none at all."""

    def __init__(self, of):
        super().__init__()
        self.a, self.of = torch.nn.Parameter(drawn(3, 4, 4)), of
        with torch.no_grad():
            self.a[1, :, 2], self.a[2] = self.a[1, :, 0], 0.0

    def forward(self, x):
        return self.of(self.a).sum() * x.sum()


@pytest.mark.parametrize("of", [torch.det, lambda a: torch.det(a.mT), lambda a: torch.det(a.mT.contiguous())])
def test_gradients_of_singular_matrices_are_pytorchs(of):
    assert_equals_eager(Determinants(of), drawn(2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("of", [det, slogdet])
def test_factors_do_not_depend_on_strides(of, dtype):
    a = drawn(2, 3, 4, 4).to(dtype)
    lies = (a.mT.contiguous().mT, a.movedim(1, -1).contiguous().movedim(-1, 1), a.repeat(1, 1, 1, 2)[..., :4])
    for other in lies:
        assert torch.equal(a, other) and all(map(torch.equal, of(a), of(other)))
