"""What is planned for ``benchmarks/planning.py``: models at their published size on clusters of unequal GPUs.

The zoo's models get a batch that grows with the cluster. Llama 2 at 7B and 70B are in half precision, their parameters,
gradients and optimizer state too; Mixtral 8x7B, and four layers of it, are in single precision and planned when asked
for. Clusters: HAP's testbed, mixes of three generations of GPUs, and some in which memory binds.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, ROOT
from benchmarks.zoo_models import Case, find
from benchmarks.zoo_models.case import Output, next_token_loss, tokens
from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.graph import Graph
from hap.plan import Plan
from hap.search.subsets import without

PER_DEVICE = {"gpt2": 4, "bert": 8, "vit": 32, "vgg19": 32, "hap_bert_moe": 32}  # samples
OTHERS = {"resnet50": 32, "unet": 2, "lstm": 16, "mixtral": 2, "convnext": 16}  # planned when they are asked for
HOST = "  - {{name: h{i}, devices: [{{gpu: {gpu}, count: {count}}}], link: {link}, network: {network}}}\n"
FABRIC = {
    "A100-40GB": ("nvlink", "{bandwidth: 100Gbit/s, latency: 20us}"),
    "A100-80GB": ("nvlink", "{bandwidth: 200Gbit/s, latency: 20us}"),
    "H100": ("nvlink", "{bandwidth: 400Gbit/s, latency: 20us}"),
    "V100-16GB": ("nvlink", "{bandwidth: 25Gbit/s, latency: 30us}"),
    "T4": ("pcie3", "{bandwidth: 10Gbit/s, latency: 50us}"),
}
MIXES = {
    "mix-4": (("A100-40GB", 2), ("V100-16GB", 2)),
    "mix-16": (("A100-40GB", 4), ("V100-16GB", 4), ("V100-16GB", 4), ("T4", 4)),
    "mix-32": (("A100-40GB", 8), ("V100-16GB", 8), ("V100-16GB", 8), ("T4", 8)),
    "mix-48": (("A100-80GB", 8),) * 2 + (("A100-40GB", 8),) * 4,
    "mix-128": (("A100-40GB", 8),) * 4 + (("V100-16GB", 8),) * 8 + (("T4", 8),) * 4,
    "mix-1024": (("A100-40GB", 8),) * 64 + (("A100-80GB", 8),) * 32 + (("H100", 8),) * 32,
}
SMALL = ("mix-4", "mix-16", "hap", "mix-128")  # clusters that every model of PER_DEVICE is planned for
USUAL = tuple(f"{model}@{name}" for name in SMALL for model in PER_DEVICE)
LARGE = ("llama_7b@mix-32", "llama_70b@mix-1024")


@dataclass(frozen=True)
class Llama:
    """Llama 2's shapes (Touvron et al. 2023, table 1) with one global batch."""

    title: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    dtype: torch.dtype
    batch: tuple[int, int]

    def build(self) -> Case:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate,
            vocab_size=32000,
            max_position_embeddings=4096,
        )
        with torch.device("meta"):
            model = Output(LlamaForCausalLM(config).to(self.dtype), use_cache=False)
            ids = tokens(32000, *self.batch)
        return Case(model, {"input_ids": ids}, next_token_loss, ids)


LLAMAS = {
    "llama_7b": Llama("Llama 2 7B", 4096, 32, 32, 32, 11008, torch.float16, (64, 512)),
    "llama_70b": Llama("Llama 2 70B", 8192, 80, 64, 8, 28672, torch.bfloat16, (1024, 512)),
}


@dataclass(frozen=True)
class Mixtral:
    """Mixtral 8x7B's shapes (Jiang et al. 2024, table 1), or fewer layers, with one global batch."""

    title: str
    layers: int
    batch: tuple[int, int]

    def build(self) -> Case:
        from transformers import MixtralConfig, MixtralForCausalLM

        config = MixtralConfig(
            hidden_size=4096,
            num_hidden_layers=self.layers,
            num_attention_heads=32,
            num_key_value_heads=8,
            intermediate_size=14336,
            num_local_experts=8,
            num_experts_per_tok=2,
            vocab_size=32000,
            router_aux_loss_coef=0.0,
        )
        with torch.device("meta"):
            model = Output(MixtralForCausalLM(config), use_cache=False)
            ids = tokens(32000, *self.batch)
        return Case(model, {"input_ids": ids}, next_token_loss, ids)


