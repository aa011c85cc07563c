"""The case that everything is proved on: a two-layer Hugging Face GPT-2 in float64 with a loss of its own.

Width 48, 6 heads, vocabulary 97, 8 sequences of 10 tokens, no dropout. Hugging Face computes its loss in float32, so
``lm_loss`` computes it from the logits: mean cross entropy of the next token, over the *global* batch.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from hap.capture import capture
from hap.graph import Graph

BATCH, LENGTH, VOCABULARY, WIDTH, HEADS, LAYERS = 8, 10, 97, 48, 6, 2


class Logits(nn.Module):
    """The model without its own loss: ids (B, S) -> logits (B, S, V)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.gpt2 = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.gpt2(input_ids=ids, use_cache=False).logits


def build(dtype: torch.dtype = torch.float64, seed: int = 0) -> Logits:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=LAYERS,
        n_head=HEADS,
        n_embd=WIDTH,
        vocab_size=VOCABULARY,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    torch.manual_seed(seed)
    return Logits(GPT2LMHeadModel(config)).to(dtype)


def lm_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def batch(step: int = 0, size: int = BATCH) -> torch.Tensor:
    """Token ids (size, S), a function of the step."""
    return torch.randint(0, VOCABULARY, (size, LENGTH), generator=torch.Generator().manual_seed(100 + step))


@cache
def graph(dtype: torch.dtype = torch.float64) -> Graph:
    return capture(build(dtype), (batch(),), loss_fn=lm_loss, example_targets=batch(), name="gpt2")
