"""A loss that is under way: whoever reads it waits for it, in whatever way; the backward pass does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hap.codegen.lowering import lower
from hap.codegen.passes.runner import run_passes, standard_passes
from hap.runtime.collectives import Communicator
from hap.runtime.late import Arrival, LateTensor
from hap.runtime.program import HapProgram
from tests._support import cases, gpt2
from tests._support.ranks import run_ranks


class Double(torch.autograd.Function):
    """2 x, which arrives late."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[int]) -> torch.Tensor:
        def bring() -> torch.Tensor:
            seen.append(1)
            return 2 * x.detach()

        return LateTensor.of((), torch.float64, bring)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return 2 * gradient, None


def late() -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """(x = 1.75, 2 x under way, once for every time it was brought)."""
    seen: list[int] = []
    x = torch.tensor(1.75, dtype=torch.float64, requires_grad=True)
    return x, Double.apply(x, seen), seen


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda loss: loss.item(),
    "float": float,
    "tolist": lambda loss: loss.tolist(),
    "numpy": lambda loss: float(loss.detach().numpy()),
    "data": lambda loss: loss.data.item(),
    "format": lambda loss: float(f"{loss:.3f}"),
    "str": lambda loss: float(str(loss).removeprefix("tensor(").split(",")[0]),
    "detach": lambda loss: loss.detach().clone().item(),
    "product": lambda loss: (loss * 2).item() / 2,
    "sum": lambda loss: sum([loss.detach(), loss.detach()]).item() / 2,
    "stack": lambda loss: torch.stack([loss, loss]).mean().item(),
    "in place": lambda loss: torch.zeros((), dtype=torch.float64).add_(loss.detach()).item(),
    "into a row": lambda loss: torch.zeros(2, dtype=torch.float64).index_put_((torch.tensor(1),), loss.detach())[1],
    "cast": lambda loss: loss.float().item(),
    "copy": lambda loss: copy.deepcopy(loss.detach()).item(),
    "memory": lambda loss: torch.frombuffer(bytearray(loss.untyped_storage().tolist()), dtype=torch.float64).item(),
}


@pytest.mark.parametrize("how", READS)
def test_whoever_reads_it_waits_for_it_once(how: str) -> None:
    _, loss, seen = late()
    assert seen == [] and READS[how](loss) == 3.5 and READS[how](loss) == 3.5 and seen == [1]


def test_backward_and_questions_about_its_form_wait_for_nothing() -> None:
    x, loss, seen = late()
    assert loss.shape == () and loss.dtype == torch.float64 and loss.requires_grad and loss.grad_fn is not None
    assert isinstance(loss, torch.Tensor) and loss.device.type == "cpu"
    loss.backward()
    assert x.grad is not None and x.grad.item() == 2 and seen == []


def test_it_may_be_scaled_before_backward_out_of_place_and_in_place() -> None:
    x, loss, _ = late()
    (loss / 4).backward()
    assert x.grad is not None and x.grad.item() == 0.5
    x, loss, _ = late()
    loss /= 4
    loss.backward()
    assert x.grad is not None and x.grad.item() == 0.5 and loss.item() == 0.875


def test_what_the_wait_raises_is_raised_where_the_value_is_read() -> None:
    def bring() -> torch.Tensor:
        raise RuntimeError("connection closed by peer")

    loss = LateTensor.of((), torch.float32, bring)
    with pytest.raises(RuntimeError, match="closed by peer"):
        loss.item()
    with pytest.raises(RuntimeError, match="closed by peer"):
        loss + 1


def test_an_arrived_value_is_not_brought_again() -> None:
    arrival = Arrival(torch.zeros(()), lambda: torch.ones(()))
    assert arrival.value().item() == 1 and arrival.value() is arrival.value()


def losses(rank: int) -> list[float]:
    """Of one step on two ranks, read before backward; after it; never, by the wire itself."""
    program = run_passes(lower(gpt2.graph(), cases.data_parallel((5, 3))), standard_passes()).program
    comm = Communicator(dist.group.WORLD)
    module = HapProgram(program, cases.data_parallel((5, 3)), comm, gpt2.build(), (gpt2.batch(),), gpt2.batch())
    share, targets = module.shard_batch(gpt2.batch(), gpt2.batch())
    loss = module(share, targets=targets)
    assert type(loss) is LateTensor and not loss.arrival._arrived
    before = loss.item()
    loss.backward()
    loss = module(share, targets=targets)
    loss.backward()
    assert loss.arrival._arrived, "nothing is under way when a step has ended"
    after = loss.item()
    loss = module(share, targets=targets)
    dist.all_reduce(loss)  # reads it inside of torch
    with torch.no_grad():
        plain = module(share, targets=targets)
    assert type(plain) is torch.Tensor
    return [before, after, loss.item() / 2, plain.item()]


def test_on_ranks_it_is_the_whole_losss_value_whenever_it_is_read() -> None:
    found = run_ranks(2, losses)
    expected = gpt2.lm_loss(gpt2.build()(gpt2.batch()), gpt2.batch()).item()
    assert found[0] == found[1] and len(set(found[0])) == 1
    assert found[0][0] == pytest.approx(expected, rel=1e-12)
