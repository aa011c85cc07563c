"""Random numbers are the same however a tensor is cut, are distributed as PyTorch's are, and a model that draws them
equals one device."""

import pytest
import torch
from torch import distributions, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hap
from benchmarks.zoo_models.reference import one_device
from hap import bits
from hap.capture import capture
from hap.codegen.lowering import lower
from hap.codegen.source import to_python
from hap.draws import rand, randint, randn
from hap.errors import CaptureError, MissingRuleError
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
REAL = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def whole_numbers(size, seed, site, shard, *, dtype=torch.int64):
    return randint(size, -5, 1000, seed, site, shard, dtype=dtype)


# ---- the numbers ----


@pytest.mark.parametrize("draw", [rand, randn, whole_numbers])
@pytest.mark.parametrize("shard", [Shard(0, 2, 3, 1, "g"), Shard(2, 3, 2, 2, "g"), Shard(1, 1, 4, 1, "g")], ids=str)
def test_a_piece_has_its_part_of_the_whole(draw, shard):
    whole = draw(SHAPE, SEED, 3, None, dtype=torch.float32)
    sizes = (shard.n - 1, 0, 1)
    for rank in range(3):
        expected = take_shard(whole, shard, sizes, rank)
        place = (shard.dim, shard.outer, shard.n, shard.unit, sum(sizes[:rank]))
        assert draw(tuple(expected.shape), SEED, 3, place, dtype=torch.float32).equal(expected)


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_uniform_numbers_are_uniform_and_never_0_or_1(dtype):
    found = rand((500, 2000), SEED, 0, None, dtype=dtype).double()
    assert found.min() > 0 and found.max() < 1
    counts = torch.histc(found, 16, 0, 1)  # 62,500 each, with a standard deviation of 242
    assert (counts - 62_500).abs().max() < 1_300


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_normal_numbers_are_normal(dtype):
    found = randn((500, 2000), SEED, 0, None, dtype=dtype).double()
    edges = torch.tensor([-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0], dtype=torch.float64) + 0.0039  # between bfloat16's
    below = torch.stack([(found < edge).double().mean() for edge in edges])
    assert (below - distributions.Normal(0.0, 1.0).cdf(edges)).abs().max() < 0.0045  # nine standard deviations
    assert abs(found.mean().item()) < 0.005 and abs(found.var().item() - 1) < 0.01


def test_whole_numbers_are_alike_likely():
    found = randint((500, 2000), -3, 7, SEED, 0, None, dtype=torch.int64)
    counts = torch.bincount((found + 3).flatten(), minlength=10)
    assert len(counts) == 10 and (counts - 100_000).abs().max() < 1_600  # a standard deviation is 300


def test_the_widest_range_of_whole_numbers():
    found = randint((100_000,), -(2**30), 2**30, SEED, 0, None, dtype=torch.int64)
    assert -(2**30) <= found.min() < -(2**30) * 0.999 and 2**30 * 0.999 < found.max() < 2**30
    assert len(found.unique()) > 99_990


def test_numbers_of_seeds_sites_and_neighbours_are_unrelated():
    a = randn((200, 1000), SEED, 0, None, dtype=torch.float64)
    others = [
        randn((200, 1000), SEED + 1, 0, None, dtype=torch.float64),
        randn((200, 1000), SEED, 1, None, dtype=torch.float64),
        a.roll(1, 0),
        a.roll(1, 1),
    ]
    for other in others:  # a standard deviation of 0.0022
        assert abs((a * other).mean().item()) < 0.011


def test_the_numbers_are_these_for_ever():
    """A change would change the training runs of users from one version to the next."""
    zero = torch.tensor(0)
    assert randint((6,), 0, 100, zero, 0, None, dtype=torch.int64).tolist() == [93, 72, 80, 95, 78, 30]
    assert rand((3,), zero, 0, None, dtype=torch.float32).tolist() == pytest.approx(
        [0.93943793, 0.727377, 0.80848092], rel=1e-6
    )
    assert randn((3,), zero, 0, None, dtype=torch.float32).tolist() == pytest.approx(
        [1.5500724, 0.6048992, 0.8723121], rel=1e-5
    )


# ---- what PyTorch draws ----


class Draws(nn.Module):
    """A linear layer and what a function makes of its output, squared."""

    def __init__(self, function, width=4):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.function = nn.Linear(6, width), function

    def forward(self, x):
        return self.function(self.linear(x)).square().mean()


def case(function):
    return case_of(Draws(function), drawn(8, 6), lambda loss: loss, None)


def stochastic_depth(x):
    kept = torch.rand((x.shape[0], 1), dtype=x.dtype) + 0.8
    return x.div(0.8) * kept.floor()


