"""One model family of ``families.py``, in a process of its own: prints what became of it as one line of JSON."""

from __future__ import annotations

import json
import logging
import random
import resource
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.common import ROOT
from benchmarks.zoo_models.case import Case
from benchmarks.zoo_models.families import BATCH, NotBuilt, build
from benchmarks.zoo_models.reference import Outcome, one_device, worst_error
from hap.capture import capture, source_values
from hap.codegen.lowering import lower
from hap.cost_models.work import op_class
from hap.errors import HapError
from hap.graph import Graph
from hap.placement import GroupSizes, Shard
from hap.plan import Strategy
from hap.rules.choices import Choices, choices
from hap.runtime.lockstep import run_lockstep
from tests._support.plans import greedy_strategies, make_plan, random_sizes, random_strategies, sizes_for

SEED, RANDOM_PLANS = 5, 2
DEALT = (2, 1, 1)  # samples of the batch, to three ranks
HEAVY = ("matmul", "conv", "attention")


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
    """The worst relative error of three plans, and what part of the heavy calls the data-parallel one deals out."""
    graph = capture(case.model, case.inputs, loss_fn=case.loss_fn, example_targets=case.targets)
    made, expected, source = choices(graph), one_device(case, SEED), random.Random(SEED)
    inputs = graph.sources("input")
    by_batch = greedy_strategies(
        made, {n.target: (0, n.meta.shape[0]) for n in inputs if len(made.strategies[n.name]) > 1}
    )
    plans = [(by_batch, sizes_for(made, DEALT, {BATCH: DEALT}))]
    plans += [(random_strategies(made, source), random_sizes(made, 3, source)) for _ in range(RANDOM_PLANS)]
    errors = [worst_error(_run(case, made, strategies, sizes), expected) for strategies, sizes in plans]
    error, where = max(errors)
    return {"nodes": len(graph.nodes), "error": error, "where": where, "dealt": _dealt(graph, by_batch)}


def _run(case: Case, made: Choices, strategies: Mapping[str, Strategy], sizes: GroupSizes) -> Outcome:
    """One step on lockstep ranks."""
    plan = make_plan(made, strategies, sizes, world_size=len(DEALT))
    values = source_values(made.graph, case.model, case.inputs, case.targets, seed=SEED)
    result, stored = run_lockstep(lower(made.graph, plan), values), case.model.state_dict()
    buffers = {name: stored[name] for name, _ in case.model.named_buffers() if name in stored}
    return Outcome(result.loss, result.gradients, {**buffers, **result.updates})


def _dealt(graph: Graph, strategies: Mapping[str, Strategy]) -> float:
    heavy = [n.name for n in graph.nodes if not n.is_source and op_class(n.op) in HEAVY]
    dealt = [any(isinstance(p, Shard) for p in (*strategies[n].inputs, *strategies[n].outputs)) for n in heavy]
    return sum(dealt) / max(1, len(dealt))


if __name__ == "__main__":
    sys.exit(main())
