"""One model family of ``families.py``, in a process of its own: prints what became of it as one line of JSON."""

from __future__ import annotations

import json
import logging
import random
import resource
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.common import ROOT
from benchmarks.zoo_models import timm_families
from benchmarks.zoo_models.case import Case
from benchmarks.zoo_models.equality import TOLERANCE, sharded_share
from benchmarks.zoo_models.families import BATCH, NotBuilt, build
from benchmarks.zoo_models.reference import errors, one_device
from hap.errors import HapError
from hap.rules.choices import choices
from tests._support.plans import make_plan, random_sizes, random_strategies, sizes_for
from tests.zoo.lockstep import SEED, batch_strategies, captured, run

RANDOM_PLANS = 2
TIMM = "timm"  # a kind of families
DEALT = (2, 1, 1)  # samples of the batch, to three ranks
ROUNDINGS, MOST_ROUNDING = 4.0, 1e-6  # times what PyTorch is from itself, which counts up to this


def main() -> int:
    kind, name, most_gib = sys.argv[1], sys.argv[2], int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_DATA, (most_gib << 30, most_gib << 30))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        found = compared(timm_families.build(name) if kind == TIMM else build(kind, name))
    except NotBuilt as e:
        found = {"not_built": str(e)}
    except HapError as e:
        found = {"refused": " ".join(str(e).replace(f"{ROOT}/", "").split())}
    print(json.dumps(found))
    return 0


def compared(case: Case) -> Mapping[str, Any]:
    """The relative error of three plans in the tensor in which it is furthest from what is allowed, and what part of
    the heavy calls the data-parallel one deals out. ``largest``: of all tensors. ``own``: where some error is more than
    ``TOLERANCE``, how far PyTorch is from itself in that tensor with the batch in other orders."""
    graph = captured(case)
    made, expected, source = choices(graph), one_device(case, SEED), random.Random(SEED)
    by_batch, dealt = batch_strategies(made), sizes_for(made, DEALT, {BATCH: DEALT})
    plans = [(by_batch, dealt)]
    plans += [(random_strategies(made, source), random_sizes(made, len(DEALT), source)) for _ in range(RANDOM_PLANS)]
    found = dict[str, float]()
    for strategies, sizes in plans:
        for name, error in errors(run(case, made, strategies, sizes), expected).items():
            found[name] = max(error, found.get(name, 0.0))
    is_close = max(found.values()) <= TOLERANCE
    own = dict[str, float]()
    for other in [] if is_close else _other_orders(case):
        for name, error in errors(one_device(other, SEED), expected).items():
            own[name] = max(error, own.get(name, 0.0))
    where = max(found, key=lambda name: found[name] / allowed(own.get(name, 0.0)))
    share = sharded_share(graph, make_plan(made, by_batch, dealt, world_size=len(DEALT)))
    return {
        "nodes": len(graph.nodes),
        "error": found[where],
        "largest": max(found.values()),
        "where": where,
        "own": own.get(where, 0.0),
        "dealt": share,
    }


def allowed(own: float) -> float:
    """Of a tensor that PyTorch computes so differently with the batch in another order."""
    return max(TOLERANCE, ROUNDINGS * min(own, MOST_ROUNDING))


def _other_orders(case: Case) -> Iterator[Case]:
    """The same batch in reverse order, and from its second sample on, and so on."""
    forth = list(range(BATCH))
    for order in (forth[::-1], *(forth[first:] + forth[:first] for first in range(1, BATCH))):
        inputs = {name: value[order] for name, value in case.inputs.items()}
        yield replace(case, inputs=inputs, targets=case.targets[order])


if __name__ == "__main__":
    sys.exit(main())
