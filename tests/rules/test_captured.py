"""Every strategy of every operator call of small captured models is proved by running it on uneven pieces."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional

from hap.capture import capture
from hap.graph import Graph
from hap.placement import Shard
from hap.rules.choices import Choices, choices
from hap.rules.localize import localize
from hap.rules.prove import prove_graph

BATCH, LENGTH, VOCABULARY, WIDTH, HEADS = 8, 10, 97, 48, 6
IDS = torch.zeros(BATCH, LENGTH, dtype=torch.int64)


def gpt2(attention: str) -> Graph:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2,
        n_head=HEADS,
        n_embd=WIDTH,
        vocab_size=VOCABULARY,
        n_positions=16,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        attn_implementation=attention,
    )
    return capture(GPT2LMHeadModel(config), {"input_ids": IDS, "labels": IDS})


def bert() -> Graph:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        intermediate_size=96,
        max_position_embeddings=16,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    return capture(BertForMaskedLM(config), {"input_ids": IDS, "labels": IDS, "attention_mask": IDS})


def llama() -> Graph:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=3,
        intermediate_size=96,
    )
    return capture(LlamaForCausalLM(config), {"input_ids": IDS, "labels": IDS})


def vit() -> Graph:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        intermediate_size=96,
        image_size=16,
        patch_size=8,
        num_labels=5,
    )
    inputs = {"pixel_values": torch.zeros(BATCH, 3, 16, 16), "labels": IDS[:, 0]}
    return capture(ViTForImageClassification(config), inputs)


def encoder() -> Graph:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 96, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(WIDTH, 5))
    inputs, targets = torch.zeros(BATCH, LENGTH, WIDTH), torch.zeros(BATCH, LENGTH, 5)
    return capture(model, inputs, loss_fn=functional.mse_loss, example_targets=targets)


def mlp() -> Graph:
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.SiLU(), nn.Linear(24, 5))
    targets = torch.zeros(BATCH, dtype=torch.int64)
    return capture(model, torch.zeros(BATCH, 12), loss_fn=functional.cross_entropy, example_targets=targets)


def cnn() -> Graph:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.GroupNorm(2, 8),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 6, 3, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    targets = torch.zeros(BATCH, dtype=torch.int64)
    return capture(model, torch.zeros(BATCH, 3, 12, 12), loss_fn=functional.cross_entropy, example_targets=targets)


class Codes(nn.Module):
    """As many codes as samples: that a dim is as large as the batch does not make it the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.codes = nn.Linear(12, 12), nn.Parameter(torch.zeros(BATCH, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cdist(self.layer(x), self.codes, p=1.0).amin(-1).mean()


def codes() -> Graph:
    return capture(Codes(), torch.zeros(BATCH, LENGTH, 12))


MODELS = {
    "gpt2": lambda: gpt2("sdpa"),
    "gpt2 eager": lambda: gpt2("eager"),
    "bert": bert,
    "llama": llama,
    "vit": vit,
    "encoder": encoder,
    "mlp": mlp,
    "cnn": cnn,
    "codes": codes,
}


@cache
def of(name: str) -> Choices:
    return choices(MODELS[name]())


@pytest.mark.parametrize("name", MODELS)
def test_every_strategy_of_every_call_is_proved(name):
    verdicts = prove_graph(of(name))
    assert [v for v in verdicts if not v.ok] == []
    assert len(verdicts) > 60


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_and_its_gradient_can_be_sharded_alike(name):
    found = of(name)
    for node in found.graph.sources("parameter"):
        stored = [s.outputs[0] for s in found.strategies[node.name] if isinstance(s.outputs[0], Shard)]
        assert {shard.dim for shard in stored} == {d for d, size in enumerate(node.meta.shape) if size > 1}


@pytest.mark.parametrize("name", MODELS)
def test_most_of_the_work_can_follow_the_batch(name):
    """Every matrix product, convolution and attention has a strategy in which the batch is cut."""
    found = of(name)
    (batch,) = [g.name for g in found.groups.values() if g.label == "batch"]
    heavy = ("aten.mm", "aten.bmm", "aten.convolution", "hap.attention")
    for node in found.graph.nodes:
        if node.op.startswith(heavy):
            groups = {p.group for s in found.strategies[node.name] for p in s.inputs if isinstance(p, Shard)}
            assert batch in groups, f"{node.name} of {name}"


@pytest.mark.parametrize("name", ["gpt2", "gpt2 eager"])
def test_the_fused_projection_of_gpt2_is_sharded_by_heads(name):
    found = of(name)
    (weight,) = [n for n in found.graph.sources("parameter") if n.target == "transformer.h.0.attn.c_attn.weight"]
    atoms = {(s.dim, s.outer, s.n, s.unit) for (s,) in (x.outputs for x in found.strategies[weight.name][1:])}
    assert (1, 3, HEADS, WIDTH // HEADS) in atoms


def test_every_strategy_of_gpt2_passes_the_check_of_loaded_plans():
    found = of("gpt2")
    for node in found.graph.nodes:
        for strategy in found.strategies[node.name]:
            localize(node, strategy, found.graph)


def test_choices_of_a_captured_model_are_the_same_every_time():
    again = choices(of("gpt2").graph)
    assert list(again.groups.items()) == list(of("gpt2").groups.items())
    assert list(again.strategies.items()) == list(of("gpt2").strategies.items())
