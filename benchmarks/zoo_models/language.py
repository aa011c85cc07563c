"""Language models: Hugging Face's from configs, ``nn.TransformerEncoder`` and an LSTM of our own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.zoo_models.case import Case, Output, Size, ZooModel, class_loss, next_token_loss, smoothed_loss, tokens

SMALL_BATCH, SMALL_LENGTH, SMALL_VOCABULARY = 7, 10, 61


def gpt2(size: Size) -> Case:
    """124M parameters, 1024 tokens, tied embeddings, dropout 0.1."""
    from transformers import GPT2Config, GPT2LMHeadModel

    small: dict[str, int | None] = {"n_layer": 2, "n_head": 6, "n_embd": 48, "vocab_size": SMALL_VOCABULARY}
    small |= {"n_positions": 16, "bos_token_id": None, "eos_token_id": None}
    model = Output(GPT2LMHeadModel(GPT2Config(**(small if size == "small" else {}))), use_cache=False)
    vocabulary, shape = (50257, (8, 1024)) if size == "real" else (SMALL_VOCABULARY, (SMALL_BATCH, SMALL_LENGTH))
    ids = tokens(vocabulary, *shape)
    return Case(model, {"input_ids": ids}, next_token_loss, ids)


def bert(size: Size) -> Case:
    """110M parameters, masked language modelling over padded sequences; labels of other tokens are -100."""
    from transformers import BertConfig, BertForMaskedLM

    small = {
        "vocab_size": SMALL_VOCABULARY,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "intermediate_size": 80,
        "max_position_embeddings": 16,
    }
    model = Output(BertForMaskedLM(BertConfig(**(small if size == "small" else {}))))
    vocabulary, (batch, length) = (30522, (64, 512)) if size == "real" else (SMALL_VOCABULARY, (SMALL_BATCH, 10))
    ids = tokens(vocabulary, batch, length)
    mask = (torch.arange(length) < torch.randint(length // 2, length + 1, (batch, 1))).long()
    labels = torch.where((torch.rand(batch, length) < 0.3) & (mask == 1), ids, -100)
    segments = torch.randint(0, 2, (batch, length))
    return Case(model, {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}, class_loss, labels)


def llama(size: Size) -> Case:
    """Llama 3.2 1B's shape: grouped-query attention, rotary positions, gated MLP."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any]
    if size == "real":
        shape = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
        shape |= {"intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True}
        shape |= {"max_position_embeddings": 2048}
    else:
        shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3}
        shape |= {"intermediate_size": 80, "vocab_size": SMALL_VOCABULARY, "max_position_embeddings": 32}
    model = Output(LlamaForCausalLM(LlamaConfig(**shape)), use_cache=False)
    ids = tokens(shape["vocab_size"], *((4, 1024) if size == "real" else (SMALL_BATCH, SMALL_LENGTH)))
    return Case(model, {"input_ids": ids}, next_token_loss, ids)


def t5(size: Size) -> Case:
    """T5-base, encoder and decoder with relative position biases, padded input, dropout 0.1."""
    from transformers import T5Config, T5ForConditionalGeneration

    shape: dict[str, Any]
    if size == "real":
        shape = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 32128}
    else:
        shape = {"d_model": 48, "d_kv": 8, "d_ff": 80, "num_layers": 2, "num_heads": 6, "vocab_size": SMALL_VOCABULARY}
    model = Output(T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0)), use_cache=False)
    batch, source, target = (32, 512, 128) if size == "real" else (SMALL_BATCH, 10, 6)
    ids, labels = tokens(shape["vocab_size"], batch, source), tokens(shape["vocab_size"], batch, target)
    mask = (torch.arange(source) < torch.randint(source // 2, source + 1, (batch, 1))).long()
    shifted = torch.cat((torch.zeros_like(labels[:, :1]), labels[:, :-1]), 1)
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": shifted}
    return Case(model, inputs, class_loss, labels)


def mixtral(size: Size) -> Case:
    """Mixtral's block, 8 experts of which 2 see each token; experts as batched products (Hugging Face's batched_mm)."""
    from transformers import MixtralConfig, MixtralForCausalLM

    shape: dict[str, Any]
    if size == "real":
        shape = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4}
        shape |= {"intermediate_size": 3584, "vocab_size": 32000}
    else:
        shape = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 3}
        shape |= {"intermediate_size": 40, "vocab_size": SMALL_VOCABULARY, "num_local_experts": 5}
    config = MixtralConfig(**shape, max_position_embeddings=512, experts_implementation="batched_mm")
    model = Output(MixtralForCausalLM(config), use_cache=False)
    ids = tokens(shape["vocab_size"], *((8, 16) if size == "real" else (SMALL_BATCH, SMALL_LENGTH)))
    return Case(model, {"input_ids": ids}, next_token_loss, ids)


