"""HapProgram as a user meets it: an nn.Module with the model's names, any training loop, refusals in one line."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hap.capture import capture
from hap.capture.inputs import step_inputs
from hap.codegen.lowering import lower
from hap.errors import ProgramError
from hap.graph import Graph
from hap.plan import Plan
from hap.rules.choices import choices
from hap.runtime.collectives import Communicator
from hap.runtime.data import Signature
from hap.runtime.program import HapProgram
from hap.runtime.variants import Built, Variant, without_data
from tests._support import cases, gpt2
from tests._support.plans import greedy_strategies, make_plan, replicated_plan, sizes_for
from tests._support.ranks import run_ranks


class Tower(nn.Module):
    """A frozen layer, a tied weight, a batch norm, a parameter that nothing reads: everything a state dict may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.plan = nn.Linear(4, 4)  # a name that the program has too
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.plan.weight
        self.norm = nn.BatchNorm1d(4)
        self.unread = nn.Parameter(torch.ones(2))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.plan(self.frozen(x)))
        return (self.tied(torch.tanh(hidden)) - y).square().mean()


def tower(seed: int = 0) -> Tower:
    torch.manual_seed(seed)
    return Tower().double()


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(6, 4, dtype=torch.float64, generator=generator) for key in ("x", "y")}


def compiled(model: nn.Module) -> HapProgram:
    """On a world of one, where everything but the sizes is the same."""
    graph = capture(model, batch())
    plan = replicated_plan(graph)
    return HapProgram(lower(graph, plan), plan, Communicator(), model, batch())


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-14)


def test_parameters_have_the_models_names_and_kinds() -> None:
    model, program = tower(), compiled(tower())
    assert [n for n, _ in program.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [n for n, _ in program.named_buffers()] == [n for n, _ in model.named_buffers()]
    assert not program.get_parameter("frozen.weight").requires_grad
    assert isinstance(program.plan, Plan), "the program's own attribute wins over the user's module of that name"


def test_gradients_are_autograds_and_frozen_or_unread_parameters_get_none() -> None:
    model, program = tower(), compiled(tower())
    program(**batch()).backward()
    model(**batch()).backward()
    same(gradients(program), gradients(model))
    assert "frozen.weight" not in gradients(program) and "unread" not in gradients(program)


def test_what_was_frozen_at_compilation_is_not_unfrozen_later() -> None:
    """It would get no gradient. What was trainable may be frozen."""
    program = compiled(tower())
    program.get_parameter("frozen.weight").requires_grad_(True)
    with pytest.raises(ProgramError, match=r"frozen\.weight was frozen when the program was compiled"):
        program(**batch())
    program.get_parameter("frozen.weight").requires_grad_(False)
    trained = dict(program.named_parameters())["plan.weight"].requires_grad_(False)
    program(**batch()).backward()
    assert trained.grad is None
    with torch.no_grad():
        program.get_parameter("frozen.weight").requires_grad_(True)
        program(**batch())


def test_an_optimizer_of_the_models_own_parameters_is_refused() -> None:
    """It would update nothing. Who trains the model itself, beside a program of it, may do so."""
    model = tower()
    optimizer, closed = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    optimizer.step()
    program = compiled(model)
    program(**batch()).backward()
    with pytest.raises(ProgramError, match=r"none of which has a gradient: make it of program\.parameters"):
        optimizer.step()
    torch.optim.SGD(program.parameters(), lr=0.1).step()
    closed.step(lambda: model(**batch()).backward())
    optimizer.step()
    torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).step()


def test_what_is_loaded_into_the_model_after_its_compilation_is_warned_of(tmp_path: Path) -> None:
    """Once, before the first step; not where the program has had it all, nor what the program gave."""
    model, other = tower(), tower()
    program, loaded, resumed, trained = (compiled(model) for _ in range(4))
    trained(**batch())
    trained.save_checkpoint(tmp_path / "saved")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    model.load_state_dict(other.state_dict())
    with pytest.warns(UserWarning, match=r"of the model was written to after .* give it to program\.load_state_dict"):
        program(**batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program(**batch())
        loaded.load_state_dict(model.state_dict())
        loaded(**batch())
        resumed.load_checkpoint(tmp_path / "saved")
        resumed(**batch())
        model.load_state_dict(resumed.state_dict())
        resumed(**batch())
        model(**batch()).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        resumed(**batch())


def test_values_are_handed_out_in_inference_mode() -> None:
    program = compiled(tower())
    with torch.inference_mode():
        found = program.state_dict()
    assert all(tensor.is_inference() for tensor in found.values())
    program(**batch())


def test_what_is_written_into_copies_and_thrown_away_is_warned_of() -> None:
    """As averages that are kept by ``state_dict().values()``; who keeps what he wrote to, or loads it, may do so."""
    program, averaged = compiled(tower()), copy.deepcopy(compiled(tower()))

    def average() -> None:
        with torch.no_grad():
            for one, other in zip(averaged.state_dict().values(), program.state_dict().values(), strict=True):
                one.copy_(other)

    kept, loaded = program.state_dict(), program.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tensor in (*kept.values(), *loaded.values()):
            tensor.mul_(2)
        program(**batch())
        program.load_state_dict(loaded)
        del loaded, tensor
        program(**batch())
        average()
    with pytest.warns(UserWarning, match=r"of what program\.state_dict\(\) returned was written to, which is a copy"):
        average()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, scales: tuple[float, ...] = (1.0,), mask: Any = None) -> torch.Tensor:
        return (self.linear(x) * scales[0]).square().mean()


