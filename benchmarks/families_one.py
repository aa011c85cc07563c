"""One model family of ``families.py``, in a process of its own: prints what became of it as one line of JSON."""

from __future__ import annotations

import json
import logging
import random
import resource
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.common import ROOT
from benchmarks.zoo_models.case import Case
from benchmarks.zoo_models.equality import TOLERANCE, sharded_share
from benchmarks.zoo_models.families import BATCH, NotBuilt, build
from benchmarks.zoo_models.reference import one_device, worst_error
from hap.errors import HapError
from hap.rules.choices import choices
from tests._support.plans import make_plan, random_sizes, random_strategies, sizes_for
from tests.zoo.lockstep import SEED, batch_strategies, captured, run

RANDOM_PLANS = 2
DEALT = (2, 1, 1)  # samples of the batch, to three ranks


def main() -> int:
    kind, name, most_gib = sys.argv[1], sys.argv[2], int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_DATA, (most_gib << 30, most_gib << 30))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        found = compared(build(kind, name))
    except NotBuilt as e:
        found = {"not_built": str(e)}
    except HapError as e:
        found = {"refused": " ".join(str(e).replace(f"{ROOT}/", "").split())}
    print(json.dumps(found))
    return 0


def compared(case: Case) -> Mapping[str, Any]:
    """The worst relative error of three plans, and what part of the heavy calls the data-parallel one deals out.
    ``own``: where that is more than ``TOLERANCE``, how far PyTorch is from itself with the batch in reverse order."""
    graph = captured(case)
    made, expected, source = choices(graph), one_device(case, SEED), random.Random(SEED)
    by_batch, dealt = batch_strategies(made), sizes_for(made, DEALT, {BATCH: DEALT})
    plans = [(by_batch, dealt)]
    plans += [(random_strategies(made, source), random_sizes(made, len(DEALT), source)) for _ in range(RANDOM_PLANS)]
    error, where = max(worst_error(run(case, made, strategies, sizes), expected) for strategies, sizes in plans)
    own = worst_error(one_device(_reversed(case), SEED), expected)[0] if error > TOLERANCE else 0.0
    share = sharded_share(graph, make_plan(made, by_batch, dealt, world_size=len(DEALT)))
    return {"nodes": len(graph.nodes), "error": error, "where": where, "own": own, "dealt": share}


def _reversed(case: Case) -> Case:
    inputs = {name: value.flip(0) for name, value in case.inputs.items()}
    return replace(case, inputs=inputs, targets=case.targets.flip(0))


if __name__ == "__main__":
    sys.exit(main())
