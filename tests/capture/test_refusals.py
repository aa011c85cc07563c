"""What cannot be one static graph is refused in one line that names the user's line and module."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn as dist_nn
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives

from hap.capture import capture
from hap.capture.blame import blame
from hap.capture.torch_private import pytree
from hap.errors import CaptureError
from tests._support.torch_release import TORCH

X = torch.randn(2, 3)


def total(output: torch.Tensor) -> torch.Tensor:
    return output.sum()


class Block(nn.Module):
    """A linear layer followed by what the test passes in."""

    def __init__(self, then: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("memory", torch.zeros(2, 3))
        self.then = then

    def forward(self, x: torch.Tensor) -> Any:
        return self.then(self, self.linear(x))


def refusal(model: nn.Module, inputs: Any = X, **options: Any) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(model, inputs, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def branches(module: Block, y: torch.Tensor) -> torch.Tensor:
    if y.sum() > 0:  # the guilty line
        y = y * 2
    return y.sum()


def picks(module: Block, y: torch.Tensor) -> torch.Tensor:
    return y[y.detach().relu().nonzero()].sum()


def reads(module: Block, y: torch.Tensor) -> torch.Tensor:
    return y.sum() * y.max().item()


def masks(module: Block, y: torch.Tensor) -> torch.Tensor:
    return y[:, y[0] > 0].sum()


@pytest.mark.parametrize(
    ("then", "what"),
    [
        (branches, "data-dependent control flow"),
        (reads, "data-dependent control flow"),
        (picks, "a tensor whose size depends on values"),
        (masks, "a tensor whose size depends on values"),
    ],
)
def test_what_depends_on_values(then: Callable[..., Any], what: str) -> None:
    message = refusal(nn.Sequential(nn.ReLU(), Block(then)))
    source, first = inspect.getsourcelines(then)
    assert f"{what} at {__file__}:{first + 1}: " in message
    assert f"`{source[1].partition('#')[0].strip()}" in message
    assert "in module '1'" in message


def test_a_boolean_index_is_made_of_constants_in_the_forward_pass() -> None:
    """A buffer may be loaded with other values."""
    assert "a boolean index" in (said := refusal(Block(masks))) and "make a constant one in the forward pass" in said
    kept = Block(lambda module, y: y[:, module.kept].sum())
    kept.register_buffer("kept", torch.tensor([True, False, True]))
    assert "a boolean index" in refusal(kept)
    capture(Block(lambda module, y: y[:, torch.tensor([True, False, True])].sum()), X)


def test_a_batch_norm_without_a_momentum() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None))
    assert "BatchNorm with momentum=None, which divides by a count" in (said := refusal(model, loss_fn=total))
    assert said.endswith("in module '1': give it a momentum")


@pytest.mark.parametrize("times", [1, 2])  # a leaf of autograd's graph, or not
@pytest.mark.parametrize("kept", [lambda w: w, lambda w: [w], lambda w: {"w": w}])
def test_a_kept_tensor_that_needs_gradients_is_no_constant(kept: Callable[[Any], Any], times: int) -> None:
    block = Block(lambda module, y: (y * next(t for t in pytree.tree_leaves(module.kept))).sum())
    weight = torch.ones(3, requires_grad=True)
    block.kept = kept(weight if times == 1 else weight * times)
    assert "that needs gradients is no parameter of the model, and would get none" in refusal(block)


@pytest.mark.parametrize("kept", [lambda y: y, lambda y: [y], lambda y: {"y": y}])
def test_what_the_last_forward_pass_left_does_no_harm(kept: Callable[[Any], Any]) -> None:
    def then(module: Block, y: torch.Tensor) -> torch.Tensor:
        module.last = kept(y)
        return y.sum()

    (block := Block(then))(X)
    assert capture(block, X).fingerprint == capture(Block(then), X).fingerprint


def fails(module: Block, y: torch.Tensor) -> torch.Tensor:
    raise KeyError("no such\nhead")


def test_an_exception_of_the_users_own_keeps_its_cause() -> None:
    with pytest.raises(
        CaptureError, match=r"KeyError at .*test_refusals.py:\d+: `raise KeyError.*in the root module"
    ) as e:
        capture(Block(fails), X)
    assert isinstance(e.value.__cause__, KeyError)
    assert "\n" not in str(e.value)


def test_an_exception_inside_torchs_own_modules_names_the_module(capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4))
    assert "RuntimeError in module '1'" in refusal(model, loss_fn=total)
    assert capfd.readouterr().err == ""  # torch logs no traceback either


def test_calls_that_do_not_fit_the_signature() -> None:
    assert "unexpected keyword argument 'y'" in refusal(nn.Linear(3, 3), {"y": X}, loss_fn=total)


@pytest.mark.parametrize(
    ("loss_fn", "expected"),
    [
        (None, "the loss must be a scalar, and has shape (2, 3)"),
        (lambda out: out, "the loss must be a scalar, and has shape (2, 3)"),
        (lambda out: None, "no loss in what the loss_fn returns"),
        (lambda out: out.argmax(), "the loss must be floating-point, and is torch.int64"),
        (lambda out: out.detach().sum(), "the loss depends on no trainable parameter"),
    ],
)
def test_no_scalar_loss(loss_fn: Any, expected: str) -> None:
    assert expected in refusal(nn.Linear(3, 3), loss_fn=loss_fn)


def test_a_model_without_labels_has_no_loss() -> None:
    assert "no loss in what the model (which returns a dict) returns" in refusal(Block(lambda module, y: {"logits": y}))


def test_targets_without_a_loss_function() -> None:
    assert refusal(nn.Linear(3, 3), example_targets=X) == "example_targets needs a loss_fn to receive them"


def test_inputs_that_are_no_inputs() -> None:
    assert "input args.0 requires grad" in refusal(nn.Linear(3, 3), X.clone().requires_grad_(), loss_fn=total)
    assert "input kwargs.cache is a object" in refusal(nn.Linear(3, 3), {"input": X, "cache": object()}, loss_fn=total)


def test_changes_in_place() -> None:
    class ChangesInput(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return super().forward(x)

    def changes_weight(module: Block, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            module.linear.weight.mul_(2)
        return y.sum()

    def remembers(module: Block, y: torch.Tensor) -> torch.Tensor:
        module.memory.copy_(y)
        return y.sum()

    assert "changes input args.0 in place" in refusal(ChangesInput(3, 3), loss_fn=total)
    assert "changes parameter linear.weight in place" in refusal(Block(changes_weight))
    assert "changes buffer memory in place: detach the new value" in refusal(Block(remembers))


def test_a_buffer_replaced_by_another_shape() -> None:
    def grows(module: Block, y: torch.Tensor) -> torch.Tensor:
        module.memory = torch.cat([module.memory, y.detach()])
        return y.sum()

    assert "replaces buffer memory by a tensor of another shape" in refusal(Block(grows))


def test_buffers_replaced_by_what_needs_gradients() -> None:
    def averages(module: Block, y: torch.Tensor) -> torch.Tensor:
        module.memory = 0.9 * module.memory + 0.1 * y
        return y.sum()

    assert "replaces buffer memory by what needs gradients: detach the new value" in refusal(Block(averages))


def test_who_deals_out_the_batch_already() -> None:
    assert refusal(nn.DataParallel(nn.Linear(3, 3)), loss_fn=total).endswith("give HAP its .module")


def test_operators_without_graph_form() -> None:
    def strided(module: Block, y: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(y, (2, 2), (1, 1)).sum()

    def conditional(module: Block, y: torch.Tensor) -> torch.Tensor:
        return torch.cond(y.sum() > 0, torch.cos, torch.sin, (y,)).sum()

    def draws(module: Block, y: torch.Tensor) -> torch.Tensor:
        return (y * torch.randn(3, generator=torch.Generator())).sum()

    call = "aten.randn.generator" if TORCH >= (2, 13) else "a draw"
    assert f"{call} with a generator of random numbers" in refusal(Block(draws))
    assert "aten.as_strided.default, whose result depends on memory layout" in refusal(Block(strided))
    assert "torch.cond, or another call of functions, at" in refusal(Block(conditional))


@pytest.mark.parametrize(
    "error, words",
    [
        (
            RuntimeError("Unhandled FakeTensor Device Propagation for aten.mul.Tensor, found cpu, meta"),
            "of two devices",
        ),
        (NotImplementedError("argument of type: <class 'torch._C.Generator'>"), "a draw with a generator"),
    ],
)
def test_what_other_releases_of_torch_say_otherwise(error: Exception, words: str) -> None:
    assert words in str(blame(error, "Block", "")) and type(error).__name__ not in str(blame(error, "Block", ""))


@pytest.mark.skipif(TORCH < (2, 13), reason="its trace has no such check")
def test_checks_of_values() -> None:
    def inverts(module: Block, y: torch.Tensor) -> torch.Tensor:
        return torch.linalg.lu_factor(module.linear.weight).LU.sum()

    checks = "calls aten._linalg_check_errors.default, which acts on values while the program runs"
    assert checks in refusal(Block(inverts))


def test_chance_that_every_step_would_share() -> None:
    def skips(module: Block, y: torch.Tensor) -> torch.Tensor:
        return y.sum() if random.random() < 2 else y.mean()

    def scales(module: Block, y: torch.Tensor) -> torch.Tensor:
        return (y * float(numpy.random.rand())).sum()

    def seeds(module: Block, y: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return (y + torch.randn_like(y)).sum()

    assert "it draws from Python's random numbers, and what it drew would be so in every step" in refusal(Block(skips))
    assert "it draws from NumPy's random numbers" in refusal(Block(scales))
    seeded = refusal(Block(seeds))
    assert "the model seeds PyTorch's random numbers" in seeded and "torch.manual_seed(3)" in seeded
    torch.manual_seed(0)
    first = torch.rand(())
    torch.random.manual_seed(0)
    assert first == torch.rand(()), "seeding is back"


class Anew(nn.Linear):
    """Makes its weight anew whenever modules are listed, as PEFT's LoRA of ``nn.MultiheadAttention`` does."""

    def named_modules(self, *args: Any, **options: Any) -> Any:
        self.weight = nn.Parameter(self.weight.data)
        return super().named_modules(*args, **options)