def granite_moe(size: Size) -> Case:
    """Granite 3.0 1B A400M: 32 experts of which 8 see each token, with the kernel that Hugging Face's default is."""
    from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

    shape: dict[str, Any]
    if size == "real":
        shape = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 8}
        shape |= {"intermediate_size": 512, "vocab_size": 49155, "num_local_experts": 32, "num_experts_per_tok": 8}
    else:
        shape = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 3}
        shape |= {"intermediate_size": 40, "vocab_size": SMALL_VOCABULARY, "num_local_experts": 5}
        shape |= {"num_experts_per_tok": 3, "experts_implementation": "eager"}  # the default's kernels have no float64
    model = Output(GraniteMoeForCausalLM(GraniteMoeConfig(**shape, tie_word_embeddings=True)), use_cache=False)
    ids = tokens(shape["vocab_size"], *((8, 512) if size == "real" else (SMALL_BATCH, SMALL_LENGTH)))
    return Case(model, {"input_ids": ids}, next_token_loss, ids)


class EncoderLM(nn.Module):
    """``nn.TransformerEncoder`` with a causal mask between an embedding and a projection."""

    def __init__(self, vocabulary: int, width: int, heads: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, heads, hidden, dropout, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        hidden = torch.full((length, length), float("-inf"), dtype=self.head.weight.dtype).triu(1)
        return self.head(self.encoder(self.embedding(ids), mask=hidden, is_causal=True))


def transformer_encoder(size: Size) -> Case:
    """PyTorch's own encoder as a language model, label smoothing 0.1, dropout 0.1."""
    if size == "real":
        model, ids = EncoderLM(32000, 1024, 16, 4096, 12, 0.1), tokens(32000, 64, 512)
    else:
        model, ids = EncoderLM(SMALL_VOCABULARY, 48, 6, 80, 2, 0.1), tokens(SMALL_VOCABULARY, SMALL_BATCH, 10)
    return Case(model, ids, smoothed_loss, ids)


class LstmLM(nn.Module):
    """Embedding, stacked LSTM, projection: ids (B, S) -> logits (B, S, V)."""

    def __init__(self, vocabulary: int, width: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, layers, batch_first=True, dropout=dropout)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(ids))[0])


def lstm(size: Size) -> Case:
    """The medium LSTM of Zaremba et al. 2014 (650 units, 35 steps), two layers, dropout 0.5."""
    if size == "real":
        model, ids = LstmLM(10000, 650, 650, 2, 0.5), tokens(10000, 256, 35)
    else:
        model, ids = LstmLM(SMALL_VOCABULARY, 12, 10, 2, 0.5), tokens(SMALL_VOCABULARY, SMALL_BATCH, 5)
    return Case(model, ids, next_token_loss, ids)


MODELS = (
    ZooModel("gpt2", "GPT-2 124M", gpt2),
    ZooModel("bert", "BERT-base", bert),
    ZooModel("llama", "Llama 1.2B (GQA)", llama),
    ZooModel("t5", "T5-base", t5),
    ZooModel("mixtral", "Mixtral-style MoE", mixtral),
    ZooModel("granite_moe", "Granite 3.0 1B A400M (MoE)", granite_moe),
    ZooModel("transformer_encoder", "nn.TransformerEncoder", transformer_encoder),
    ZooModel("lstm", "LSTM 650", lstm),
)
