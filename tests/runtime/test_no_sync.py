"""Gradients of several batches, summed over the ranks once: as one process adds them up."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import hap
from benchmarks.zoo_models.reference import SameDraws
from hap.codegen.accumulate import find_accumulation
from hap.codegen.lowering import lower
from hap.codegen.passes.runner import run_passes, standard_passes
from hap.codegen.program import Call, converts
from hap.deferral import deferrable_values
from hap.errors import ProgramError
from hap.mesh_plan import MeshPlan
from hap.plan import Plan
from hap.rules.choices import choices
from hap.runtime.hosts import HostCommunicator
from hap.runtime.program import HapProgram
from hap.runtime.state import whole_tensor
from hap.runtime.step import Step
from tests._support import cases, gpt2
from tests._support.mesh import make_mesh
from tests._support.plans import greedy_strategies, make_plan, replicated_plan, sizes_for
from tests._support.ranks import run_alike, run_ranks
from tests.runtime.test_features_batches import BATCH, apart, batch, graph_of, net, net_plans, worst_gradient
from tests.runtime.test_features_precision import batch as narrow_batch
from tests.runtime.test_features_precision import compiled as narrow_program
from tests.runtime.test_features_precision import net as narrow_net
from tests.runtime.test_features_precision import zero_plan

TOLERANCE = 1e-10
Data = Callable[..., tuple[torch.Tensor, torch.Tensor]]
STEPS = ((8, 8, 8), (8, 3, 8), (3, 3, 8), (8, 3), (8,), (8, 8))  # sizes of the batches of one step


def language(step: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return (gpt2.batch(step, size),) * 2


def compiled(plan: Plan | MeshPlan, data: Data) -> HapProgram:
    x, y = data(0)
    build, loss_fn = parts(data)
    return hap.compile(build(), plan=plan, example_inputs=(x,), example_targets=y, loss_fn=loss_fn)


def parts(data: Data) -> tuple[Callable[[], nn.Module], Callable[..., torch.Tensor]]:
    return (net, nn.functional.cross_entropy) if data is batch else (gpt2.build, gpt2.lm_loss)


# ---- equality ----


def train_in_parts(rank: int, plans: Mapping[str, Plan | MeshPlan], data: Data) -> dict[str, list[float]]:
    return {name: train_one(compiled(plan, data), data) for name, plan in plans.items()}


def train_one(program: HapProgram, data: Data) -> list[float]:
    """Errors of the gradients of every step, of several batches each, and of what is trained by them."""
    build, loss_fn = parts(data)
    model, found = build(), []
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (program, model))
    for number, sizes in enumerate(STEPS):
        for place, size in enumerate(sizes):
            x, y = data(10 * number + place, size)
            seed = program.random_seed
            share, targets = program.shard_batch((x,), y)
            if place < len(sizes) - 1:
                with program.no_sync():
                    (program(*share, targets=targets) / len(sizes)).backward()
            else:
                (program(*share, targets=targets) / len(sizes)).backward()
            with SameDraws(seed):
                (loss_fn(model(x), y) / len(sizes)).backward()
        found.append(worst_gradient(program, model))
        norms = program.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        found.append(apart(*norms))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    state = program.state_dict()  # AdamW makes something of the rounding of the bias in front of a batch norm
    return [*found, *(apart(state[n], p.detach()) for n, p in model.named_parameters() if n != "inward.bias")]


def language_plans() -> dict[str, Plan]:
    return {"data": cases.data_parallel((5, 2, 1)), "zero": cases.zero((5, 0, 3), regather=True)}


def other_language_plans() -> dict[str, Plan]:
    return {"tensor": cases.tensor_parallel((3, 2, 1))} | {f"any {n}": cases.anything(n) for n in range(3)}


def language_meshes() -> dict[str, MeshPlan]:
    graph = gpt2.graph()
    return {
        "cut": make_mesh(graph, (2, 1), (5, 3)),
        "any 1": make_mesh(graph, (1, 2), (3, 5), seed=1),
        "any 5": make_mesh(graph, (2, 1), (5, 3), seed=5),
    }


def net_meshes() -> dict[str, MeshPlan]:
    graph = graph_of(net())
    return {"cut": make_mesh(graph, (2, 1), (5, 3)), "any": make_mesh(graph, (1, 2), (3, 5), seed=1)}


@pytest.mark.parametrize(
    ("data", "make_plans"),
    [
        pytest.param(batch, net_plans, id="batch norm and dropout"),
        pytest.param(language, language_plans, id="gpt2", marks=pytest.mark.long),
        pytest.param(language, other_language_plans, id="gpt2, other plans", marks=pytest.mark.long),
        pytest.param(batch, net_meshes, id="batch norm and dropout, two axes"),
        pytest.param(language, language_meshes, id="gpt2, two axes", marks=pytest.mark.long),
    ],
)
def test_steps_of_several_batches_are_those_of_one_process(
    data: Data, make_plans: Callable[[], Mapping[str, Plan | MeshPlan]]
) -> None:
    plans = make_plans()
    for rank in run_ranks(3, train_in_parts, plans, data):
        assert rank.keys() == plans.keys()
        for name, errors in rank.items():
            assert len(errors) > 2 * len(STEPS) and max(errors) < TOLERANCE, (name, errors)


def train_under_autocast(rank: int, dtype: torch.dtype, plan: Plan) -> float:
    """The worst gradient of four batches, beside those of one process."""
    program, model, worst = narrow_program(plan, dtype), narrow_net(), 0.0
    for place in range(4):
        x, y = narrow_batch(place)
        share, targets = program.shard_batch((x,), y)
        with torch.autocast("cpu", dtype):
            if place < 3:
                with program.no_sync():
                    program(*share, targets=targets).backward()
            else:
                program(*share, targets=targets).backward()
            expected = nn.functional.cross_entropy(model(x), y)
        expected.backward()
    whole = program.full_gradients()
    for name, parameter in model.named_parameters():
        worst = max(worst, float((whole[name] - parameter.grad).abs().max() / parameter.grad.abs().max()))
    return worst


def test_under_autocast_batches_are_added_up_in_the_gradients_dtype() -> None:
    plan = zero_plan(torch.bfloat16)
    for error in run_alike(3, train_under_autocast, torch.bfloat16, plan):
        assert 0 < error < 4 * 2**-8, "no more than a single batch is off"


# ---- what is sent ----


def sent(part: Sequence[Any]) -> int:
    return sum(c.kind != "slice" for i in part for c in converts(i))


@pytest.mark.parametrize("bundled", [False, True])
def test_gradients_are_summed_once(bundled: bool) -> None:
    passes = standard_passes(limit_bytes=1 << 20 if bundled else 1)
    program = run_passes(lower(gpt2.graph(), cases.data_parallel((5, 2, 1))), passes).program
    found = find_accumulation(program)
    assert found.deferred == tuple(program.gradients), "all of them"
    assert sent(program.backward) == sent(found.together.instructions) == sent(found.remainder.instructions) > 20
    assert len(found.further.instructions) == len(found.first.instructions) + len(found.local)
    assert sent(found.further.instructions) == 0 and not found.further.gradients
    left = {i.op for i in found.remainder.instructions if isinstance(i, Call)}
    assert left <= {"aten.add.Tensor", "aten.t.default", "aten.permute.default", "aten.view.default"}
    assert len(found.together.instructions) == len(program.backward) + len(found.local), "an addition each"


def test_gradients_whose_factors_are_gathered_are_whole_at_once() -> None:
    program = run_passes(lower(gpt2.graph(), cases.zero((5, 2, 1))), standard_passes()).program
    found = find_accumulation(program)
    assert found.deferred and found.further.gradients
    assert sent(found.further.instructions) + sent(found.remainder.instructions) == sent(program.backward)


@pytest.mark.parametrize("seed", range(6))
def test_what_the_search_takes_to_wait_does(seed: int) -> None:
    """What is exchanged of a value that can wait, by the graph, is not among what programs exchange at once."""
    program = run_passes(lower(gpt2.graph(), cases.anything(seed)), standard_passes()).program
    once, found = deferrable_values(gpt2.graph()), find_accumulation(program)
    values = [
        program.held[c.output].value for i in found.further.instructions for c in converts(i) if c.kind != "slice"
    ]
    waiting = [program.held[name].value for name in found.behind]
    assert waiting and not once.keys() & set(values)


def test_what_other_calls_read_is_summed_each_time() -> None:
    """Where activations' gradients are partial sums, their sums are needed at once, and a bias reads them, too."""
    program = lower(gpt2.graph(), cases.tensor_parallel((3, 2, 1)))
    found = find_accumulation(program)
    kept, alone = sent(found.further.instructions), sent(found.remainder.instructions)
    assert kept > 0 and kept + alone == sent(program.backward)
    assert set(found.further.gradients) | set(found.deferred) == set(program.gradients)


