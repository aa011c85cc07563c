"""Dropout drops the same elements however a tensor is cut, and what it drops looks random."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import hap
from benchmarks.zoo_models.reference import one_device
from hap.capture import capture, interpret, source_values
from hap.capture.seed import SEED as SEED_TARGET
from hap.codegen.lowering import lower
from hap.codegen.source import to_python
from hap.dropout import dropout, keep_mask
from hap.placement import Shard, take_shard
from hap.rules.choices import choices
from tests._support.plans import make_plan, replicated_plan, sizes_for
from tests.capture.equality import count
from tests.zoo.lockstep import (
    TOLERANCE,
    batch_strategies,
    captured,
    case_of,
    data_parallel_error,
    drawn,
    random_error,
)

SEED = torch.tensor(11)
SHAPE = (6, 4, 12)
SHARDS = [
    Shard(0, 1, 6, 1, "g"),
    Shard(0, 2, 3, 1, "g"),
    Shard(1, 1, 4, 1, "g"),
    Shard(2, 1, 12, 1, "g"),
    Shard(2, 3, 2, 2, "g"),
    Shard(2, 1, 4, 3, "g"),
]


@pytest.mark.parametrize("shard", SHARDS, ids=str)
def test_a_piece_has_its_part_of_the_whole_mask(shard):
    whole = keep_mask(SHAPE, SEED, 0.4, 3)
    sizes = (shard.n - 1, 0, 1)
    for rank in range(3):
        expected = take_shard(whole, shard, sizes, rank)
        place = (shard.dim, shard.outer, shard.n, shard.unit, sum(sizes[:rank]))
        assert keep_mask(expected.shape, SEED, 0.4, 3, place).equal(expected)


Piece = tuple[Shard, tuple[int, ...], int]  # a rank's


@st.composite
def pieces_of_pieces(draw) -> tuple[tuple[int, ...], Piece, Piece]:
    """A shape, a piece of it, and a piece of that along the same dim or another, an empty one now and then."""
    few, counts = st.integers(1, 3), st.lists(st.integers(0, 3), min_size=1, max_size=3)
    dims = draw(st.integers(1, 3))
    first, second = (draw(st.integers(0, dims - 1)) for _ in range(2))
    shape = [draw(st.integers(1, 5)) for _ in range(dims)]
    sizes = tuple(draw(counts.filter(any)))
    shard = Shard(first, draw(few), sum(sizes), draw(few), "hosts")
    shape[first] = shard.extent
    rank = draw(st.integers(0, len(sizes) - 1).filter(lambda r: sizes[r] or first != second))
    extent = shard.local_extent(sizes[rank]) if first == second else shape[second]
    outer = draw(st.sampled_from([d for d in range(1, extent + 1) if extent % d == 0]))
    unit = draw(st.sampled_from([d for d in range(1, extent // outer + 1) if extent // outer % d == 0]))
    n = extent // outer // unit
    cuts = sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2)))
    inside = (cuts[0], cuts[1] - cuts[0], n - cuts[1])
    return (
        tuple(shape),
        (shard, sizes, rank),
        (Shard(second, outer, n, unit, "inside"), inside, draw(st.integers(0, 2))),
    )


@settings(max_examples=300)
@given(pieces_of_pieces())
def test_a_piece_of_a_piece_has_its_part_of_the_whole_mask(given_pieces):
    shape, *pieces = given_pieces
    expected, places = keep_mask(shape, SEED, 0.4, 3), []
    for shard, sizes, rank in pieces:
        expected = take_shard(expected, shard, sizes, rank)
        places += [shard.dim, shard.outer, shard.n, shard.unit, sum(sizes[:rank])]
    assert keep_mask(expected.shape, SEED, 0.4, 3, places).equal(expected)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_of_kept_elements_is_one_minus_p(p):
    kept = keep_mask((500, 2000), SEED, p, 0)  # a standard deviation of the share is at most 0.0005
    assert abs(kept.double().mean().item() - (1 - p)) < 0.0025
    assert (kept.double().mean(0) - (1 - p)).abs().max() < 0.12  # per column of 500: at most 5.4 deviations of 0.022
    assert (kept.double().mean(1) - (1 - p)).abs().max() < 0.06  # per row of 2000: at most 5.4 deviations of 0.011


def test_masks_of_seeds_sites_rows_and_neighbours_are_unrelated():
    a = keep_mask((200, 1000), SEED, 0.5, 0)
    others = [
        keep_mask((200, 1000), SEED + 1, 0.5, 0),
        keep_mask((200, 1000), SEED, 0.5, 1),
        a.roll(1, 0),
        a.roll(1, 1),
    ]
    for other in others:  # agreement of independent coins: 0.5, with a standard deviation of 0.0011
        assert abs((a == other).double().mean().item() - 0.5) < 0.006


def test_the_mask_is_this_one_for_ever():
    """A change of the bits would change the training runs of users from one version to the next."""
    assert keep_mask((2, 8), torch.tensor(0), 0.5, 0).int().tolist() == [
        [1, 1, 1, 1, 1, 0, 0, 1],
        [0, 1, 0, 1, 0, 1, 1, 1],
    ]


def test_kept_elements_are_divided_by_the_chance_to_be_kept():
    x = drawn(40, 50)
    y = dropout(x, SEED, 0.25, 0, None)
    kept = keep_mask(x.shape, SEED, 0.25, 0)
    torch.testing.assert_close(y, torch.where(kept, x / 0.75, 0.0))


def test_the_ends_of_p():
    x = drawn(4, 5)
    assert dropout(x, SEED, 1.0, 0, None).equal(torch.zeros_like(x)) and dropout(x, SEED, 0.0, 0, None).equal(x)


def test_scalars_and_empty_pieces():
    assert keep_mask((), SEED, 0.5, 0).shape == ()
    assert keep_mask((0, 4), SEED, 0.5, 0, (0, 1, 6, 1, 2)).shape == (0, 4)


def mlp(p=0.3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Dropout(p), nn.ReLU(), nn.Linear(12, 8), nn.Dropout(p), nn.Linear(8, 3))


def case(model):
    return case_of(model, drawn(8, 6), functional.mse_loss, drawn(8, 3, seed=1))


@pytest.mark.parametrize("sizes", [(5, 2, 1), (0, 8, 0)])
def test_training_with_dropout_equals_one_device_with_the_same_masks(sizes):
    assert data_parallel_error(case(mlp()), sizes) <= TOLERANCE


@pytest.mark.parametrize("seed", range(4))
def test_under_any_strategies(seed):
    error, where = random_error(case(mlp()), seed)
    assert error <= TOLERANCE, where


def test_attention_dropout_and_recurrent_dropout_too():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 3, 16, dropout=0.2, batch_first=True)
    found = case_of(layer, drawn(8, 4, 12), functional.mse_loss, drawn(8, 4, 12, seed=1))
    assert data_parallel_error(found, (5, 2, 1)) <= TOLERANCE


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.stack = kind(5, 6, num_layers=3, dropout=0.4, **options)

    def forward(self, x):
        out, state = self.stack(x)
        return out.sum() + sum(s.square().sum() for s in (state if isinstance(state, tuple) else (state,)))


STACKS = ((nn.LSTM, {}), (nn.GRU, {"batch_first": True}), (nn.RNN, {"bidirectional": True}))
REST = [(kind, options) for kind, _ in STACKS for _, options in STACKS if (kind, options) not in STACKS]


@pytest.mark.parametrize(
    ("kind", "options"), [*STACKS, *(pytest.param(*stack, marks=pytest.mark.long) for stack in REST)]
)
def test_stacked_recurrent_layers_keep_their_dropout(kind, options):
    """torch 2.13 loses it while it traces."""
    torch.manual_seed(0)
    found = case_of(Recurrent(kind, **options), drawn(4, 3, 5), lambda loss: loss, None)
    graph = capture(found.model, found.inputs, loss_fn=found.loss_fn)
    assert sorted({n.args[3] for n in graph.nodes if n.op == "hap.dropout.default"}) == [0, 1]
    values = interpret(graph, source_values(graph, found.model, found.inputs, seed=5))
    expected = one_device(found, 5)
    torch.testing.assert_close(values[graph.loss], expected.loss, rtol=1e-12, atol=0)


def test_a_program_takes_the_next_seed_each_step_and_drops_nothing_in_evaluation():
    found = case(mlp())
    graph = capture(found.model, found.inputs, loss_fn=found.loss_fn, example_targets=found.targets, name="mlp")
    program = hap.compile(
        found.model,
        plan=replicated_plan(graph),
        example_inputs=found.inputs,
        example_targets=found.targets,
        loss_fn=found.loss_fn,
    )
    program.random_seed = 5
    losses = [program(found.inputs, targets=found.targets).item() for _ in range(2)]
    assert losses[0] != losses[1] and program.random_seed == 7
    assert losses[0] == pytest.approx(one_device(found, 5).loss.item(), rel=1e-14)
    program.random_seed = 5
    assert program(found.inputs, targets=found.targets).item() == losses[0]
    program.eval()
    whole = found.loss_fn(copy.deepcopy(found.model).eval()(found.inputs), found.targets).item()
    assert program(found.inputs, targets=found.targets).item() == pytest.approx(whole, rel=1e-14)
    assert program.random_seed == 6


def test_the_emitted_file_says_where_a_piece_begins():
    found = choices(captured(case(mlp())))
    plan = make_plan(found, batch_strategies(found), sizes_for(found, (5, 2, 1), {8: (5, 2, 1)}), world_size=3)
    text = to_python(lower(found.graph, plan), plan)
    assert "from hap.dropout import dropout" in text
    assert "[0, 1, 8, 1, sum(BATCH[:rank])]" in text
    compile(text, "emitted", "exec")


def test_a_program_without_dropout_needs_no_seed():
    graph = capture(mlp(0.0), torch.zeros(8, 6), loss_fn=torch.sum)
    assert [n.target for n in graph.sources("input")] == ["args.0"]


def test_forward_and_backward_are_one_operator_and_no_mask_is_kept():
    graph = capture(mlp(), torch.zeros(8, 6), loss_fn=torch.sum)
    assert count(graph)["hap.dropout.default"] == 4
    assert [n.target for n in graph.sources("input")] == ["args.0", SEED_TARGET]
    assert not [m for n in graph.nodes for m in n.outputs if m is not None and m.dtype == torch.bool and m.numel == 96]