DRAWING = {
    "rand": stochastic_depth,
    "rand_like": lambda x: x * torch.rand_like(x),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(-1, 3),
    "randn": lambda x: x + torch.randn(4, dtype=x.dtype),
    "randn_like": lambda x: x + torch.randn_like(x),
    "normal_": lambda x: x + torch.empty_like(x).normal_(2, 3),
    "normal of floats": lambda x: x + torch.normal(1.0, 2.0, x.shape, dtype=x.dtype),
    "randn, no generator": lambda x: x + torch.randn(x.shape, generator=None, dtype=x.dtype),
    "rand, no generator": lambda x: x * torch.rand(x.shape, generator=None, dtype=x.dtype),
    "randint": lambda x: x * torch.randint(-4, 9, (x.shape[0], 1)),
    "randint from 0": lambda x: x * torch.randint(9, x.shape),
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x)),
    "bernoulli_ of a number": lambda x: x * torch.empty_like(x).bernoulli_(0.7),
    "exponential_": lambda x: x * torch.empty_like(x).exponential_(0.5),
    "gumbel softmax": lambda x: functional.gumbel_softmax(x, hard=True),
    "multinomial": lambda x: x.gather(1, torch.multinomial(torch.softmax(x, 1), 1)),
    "a normal distribution": lambda x: distributions.Normal(x, functional.softplus(x)).rsample(),
    "a uniform distribution": lambda x: distributions.Uniform(x, x + 1).rsample(),
    "a Bernoulli distribution": lambda x: x * distributions.Bernoulli(logits=x).sample(),
    "a categorical distribution": lambda x: x * distributions.Categorical(logits=x).sample()[:, None],
    "dropout between draws": lambda x: torch.randn_like(x) + functional.dropout(x) * torch.rand_like(x),
}


@pytest.mark.parametrize("function", DRAWING.values(), ids=DRAWING)
def test_a_model_that_draws_equals_one_device(function):
    assert data_parallel_error(case(function), (5, 0, 3)) <= TOLERANCE
    error, where = random_error(case(function), 1)
    assert error <= TOLERANCE, where