# ---- what is refused, and what is dropped ----


def misuse(rank: int, plan: Plan) -> list[str]:
    program, said = compiled(plan, batch), []
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    (x,), y = program.shard_batch((batch(1)[0],), batch(1)[1])

    def unsummed() -> None:
        program.zero_grad()
        with program.no_sync():
            program(x, targets=y).backward()

    def tell(call: Callable[[], object]) -> None:
        try:
            call()
            said.append("")
        except ProgramError as e:
            said.append(str(e))

    for call in (optimizer.step, lambda: program.clip_grad_norm_(1.0), program.full_gradients):
        unsummed()
        tell(call)
    unsummed()
    optimizer.zero_grad(set_to_none=False)
    tell(program(x, targets=y).backward)
    unsummed()
    next(program.parameters()).grad = None
    tell(program(x, targets=y).backward)
    unsummed()
    tell(copy.deepcopy(program).full_gradients)  # what it lacks is not the copy's
    with pytest.MonkeyPatch.context() as patch, program.no_sync(), pytest.raises(MemoryError):
        patch.setattr(Step, "backward_apart", fail)
        program(x, targets=y).backward()
    tell(program(x, targets=y).backward)
    program.zero_grad()
    tell(program(x, targets=y).backward)
    weight = program.get_parameter("outward.weight")
    unsummed()
    tell(lambda: program(x, targets=y).backward(inputs=[p for p in program.parameters() if p is not weight]))
    weight.requires_grad_(False)
    unsummed()
    weight.requires_grad_(True)
    tell(program(x, targets=y).backward)
    program.zero_grad()
    tell(program(x, targets=y).backward)
    return said


