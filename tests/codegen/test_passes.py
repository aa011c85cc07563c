"""Passes move and bundle collectives and drop what is not needed; what a program means stays."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hap.capture import capture, interpret, source_values
from hap.codegen.lowering import lower
from hap.codegen.passes.bucket import bucket_collectives
from hap.codegen.passes.fuse import fuse_calls
from hap.codegen.passes.hoist import hoist_batch_sums
from hap.codegen.passes.overlap import _overlapped, _prefetched, _started, overlap_collectives, prefetch_parameters
from hap.codegen.passes.prune import remove_dead_code, remove_renames
from hap.codegen.passes.runner import print_program, run_passes, standard_passes
from hap.codegen.passes.sink import sink_results
from hap.codegen.passes.windows import work_of
from hap.codegen.program import Call, Convert, Program, Start, Together, Wait, verify_program
from hap.codegen.source import to_python
from hap.errors import PlanError
from hap.graph import Value
from hap.hosts_sum import HOSTS_SUM, SITE
from hap.placement import PARTIAL, REPLICATE, Shard
from hap.rules.choices import Choices, choices
from hap.rules.host_graph import batch_group, deal_batch, host_graph, summed
from hap.runtime.lockstep import run_lockstep
from tests._support import cases, gpt2
from tests._support.plans import greedy_strategies, make_plan, random_sizes, random_strategies, sizes_for
from tests.codegen.test_lockstep import Small

NAMES = ("renames", "dead_code", "recompute", "fuse", "hoist", "sink", "bucket", "prefetch", "overlap")


@cache
def small() -> tuple[Choices, dict[Value, torch.Tensor]]:
    torch.manual_seed(0)
    model = Small().double()
    batch = (torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64))
    graph = capture(model, batch)
    return choices(graph), interpret(graph, source_values(graph, model, batch, tangent=0.7))


@cache
def data_parallel() -> Program:
    """GPT-2 of two layers, the batch dealt to three ranks: 28 gradients to be summed."""
    return lower(gpt2.graph(), cases.data_parallel((5, 2, 1)))


def works(program: Program) -> list[Together]:
    """Every collective as a bundle, in the order in which it begins."""
    found = []
    for instruction in (*program.forward, *program.backward):
        match instruction:
            case Convert(kind=kind) if kind != "slice":
                found.append(Together((instruction,), instruction.decomposition))
            case Together():
                found.append(instruction)
            case Start():
                found.append(instruction.work)
    return found


def ops(program: Program) -> Counter[str]:
    return Counter(i.op for i in (*program.forward, *program.backward) if isinstance(i, Call))


# ------------------------------------------------------------------------------------------------ fusing


def test_a_product_and_its_bias_are_one_call() -> None:
    """Two layers of GPT-2 with four biased products each; the head has none. Beside them the loss's gradient, which is
    written among zeros, and nothing else."""
    before = data_parallel()
    gone, come = ops(before) - ops(fuse_calls(before)), ops(fuse_calls(before)) - ops(before)
    assert come == {"aten.addmm.default": 8, "hap.scatter_into_zeros.default": 1}
    assert gone == {"aten.mm.default": 8, "aten.add.Tensor": 8, "aten.zeros_like.default": 1, "aten.scatter.src": 1}


@pytest.mark.parametrize("op", ["aten.mm.default", "aten.zeros_like.default"])
def test_a_product_and_zeros_that_something_else_reads_stay(op: str) -> None:
    """As if another part read them all: none may go."""
    program = data_parallel()
    calls = [i for i in (*program.forward, *program.backward) if isinstance(i, Call)]
    made = [str(name) for call in calls if call.op == op for name in call.outputs]
    kept = fuse_calls(replace(program, saved=(*program.saved, *made)))
    assert made and ops(kept)[op] == len(made)


# ------------------------------------------------------------------------------------------------ meaning


@settings(max_examples=80, deadline=None)
@given(
    source=st.randoms(use_true_random=False),
    world_size=st.integers(1, 4),
    regather=st.booleans(),
    limit=st.sampled_from([0, 64, 300, 1 << 20]),
    ahead=st.integers(0, 3),
    off=st.sets(st.sampled_from(NAMES)),
)
def test_any_program_means_the_same_with_any_passes(source, world_size, regather, limit, ahead, off) -> None:  # type: ignore[no-untyped-def]
    found, values = small()
    plan = make_plan(
        found, random_strategies(found, source), random_sizes(found, world_size, source), regather=regather
    )
    program = lower(found.graph, plan)
    passes = standard_passes(limit_bytes=limit, ahead=ahead)
    after = run_passes(program, passes, off=sorted(off)).program
    step = run_lockstep(after, values, check=True)
    for target, value in found.graph.gradients.items():
        torch.testing.assert_close(step.gradients[target], values[value], rtol=1e-10, atol=1e-12)
    moved = sorted(m.output for w in works(after) for m in w.members)
    if "dead_code" in off:
        assert moved == sorted(m.output for w in works(program) for m in w.members)


@pytest.mark.parametrize("seed", range(2))
def test_gpt2_means_the_same(seed: int) -> None:
    graph = gpt2.graph()
    values = interpret(graph, source_values(graph, gpt2.build(), (gpt2.batch(),), gpt2.batch(), tangent=1.3))
    after = run_passes(lower(graph, cases.anything(seed)), standard_passes()).program
    step = run_lockstep(after, values, check=True)
    torch.testing.assert_close(step.loss, values[graph.loss], rtol=1e-12, atol=0)


# ------------------------------------------------------------------------------------------------ buckets


def test_all_gradients_of_a_small_model_are_summed_at_once() -> None:
    program = data_parallel()
    assert len(works(program)) == 2 + 28  # the number of targets, the loss, and each gradient
    after = bucket_collectives(program)
    assert [len(w.members) for w in works(after)] == [1, 1, 28]
    assert isinstance(after.backward[-1], Together)  # when the last gradient is made


def test_a_bundle_holds_no_more_than_its_limit() -> None:
    program = data_parallel()
    largest = max(program.held[c.input].meta.nbytes for c in program.conversions)
    for limit in (largest // 8, largest, 3 * largest):
        for work in works(bucket_collectives(program, limit_bytes=limit)):
            total = sum(program.held[name].meta.nbytes for name in work.inputs)
            assert total <= limit or len(work.members) == 1


def test_a_limit_of_nothing_changes_nothing() -> None:
    program = data_parallel()
    assert bucket_collectives(program, limit_bytes=0) == program


def test_bundles_take_the_way_that_suits_their_bytes() -> None:
    seen: list[int] = []

    def choose(largest: Convert, nbytes: int) -> str:
        seen.append(nbytes)
        return "owners[0]"

    after = bucket_collectives(data_parallel(), choose=choose)
    assert works(after)[-1].decomposition == "owners[0]"
    assert seen == [sum(data_parallel().held[n].meta.nbytes for n in works(after)[-1].inputs)]


# ------------------------------------------------------------------------------------------------ overlap


def test_a_gradient_is_on_its_way_while_the_next_is_computed() -> None:
    program = overlap_collectives(bucket_collectives(data_parallel(), limit_bytes=20_000))
    starts = [i for i, x in enumerate(program.backward) if isinstance(x, Start)]
    waits = [i for i, x in enumerate(program.backward) if isinstance(x, Wait)]
    assert len(starts) == len(waits) > 2
    assert max(starts) < min(waits)  # all are waited for at the end, as they began
    assert [program.backward[i].handle for i in waits] == [program.backward[i].handle for i in starts]  # type: ignore[union-attr]
    for at in starts:
        start = program.backward[at]
        before = program.backward[at - 1]
        assert isinstance(start, Start) and (isinstance(before, Start) or before.outputs[-1] in start.inputs)


@pytest.mark.parametrize("late", ["x", "y"])
def test_results_are_waited_for_in_the_order_in_which_they_begin(late: str) -> None:
    """One of two gradients is viewed when it is summed, behind everything else: only what began before it is waited for
    before the view, whichever of both that is."""
    calls = [Call((n,), "aten.mm.default", (Value("a"), Value("b")), (), "") for n in ("x", "y", "z")]
    sums = [Convert(f"{n}__r", n, "all_reduce", "ring", PARTIAL, REPLICATE, "backward", "") for n in ("x", "y")]
    view = Call(("viewed",), "aten.view.default", (Value(f"{late}__r"), [-1]), (), "")
    part = (calls[0], sums[0], calls[1], sums[1], calls[2], view)
    begins = _overlapped(part)
    assert [part[w.position].outputs[0] for w, _ in begins] == ["x__r", "y__r"]
    assert [at for _, at in begins] == [1, 3] and all(w.is_result for w, _ in begins)
    assert [w.due for w, _ in begins] == ([5, 6] if late == "x" else [5, 5])


@pytest.mark.parametrize("another", [False, True])
def test_what_the_last_call_reads_is_under_way_while_a_result_is_unpacked(another: bool) -> None:
    """If there is one; else there is nothing to do meanwhile."""
    made = [Call((n,), op, (Value("a"), Value("b")), (), "") for n, op in (("x", "aten.mm.default"), ("y", "aten.add"))]
    sums = [Convert(f"{n}__r", n, "all_reduce", "ring", PARTIAL, REPLICATE, "backward", "") for n in ("x", "y")]
    product = Call(("z",), "aten.mm.default", (Value("a"), Value("b")), (), "")
    reading = Call(("w",), "aten.mul.Tensor", (Value("y__r"), 2), (), "")
    first = (made[0], sums[0]) if another else ()
    part = (*first, product, made[1], sums[1], reading)
    after = _started(part, _overlapped(part), set(), "pending")
    if another:
        kinds = [type(i) for i in after]
        assert kinds == [Call, Start, Call, Call, Start, Wait, Wait, Call]
        assert [i.outputs for i in after if isinstance(i, Wait)] == [("x__r",), ("y__r",)]
    else:
        assert after == part


def test_what_is_read_at_once_is_not_started() -> None:
    """The number of targets divides the loss a moment later; the loss is the last thing that the forward part makes."""
    program = overlap_collectives(data_parallel())
    assert not any(isinstance(i, (Start, Wait)) for i in program.forward)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_parameters_are_gathered_ahead_but_not_all_at_once(ahead: int) -> None:
    program = lower(gpt2.graph(), cases.zero((5, 2, 1)))
    parameters = {s.name for s in program.sources_of("parameter")}
    after = prefetch_parameters(program, ahead=ahead)
    verify_program(after)
    running = most = 0
    for instruction in after.forward:
        if isinstance(instruction, (Start, Wait)) and instruction.work.inputs[0] in parameters:
            running += 1 if isinstance(instruction, Start) else -1
            most = max(most, running)
    assert most <= ahead and (most > 0) == (ahead > 0)


def test_parameters_are_gathered_behind_what_is_needed_sooner() -> None:
    """Positions are looked up in pieces and gathered at once, and the first product reads what is exchanged just before
    it: on one wire, layers would hold these up."""
    after = prefetch_parameters(lower(gpt2.graph(), cases.zero((5, 2, 1))))
    sooner = [next(i for i, x in enumerate(after.forward) if n in x.outputs) for n in ("embedding_2__r", "view_1__s1")]
    product = next(i for i, x in enumerate(after.forward) if isinstance(x, Call) and x.op == "aten.mm.default")
    first = next(i for i, x in enumerate(after.forward) if isinstance(x, Start))
    assert max(sooner) < first < product


@pytest.mark.parametrize(
    ("op", "begin"),
    [("aten.view.default", 2), ("aten.add.Tensor", 2), ("aten.mm.default", 0), ("hap.addmm.default", 0)],
)
def test_what_a_product_comes_before_is_not_waited_for(op: str, begin: int) -> None:
    first = Call(("y",), op, (Value("x"), Value("w")), (), "")
    summed = Convert("y__r", "y", "all_reduce", "ring", PARTIAL, REPLICATE, "forward", "")
    gathered = Convert("p__r", "p", "all_gather", "padded", Shard(0, 1, 4, 1, "rows"), REPLICATE, "forward", "")
    last = Call(("z",), "aten.mm.default", (Value("y__r"), Value("y__r")), (), "")
    reading = Call(("out",), "aten.mm.default", (Value("z"), Value("p__r")), (), "")
    ((window, at),) = _prefetched((first, summed, last, gathered, reading), 2)
    assert (window.position, at) == (3, begin)


@pytest.mark.parametrize(
    ("op", "behind"),
    [("aten.threshold_backward.default", True), ("aten.view.default", True), ("aten.mm.default", False)],
)
def test_what_has_time_begins_behind_what_has_none(op: str, behind: bool) -> None:
    """A call makes a gradient, and what another call makes the sums of that the next product needs; wherever the
    gradient's conversion stands, and unless another product comes first."""
    both = Call(("x", "w"), "aten.convolution_backward.default", (Value("v"),), (), "")
    other = Call(("s",), op, (Value("x"), Value("x")), (), "")
    urgent = Convert("s__r", "s", "all_reduce", "ring", PARTIAL, REPLICATE, "backward", "")
    patient = Convert("w__r", "w", "all_reduce", "ring", PARTIAL, REPLICATE, "backward", "")
    product = Call(("y",), "aten.mm.default", (Value("x"), Value("s__r")), (), "")
    for part in ((both, patient, other, urgent, product), (both, other, urgent, product, patient)):
        begins = {w.position: at for w, at in _overlapped(part)}
        sent, summed = begins[part.index(patient)], part.index(urgent)
        assert begins[summed] == part.index(other) + 1
        assert sent == (summed + 1 if behind else 1)


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_sums_of_a_batch_norm_go_before_gradients_of_a_convolution(limit: int) -> None:
    """On one wire each layer's backward pass would wait for the weights of the layer above, be they bundled or not."""
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())]
    graph = capture(nn.Sequential(*layers), (torch.randn(4, 3, 6, 6),), loss_fn=torch.sum)
    found = choices(graph)
    plan = make_plan(found, greedy_strategies(found, {"args.0": (0, 4)}), sizes_for(found, (3, 1)))
    program = overlap_collectives(bucket_collectives(lower(graph, plan), limit_bytes=limit))
    verify_program(program)
    part = program.backward
    norms = [i for i, x in enumerate(part) if isinstance(x, Call) and x.op == "hap.batch_norm_backward.default"]
    assert len(norms) == 3
    for before, norm in pairwise((-1, *norms)):
        sent = [i.work if isinstance(i, Start) else work_of(i) for i in part[before + 1 : norm]]
        read = [{name in part[norm].inputs for name in work.outputs} for work in sent if work is not None]
        urgent = [True in names for names in read]
        assert urgent[0] and urgent == sorted(urgent, reverse=True) and {True, False} not in read


