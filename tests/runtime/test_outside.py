"""A loss function that closes over the model, and a hook of a parameter, over steps of training on ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hap
from hap.capture import capture
from hap.errors import ProgramError
from hap.plan import Plan
from hap.rules.choices import choices
from tests._support.plans import greedy_strategies, make_plan, sizes_for
from tests._support.ranks import run_ranks

BATCH, WIDTH, TOLERANCE = 8, 6, 1e-10
Loss = Callable[[torch.Tensor], torch.Tensor]


def built() -> tuple[nn.Module, Loss]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
    weight = model[0].weight
    weight.register_hook(lambda g: g.clamp(-0.02, 0.02) + 0.01 * weight)
    return model, lambda y: y.square().mean() + 0.1 * sum(p.square().sum() for p in model.parameters())


def batch(step: int, size: int = BATCH) -> torch.Tensor:
    return torch.randn(size, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def plan() -> Plan:
    model, loss_fn = built()
    found = choices(capture(model, batch(0), loss_fn=loss_fn))
    rows = {n.target: (0, n.meta.shape[0]) for n in found.graph.sources("parameter")}
    return make_plan(found, greedy_strategies(found, {"args.0": (0, BATCH)} | rows), sizes_for(found, (5, 2, 1)))


def train(rank: int, made: Plan) -> list[float]:
    """Errors of the state after every step, and of the loss in evaluation."""
    (model, loss_fn), (ours, our_loss) = built(), built()
    program = hap.compile(ours, plan=made, example_inputs=batch(0), loss_fn=our_loss)
    optimizers, errors = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (program, model)], []
    for step, size in enumerate((8, 8, 5, 8)):
        program(program.shard_batch(batch(step, size))).backward()
        loss_fn(model(batch(step, size))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found, expected = program.state_dict(), model.state_dict()
        errors += [float((found[n] - e).abs().max() / e.abs().max()) for n, e in expected.items()]
    program.eval(), model.eval()
    with torch.no_grad():
        loss, own = program(program.shard_batch(batch(9))), loss_fn(model(batch(9)))
    return [*errors, float((loss - own).abs() / own)]


def test_weights_in_the_loss_and_a_hook_are_as_on_one_device_after_every_step() -> None:
    for errors in run_ranks(3, train, plan()):
        assert len(errors) == 4 * 9 + 1 and max(errors) < TOLERANCE, errors


class Weighted(nn.Module):
    """Whose weights are no buffer, and whose cache may grow."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weights, self.cache = nn.Linear(WIDTH, WIDTH), torch.ones(WIDTH), torch.arange(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.weights + self.cache[1]


def in_place(model: nn.Module, teacher: nn.Module) -> None:
    model.weights.mul_(2)


def replaced(model: nn.Module, teacher: nn.Module) -> None:
    model.weights = model.weights * 2


def moved(model: nn.Module, teacher: nn.Module) -> None:
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(0.9)


def exchanged(model: nn.Module, teacher: nn.Module) -> None:
    for parameter in teacher.parameters():
        parameter.data = parameter.data * 2


@pytest.mark.parametrize("change", [in_place, replaced, moved, exchanged])
def test_a_constant_that_changes_is_refused_at_the_next_step(change: Callable[[nn.Module, nn.Module], None]) -> None:
    """A teacher of the loss function, an attribute; what is written to and has its values still may go on."""
    torch.manual_seed(0)
    model, teacher = Weighted(), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def loss_fn(found: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (found - teacher(x)).square().mean()

    one = hap.ClusterSpec.from_yaml(
        "{name: one, backend: gloo, hosts: [{name: h, devices: [{name: cpu, tflops: {float32: 0.02}, memory: 2GB, "
        "memory_bandwidth: 8GB/s}]}]}"
    )
    x = torch.randn(BATCH, WIDTH)
    program = hap.compile(model, one, example_inputs=x, example_targets=x, loss_fn=loss_fn, effort="quick")
    program(x, targets=x)
    teacher.load_state_dict(teacher.state_dict())
    model.weights, model.cache = model.weights.clone(), torch.arange(5.0)
    program(x, targets=x)
    change(model, teacher)
    with pytest.raises(
        ProgramError, match="no parameter or buffer of the model, has changed since the program was comp"
    ):
        program(x, targets=x)
