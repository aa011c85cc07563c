"""Every model family of Hugging Face at a small size: its own configuration, with other sizes where it names them so.

What a family's configuration does not stand (sizes that must go together, a model inside that keeps its size) ends as
``NotBuilt``; that says nothing about HAP.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.zoo_models.case import Case, Output, class_loss, next_token_loss

BATCH, LENGTH, CLASSES, VOCABULARY = 4, 8, 5, 64
MOST_PARAMETERS = 20_000_000  # of a family that keeps its size in spite of all this
HEADS = 4
_WIDTHS = dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "lru_width"), 32)
_WIDTHS |= dict.fromkeys(("word_embed_proj_dim", "multi_query_width"), 32)
_LAYERS = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2
)
_HEADS = dict.fromkeys(
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
    HEADS,
)
_HIDDEN = dict.fromkeys(
    ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 48
)
_HIDDEN |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24)
_EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4) | {
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_OF_A_HEAD = dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "d_kv"), 8) | {
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "index_topk": 4,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "rotary_dim": 4,
    "rotary_pct": 1.0,
}
_STATES = dict.fromkeys(("mamba_d_state", "mamba_n_heads", "mamba_d_head", "mamba_num_heads", "mamba_head_dim"), 8) | {
    "state_size": 8,
    "expand": 1,
    "conv_kernel": 4,
    "time_step_rank": 4,
    "n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_WINDOWS = dict.fromkeys(("sliding_window", "attention_window_size", "attention_window"), 8) | {"window_size": 4}
_IMAGES = {
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
}
_WORDS = dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "vocab_size"), VOCABULARY) | {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIZES: Mapping[str, Any] = {
    **_WIDTHS,
    **_LAYERS,
    **_HEADS,
    **_HIDDEN,
    **_EXPERTS,
    **_OF_A_HEAD,
    **_STATES,
    **_WINDOWS,
    **_IMAGES,
    **_WORDS,
}
EXPERTS = "eager"  # the default's kernels have no float64
PER_STAGE: Mapping[str, list[Any]] = {
    "depths": [1, 1],
    "num_heads": [2, 4],
    "hidden_sizes": [16, 32],
    "embed_dims": [16, 32],
    "attention_types": [[["global", "local"], 1]],
    "attention_layers": ["global", "local"],
}
PER_LAYER = ("layer_types", "layers_block_type", "block_types", "no_rope_layers", "mlp_layer_types")


class NotBuilt(Exception):
    """A family does not stand these sizes."""


def families() -> tuple[tuple[str, str], ...]:
    """(what for, model type) of all that Hugging Face has: language models, then classifiers of images, then what
    classifies texts and is no language model."""
    from transformers.models.auto import modeling_auto as auto

    language = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    texts = [name for name in auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES if name not in language]
    found = {"language": language, "images": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, "texts": texts}
    return tuple((kind, name) for kind, names in found.items() for name in names)


def build(kind: str, name: str) -> Case:
    """In float64, with one global batch. NotBuilt, with the reason, where there is none."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            case = _KINDS[kind](_small(name))
            with torch.no_grad():  # some keep what the last call made
                made = case.model(**case.inputs)  # and some make other modules of themselves in their first call
            for module in case.model.modules():
                if isinstance(module, nn.Dropout):  # a draw that nothing comes of has a number in PyTorch's run alone
                    module.p = 0.0
    except Exception as e:
        raise NotBuilt(f"{type(e).__name__}: {next(iter(str(e).strip().splitlines()), '')}") from e
    if not torch.isfinite(made).all():
        raise NotBuilt("its output is not finite")
    return case


def _small(name: str) -> Any:
    """The family's configuration."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[name](**_sizes(CONFIG_MAPPING[name], experts_implementation=EXPERTS))


def _sizes(kind: Any, **more: Any) -> dict[str, Any]:
    """What a class of configurations is called with, those that it holds included."""
    from transformers import PretrainedConfig

    own = kind()
    stages = len(own.depths) if _is_list(own, "depths") else 0
    found = dict[str, Any]()
    for key, value in vars(own).items():
        names = [key, *(alias for alias, known in own.attribute_map.items() if known == key)]
        size = next((SIZES[name] for name in names if name in SIZES), None)
        if isinstance(value, PretrainedConfig):
            found[key] = _sizes(type(value))
        elif isinstance(value, list | tuple):
            per_layer = any(name in PER_LAYER for name in names)
            if key in PER_STAGE:
                found[key] = PER_STAGE[key]
            elif _is_settable(kind, key) and (per_layer or (stages and len(value) == stages)):
                found[key] = value[:2]
        elif size is not None and _is_settable(kind, key):
            found[key] = size
    if stages:  # follows from the first stage's
        found.pop("hidden_size", None)
    if "qk_nope_head_dim" in found:  # latent attention: as many keys as queries, in heads of two parts
        found.pop("head_dim", None)
        found["num_key_value_heads"] = HEADS
    return found | more


def _is_settable(kind: type, key: str) -> bool:
    found = getattr(kind, key, None)
    return not key.startswith("_") and (not isinstance(found, property) or found.fset is not None)


def _is_list(own: object, key: str) -> bool:
    return isinstance(getattr(own, key, None), list | tuple)


def _language(config: Any) -> Case:
    from transformers import AutoModelForCausalLM

    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    ids = _tokens()
    return Case(_in_float64(AutoModelForCausalLM, config), {"input_ids": ids}, next_token_loss, ids)


def _images(config: Any) -> Case:
    from transformers import AutoModelForImageClassification

    config.num_labels = CLASSES
    model, side = _in_float64(AutoModelForImageClassification, config), getattr(config, "image_size", 32)
    side = side if isinstance(side, int) else 32
    pixels = torch.randn(BATCH, 3, side, side, dtype=torch.float64)
    return Case(model, {"pixel_values": pixels}, class_loss, torch.randint(0, CLASSES, (BATCH,)))


def _texts(config: Any) -> Case:
    from transformers import AutoModelForSequenceClassification

    config.num_labels = CLASSES
    model, ids = _in_float64(AutoModelForSequenceClassification, config), _tokens()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return Case(model, inputs, class_loss, torch.randint(0, CLASSES, (BATCH,)))


_KINDS: Mapping[str, Callable[[Any], Case]] = {"language": _language, "images": _images, "texts": _texts}


def _in_float64(kind: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        count = sum(p.numel() for p in kind.from_config(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"it keeps {count / 1e6:.0f} million parameters")
    model = kind.from_config(config).double().train()
    caches = "use_cache" in inspect.signature(model.forward).parameters
    return Output(model, use_cache=False) if caches else Output(model)


def _tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH))