def test_what_was_started_ahead_is_not_started_again() -> None:
    """Parameters by one pass, their gradients by the other."""
    program = bucket_collectives(lower(gpt2.graph(), cases.zero((5, 2, 1))), limit_bytes=20_000)
    ahead = prefetch_parameters(program)
    both = overlap_collectives(ahead)
    verify_program(both)
    started = [{i.work.kind for i in p.forward + p.backward if isinstance(i, Start)} for p in (ahead, both)]
    assert started == [{"all_gather", "all_to_all"}, {"all_gather", "all_to_all", "reduce_scatter"}]
    assert sorted(w.outputs for w in works(both)) == sorted(w.outputs for w in works(program))


def test_the_order_of_collectives_is_in_the_program() -> None:
    """Each rank's program is emitted from the same instructions; here: starting never overtakes another's start."""
    program = bucket_collectives(data_parallel(), limit_bytes=20_000)
    assert [w.outputs for w in works(overlap_collectives(program))] == [w.outputs for w in works(program)]


# ------------------------------------------------------------------------------------------------ dead code, renames


def test_what_nobody_reads_is_dropped() -> None:
    program = data_parallel()
    dead = Call(("unread",), "aten.neg.default", (Value(program.loss),), (), "")
    held = {**program.held, "unread": program.held[program.loss]}
    longer = replace(program, forward=(*program.forward, dead), held=held)
    assert remove_dead_code(longer).forward == program.forward


