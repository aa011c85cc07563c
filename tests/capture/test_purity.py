"""Capture is a function of the model's structure alone, and leaves nothing changed behind it."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from hap.capture import capture
from hap.errors import CaptureError
from tests.capture.test_models import Counting, SmallCnn, tiny_gpt2
from tests.capture.test_refusals import Block, branches

IDS = torch.randint(0, 19, (4, 8), generator=torch.Generator().manual_seed(0))


def gpt2_fingerprint() -> str:
    return capture(tiny_gpt2(), {"input_ids": IDS, "labels": IDS}).fingerprint


def test_two_captures_are_identical() -> None:
    assert gpt2_fingerprint() == gpt2_fingerprint()


@pytest.mark.long
def test_the_hash_seed_does_not_matter() -> None:
    code = "from tests.capture.test_purity import gpt2_fingerprint as f; print(f())"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "4321", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == gpt2_fingerprint()


def test_a_model_on_meta_gives_the_same_graph() -> None:
    with torch.device("meta"):
        model = tiny_gpt2()
    ids = IDS.to("meta")
    assert capture(model, {"input_ids": ids, "labels": ids}).fingerprint == gpt2_fingerprint()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")])
def test_the_callers_context_does_not_matter(context: type) -> None:
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    plain = capture(model, x, loss_fn=lambda out: (out + torch.arange(3)).sum()).fingerprint
    with context():
        assert capture(model, x, loss_fn=lambda out: (out + torch.arange(3)).sum()).fingerprint == plain


def test_names_are_identifiers_and_unique() -> None:
    model = nn.ModuleDict({"a_b": nn.Linear(3, 3), "a": nn.ModuleDict({"b": nn.Linear(3, 3)})})

    def both(output: object) -> torch.Tensor:
        return output  # type: ignore[return-value]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nets = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.nets["a_b"](self.nets["a"]["b"](x)).sum()

    graph = capture(Net(), torch.randn(2, 3), loss_fn=both)
    names = [n.name for n in graph.nodes]
    assert all(name.isidentifier() for name in names)
    assert len(set(names)) == len(names)
    assert [n.name for n in graph.sources("parameter")] == [
        "p_nets_a_b_weight",
        "p_nets_a_b_bias",
        "p_nets_a_b_weight_again_1",
        "p_nets_a_b_bias_again_1",
    ]


def test_the_model_is_untouched() -> None:
    model = SmallCnn()
    model.head.eval()
    before = copy.deepcopy(model.state_dict())
    objects = [id(t) for t in (*model.parameters(), *model.buffers())]
    capture(model, torch.randn(4, 3, 6, 6), loss_fn=lambda out: out.sum())
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == objects
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert (model.training, model.conv.training, model.head.training) == (True, True, False)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("model", [Counting(), Block(branches)], ids=["succeeds", "fails"])
def test_global_state_is_restored(model: nn.Module) -> None:
    def state() -> tuple[object, ...]:
        flags = torch.compiler.is_exporting(), torch.compiler.is_compiling()
        return (
            *flags,
            torch.is_grad_enabled(),
            torch.get_default_device(),
            torch.get_default_dtype(),
            torch.initial_seed(),
        )

    before, random = state(), torch.get_rng_state()
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    try:
        capture(model, x.double() if isinstance(model, Counting) else x)
    except CaptureError:
        assert isinstance(model, Block)
    assert state() == before
    assert torch.equal(torch.get_rng_state(), random)
    y = nn.Linear(3, 3)(x)  # and eager torch still works, without fake tensors
    y.sum().backward()
    assert type(y) is torch.Tensor
