"""A captured step, run node by node, is the module's own step: loss, every gradient, every changed buffer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from hap.capture import capture, input_paths, interpret, source_values
from hap.errors import CaptureError
from tests.capture.equality import assert_close, assert_equals_eager, count


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def tiny_gpt2(attention: str = "sdpa") -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_head=3, n_embd=12, vocab_size=19, n_positions=8, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation=attention,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def shifted_cross_entropy(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """In the logits' own dtype (Hugging Face's own loss is always in float32)."""
    logits = output.logits[:, :-1]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=-100)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 4)).double()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gpt2(attention: str) -> None:
    model = tiny_gpt2(attention).double()
    ids = torch.randint(0, 19, (4, 8))
    labels = ids.clone()
    labels[0, 3:] = -100
    graph = assert_equals_eager(model, {"input_ids": ids}, loss_fn=shifted_cross_entropy, targets=labels)
    assert count(graph).get("hap.attention.default", 0) == (2 if attention == "sdpa" else 0)


def test_gpt2_with_its_own_loss_in_float32() -> None:
    ids = torch.randint(0, 19, (4, 8))
    graph = assert_equals_eager(tiny_gpt2(), {"input_ids": ids, "labels": ids}, tolerance=1e-6)
    assert [n.target for n in graph.sources("input")] == ["kwargs.input_ids", "kwargs.labels"]


def test_gpt2_attention_is_causal_without_a_mask_tensor() -> None:
    ids = torch.zeros(4, 8, dtype=torch.int64)
    graph = capture(tiny_gpt2(), {"input_ids": ids, "labels": ids})
    (first, _) = (n for n in graph.nodes if n.op == "hap.attention.default")
    q, k, v, mask, is_causal, scale = first.args
    assert (mask, is_causal, scale) == (None, True, 0.5)  # head size 4
    assert [graph.meta(x).shape for x in (q, k, v)] == [(4, 3, 8, 4)] * 3
    assert [o and o.shape for o in first.outputs] == [(4, 3, 8, 4), (4, 3, 8)]
    assert first.module == "transformer.h.0.attn"
    assert "aten.le.Tensor" not in count(graph)


def test_gpt2_with_an_attention_mask_keeps_the_mask() -> None:
    ids = torch.randint(0, 19, (2, 8))
    keep = torch.ones(2, 8, dtype=torch.int64)
    keep[1, 6:] = 0
    inputs = {"input_ids": ids, "attention_mask": keep}
    graph = assert_equals_eager(tiny_gpt2().double(), inputs, loss_fn=shifted_cross_entropy, targets=ids)
    masks = {n.args[3] for n in graph.nodes if n.op == "hap.attention.default"}
    assert [graph.meta(m).shape for m in masks] == [(2, 1, 8, 8)]


def test_llama_with_grouped_queries() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=19, max_position_embeddings=8,
    )  # fmt: skip
    ids = torch.randint(0, 19, (2, 6))
    model = LlamaForCausalLM(config).double()
    graph = assert_equals_eager(model, {"input_ids": ids}, loss_fn=shifted_cross_entropy, targets=ids, tolerance=1e-7)
    for node in graph.nodes:
        if node.op == "hap.attention.default":
            assert [graph.meta(x).shape for x in node.args[:3]] == [(2, 4, 6, 4)] * 3  # keys repeated for their queries
            assert node.args[3:5] == (None, True)  # its mask is worked out, though it is looked up batch by batch


def test_mlp_with_loss_fn_and_targets() -> None:
    graph = assert_equals_eager(
        mlp(), torch.randn(5, 6).double(), loss_fn=F.mse_loss, targets=torch.randn(5, 4).double()
    )
    assert [n.target for n in graph.sources("input")] == ["args.0", "targets.0"]
    assert count(graph)["aten.gelu.default"] == 1  # not taken apart
    assert {"aten.addmm.default", "aten.mse_loss.default", "aten.mean.default"}.isdisjoint(count(graph))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy(reduction: str, weighted: bool) -> None:
    weight = torch.tensor([0.5, 1.0, 2.0, 3.0]).double() if weighted else None
    loss = nn.CrossEntropyLoss(weight, ignore_index=3, reduction=reduction)
    assert_equals_eager(mlp(), torch.randn(5, 6).double(), loss_fn=loss, targets=torch.tensor([0, 3, 1, 2, 1]))


@pytest.mark.parametrize("loss", [nn.SmoothL1Loss(), nn.HuberLoss(), nn.BCEWithLogitsLoss(), nn.L1Loss()])
def test_other_losses_divide_by_a_literal(loss: nn.Module) -> None:
    graph = assert_equals_eager(mlp(), torch.randn(5, 6).double(), loss_fn=loss, targets=torch.rand(5, 4).double())
    divisors = [n.args[1] for n in graph.nodes if n.op == "aten.div.Tensor" and n.phase == "forward"]
    assert divisors == [20]  # 5 rows of 4


class SmallCnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = F.max_pool2d(F.relu(self.norm(self.conv(images))), 2)
        return self.head(features.mean((2, 3)))


def test_cnn_returns_its_running_statistics() -> None:
    images, classes = torch.randn(4, 3, 6, 6).double(), torch.tensor([0, 1, 1, 0])
    graph = assert_equals_eager(SmallCnn().double(), images, loss_fn=F.cross_entropy, targets=classes)
    assert sorted(graph.updates) == ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]


def test_cnn_in_eval_mode_updates_nothing() -> None:
    images, classes = torch.randn(4, 3, 6, 6).double(), torch.tensor([0, 1, 1, 0])
    graph = assert_equals_eager(SmallCnn().double().eval(), images, loss_fn=F.cross_entropy, targets=classes)
    assert graph.updates == {}


def test_an_lstm_in_float32_is_made_of_products_and_captures_alike_every_time() -> None:
    model, x = nn.LSTM(6, 4, batch_first=True), torch.zeros(3, 2, 6)
    first, second = (capture(model, x, loss_fn=lambda out: out[0].sum()) for _ in range(2))
    assert first.fingerprint == second.fingerprint and count(first)["aten.mm.default"] > 0
    assert not [n.op for n in first.nodes if "rnn" in n.op]


def test_transformer_encoder() -> None:
    layer = nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=12, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, num_layers=2).double()
    x, y = torch.randn(3, 5, 8).double(), torch.randn(3, 5, 8).double()
    graph = assert_equals_eager(model, x, loss_fn=F.mse_loss, targets=y)
    assert count(graph)["hap.attention.default"] == count(graph)["hap.attention_backward.default"] == 2
    assert {n.args[3:5] for n in graph.nodes if n.op == "hap.attention.default"} == {(None, False)}


class Affine(nn.Module):
    """Called in every way an input can come in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3).double())

    def forward(self, x: torch.Tensor, extra: Any = None, *, scale: Any = 1.0) -> dict[str, torch.Tensor]:
        if isinstance(extra, dict):
            x = x + extra["shift"]
        return {"loss": (x * self.weight * scale).sum()}


