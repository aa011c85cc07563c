"""What training really uses, each equal to one device in float64 with the batch dealt unevenly."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.zoo_models import find
from benchmarks.zoo_models.reference import one_device, worst_error
from hap.capture import capture
from hap.codegen.lowering import lower
from hap.codegen.program import Convert
from hap.placement import Shard
from tests._support.plans import greedy_strategies, make_plan, sizes_for
from tests.zoo.lockstep import SEED, TOLERANCE, captured, case_of, data_parallel_error, drawn, labels, possible, run

BATCH, CLASSES = 8, 5
SIZES = [(5, 2, 1), (0, 6, 2)]


def linear():
    torch.manual_seed(0)
    return nn.Linear(6, CLASSES)


def classes_with_ignored():
    """The first five samples, all of rank 0's share, count for nothing."""
    found = labels(CLASSES, BATCH)
    found[:5] = -100
    return found


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1},
        {"weight": torch.tensor([0.1, 2.0, 3.0, 0.5, 1.0], dtype=torch.float64)},
        {"weight": torch.tensor([0.1, 2.0, 3.0, 0.5, 1.0], dtype=torch.float64), "label_smoothing": 0.2},
        {"reduction": "sum"},
    ],
    ids=lambda o: "+".join(o) or "plain",
)
def test_cross_entropy_is_a_mean_over_the_valid_tokens_of_all_ranks(options, sizes):
    found = case_of(linear(), drawn(BATCH, 6), partial(functional.cross_entropy, **options), classes_with_ignored())
    assert data_parallel_error(found, sizes) <= TOLERANCE


@pytest.mark.parametrize(
    "loss", [functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss]
)
def test_regression_losses(loss):
    found = case_of(linear(), drawn(BATCH, 6), loss, drawn(BATCH, CLASSES, seed=1))
    assert data_parallel_error(found, (5, 2, 1)) <= TOLERANCE


def test_binary_cross_entropy_with_positive_weights():
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    loss = partial(functional.binary_cross_entropy_with_logits, pos_weight=weight)
    found = case_of(linear(), drawn(BATCH, 6), loss, (drawn(BATCH, CLASSES, seed=1) > 0).double())
    assert data_parallel_error(found, (5, 2, 1)) <= TOLERANCE


def test_a_masked_mean_divides_by_the_global_count():
    def loss(y, mask):
        return (y.square().sum(1) * mask).sum() / mask.sum()

    mask = torch.tensor([1, 0, 1, 1, 0, 0, 0, 1], dtype=torch.float64)
    assert data_parallel_error(case_of(linear(), drawn(BATCH, 6), loss, mask), (5, 2, 1)) <= TOLERANCE


class Lora(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, CLASSES).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, CLASSES, bias=False)

    def forward(self, x):
        return self.base(x) + 0.5 * self.up(self.down(x))


def test_adapters_train_and_what_is_frozen_does_not():
    torch.manual_seed(0)
    found = case_of(Lora(), drawn(BATCH, 6), functional.cross_entropy, labels(CLASSES, BATCH))
    assert list(captured(found).gradients) == ["down.weight", "up.weight"]
    assert data_parallel_error(found, (5, 2, 1)) <= TOLERANCE


class Averaging(nn.Module):
    """Keeps a running mean of its inputs, by assignment, and counts its calls, in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.calls += 1
        return self.linear(x - self.mean)


def test_buffers_get_the_values_of_the_global_batch():
    torch.manual_seed(0)
    found = case_of(Averaging(), drawn(BATCH, 6), functional.cross_entropy, labels(CLASSES, BATCH))
    assert sorted(captured(found).updates) == ["calls", "mean"]
    assert data_parallel_error(found, (5, 2, 1)) <= TOLERANCE


class Attends(nn.Module):
    """Grouped-query attention with a padding mask; two inputs by keyword."""

    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(12, 24), nn.Linear(12, 12)

    def forward(self, x, mask):
        q = self.q(x).unflatten(2, (6, 4)).transpose(1, 2)
        k, v = (
            t.unflatten(2, (3, 2)).transpose(1, 2).repeat_interleave(2, 1).repeat(1, 1, 1, 2)
            for t in self.kv(x).chunk(2, 2)
        )
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return found.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("sizes", SIZES)
def test_attention_with_shared_keys_and_padding(sizes):
    torch.manual_seed(0)
    mask = torch.arange(7) < torch.tensor([7, 3, 5, 1, 2, 7, 4, 6]).unsqueeze(1)
    found = case_of(
        Attends(), {"x": drawn(BATCH, 7, 12), "mask": mask}, functional.mse_loss, drawn(BATCH, 7, 24, seed=1)
    )
    assert data_parallel_error(found, sizes) <= TOLERANCE


def test_a_check_of_values_leaves_no_trace():
    """one_hot asserts that its classes are not negative."""
    graph = capture(
        linear(),
        (drawn(BATCH, 6).float(),),
        loss_fn=lambda y, t: (y * functional.one_hot(t, CLASSES)).sum(),
        example_targets=labels(CLASSES, BATCH),
    )
    assert not [n for n in graph.nodes if "assert" in n.op]


@pytest.mark.parametrize("name", ["hap_bert_moe", "hap_bert_switch"])
def test_experts_are_dealt_unevenly_and_stay_where_they_are(name):
    """Expert parallelism: five experts as 3, 2, 0; their weights are never gathered."""
    found = find(name).build("small")
    made = possible(found)
    experts = {n.target: (0, 5) for n in made.graph.sources("parameter") if n.target.endswith((".up", ".down"))}
    batch = {"args.0": (0, 7), "targets.0": (0, 7)}
    strategies = greedy_strategies(made, {**experts, **batch})
    sizes = sizes_for(made, (3, 2, 1), {5: (3, 2, 0)})
    assert worst_error(run(found, made, strategies, sizes), one_device(found, SEED))[0] <= TOLERANCE
    program = lower(made.graph, make_plan(made, strategies, sizes, world_size=3))
    moved = [i for i in (*program.forward, *program.backward) if isinstance(i, Convert)]
    homes = {n.name for n in made.graph.sources("parameter") if n.target in experts}
    assert len(experts) == 2 and not [c for c in moved if c.input in homes]
    products = [n for n in made.graph.nodes if n.op == "aten.bmm.default" and n.module == "layers.1.inner"]
    by_expert = [
        n for n in products if isinstance(strategies[n.name].inputs[0], Shard) and strategies[n.name].inputs[0].n == 5
    ]
    assert len(by_expert) >= 4  # up and down, forward and backward
