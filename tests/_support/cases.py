"""Named plans of the two-layer GPT-2, made without a search: what a person would call data parallel and so on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

from hap.graph import Graph
from hap.plan import Plan, Recomputed
from hap.rules.choices import Choices, choices
from tests._support import gpt2
from tests._support.plans import greedy_strategies, make_plan, random_sizes, random_strategies, sizes_for

BATCH = {"args.0": (0, gpt2.BATCH), "targets.0": (0, gpt2.BATCH)}
TENSOR_PARALLEL = {
    "attn.c_attn.weight": (1, gpt2.HEADS),
    "attn.c_attn.bias": (0, gpt2.HEADS),
    "attn.c_proj.weight": (0, gpt2.HEADS),
    "mlp.c_fc.weight": (1, 4 * gpt2.WIDTH),
    "mlp.c_fc.bias": (0, 4 * gpt2.WIDTH),
    "mlp.c_proj.weight": (0, 4 * gpt2.WIDTH),
}


@cache
def gpt2_choices() -> Choices:
    return choices(gpt2.graph())


def data_parallel(sizes: tuple[int, ...]) -> Plan:
    """Whole parameters everywhere, the batch dealt as ``sizes``."""
    found = gpt2_choices()
    return make_plan(found, greedy_strategies(found, BATCH), sizes_for(found, sizes, {gpt2.BATCH: sizes}))


def tensor_parallel(heads: tuple[int, ...]) -> Plan:
    """The whole batch everywhere, heads dealt as ``heads`` and the MLP's columns in proportion."""
    found = gpt2_choices()
    wishes = {
        f"gpt2.transformer.h.{layer}.{name}": cut
        for layer in range(gpt2.LAYERS)
        for name, cut in TENSOR_PARALLEL.items()
    }
    return make_plan(found, greedy_strategies(found, wishes), sizes_for(found, heads))


def zero(
    sizes: tuple[int, ...], *, regather: bool = False, every: int = 1, recomputed: Sequence[Recomputed] = ()
) -> Plan:
    """The batch dealt as ``sizes``, every parameter sharded on dim 0 in proportion; with ``regather`` the first of
    ``every`` so many parameters is gathered again for the backward pass."""
    found = gpt2_choices()
    wishes = {n.target: (0, n.meta.shape[0]) for n in found.graph.sources("parameter")} | BATCH
    strategies = greedy_strategies(found, wishes)
    kept = [n.name for i, n in enumerate(found.graph.sources("parameter")) if i % every]
    every_size = sizes_for(found, sizes, {gpt2.BATCH: sizes})
    return make_plan(found, strategies, every_size, regather=regather, kept=kept, recomputed=recomputed)


def anything(seed: int, world_size: int = 3) -> Plan:
    """Any sound strategy for each node, any sizes: zero shares and senseless conversions included."""
    found, source = gpt2_choices(), random.Random(seed)
    strategies = random_strategies(found, source)
    return make_plan(found, strategies, random_sizes(found, world_size, source), regather=seed % 2 == 1)


def retarget(plan: Plan, graph: Graph) -> Plan:
    """The same decisions for a graph that differs only in dtypes."""
    provenance = plan.provenance.model_copy(update={"model_fingerprint": graph.fingerprint})
    return plan.model_copy(update={"provenance": provenance})