def fail(*_: object) -> None:
    raise MemoryError


def test_incomplete_gradients_are_refused() -> None:
    for said in run_alike(2, misuse, make_pair()):
        for message, words in zip(
            said,
            (
                r"optimizer.step() after backward passes under no_sync() alone",
                r"clip_grad_norm_() after backward passes",
                r"full_gradients() after backward passes",
                r"was written between backward passes under no_sync()",
                r"was dropped between backward passes under no_sync(), that of",
                r"",
                r"a backward pass of a step with no_sync() did not come to its end: zero_grad(), and start anew",
                r"",
                r"under no_sync() added to the gradient of outward.weight, and this one leaves it out (by",
                r"under no_sync() left out the gradient of outward.weight, and this one adds to it (by",
                r"",
            ),
            strict=True,
        ):
            assert words in message and bool(words) == bool(message), (message, words)


def make_pair() -> Plan:
    """On two ranks."""
    found = choices(graph_of(net()))
    wishes = {"args.0": (0, BATCH), "targets.0": (0, BATCH)}
    return make_plan(found, greedy_strategies(found, wishes), sizes_for(found, (5, 3)))


def drop_and_go_on(rank: int, plan: Plan | MeshPlan) -> list[float]:
    """What zero_grad() drops is dropped; what was called inside stays inside; a copy has gradients of its own."""
    program, model, found = compiled(plan, language), gpt2.build(), []
    for size in (8, 3):
        x, y = language(1, size)
        share, targets = program.shard_batch((x,), y)
        with program.no_sync():
            loss = program(*share, targets=targets)
        loss.backward()
        program.zero_grad()
        for _ in range(2):
            with program.no_sync():
                loss = program(*share, targets=targets)
            loss.backward()
            gpt2.lm_loss(model(x), y).backward()
        program(*share, targets=targets).backward()
        gpt2.lm_loss(model(x), y).backward()
        found.append(worst_gradient(program, model))
        model.zero_grad(), program.zero_grad()
    return found


def test_zero_grad_drops_what_was_not_summed() -> None:
    for errors in run_alike(3, drop_and_go_on, cases.data_parallel((5, 2, 1))):
        assert len(errors) == 2 and max(errors) < TOLERANCE


def uneven_plans() -> list[Plan]:
    return [cases.data_parallel((5, 2, 1)), cases.zero((5, 2, 1))]


def add_by_hand(rank: int, plans: Sequence[Plan]) -> float:
    return max(add_under(plan) for plan in plans)


def add_under(plan: Plan) -> float:
    """A term of the loss that the program does not know of, in some batches, and a gradient from before."""
    program, model = compiled(plan, language), gpt2.build()
    for place in range(4):
        x, y = language(place)
        share, targets = program.shard_batch((x,), y)
        with nullcontext() if place in (0, 3) else program.no_sync():
            loss = program(*share, targets=targets)
        expected = gpt2.lm_loss(model(x), y)
        for module in (program, model):
            terms = [p.square().sum() for p in module.parameters()] if place in (1, 3) else []
            (sum(terms) + (loss if module is program else expected)).backward()
    return worst_gradient(program, model)