def test_inputs_positional_keyword_nested_and_mixed() -> None:
    x, shift, scale = (torch.randn(2, 3).double() for _ in range(3))
    cases: list[tuple[Any, list[str]]] = [
        (x, ["args.0"]),
        ((x,), ["args.0"]),
        ([x, {"shift": shift}], ["args.0", "args.1.shift"]),
        ({"x": x, "scale": scale}, ["kwargs.scale", "kwargs.x"]),
        (((x,), {"scale": scale}), ["args.0", "kwargs.scale"]),
        (((x, {"shift": shift}), {"scale": 3.0}), ["args.0", "args.1.shift"]),
    ]
    for inputs, paths in cases:
        graph = assert_equals_eager(Affine(), inputs)
        assert [n.target for n in graph.sources("input")] == [path for path, _ in input_paths(inputs)] == paths


def test_keyword_order_is_no_part_of_the_graph() -> None:
    x, scale = torch.randn(2, 3).double(), torch.randn(2, 3).double()
    one, two = capture(Affine(), {"x": x, "scale": scale}), capture(Affine(), {"scale": scale, "x": x})
    assert one.fingerprint == two.fingerprint


def test_frozen_parameters_are_sources_without_gradient() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    graph = assert_equals_eager(
        model, torch.randn(5, 6).double(), loss_fn=F.mse_loss, targets=torch.randn(5, 4).double()
    )
    assert [n.target for n in graph.sources("parameter")] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert list(graph.gradients) == ["0.bias", "2.weight", "2.bias"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def test_tied_weights_are_one_parameter_whose_gradients_are_added() -> None:
    ids, targets = torch.randint(0, 7, (5,)), torch.randint(0, 7, (5,))
    graph = assert_equals_eager(Tied().double(), ids, loss_fn=F.cross_entropy, targets=targets)
    assert graph.tied == {"head.weight": "embed.weight"}
    assert list(graph.gradients) == ["embed.weight"]  # and none for what the loss does not reach
    assert [n.target for n in graph.sources("parameter")] == ["unused.weight", "unused.bias", "embed.weight"]
    last = graph.by_name[graph.gradients["embed.weight"].node]
    assert (last.op, last.phase) == ("aten.add.Tensor", "backward")


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3).double())
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return ((x - self.mean) * self.weight).sum()


def test_buffers_assigned_or_changed_in_place() -> None:
    graph = assert_equals_eager(Counting(), torch.randn(4, 3).double())
    assert sorted(graph.updates) == ["calls", "mean"]


class WithConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3).double())
        self.table = torch.arange(3.0).double()  # neither parameter nor buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight * self.table * torch.tensor([1.0, 2.0, 4.0]).double()).sum()


def test_tensors_built_into_the_program_are_constants() -> None:
    graph = assert_equals_eager(WithConstant(), torch.randn(2, 3).double())
    assert sorted(t.tolist() for t in graph.constants.values()) == [[0.0, 1.0, 2.0], [1.0, 2.0, 4.0]]


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool, first: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6).double() if first else nn.Identity()
        self.block, self.last, self.use_reentrant = mlp(), nn.Linear(4, 3).double(), use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=self.use_reentrant))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_activation_checkpointing_is_left_to_the_planner(use_reentrant: bool) -> None:
    loss_fn, x = (lambda out: out.square().sum()), torch.randn(5, 6).double()
    model = Checkpointed(use_reentrant, first=True)
    graph = assert_equals_eager(model, x, loss_fn=loss_fn)
    plain = capture(nn.Sequential(model.first, model.block, model.last), x, loss_fn=loss_fn)
    assert count(graph) == count(plain) and set(graph.gradients) == set(dict(model.named_parameters()))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_of_what_needs_no_gradient_has_none_inside() -> None:
    model = Checkpointed(use_reentrant=True, first=False)
    graph = assert_equals_eager(model, torch.randn(5, 6).double(), loss_fn=lambda out: out.square().sum())
    assert set(graph.gradients) == {"last.weight", "last.bias"}


def test_checkpointing_is_as_before_after_a_capture() -> None:
    model = Checkpointed(use_reentrant=True, first=True)
    with pytest.raises(CaptureError):
        capture(model, torch.randn(5, 6).double(), loss_fn=lambda out: out)
    assert "apply" not in vars(CheckpointFunction)
    model(torch.randn(5, 6).double()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_modules_and_phases_of_the_calls() -> None:
    graph = capture(mlp(), torch.randn(5, 6).double(), loss_fn=lambda out: out.square().sum())
    products = [(n.module, n.phase) for n in graph.nodes if n.op == "aten.mm.default"]
    forward, backward = [("0", "forward"), ("2", "forward")], [("2", "backward"), ("2", "backward"), ("0", "backward")]
    assert products == forward + backward
    reached = {"tangent"}
    for node in graph.nodes:
        if any(v.node in reached for v in node.inputs):
            reached.add(node.name)
    assert {n.name for n in graph.nodes if n.phase == "backward"} == reached


class Ranges(nn.Module):
    """Says to profilers where it is, as ``nn.DataParallel`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("first"):
            x = self.first(x)
            with torch.autograd.profiler.record_function("second"):
                x = self.second(x.tanh())
        return x.square().sum()


def test_ranges_for_profilers_are_no_calls() -> None:
    graph = assert_equals_eager(Ranges().double(), torch.randn(4, 6, dtype=torch.float64))
    assert not [n for n in graph.nodes if "profiler" in n.op]


def test_a_module_in_data_parallel_is_what_it_is() -> None:
    layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh()).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    graph = capture(nn.Sequential(nn.DataParallel(layers)), x, loss_fn=lambda y: y.square().sum())
    assert list(graph.gradients) == ["0.module.0.weight", "0.module.0.bias"]


class Frozen(nn.Module):
    """Its head, frozen, reads what a latent is predicted to be, as NextLat has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 5), nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frozen = copy.deepcopy(self.head)
        for p in frozen.parameters():
            p.requires_grad_(False).mul_(2)
        y = self.first(x)
        return (frozen(y) - self.head(y.detach())).square().sum()


def test_a_module_that_the_forward_pass_copies_is_one_of_its_own() -> None:
    assert_equals_eager(Frozen().double(), torch.randn(4, 6, dtype=torch.float64))


class LowRank(nn.Module):
    """A class that Python cannot make without arguments, and does not copy; nor does it static methods."""

    def __new__(cls, width: int, *, rank: int | None = None) -> Any:
        return super().__new__(cls) if rank else nn.Linear(width, width)

    def __init__(self, width: int, *, rank: int) -> None:
        super().__init__()
        self.down, self.up, self.act = nn.Linear(width, rank), nn.Linear(rank, width), staticmethod(torch.tanh)
        self.later = lambda x: self.up(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.later(self.act(self.down(x)))


@pytest.mark.parametrize("is_root", [True, False])
def test_what_python_does_not_copy(is_root: bool) -> None:
    one, x = LowRank(6, rank=2).double(), torch.randn(4, 6, dtype=torch.float64)
    model = one if is_root else nn.Sequential(nn.Linear(6, 6).double(), one)
    graph = capture(model, x, loss_fn=lambda y: y.square().sum())
    values = interpret(graph, source_values(graph, model, x, None))
    model(x).square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert_close(values[graph.gradients[name]], p.grad, 1e-12, name)
