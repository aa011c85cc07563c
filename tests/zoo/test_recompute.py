"""What blocks offer to repeat, repeated: every value of the step is one device's, in models of all kinds."""

import random

import pytest

from benchmarks.zoo_models import find
from hap.capture import interpret, source_values
from hap.codegen.lowering import lower
from hap.codegen.passes.recompute import recompute_calls
from hap.codegen.passes.runner import run_passes, standard_passes
from hap.codegen.program import Call
from hap.order import program_parts, repeats
from hap.plan import Recomputed, Strategy
from hap.rules.choices import choices
from hap.runtime.lockstep import run_lockstep
from hap.search.blocks import find_blocks
from tests._support.plans import make_plan, random_sizes, random_strategies, sizes_for
from tests.zoo.lockstep import SEED, batch_strategies, captured

NAMES = ("bert", "mixtral", "lstm", "resnet50", "unet", "hap_bert_moe")


@pytest.mark.parametrize("name", NAMES)
def test_repeated_calls_give_what_was_kept(name):
    """The batch dealt unevenly with the strongest level of each block; any strategies with the weakest of each."""
    case = find(name).build("small")
    graph = captured(case)
    found, source, blocks = choices(graph), random.Random(NAMES.index(name)), find_blocks(graph)
    whole = interpret(graph, source_values(graph, case.model, case.inputs, case.targets, seed=SEED, tangent=1.1))
    batch = next(n.meta.shape[0] for n in graph.sources("input") if n.meta.shape)
    dealt = (batch - batch // 3 - 1, batch // 3, 1)
    for strategies, sizes, place in (
        (batch_strategies(found), sizes_for(found, dealt, {batch: dealt}), -1),
        (random_strategies(found, source), random_sizes(found, 3, source), 0),
    ):
        offered = [list(b.calls.items())[place] for b in blocks]
        again = tuple(Recomputed(block="", what=what, calls=calls) for what, calls in offered)
        plan = make_plan(found, strategies, sizes).model_copy(update={"recomputed": again})
        program = lower(graph, plan)
        run_lockstep(run_passes(program, standard_passes()).program, whole, check=True)
        assert sorted(_ran(recompute_calls(program))) == sorted(_told(graph, plan))


def _ran(program):
    calls = [i for i in program.backward if isinstance(i, Call)]
    return [program.held[next(name for name in call.outputs if name)].value.node for call in calls]


def _told(graph, plan):
    again = repeats(graph, {n: Strategy.parse(s) for n, s in plan.strategies.items()}, plan.repeated)
    return [m.name for n in program_parts(graph)[2] for m in (*again.get(n.name, ()), n)]
