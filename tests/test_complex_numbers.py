"""Complex numbers in a model: rotary positions as complex products, Fourier layers, complex parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hap
from benchmarks.zoo_models.case import Case
from benchmarks.zoo_models.reference import Outcome, one_device, worst_error
from hap.capture import capture
from hap.complex_numbers import fft_c2c, fft_c2r, fft_r2c, view_as_complex, view_as_real
from hap.plan import Plan
from hap.rules.choices import choices
from tests._support.plans import greedy_strategies, make_plan, sizes_for
from tests._support.ranks import run_ranks
from tests.capture.equality import assert_equals_eager, count
from tests.zoo.lockstep import TOLERANCE, drawn, random_error


class Rotary(nn.Module):
    """As in Llama's reference code: pairs of channels turned by their position."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(8, 8), nn.Linear(8, 8)
        angles = torch.outer(torch.arange(4.0), 0.1 ** torch.arange(2.0)).double()
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        heads = self.inward(x).view(rows, length, 2, 4).transpose(1, 2)
        pairs = torch.view_as_complex(heads.reshape(*heads.shape[:-1], 2, 2))
        turned = torch.view_as_real(pairs * self.turns).flatten(3)
        return self.outward(turned.transpose(1, 2).reshape(x.shape))


class Fourier(nn.Module):
    """A layer of a Fourier neural operator (Li et al. 2021): few modes, each with a complex matrix of its own."""

    def __init__(self, modes: int = 3) -> None:
        super().__init__()
        self.lift, self.beside, self.out = nn.Linear(1, 6), nn.Conv2d(6, 6, 1), nn.Linear(6, 1)
        weight = torch.randn(6, 6, modes, modes, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.weight = nn.Parameter(0.1 * torch.view_as_complex(weight))
        self.modes = modes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.lift(x.unsqueeze(-1)).permute(0, 3, 1, 2)
        spectrum = torch.fft.rfft2(h)
        low = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, : self.modes, : self.modes], self.weight)
        kept = F.pad(low, (0, spectrum.shape[3] - self.modes, 0, spectrum.shape[2] - self.modes))
        h = F.gelu(torch.fft.irfft2(kept, s=h.shape[-2:]) + self.beside(h))
        return self.out(h.permute(0, 2, 3, 1)).squeeze(-1)


class Parts(nn.Module):
    """What takes complex numbers apart and makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        mixed = torch.fft.fft(torch.fft.fft(h, dim=-1), dim=-2).real  # FNet (Lee-Thorp et al. 2021)
        return mixed + torch.complex(h, x).abs() + torch.polar(h, x).imag + (torch.complex(x, h).conj() * h).imag


class Turned(Parts):
    """Complex numbers of Python's own beside complex tensors: their conjugates are autograd's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        z = torch.exp(1j * h) * 1j + torch.complex(h, x) / (2 + 1j) - 0.5j
        return (z * z.conj()).real + z.imag


def case(kind: type[nn.Module]) -> Case:
    torch.manual_seed(0)
    shape = (6, 4, 8) if kind is Rotary else (6, 8, 8) if kind is Fourier else (6, 4, 6)
    return Case(kind().double(), drawn(*shape), F.mse_loss, drawn(*shape, seed=1))


@pytest.mark.parametrize("kind", [Rotary, Fourier, Parts, Turned])
def test_any_strategies_equal_one_device(kind: type[nn.Module]) -> None:
    for seed in range(3):
        error, where = random_error(case(kind), seed)
        assert error <= TOLERANCE, where


@pytest.mark.parametrize("kind", [Rotary, Fourier, Parts, Turned])
def test_a_graph_has_no_marks_of_conjugates(kind: type[nn.Module]) -> None:
    made = case(kind)
    graph = assert_equals_eager(made.model, made.inputs, loss_fn=made.loss_fn, targets=made.targets)
    assert not {"aten._conj.default", "aten.resolve_conj.default"} & set(count(graph))
    assert count(graph).get("aten.conj_physical.default", 0) > 0


def plans() -> dict[str, Plan]:
    """The batch dealt out with complex parameters whole, and in shards."""
    made = case(Fourier)
    found = choices(capture(made.model, made.inputs, loss_fn=made.loss_fn, example_targets=made.targets))
    batch = {n.target: (0, 6) for n in found.graph.sources("input")}
    rows = {n.target: (0, n.meta.shape[0]) for n in found.graph.sources("parameter") if n.meta.shape[0] > 1}
    return {
        "data": make_plan(found, greedy_strategies(found, batch), sizes_for(found, (3, 2, 1)), world_size=3),
        "zero": make_plan(found, greedy_strategies(found, batch | rows), sizes_for(found, (3, 0, 2)), world_size=3),
    }


def trained(rank: int, made: dict[str, Plan]) -> dict[str, tuple[float, str, float]]:
    """Of each plan: the error of the first step, where it is, and of the norm of all gradients."""
    found = {}
    for name, plan in made.items():
        one = case(Fourier)
        program = hap.compile(
            one.model, plan=plan, example_inputs=one.inputs, example_targets=one.targets, loss_fn=one.loss_fn
        )
        batch, targets = program.shard_batch(one.inputs, one.targets)
        loss = program(batch, targets=targets)
        loss.backward()
        gradients = {n: g.clone() for n, g in program.full_gradients().items()}
        expected = one_device(case(Fourier), 0)
        error, where = worst_error(Outcome(loss.detach(), gradients, {}), expected)
        norm = torch.stack([g.abs().square().sum() for g in expected.gradients.values()]).sum().sqrt()
        clipped = program.clip_grad_norm_(0.1)
        found[name] = error, where, abs(float(clipped / norm) - 1)
    return found


def test_complex_parameters_on_real_ranks() -> None:
    for found in run_ranks(3, trained, plans()):
        for name, (error, where, norm) in found.items():
            assert error <= TOLERANCE and norm <= 1e-12, (name, where, error, norm)


def test_pairs_that_do_not_lie_together() -> None:
    """PyTorch refuses each of these."""
    whole = drawn(3, 4, 2)
    for pairs in (drawn(3, 2, 4).transpose(1, 2), drawn(9)[1:].view(4, 2), drawn(4, 3)[:, :2]):
        with pytest.raises(RuntimeError):
            torch.view_as_complex(pairs)
        torch.testing.assert_close(view_as_real(view_as_complex(pairs)), pairs)
    conjugate = view_as_complex(whole).conj()
    torch.testing.assert_close(view_as_real(conjugate), torch.stack([whole[..., 0], -whole[..., 1]], -1))


def test_transforms_of_nothing() -> None:
    """PyTorch's for CPUs raise."""
    real, paired = drawn(0, 4, 6), torch.zeros(0, 4, 6, dtype=torch.complex128)
    with pytest.raises(RuntimeError):
        torch.fft.rfft2(real)
    for made, like in (
        (fft_r2c(real, (1, 2), 0, True), torch.fft.rfft2(drawn(1, 4, 6))),
        (fft_r2c(real, (1,), 0, False), torch.fft.fft(drawn(1, 4, 6), dim=1)),
        (fft_c2r(paired, (1, 2), 2, 7), torch.fft.irfft2(paired.new_zeros(1, 4, 6), s=(4, 7))),
        (fft_c2c(paired, (2,), 0, True), torch.fft.fft(paired.new_zeros(1, 4, 6))),
    ):
        assert (made.shape, made.dtype) == ((0, *like.shape[1:]), like.dtype)
