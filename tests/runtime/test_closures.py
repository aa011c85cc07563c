"""Functions that close over the model: in evaluation and in training they do what the program's mode says, whatever is
done to the model; and numbers of a loss function, which a program has as they were."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

import hap
from hap.errors import ProgramError

ONE = hap.ClusterSpec.from_yaml(
    "{name: one, backend: gloo, hosts: [{name: h, devices: [{name: cpu, tflops: {float32: 0.02}, memory: 2GB, "
    "memory_bandwidth: 8GB/s}]}]}"
)
BETA = 1.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.norm(self.inner(x)))


def listed() -> nn.Module:
    class Listed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [lambda x: self.norm(self.inner(x)), lambda x: functional.dropout(x, 0.5, self.training)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.outer(x)

    return Listed()


def patched() -> nn.Module:
    model = Net()
    old = model.forward
    model.forward = lambda x: functional.dropout(old(x), 0.5, model.training)  # type: ignore[method-assign]
    return model


def hooked() -> nn.Module:
    model = Net()
    model.inner.register_forward_hook(lambda module, given, found: found * (2 if model.training else 3))
    model.inner.register_forward_hook(lambda m, given, found, of=model: functional.dropout(found, 0.5, of.training))
    return model


def named() -> nn.Module:
    global GLOBAL
    GLOBAL = Net()
    GLOBAL.inner.register_forward_hook(lambda m, given, found: functional.dropout(found, 0.5, GLOBAL.training))
    return GLOBAL


@pytest.mark.parametrize("made", [listed, patched, hooked, named])
def test_a_program_evaluates_and_trains_as_its_own_mode_says(made: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = made(), torch.randn(8, 4)
    program = hap.compile(model, ONE, example_inputs=x, loss_fn=torch.sum, effort="quick")
    program(x)
    before = program.state_dict()
    program.eval()
    with torch.no_grad():
        found = program(x).clone()
    assert all(torch.equal(value, before[name]) for name, value in program.state_dict().items())
    assert model.training
    model.load_state_dict(before)
    model.eval()
    assert torch.allclose(found, model(x).sum(), rtol=1e-5)
    program.train()
    shorter = program.shard_batch(x[:6])
    assert not torch.equal(program(shorter), program(shorter)), "dropout"


def test_a_number_that_the_loss_function_reads_may_not_change() -> None:
    """What is only near may."""
    global BETA
    weights, x = SimpleNamespace(beta=1.0, step=0), torch.randn(8, 4)

    def of_an_object(y: torch.Tensor) -> torch.Tensor:
        return y.square().mean() * weights.beta

    def of_a_global(y: torch.Tensor) -> torch.Tensor:
        return y.square().mean() * BETA

    def compiled(loss_fn: Callable[..., torch.Tensor]) -> hap.HapProgram:
        found = hap.compile(nn.Linear(4, 4), ONE, example_inputs=x, loss_fn=loss_fn, effort="quick")
        found(x)
        weights.step += 1
        found(x)
        return found

    first, second = compiled(of_an_object), compiled(of_a_global)
    weights.beta = 0.5
    with pytest.raises(ProgramError, match=r"weights\.beta, which the loss function reads, has changed since .* 1\.0"):
        first(x)
    BETA = 0.5
    with pytest.raises(ProgramError, match="BETA, which the loss function reads, has changed since"):
        second(x)


class Counting:
    """A loss that counts its calls, for nobody."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return y.square().mean()


def test_a_count_of_its_own_calls_may() -> None:
    loss_fn, x = Counting(), torch.randn(8, 4)
    program = hap.compile(nn.Linear(4, 4), ONE, example_inputs=x, loss_fn=loss_fn, effort="quick")
    assert loss_fn.calls == 0
    program(x)
    loss_fn(x)
    program(x)