class Given(nn.Module):
    """Returns what a function draws of an input, beside a loss."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.weight.square(), self.function(x)


def first(out):
    return out[0]


def output(function, x):
    """What a step of a program draws of x."""
    model = Given(function)
    graph = capture(model, x, loss_fn=first, outputs=("1",))
    plan = replicated_plan(graph)
    program = hap.compile(model, plan=plan, example_inputs=x, loss_fn=first, outputs=("1",))
    program.random_seed = 7
    program(x)
    return program.outputs["1"]


CHANCES = torch.tensor([0.1, 0.0, 0.3, 0.6])
MANY = 20_000


def shares(classes):
    return torch.bincount(classes.flatten(), minlength=4) / classes.numel()


def test_one_class_is_drawn_by_its_chance():
    found = output(lambda p: torch.multinomial(p, 1), CHANCES.expand(MANY, 4).contiguous())
    assert (shares(found) - CHANCES).abs().max() < 0.018  # five standard deviations


def test_classes_are_drawn_with_replacement():
    found = output(lambda p: torch.multinomial(p, 10, True), 3 * CHANCES.expand(MANY // 10, 4).contiguous())
    assert found.shape == (MANY // 10, 10) and (shares(found) - CHANCES).abs().max() < 0.018


def test_classes_are_drawn_without_replacement():
    found = output(lambda p: torch.multinomial(p, 2), CHANCES.expand(MANY, 4).contiguous())
    assert (found[:, 0] != found[:, 1]).all() and (shares(found[:, :1]) - CHANCES).abs().max() < 0.018
    after_3 = found[found[:, 0] == 3, 1]  # 0.1 and 0.3 are left
    assert abs((after_3 == 2).float().mean().item() - 0.75) < 0.025


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_numbers_are_drawn_in_many_steps(dtype):
    even = torch.ones(500, 2000, dtype=dtype)  # of so many classes, hundreds would share a step of 7 bits
    found = output(lambda p: torch.multinomial(p, 1), even)
    assert found.float().mean().item() == pytest.approx(999.5, abs=130) and len(found.unique()) > 380
    again = output(lambda p: torch.multinomial(p, 3, True), even)
    assert len(again.unique()) > 950
    waited = output(lambda x: torch.empty_like(x).exponential_(), even)
    assert waited.dtype == dtype and waited.min().item() < 1e-4 and waited.max().item() > 9


def test_a_permutation_is_one():
    found = output(lambda x: torch.randperm(x.shape[0]), torch.zeros(1000))
    assert found.sort().values.equal(torch.arange(1000)) and not found.equal(torch.arange(1000))
    ranks = torch.stack([found.double(), torch.arange(1000.0, dtype=torch.float64)])
    assert abs(torch.corrcoef(ranks)[0, 1].item()) < 0.16  # a standard deviation of 0.032


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_a_coin_falls_by_its_chance(p):
    zeros = torch.zeros(100, 200)
    for function in (lambda x: x.bernoulli(p), lambda x: torch.bernoulli(x + p), lambda x: x.clone().bernoulli_(x + p)):
        found = output(function, zeros)
        assert abs(found.mean().item() - p) < (0.017 if 0 < p < 1 else 1e-9) and found.dtype == zeros.dtype


def test_waiting_times_have_their_rate():
    found = output(lambda x: torch.empty_like(x).exponential_(4.0), torch.zeros(100, 200))
    assert found.min() > 0 and abs(found.mean().item() - 0.25) < 0.01


def test_numbers_are_in_the_dtype_that_was_asked_for():
    x = torch.zeros(64, 64)
    assert output(lambda x: torch.randint_like(x, 3), x).dtype == torch.float32
    assert output(lambda x: torch.randn(4, dtype=torch.bfloat16), x).dtype == torch.bfloat16
    assert output(lambda x: torch.randint(0, 9, (4,), dtype=torch.int32), x).dtype == torch.int32
    found = output(lambda x: torch.bernoulli(torch.full_like(x, 1e-3, dtype=torch.bfloat16)), x)
    assert found.dtype == torch.bfloat16 and found.float().mean() < 0.01


# ---- the program ----


def test_every_step_draws_others_and_calls_have_sites_in_program_order():
    graph = captured(case(DRAWING["dropout between draws"]))
    sites = {n.op: n.args[-2] for n in graph.nodes if n.op.startswith("hap.")}
    assert sites == {"hap.randn.default": 0, "hap.dropout.default": 1, "hap.rand.default": 2}
    first, second = (one_device(case(DRAWING["randn_like"]), seed).loss for seed in (1, 2))
    assert first != second


def test_checkpointing_draws_once():
    def block(y):
        return (y * torch.randn_like(y)).sin()

    graph = captured(case(lambda x: checkpoint(block, x, use_reentrant=False)))
    assert [n.op for n in graph.nodes] == [n.op for n in captured(case(block)).nodes]
    assert count(graph)["hap.randn.default"] == 1


def test_the_emitted_file_says_where_a_piece_begins():
    found = choices(captured(case(DRAWING["randn_like"])))
    plan = make_plan(found, batch_strategies(found), sizes_for(found, (5, 2, 1), {8: (5, 2, 1)}), world_size=3)
    text = to_python(lower(found.graph, plan), plan)
    assert "from hap.draws import randn" in text
    assert "randn([BATCH[rank], 4], i_seed, 0, [0, 1, 8, 1, sum(BATCH[:rank])], dtype=torch.float64)" in text
    compile(text, "emitted", "exec")


def test_checks_of_distributions_are_back_after_capture(monkeypatch):
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)  # torch.compile takes it away for good
    capture(Draws(lambda x: distributions.Normal(x, 1.0).rsample()), torch.zeros(8, 6))
    with pytest.raises(ValueError, match="constraint"):
        distributions.Normal(torch.zeros(2), torch.tensor([-1.0, 1.0]))


@pytest.mark.parametrize(
    "function, error, message",
    [
        (lambda x: torch.poisson(x.exp()), MissingRuleError, "aten.poisson.default .* draws random numbers"),
        (lambda x: x * torch.randint(0, 2**40, x.shape), MissingRuleError, "aten.randint.low .* draws random"),
        (lambda x: x + torch.randn(4, generator=torch.Generator()), CaptureError, "a generator of random numbers"),
    ],
)
def test_what_cannot_be_drawn_alike_is_refused(function, error, message):
    with pytest.raises(error, match=message):
        choices(capture(Draws(function), torch.zeros(8, 6)))


SIZES = [(300, 1024), (3, 200_000), (400_000,), (70_000, 3), (2, 50, 30, 100), (), (0, 5), (5, 0)]


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_numbers_drawn_some_rows_at_a_time_are_those_drawn_at_once(shape, monkeypatch):
    found = [draw(shape, SEED, 2, None, dtype=torch.float64) for draw in (rand, randn, whole_numbers)]
    monkeypatch.setattr(bits, "_CACHED", 1 << 40)
    for draw, one in zip((rand, randn, whole_numbers), found, strict=True):
        assert one.shape == shape and draw(shape, SEED, 2, None, dtype=torch.float64).equal(one)
