"""Autocast around a step and inside of it: the casts of eager PyTorch, forward and backward."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from hap.capture import capture, interpret, source_values
from hap.capture.autocast import IN_FLOAT32, Autocast
from hap.graph import Graph
from tests.capture.equality import assert_close

Region = Callable[[], AbstractContextManager[object]]


class Exact(nn.Module):
    """Its second product is in float32, whatever is active outside. Without biases no kernel rounds more than once."""

    def __init__(self, region: Region = lambda: torch.autocast("cpu", enabled=False)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.region = nn.Linear(6, 10, bias=False), nn.Linear(10, 4, bias=False), region

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with self.region():
            return self.second(x.float()).square().mean()


def products(graph: Graph) -> dict[tuple[str, torch.dtype], int]:
    """(phase, dtype) -> how many."""
    found: dict[tuple[str, torch.dtype], int] = {}
    for node in graph.nodes:
        if node.op == "aten.mm.default":
            found[node.phase, node.meta.dtype] = found.get((node.phase, node.meta.dtype), 0) + 1
    return found


EXACT = {
    ("forward", torch.bfloat16): 1,
    ("forward", torch.float32): 1,
    ("backward", torch.float32): 2,
    ("backward", torch.bfloat16): 1,
}


def assert_gradients(graph: Graph, model: nn.Module, x: torch.Tensor) -> None:
    """Those of ``Exact`` in eager PyTorch, under the CPU's autocast, which has the same products."""
    eager = Exact()
    eager.load_state_dict(model.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        loss = eager(x)
    loss.backward()
    values = interpret(graph, source_values(graph, model, x))
    for name, parameter in eager.named_parameters():
        assert_close(values[graph.gradients[name]], parameter.grad, 1e-6, name)


def test_the_backward_pass_is_outside_of_autocast() -> None:
    model, x = Exact(), torch.randn(8, 6)
    with torch.autocast("cpu", torch.bfloat16):
        graph = capture(model, x)
    assert products(graph) == EXACT
    assert_gradients(graph, model, x)


@pytest.fixture
def under_cudas() -> Iterator[None]:
    """As within ``torch.autocast("cuda", torch.bfloat16)``, which does nothing where there is no GPU."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cuda", torch.float16)


REGIONS: dict[str, Region] = {
    "cuda": lambda: torch.autocast("cuda", enabled=False),
    "the tensors' device": lambda: torch.autocast("cpu", enabled=False),
    "torch.cuda.amp": lambda: torch.cuda.amp.autocast(enabled=False),
}


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.usefixtures("under_cudas")
def test_a_region_in_float32_under_cudas_autocast(region: str) -> None:
    model, x = Exact(REGIONS[region]), torch.randn(8, 6)
    graph = capture(model, x)
    assert products(graph) == EXACT
    assert_gradients(graph, model, x)
    assert torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled("cpu")


class Squares(torch.autograd.Function):
    """(x @ x.T) in float32, and so is its gradient."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x @ x.T

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return (grad + grad.T) @ x


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Squares.apply(self.layer(x)).mean()


@pytest.mark.usefixtures("under_cudas")
def test_custom_fwd_under_cudas_autocast() -> None:
    found = products(capture(OwnFunction(), torch.randn(8, 6)))
    assert found == {
        ("forward", torch.bfloat16): 1,
        ("forward", torch.float32): 1,
        ("backward", torch.float32): 1,
        ("backward", torch.bfloat16): 1,
    }


class Inside(nn.Module):
    """A part of it is under CUDA's autocast, and a part of that under none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        with torch.autocast("cuda", torch.bfloat16):
            x = torch.softmax(first(x), -1)  # in float32, of CUDA's
            with torch.autocast("cuda", enabled=False):
                x = second(x)
        return third(x).mean()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a trace on the CPU asks."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: None)


@pytest.mark.usefixtures("cuda")
def test_an_autocast_of_cuda_inside_of_none() -> None:
    graph = capture(Inside(), torch.randn(8, 6))
    assert products(graph) == {
        ("forward", torch.bfloat16): 1,
        ("forward", torch.float32): 2,
        ("backward", torch.bfloat16): 1,
        ("backward", torch.float32): 4,
    }
    assert {n.meta.dtype for n in graph.nodes if "softmax" in n.op} == {torch.float32}


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch says so where there is no GPU")
def test_an_autocast_of_cuda_inside_where_there_is_none_does_nothing() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        graph = capture(Inside(), torch.randn(8, 6))
    assert {dtype for _, dtype in products(graph)} == {torch.float32}


def test_under_the_cpus_autocast_one_of_cuda_does_nothing() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        graph = capture(Exact(REGIONS["cuda"]), torch.randn(8, 6))
    assert {dtype for _, dtype in products(graph)} == {torch.bfloat16}


def test_the_list_of_what_cuda_computes_in_float32_is_that_of_torch() -> None:
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    lists = dict(re.findall(r"#define AT_FORALL_(\w+)\(_\)((?:.*\\\n)*.*)", header.read_text()))
    names = re.findall(r"_\((\w+)[,)]", lists["FP32"] + lists["FP32_SET_OPT_DTYPE"])
    names += re.findall(r"ADD_NS\((\w+)\)", lists["DIFFERENT_REDISPATCH_SIGNATURE"])
    assert len(names) > 60
    assert sorted(set(names) - IN_FLOAT32) == []


IMAGE = torch.ones(1, 2, 4, 4, dtype=torch.bfloat16)
WIDE = [
    lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
    lambda x: functional.interpolate(x, (8, 8)),
    lambda x: torch.logsumexp(x, 1),
    lambda x: torch.linalg.vector_norm(x, dim=1),
    lambda x: torch.linalg.matrix_norm(x),
    lambda x: torch.linalg.norm(x, dim=1),
    lambda x: functional.huber_loss(x, x),
    lambda x: torch.renorm(x, 2, 0, 1.0),
    lambda x: torch.special.logsumexp(x, 1),
]


@pytest.mark.parametrize("function", WIDE)
def test_what_cuda_computes_in_float32_is_in_float32(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with Autocast("cuda", torch.bfloat16).on_cpu():
        assert function(IMAGE).dtype == torch.float32


def test_what_cuda_computes_in_16_bits_stays_so() -> None:
    with Autocast("cuda", torch.bfloat16).on_cpu():
        assert functional.interpolate(IMAGE, (2, 2), mode="area").dtype == torch.bfloat16
        assert functional.gelu(IMAGE).dtype == torch.bfloat16