def test_other_terms_of_a_loss_are_added() -> None:
    assert max(run_alike(3, add_by_hand, uneven_plans())) < TOLERANCE


def leave_out(rank: int, plans: Sequence[Plan | MeshPlan], frozen: bool) -> float:
    return max(leave_out_under(plan, frozen) for plan in plans)


def leave_out_under(plan: Plan | MeshPlan, frozen: bool) -> float:
    """A parameter that was frozen after the program was compiled, or that no pass is for; gradients of another batch
    that are handed out in the midst are summed, and nothing of what waits."""
    program, model, worst = compiled(plan, language), gpt2.build(), 0.0
    left = next(n for n, p in model.named_parameters() if p.dim() == 2 and "mlp" in n)
    for module in (program, model):
        module.get_parameter(left).requires_grad_(not frozen)
    names = [n for n, _ in model.named_parameters() if n != left]
    slots = {slot.name: slot for slot in program._tensors.slots}
    for place in range(4):
        x, y = language(place)
        share, targets = program.shard_batch((x,), y)
        with nullcontext() if place == 3 else program.no_sync():
            losses = program(*share, targets=targets), gpt2.lm_loss(model(x), y)
        both = [(loss, [m.get_parameter(n) for n in names]) for loss, m in zip(losses, (program, model), strict=True)]
        if place == 1:
            for name, found, expected in zip(names, *(torch.autograd.grad(*one) for one in both), strict=True):
                worst = max(worst, apart(whole_tensor(slots[name], found, program._comm), expected))
        else:
            for loss, parameters in both:
                loss.backward(inputs=None if frozen else parameters)
    return max(worst, worst_gradient(program, model))


@pytest.mark.parametrize("frozen", [True, pytest.param(False, marks=pytest.mark.long)])
def test_what_is_left_out_of_all_passes_stays_out_and_what_is_handed_out_is_summed(frozen: bool) -> None:
    assert max(run_alike(3, leave_out, uneven_plans(), frozen)) < TOLERANCE


def test_on_one_rank_nothing_waits() -> None:
    program = compiled(replicated_plan(gpt2.graph()), language)
    x, y = language(0)
    with program.no_sync():
        program(x, targets=y).backward()
    model = gpt2.build()
    gpt2.lm_loss(model(x), y).backward()
    assert worst_gradient(program, model) < TOLERANCE


# ---- on two axes ----


def sum_over_hosts(rank: int, plan: MeshPlan) -> tuple[list[list[int]], list[int]]:
    """The sites that are summed over hosts in the backward passes of three batches, the last of which is outside of
    ``no_sync()``, and in one of a step with one batch; those that are summed at the end of a step."""
    program = compiled(plan, language)
    comm, made = program._comm, list[list[int]]()
    assert isinstance(comm, HostCommunicator)
    over_hosts = comm.over_hosts

    def count(piece: torch.Tensor, site: int) -> torch.Tensor:
        made[-1].append(site)
        return over_hosts(piece, site)

    for place, (only_own, zeroed) in enumerate([(True, False), (True, False), (False, True), (False, False)]):
        x, y = language(place)
        share, targets = program.shard_batch((x,), y)
        with program.no_sync() if only_own else nullcontext():
            loss = program(*share, targets=targets)
        made.append([])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(comm, "over_hosts", count)
            loss.backward()
        if zeroed:
            program.zero_grad()
    return made, list(comm.later)


@pytest.mark.parametrize("seed", [None, pytest.param(5, marks=pytest.mark.long)])
def test_gradients_are_summed_over_hosts_once(seed: int | None) -> None:
    for (first, further, last, single), later in run_alike(
        3, sum_over_hosts, make_mesh(gpt2.graph(), (2, 1), (5, 3), seed)
    ):
        assert last == single and len(last) > 25
        assert first == further == [], "nothing but gradients is summed in the backward pass"
        assert later and set(later) <= set(last) - set(first)


@pytest.mark.long
@pytest.mark.parametrize("frozen", [True, False])
def test_on_two_axes_what_is_left_out_stays_out_and_what_is_handed_out_is_summed(frozen: bool) -> None:
    assert max(run_alike(3, leave_out, [make_mesh(gpt2.graph(), (2, 1), (5, 3))], frozen)) < TOLERANCE


@pytest.mark.long
def test_on_two_axes_zero_grad_drops_what_was_not_summed() -> None:
    for errors in run_alike(3, drop_and_go_on, make_mesh(gpt2.graph(), (1, 2), (3, 5))):
        assert len(errors) == 2 and max(errors) < TOLERANCE
