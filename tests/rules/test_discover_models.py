"""Operators of the user's own in a model: what is discovered is dealt out, what is not runs whole and is named."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import hap
from hap.graph import Graph
from hap.report.explain import explain
from hap.rules.table import DEFAULT_TABLE
from tests._support.lab import lab
from tests._support.ranks import run_ranks

BATCH, WIDTH = 48, 64
NORMED, DRIFT, BACK = "hap_test_models.row_norm", "hap_test_models.drift", "hap_test_models.row_norm_back"


@torch.library.custom_op("hap_test_models::row_norm", mutates_args=())
def row_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each row to length one, then scaled: rows may be cut, columns may not."""
    return x / (x.norm(dim=1, keepdim=True) + 1) * weight


@torch.library.custom_op("hap_test_models::row_norm_back", mutates_args=())
def row_norm_back(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of x as it is cut, of the weight a sum over rows."""
    length = x.norm(dim=1, keepdim=True)
    pulled, scale = grad * weight, length + 1
    dx = pulled / scale - x * (pulled * x).sum(1, keepdim=True) / (length * scale**2)
    dw = (grad * x / scale).sum(0)
    return dx, dw


@torch.library.custom_op("hap_test_models::drift", mutates_args=())
def drift(x: torch.Tensor) -> torch.Tensor:
    """Depends on all of x at once, and not linearly."""
    return x / (1 + x.abs().max())


@row_norm.register_fake
def _(x, weight):
    return torch.empty_like(x)


@row_norm_back.register_fake
def _(grad, x, weight):
    return torch.empty_like(x), torch.empty_like(weight)


drift.register_fake(torch.empty_like)
row_norm.register_autograd(
    lambda context, grad: row_norm_back(grad, *context.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
drift.register_autograd(lambda context, grad: grad * 0.5)  # as good as any: both sides of a comparison have it


class Own(nn.Module):
    def __init__(self, *, drifts: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.drifts = drifts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = row_norm(self.first(x), self.scale)
        return self.second(drift(x) if self.drifts else x)


def step(drifts: bool) -> tuple[nn.Module, dict[str, object]]:
    model = Own(drifts=drifts).double()
    x, y = torch.randn(BATCH, WIDTH, dtype=torch.float64), torch.randn(BATCH, 8, dtype=torch.float64)
    return model, {"example_inputs": (x,), "example_targets": y, "loss_fn": functional.mse_loss, "effort": "quick"}


def discovered(drifts: bool) -> None:
    for op in (NORMED, BACK, *([DRIFT] if drifts else [])):
        hap.discover_rule(f"{op}.default")


@pytest.fixture(autouse=True)
def empty_memory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_without_a_word_an_unknown_operator_is_refused_with_both_remedies():
    model, arguments = step(drifts=False)
    with pytest.raises(hap.MissingRuleError, match=r"row_norm\.default .*hap\.register_rule\(.*hap\.discover_rule\("):
        hap.plan(model, lab(), **arguments)


def test_a_discovered_operator_is_dealt_out_and_named_nowhere():
    discovered(drifts=False)
    model, arguments = step(drifts=False)
    plan = hap.plan(model, lab(), **arguments)
    (norm,) = [s for name, s in plan.strategies.items() if name.startswith("row_norm") and "back" not in name]
    (back,) = [s for name, s in plan.strategies.items() if name.startswith("row_norm_back")]
    assert norm.startswith("S(0:1x48x1@") and norm.count("S(0:1x48x1@") == 2, "rows in, rows out, the scale whole"
    assert back.endswith(", P"), "the scale's gradient is a sum over ranks"
    assert "whole on every device" not in explain(plan)


def test_an_operator_that_cannot_be_cut_runs_whole_and_the_explanation_names_it():
    discovered(drifts=True)
    model, arguments = step(drifts=True)
    plan = hap.plan(model, lab(), **arguments)
    (drifting,) = [s for name, s in plan.strategies.items() if name.startswith("drift")]
    assert drifting == "R -> R"
    (line,) = [line for line in explain(plan).splitlines() if "whole on every device" in line]
    assert line.startswith(f"assumed: {DRIFT}.default (1 call) runs whole on every device: none of 3 ways to cut")


def compare(rank: int, drifts: bool, folder: str) -> tuple[float, float, tuple[int, ...]]:
    """Relative errors of the loss and of the worst gradient, and how the batch is dealt."""
    import os

    os.environ["XDG_CACHE_HOME"] = folder
    discovered(drifts)
    model, arguments = step(drifts)
    program = hap.compile(model, lab(), **arguments)
    x, y = arguments["example_inputs"][0], arguments["example_targets"]
    share, target = program.shard_batch((x,), y)
    loss = program(*share, targets=target)
    loss.backward()
    expected = functional.mse_loss(model(x), y)
    expected.backward()
    found = program.full_gradients()
    worst = max(float((found[n] - p.grad).abs().max() / p.grad.abs().max()) for n, p in model.named_parameters())
    return abs(loss.item() / expected.item() - 1), worst, next(iter(program.plan.sizes.values()))


@pytest.mark.parametrize("drifts", [False, True], ids=["discovered", "whole"])
def test_on_three_unequal_ranks_it_equals_one_device(drifts, tmp_path):
    for loss, gradient, sizes in run_ranks(3, compare, drifts, str(tmp_path)):
        assert loss < 1e-10 and gradient < 1e-10
        assert len(set(sizes)) > 1, f"{sizes}: the batch is dealt unevenly"


def test_what_stops_the_batch_alone_is_named():
    """Rows of x in a random order: the table has no rule by which a permutation's input may be cut along it."""
    from hap.rules.choices import choices
    from hap.rules.whole import find_forced
    from tests.rules.graphs import GraphBuilder, meta

    b = GraphBuilder()
    x = b.source("input", "x", 8, 6)
    scan = b.call("scan", "aten.cumsum.default", x, 0, out=meta(8, 6), module="net.scan")
    graph: Graph = b.finish(scan)
    assert [str(f) for f in find_forced(choices(graph), DEFAULT_TABLE)] == [
        "aten.cumsum.default (1 call, first in module 'net.scan') takes the whole batch on every device: "
        "its rule has no sound way to cut this call"
    ]