def test_parameters_that_are_made_anew_whenever_they_are_listed() -> None:
    assert "weight is another tensor whenever they are listed" in refusal(Anew(3, 3), loss_fn=torch.sum)


def test_parameters_that_are_no_plain_tensors() -> None:
    frozen = nn.Linear(3, 3).requires_grad_(False)
    shared = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    shared[1].weight = nn.Parameter(shared[0].weight.data)
    assert "the model has no trainable parameter" in refusal(frozen, loss_fn=total)
    assert "weight is not initialised yet" in refusal(nn.LazyLinear(3), loss_fn=total)
    assert "1.weight and 0.weight share memory but are two parameters" in refusal(shared, loss_fn=total)


class Shares(nn.Module):
    """``kept`` beside a parameter, each a part of the same memory."""

    def __init__(self, weight: torch.Tensor, kept: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        if isinstance(kept, nn.Parameter):
            self.kept = kept
        else:
            self.register_buffer("kept", kept)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() * self.weight.sum() * self.kept.sum()


FLAT, TABLE = torch.ones(10), torch.ones(4, 6)


@pytest.mark.parametrize(
    ("weight", "kept"), [(FLAT, FLAT), (FLAT, FLAT[4:]), (FLAT[4:], FLAT[:5]), (TABLE[:, :2], TABLE[:, 1:])]
)
def test_memory_that_a_parameter_shares(weight: torch.Tensor, kept: torch.Tensor) -> None:
    stale = "buffer kept shares memory with parameter weight, and would not change with it"
    assert stale in refusal(Shares(weight, kept))
    assert "kept and weight share memory but are two parameters" in refusal(Shares(weight, nn.Parameter(kept)))


@pytest.mark.parametrize(
    ("weight", "kept"), [(FLAT[:5], FLAT[5:]), (TABLE[:, :2], TABLE[:, 2:]), (FLAT[:0], FLAT), (FLAT[::2], FLAT[1::2])]
)
def test_parts_of_one_storage_that_share_nothing(weight: torch.Tensor, kept: torch.Tensor) -> None:
    for own in (kept, nn.Parameter(kept)):
        capture(Shares(weight, own), X)
        capture(Shares(weight, own).to("meta"), X)


def test_a_buffer_that_is_registered_twice_or_lies_in_a_frozen_parameter() -> None:
    model = Shares(torch.ones(3), torch.ones(3))
    model.register_buffer("again", model.kept)
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    model.register_buffer("alike", model.frozen.data)
    capture(model, X)


def test_a_tensor_without_data_outside_of_the_buffers() -> None:
    block = Block(lambda module, y: (y * module.table).sum())
    block.table = torch.ones(3, device="meta")
    assert "a tensor that the model keeps must be a registered buffer" in refusal(block)


def test_a_large_tensor_outside_of_the_buffers() -> None:
    block = Block(lambda module, y: (y[0, 0] * module.table).sum())
    block.table = torch.ones(1025, 1024)
    assert "a tensor of shape (1025, 1024) is built into the program: register it as a buffer" in refusal(block)


def test_a_loss_with_parameters_of_its_own() -> None:
    assert "the loss_fn has trainable parameters" in refusal(nn.Linear(3, 3), loss_fn=nn.Linear(3, 1))


class Gathering(nn.Module):
    def __init__(self, call: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.call = nn.Linear(3, 3), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        self.call(out.detach())
        return out.square().mean()


COLLECTIVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": dist.all_reduce,
    "all_gather": lambda x: dist.all_gather([torch.zeros_like(x)], x),
    "differentiable": dist_nn.all_reduce,
    "functional": lambda x: functional_collectives.all_reduce(x, "sum", dist.group.WORLD),
    "barrier": lambda x: dist.barrier(),
    "of objects": lambda x: dist.all_gather_object([None], x.shape),
}


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_in_the_model(name: str, group: None) -> None:
    """None was meant for the global batch; they draw names from Python's random numbers, which is not what is wrong."""
    said = refusal(Gathering(COLLECTIVES[name]))
    assert "a collective in the model, at " in said and "test_refusals.py" in said
    assert "HAP's batch is the global one" in said and said.endswith("leave it out")


def test_a_batch_norm_over_all_ranks_is_one_over_the_batch(group: None) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    expected = capture(model, torch.zeros(4, 3), loss_fn=total)
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert capture(synced, torch.zeros(4, 3), loss_fn=total).fingerprint == expected.fingerprint
