"""Frozen parameters and buffers that the forward pass changes, over steps of training, a smaller batch and evaluation,
on ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hap
from hap.capture import capture
from hap.plan import Plan
from hap.rules.choices import choices
from tests._support.plans import greedy_strategies, make_plan, sizes_for
from tests._support.ranks import run_ranks
from tests.zoo.test_followers import Codebook, Follower, assigned

BATCH, WIDTH, TOLERANCE = 8, 6, 1e-10


def follower() -> nn.Module:
    return Follower(assigned)


class Remembering(nn.Module):
    """Buffers that are read as views, for the backward pass too, and then replaced, by each other and by new values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        for name in ("scale", "now", "before", "newest", "older"):
            self.register_buffer(name, torch.linspace(1.0, 2.0, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) / self.scale.view(1, -1) * self.newest.clone().view(1, -1)
        self.scale = 0.9 * self.scale + 0.1 * y.detach().std(0)
        self.before.copy_(self.now)
        self.now.copy_(y.detach().mean(0))
        self.older, self.newest = self.newest, 1.0 + y.detach().square().mean(0)
        return y


MODELS = {"follower": follower, "codebook": Codebook, "remembering": Remembering}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def batch(step: int, size: int = BATCH) -> torch.Tensor:
    return torch.randn(size, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return (y * y).mean()


def plan(name: str) -> Plan:
    """The batch and parameters are dealt out; what the forward pass changes is whole, as buffers are."""
    found = choices(capture(built(name), batch(0), loss_fn=loss_of))
    rows = {n.target: (0, n.meta.shape[0]) for n in found.graph.sources("parameter")}
    wishes = {"args.0": (0, BATCH)} | rows
    return make_plan(found, greedy_strategies(found, wishes), sizes_for(found, (5, 2, 1)))


def train(rank: int, name: str, made: Plan, folder: str) -> float:
    """The worst error of the state after every step, and after it was saved and read."""
    model, worst = built(name), 0.0
    program = hap.compile(built(name), plan=made, example_inputs=batch(0), loss_fn=loss_of)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (program, model))
    for step, size in enumerate((8, 8, 5, 8)):
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        program(program.shard_batch(batch(step, size))).backward()
        loss_of(model(batch(step, size))).backward()
        ours.step(), theirs.step()
        worst = max(worst, apart(program.state_dict(), model.state_dict()))
    program.eval(), model.eval()
    with torch.no_grad():
        program(program.shard_batch(batch(9)))
        model(batch(9))
    program.save_checkpoint(folder, ours)
    again = hap.compile(built(name), plan=made, example_inputs=batch(0), loss_fn=loss_of)
    again.load_checkpoint(folder)
    return max(worst, *(apart(p.state_dict(), model.state_dict()) for p in (program, again)))


def apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[n] - e).abs().max() / e.abs().max()) for n, e in expected.items())


@pytest.mark.parametrize("name", MODELS)
def test_what_follows_is_as_on_one_device_after_every_step(name: str, tmp_path: Path) -> None:
    errors = run_ranks(3, train, name, plan(name), str(tmp_path / "saved"))
    assert max(errors) < TOLERANCE, errors


def train_by_acco(rank: int, made: Plan) -> tuple[float, float]:
    """How far the codes are from the averages that they are made of, and how far they have come."""
    program = hap.compile(built("codebook"), plan=made, example_inputs=batch(0), loss_fn=loss_of)
    before = program.state_dict()["codes.weight"].clone()
    trained = [p for p in program.parameters() if p.requires_grad]
    acco = hap.Acco(program, torch.optim.SGD(trained, lr=0.1), batches=2)
    for step in range(4):
        acco.step(program.shard_batch(batch(step)))
    acco.finish()
    state = program.state_dict()
    codes = {"codes": state["codes.weight"]}
    return apart(codes, {"codes": state["total"] / state["count"][:, None]}), apart(codes, {"codes": before})


def test_acco_leaves_what_the_last_batch_made_of_them() -> None:
    for error, moved in run_ranks(3, train_by_acco, plan("codebook")):
        assert error < TOLERANCE < moved