def test_what_is_no_tensor_is_as_it_was_compiled() -> None:
    """It may be left out, and None where the example has nothing."""
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(5, 4)
    inputs = {"x": x, "scales": (2.0, float("nan"))}
    graph = capture(model, inputs)
    plan = replicated_plan(graph)
    program = HapProgram(lower(graph, plan), plan, Communicator(), model, inputs)
    expected = model(x, (2.0,))
    for given in ({}, {"scales": (2.0, float("nan"))}, {"mask": None}):
        torch.testing.assert_close(program(x=x, **given).detach(), expected.detach())
    for given, said in (
        ({"scales": (3.0, float("nan"))}, r"kwargs\.scales\.0 is 3\.0, and the program was compiled with 2\.0"),
        ({"scales": (2.0, float("nan"), 1.0)}, r"unexpected input kwargs\.scales\.2"),
        ({"mask": True}, r"unexpected input kwargs\.mask"),
        ({"x": x.clone().requires_grad_()}, r"kwargs\.x requires grad"),
    ):
        with pytest.raises(ProgramError, match=said):
            program(**{"x": x, **given})
    with torch.no_grad():
        program(x=x.clone().requires_grad_())


def test_a_scaled_loss_scales_gradients_and_two_backwards_accumulate() -> None:
    model, program = tower(), compiled(tower())
    for module in (model, program):
        for seed in (1, 2):
            (module(**batch(seed)) * 0.25).backward()
    same(gradients(program), gradients(model))


def test_gradients_never_share_memory() -> None:
    program = compiled(tower())
    program(**batch()).backward()
    storages = [p.grad.untyped_storage().data_ptr() for p in program.parameters() if p.grad is not None]
    assert len(set(storages)) == len(storages)


def test_an_ordinary_loop_with_optimizer_and_scheduler() -> None:
    model, program = tower(), compiled(tower())
    for module, clip in (
        (model, lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1)),
        (program, lambda: program.clip_grad_norm_(0.1)),
    ):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for seed in range(4):
            optimizer.zero_grad()
            module(**batch(seed)).backward()
            clip()
            optimizer.step()
            scheduler.step()
    same(program.state_dict(), dict(model.state_dict()))


def test_batch_norm_statistics_are_written_back() -> None:
    model, program = tower(), compiled(tower())
    program(**batch())
    model(**batch())
    same(dict(program.named_buffers()), dict(model.named_buffers()))


def test_a_program_made_without_its_model_knows_one_mode_and_one_shape() -> None:
    program = compiled(tower())
    program(**batch())
    with pytest.raises(ProgramError, match="not compiled for this shape of batch, and made without its model"):
        program.shard_batch({key: whole[:4] for key, whole in batch().items()})
    with pytest.raises(ProgramError, match=r"not compiled for evaluation, and made without its model: use hap.compile"):
        program.eval()(**batch(1))
    with pytest.raises(ProgramError, match="not compiled for training"):
        compiled(tower().eval()).train()(**batch(1))


def test_without_grad_the_loss_is_the_same_and_nothing_is_kept() -> None:
    program = compiled(tower())
    with torch.no_grad():
        loss = program(**batch())
    assert not loss.requires_grad and torch.equal(loss, program(**batch()).detach())


def test_a_state_dict_goes_back_and_forth_with_the_model() -> None:
    model, program = tower(1), compiled(tower(0))
    assert list(program.state_dict()) != [] and program.state_dict().keys() == model.state_dict().keys()
    program.load_state_dict(model.state_dict())
    same(program.state_dict(), dict(model.state_dict()))
    fresh = tower(2)
    fresh.load_state_dict(program.state_dict())
    torch.testing.assert_close(fresh(**batch()), program(**batch()).detach(), rtol=1e-12, atol=0, check_dtype=True)