MIXTRALS = {
    "mixtral_8x7b": Mixtral("Mixtral 8x7B", 32, (96, 2048)),
    "mixtral_4_layers": Mixtral("Mixtral, 4 layers", 4, (64, 512)),
}
WHOLE: Mapping[str, Llama | Mixtral] = {**LLAMAS, **MIXTRALS}


def asked(only: str, parser: argparse.ArgumentParser, others: str = "") -> list[str]:
    """The cases that ``--only`` names, none for an empty text. ``others``: a pattern of more that there are. SystemExit
    for a case that there is not."""
    found = only.split(",") if only else []
    models, clusters = {*PER_DEVICE, *OTHERS, *WHOLE}, {*MIXES, "hap"}
    for case in found:
        model, _, name = case.partition("@")
        if (model not in models or name not in clusters) and not (others and re.fullmatch(others, case)):
            known = f"{', '.join(sorted(models))} @ {', '.join(sorted(clusters))}"
            parser.error(f"--only: no such case: {case!r} (known: {known})")
    return found


def plans_before(out: Path) -> dict[str, Any]:
    """The rows of ``planning.py`` that have a plan, by case: of its result in ``out``, or where it has left none there
    of the committed one."""
    path = next(p for folder in (out, RESULTS) if (p := folder / "planning.json").is_file())
    rows = json.loads(path.read_text(encoding="utf-8"))["cases"]
    return {case: row for case, row in rows.items() if not row.get("failure")}


def titled(model: str) -> str:
    return WHOLE[model].title if model in WHOLE else find(model).title


@cache
def cluster(name: str) -> ClusterSpec:
    """``hap`` or one of ``MIXES``: hosts of one kind of GPU each."""
    if name == "hap":
        return ClusterSpec.load(ROOT / "examples" / "hap-paper.yaml")
    hosts = ""
    for i, (gpu, count) in enumerate(MIXES[name]):
        link, network = FABRIC[gpu]
        hosts += HOST.format(i=i, gpu=gpu, count=count, link=link, network=network)
    return ClusterSpec.from_yaml(f"name: {name}\nbackend: nccl\nhosts:\n{hosts}")


def used_by(plan: Plan, spec: ClusterSpec) -> ClusterSpec:
    """The devices of ``spec`` that a plan which may leave some out is for."""
    left = plan.provenance.solver.get("left_out", [])
    return without(spec, left) if left else spec


def captured(model: str, devices: int) -> Graph:
    """The model's step; a model of the zoo with ``PER_DEVICE`` samples for each device."""
    if model in WHOLE:
        return of_graph(model, WHOLE[model].build())
    case, batch = find(model).build("real"), {**PER_DEVICE, **OTHERS}[model] * devices
    old = next(iter(_tensors(case.inputs))).shape[0]
    return of_graph(model, case, lambda tree: _resized(tree, old, batch))


def of_graph(name: str, case: Case, resize: Callable[[Any], Any] = lambda tree: tree) -> Graph:
    inputs, targets = resize(case.inputs), resize(case.targets)
    return capture(case.model, inputs, loss_fn=case.loss_fn, example_targets=targets, name=name)


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, Mapping) else tree
    return [t for value in values for t in _tensors(value)]


def _resized(tree: Any, old: int, new: int) -> Any:
    """The same tree with tensors of ``old`` samples replaced by empty ones of ``new``."""
    if isinstance(tree, Mapping):
        return {k: _resized(v, old, new) for k, v in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(_resized(v, old, new) for v in tree)
    assert isinstance(tree, torch.Tensor)
    return tree.new_empty((new, *tree.shape[1:])) if tree.shape[:1] == (old,) else tree