def test_renames_are_joined() -> None:
    program = data_parallel()
    first = program.forward[0]
    assert isinstance(first, Call) and first.outputs[0]
    name = first.outputs[0]
    alias = Call(("other",), "aten.alias.default", (Value(name),), (), "")
    reader = Call(("last",), "aten.neg.default", (Value("other"),), (), "")
    held = {**program.held, "other": program.held[name], "last": program.held[name]}
    longer = replace(program, forward=(*program.forward, alias, reader), held=held)
    assert remove_renames(longer).forward[-1].inputs == (name,)
    assert len(remove_renames(longer).forward) == len(longer.forward) - 1


# ------------------------------------------------------------------------------------------------ the runner


def test_passes_are_timed_and_show_what_they_change() -> None:
    outcome = run_passes(data_parallel(), standard_passes())
    assert outcome.names == NAMES and set(outcome.seconds) == set(NAMES)
    diff = outcome.diff("bucket")
    assert diff.count("\n-    ") == 28 and diff.count("\n+    ") == 1
    assert outcome.diff("dead_code") == ""
    assert [(c.name, c.seconds) for c in outcome.changes] == [(name, outcome.seconds[name]) for name in NAMES]
    assert outcome.changes[NAMES.index("bucket")].diff == diff
    assert outcome.changes[0].before is outcome.stages[0] and outcome.changes[-1].after is outcome.program