def test_a_state_dict_that_does_not_fit_is_refused() -> None:
    program, whole = compiled(tower()), tower().state_dict()
    some = {k: v for k, v in whole.items() if k != "frozen.bias"}
    with pytest.raises(ProgramError, match=r"missing \['frozen.bias'\]"):
        program.load_state_dict(some)
    assert program.load_state_dict(some | {"more": torch.ones(1)}, strict=False).unexpected_keys == ["more"]
    with pytest.raises(ProgramError, match="unread: the state dict holds \\(3,\\), the model has \\(2,\\)"):
        program.load_state_dict(whole | {"unread": torch.ones(3)})


def test_a_model_on_meta_must_be_given_values_first() -> None:
    with torch.device("meta"):
        model = Tower().double()
    program = compiled(model)
    with pytest.raises(ProgramError, match=r"has no value .*load_state_dict first"):
        program(**batch())
    program.load_state_dict(tower().state_dict(), strict=True)
    with pytest.raises(ProgramError, match="scratch has no value"):
        program(**batch())  # a buffer that no state dict holds


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "shape": (
        {"x": torch.zeros(5, 4, dtype=torch.float64)},
        r"kwargs.x: rank 0's share of \(6, 4\) is \(6, 4\), got \(5",
    ),
    "dtype": ({"x": torch.zeros(6, 4)}, "kwargs.x must be torch.float64, got torch.float32"),
    "device": ({"x": torch.zeros(6, 4, dtype=torch.float64, device="meta")}, "kwargs.x is on meta"),
    "unknown": ({"z": torch.zeros(1)}, "unexpected input kwargs.z; the program takes kwargs.x, kwargs.y"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_wrong_inputs_are_refused_in_one_line(kind: str) -> None:
    wrong, message = REFUSALS[kind]
    with pytest.raises(ProgramError, match=message) as e:
        compiled(tower())(**(batch() | wrong))
    assert "\n" not in str(e.value)


def test_inputs_on_the_cpu_are_brought_to_the_programs_device() -> None:
    """As loaders make them; ``meta`` stands for a GPU."""
    signature, meta = compiled(tower())._variants.first.signature, torch.device("meta")
    found = signature.read(step_inputs(batch()), 0, meta)
    assert {(t.device, tuple(t.shape), t.dtype) for t in found.values()} == {(meta, (6, 4), torch.float64)}
    assert len(found) == 2
    given = {key: value.to(meta) for key, value in batch().items()}
    moved = signature.read(step_inputs(given), 0, meta)
    assert all(any(mine is one for one in given.values()) for mine in moved.values()), "what is there already stays"


def test_a_missing_input_is_named() -> None:
    with pytest.raises(ProgramError, match=r"input kwargs.y is missing"):
        compiled(tower())(x=batch()["x"])


def test_a_second_backward_and_a_write_in_between_are_refused() -> None:
    program = compiled(tower())
    loss = program(**batch())
    loss.backward(retain_graph=True)
    with pytest.raises(ProgramError, match="a second time"):
        loss.backward()
    loss = program(**batch())
    with torch.no_grad():
        dict(program.named_parameters())["plan.weight"].add_(1)
    with pytest.raises(ProgramError, match="plan_weight was written between"):
        loss.backward()


def test_it_cannot_be_moved_or_cast() -> None:
    with pytest.raises(ProgramError, match="cannot be moved or cast"):
        compiled(tower()).float()


def test_another_number_of_ranks_is_refused() -> None:
    graph = capture(tower(), batch())
    plan = replicated_plan(graph, world_size=2)
    with pytest.raises(ProgramError, match="the plan is for 2 ranks, this job has 1"):
        HapProgram(lower(graph, plan), plan, Communicator(), tower(), batch())


def test_it_shows_itself(capsys: pytest.CaptureFixture[str]) -> None:
    program = compiled(tower())
    assert "class Forward" in program.print_readable() and "class Backward" in capsys.readouterr().out
    assert "def backward(saved, tangent, comm):" in program.python_source()


# From here on: three real ranks, batch 5/0/3.


def feed(rank: int, graph: Graph, plan: Plan) -> dict[str, Any]:
    """What three ranks see of data: shares of batches in every form, and a DataLoader's batches."""
    comm = Communicator(dist.group.WORLD, check=True)
    example = (gpt2.batch(), gpt2.batch())
    program = HapProgram(lower(graph, plan), plan, comm, gpt2.build(), *example)
    ids = gpt2.batch(3)
    whole = {
        "tensor": program.shard_batch(ids),
        "tuple": program.shard_batch((ids,))[0],
        "list": program.shard_batch([ids])[0],
        "pair": program.shard_batch(((ids,), {}))[0][0],
        "targets": program.shard_batch((ids,), (ids,))[1][0],
    }
    rows = torch.arange(21).repeat(gpt2.LENGTH, 1).t().contiguous()
    data = TensorDataset(rows, rows)
    epochs = []
    sampler = program.batch_sampler(len(data), shuffle=True, seed=7)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        loader = DataLoader(data, batch_sampler=sampler, collate_fn=program.collate)
        shares = [share for share, _ in loader]
        assert all(s.shape == (plan.sizes[group(plan)][rank], gpt2.LENGTH) for s in shares)
        epochs.append([s[:, 0].tolist() for s in shares])
        for share in shares:
            program(share, targets=share)
    try:
        program(ids, targets=ids)
        refusal = ""
    except ProgramError as e:
        refusal = str(e)
    return {"shares": whole, "epochs": epochs, "refusal": refusal, "length": len(sampler)}


def group(plan: Plan) -> str:
    return next(name for name, g in plan.groups.items() if g.label == "batch")


@pytest.fixture(scope="module")
def fed() -> list[dict[str, Any]]:
    return run_ranks(3, feed, gpt2.graph(), cases.zero((5, 0, 3)))


def test_shard_batch_gives_this_ranks_rows_in_the_form_it_was_given(fed: list[dict[str, Any]]) -> None:
    ids = gpt2.batch(3)
    for form in fed[0]["shares"]:
        pieces = [rank["shares"][form] for rank in fed]
        assert [len(p) for p in pieces] == [5, 0, 3] and torch.equal(torch.cat(pieces), ids), form


def test_samplers_cover_the_data_once_an_epoch_in_an_order_of_its_own(fed: list[dict[str, Any]]) -> None:
    assert [rank["length"] for rank in fed] == [2, 2, 2], "21 samples are two batches of 8"
    epochs = []
    for epoch in range(2):
        batches = [[i for rank in fed for i in rank["epochs"][epoch][b]] for b in range(2)]
        assert all(len(b) == 8 for b in batches) and len({i for b in batches for i in b}) == 16
        epochs.append(batches)
    assert epochs[0] != epochs[1]


def test_a_whole_batch_where_a_share_is_due_is_refused(fed: list[dict[str, Any]]) -> None:
    assert "args.0: rank 1's share of (8, 10) is (0, 10), got (8, 10); see shard_batch" in fed[1]["refusal"]


def test_the_rest_of_the_data_is_dropped_unless_asked_for() -> None:
    program = compiled(tower())
    assert len(program.batch_sampler(12, drop_last=False)) == 2
    with pytest.raises(ProgramError, match="not compiled for this shape of batch"):
        program.batch_sampler(13, drop_last=False)
    assert [len(b) for b in program.batch_sampler(13, shuffle=False)] == [6, 6]


def test_inputs_dealt_differently_have_no_sampler() -> None:
    found = choices(gpt2.graph())
    plan = make_plan(found, greedy_strategies(found, {"args.0": (0, 8)}), sizes_for(found, (1,)))
    program = HapProgram(lower(gpt2.graph(), plan), plan, Communicator(), gpt2.build(), (gpt2.batch(),), gpt2.batch())
    with pytest.raises(ProgramError, match=r"args.0 and targets.0 are dealt differently.*, or pin their placements$"):
        program.batch_sampler(16)
    example = without_data(step_inputs((gpt2.batch(),), gpt2.batch()))
    whole = Signature.of(lower(gpt2.graph(), replicated_plan(gpt2.graph())), example)
    inside = Built(lower(gpt2.graph(), plan), Communicator(), dealt=whole)  # of a host among others: not to be pinned
    with pytest.raises(ProgramError, match=r"dealt differently.*use shard_batch on whole batches$"):
        _ = Variant.of(inside, example, gpt2.build().state_dict()).batch


def test_a_batch_that_is_no_first_dim_has_no_sampler_and_no_pins_to_help_it() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (self.mix(x).mean(0) - y).square().mean()

    late = {"x": torch.zeros(3, 6, 4), "y": torch.zeros(6, 4)}  # time first
    graph = capture(Late(), late)
    plan = replicated_plan(graph)
    program = HapProgram(lower(graph, plan), plan, Communicator(), Late(), late)
    with pytest.raises(ProgramError, match=r"kwargs.x and kwargs.y are dealt differently.*use shard_batch on whole"):
        program.batch_sampler(12)