def test_a_pass_is_switched_off_by_its_name() -> None:
    outcome = run_passes(data_parallel(), standard_passes(), off=("bucket", "prefetch", "overlap"))
    assert outcome.names == ("renames", "dead_code", "recompute", "fuse", "hoist", "sink")
    with pytest.raises(PlanError, match=rf"no pass 'melt'.*{', '.join(NAMES)}"):
        run_passes(data_parallel(), standard_passes(), off=("melt",))


def test_the_emitted_file_says_what_is_under_way() -> None:
    plan = cases.zero((5, 2, 1))
    program = run_passes(lower(gpt2.graph(), plan), standard_passes(limit_bytes=20_000)).program
    text = to_python(program, plan)
    compile(text, "emitted.py", "exec")
    assert " = comm.start(" in text and "= comm.wait(" in text
    assert max(map(len, text.splitlines())) <= 120
    assert "start all_gather" in print_program(program)


# ------------------------------------------------------------------------------------------------ sums over hosts


def sites(program: Program) -> list[int]:
    calls = [i for i in (*program.forward, *program.backward) if isinstance(i, Call) and i.op == HOSTS_SUM]
    return [call.args[SITE] for call in calls]


@cache
def host_of_two() -> Choices:
    """One of two hosts, which has five of eight samples of GPT-2."""
    found = choices(gpt2.graph())
    sizes = {batch_group(found).name: (5, 3)}
    return choices(host_graph(found.graph, deal_batch(found), sizes, 0, 3))


@pytest.mark.parametrize("seed", range(6))
def test_sums_over_hosts_are_made_in_the_order_of_their_sites(seed: int) -> None:
    """Whatever else moves: so hosts with other strategies make the same ones at the same time."""
    found, source = host_of_two(), random.Random(seed)
    plan = make_plan(found, random_strategies(found, source), random_sizes(found, 3, source), regather=seed % 2 == 1)
    before = lower(found.graph, plan)
    expected = list(range(len(summed(found.graph))))
    assert len(expected) > 28 and sites(before) == expected
    for limit in (0, 20_000, 1 << 20):
        outcome = run_passes(before, standard_passes(limit_bytes=limit))
        assert [sites(stage) for stage in outcome.stages] == [expected] * len(outcome.stages)


def test_a_sum_over_hosts_is_not_put_off() -> None:
    """It reads what was summed inside the host, and is only handed out, as the view of it."""
    program = data_parallel()
    gradient = next(c for c in program.backward if isinstance(c, Convert))
    at = program.backward.index(gradient)
    total = Call(("total",), HOSTS_SUM, (Value(gradient.output), 0, 2, 3), (), "")
    view = Call(("viewed",), "aten.view.default", (Value("total"), [-1]), (), "")
    held = {**program.held, "total": program.held[gradient.output], "viewed": program.held[gradient.output]}
    longer = replace(
        program, backward=(*program.backward[: at + 1], total, view, *program.backward[at + 1 :]), held=held
    )
    assert sink_results(longer).backward.index(total) == at + 1


def test_a_sum_over_hosts_is_not_brought_forward() -> None:
    """Of the number of targets, which follows from the batch alone and is then summed inside the host."""
    program = data_parallel()
    count = next(c for c in program.forward if isinstance(c, Convert) and c.kind == "all_reduce")
    assert hoist_batch_sums(program).forward != program.forward
    at = program.forward.index(count)
    total = Call(("total",), HOSTS_SUM, (Value(count.input), 0, 2, 3), (), "")
    forward = (*program.forward[:at], total, replace(count, input="total"), *program.forward[at + 1 :])
    longer = replace(program, forward=forward, held={**program.held, "total": program.held[count.input]})
    assert hoist_batch_sums(longer).forward == forward
