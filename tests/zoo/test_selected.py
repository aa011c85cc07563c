"""What is done with ``x[mask]``: one device's loss and gradients however all is cut, or a refusal in words."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from hap.capture import capture, interpret, known, source_values
from hap.errors import CaptureError
from hap.placement import Shard
from tests.zoo.layers import BATCH, WIDTH, Model, case, worst
from tests.zoo.lockstep import TOLERANCE, batch_strategies, drawn, labels, possible

LENGTH = 4
SHAPE = (BATCH, LENGTH, WIDTH)
PLACES = drawn(BATCH, LENGTH, seed=3) > 0.2  # of the sequence
EACH = drawn(*SHAPE, seed=2) > 0.3
SAMPLES = torch.tensor([True, False, False, True, True, False, False, True])
CLASSES = labels(WIDTH, BATCH, LENGTH, seed=4)
IMAGES = labels(LENGTH, BATCH, WIDTH, seed=10)
IGNORED = CLASSES.masked_fill(drawn(BATCH, LENGTH, seed=5) > 0.5, -100)
VALUES = drawn(*SHAPE, seed=6)
MISSING = VALUES.masked_fill(~EACH, float("nan"))  # only where nothing is selected
CHANCES = drawn(WIDTH, seed=7).square()
COLUMNS = torch.tensor([True, False, True, True, False, True])
MIX = drawn(WIDTH, WIDTH, seed=8)


def labelled(loss=functional.cross_entropy, of=lambda y: y, classes=CLASSES, **options):
    return lambda y: loss(of(y[PLACES]), classes[PLACES], **options)


def compared(loss, **options):
    return lambda y: loss(y[EACH], MISSING[EACH], **options)


def images(y):
    """Scores of four classes behind what is selected, and places behind these."""
    return functional.cross_entropy(y[SAMPLES], IMAGES[SAMPLES])


def written(value, of=PLACES):
    def then(y):
        x = y.sin()
        x[of] = value(y)
        return x

    return then


def doubled(y):
    x = y.sin()
    x[PLACES] *= 2
    x[EACH] -= MISSING[EACH]
    return x


def changed_by_another_name(y):
    first = y[EACH]
    second = first
    second *= 3
    second -= MISSING[EACH]
    second /= 2
    second += 1
    return first.square().mean()


def twice(y):
    """The losses of Hugging Face's examples, and of those who write them by hand."""
    by_hand = functional.cross_entropy(y[IGNORED != -100], CLASSES[IGNORED != -100])
    flat = y.view(-1, WIDTH)[IGNORED.view(-1) != -100]
    return by_hand + functional.cross_entropy(flat, CLASSES.view(-1)[IGNORED.view(-1).ne(-100)], reduction="sum")


def shifted(y):
    return functional.cross_entropy(y[:, :-1][IGNORED[:, 1:] != -100], CLASSES[:, 1:][IGNORED[:, 1:] != -100])


def doubled_by_one_made_twice(y):
    x = y.sin()
    x[PLACES & ~(IGNORED == -100)] *= 2
    return x


def made_again_after_a_change(y):
    """Masks that look alike and are not."""
    classes = CLASSES + torch.zeros_like(y[..., 0], dtype=torch.long)
    rows = classes.view(-1)
    mask = classes > 1
    before = y[mask].sum() + y.view(-1, WIDTH)[rows > 1].cos().sum()
    classes[:, 0] = 0
    after = y[classes > 1].square().sum() + y.view(-1, WIDTH)[rows > 1].sin().sum()
    again = classes > 1
    again[0] = True
    first, second = classes > 2, classes > 2
    first[1] = True
    after = after + y[second].tanh().sum() - y[first].square().sum()
    named = y[torch.gt(input=classes + 1, other=2)].sum() - y[torch.gt(input=classes - 1, other=2)].cos().sum()
    return named + before + after + 2 * y[again].sum() + 3 * y[classes > 1].sum() + y[mask].exp().sum()


def at_places(y):
    there, rows, columns = (IGNORED != -100).nonzero(as_tuple=True), *torch.where(PLACES)
    loss = functional.cross_entropy(y[there], CLASSES[torch.where(IGNORED != -100)])
    return loss + y[rows, columns].square().mean() + y[torch.nonzero(CLASSES, as_tuple=True)].sin().sum()


def by_numbers(y):
    i = (IGNORED.view(-1) != -100).nonzero().squeeze(1)
    loss = functional.cross_entropy(y.view(-1, WIDTH).index_select(0, i), CLASSES.view(-1)[i], reduction="sum")
    samples = torch.argwhere(SAMPLES)[:, 0]
    return loss + y[samples].cos().mean() + torch.index_select(y, dim=0, index=SAMPLES.nonzero().flatten()).sum()


def written_at_places(y):
    x = y.sin()
    x[torch.where(EACH)] = 0.5
    x[PLACES.nonzero(as_tuple=True)] *= 2
    x[:, COLUMNS[:LENGTH].nonzero().view(-1)] = 3.0
    return x


def powers(y):
    """Of what is above zero where it is selected, and has no powers elsewhere."""
    above = y[y.detach() > y.detach().mean()] - y.mean()
    return (above**1.5).sum() + (above + 0.1).pow(-0.5).mean() + torch.pow(above, 2).mean()


EQUAL = {
    "at the places of a mask": at_places,
    "by the numbers of places": by_numbers,
    "written at the places of a mask": written_at_places,
    "masks made twice": twice,
    "masks of shifted labels": shifted,
    "changed by a mask made twice": doubled_by_one_made_twice,
    "made again after a change": made_again_after_a_change,
    "changed by another name": changed_by_another_name,
    "written where it was selected": written(lambda y: y[PLACES]),
    "written by one mask in a tuple": written(lambda y: (y * VALUES)[EACH], of=(EACH,)),
    "changed where it is selected": doubled,
    "sum": lambda y: y[PLACES].sum(),
    "mean": lambda y: y[EACH].mean(),
    "mean of places": lambda y: y[PLACES].mean(),
    "mean of what is selected": lambda y: y[PLACES].mean(0).sin().sum(),
    "sum of samples": lambda y: y[SAMPLES].sum(dim=0).cos().sum(),
    "sum of samples and columns": lambda y: y[SAMPLES].sum((0, 2)).cos().sum(),
    "mean of columns, then of all": lambda y: torch.mean(y[PLACES].square().mean(-1)),
    "mean of columns, kept": lambda y: (y[PLACES] - y[PLACES].mean(1, keepdim=True)).square().sum(),
    "cross entropy": labelled(),
    "sum of cross entropies": labelled(reduction="sum"),
    "cross entropies, then a mean": lambda y: labelled(reduction="none")(y).mean(),
    "with classes to ignore": labelled(classes=IGNORED),
    "with weights and smoothing": labelled(weight=CHANCES, label_smoothing=0.1),
    "by a layer": lambda y: nn.CrossEntropyLoss(reduction="sum")(y[PLACES], CLASSES[PLACES]),
    "of images": images,
    "negative log likelihood": labelled(functional.nll_loss, of=lambda s: s.log_softmax(-1), weight=CHANCES),
    "softmax along 1": labelled(functional.nll_loss, of=lambda s: functional.log_softmax(s, dim=1)),
    "a layer of what is selected": labelled(of=lambda s: functional.linear(functional.gelu(s), MIX)),
    "a norm of what is selected": labelled(of=lambda s: functional.layer_norm(s, (WIDTH,), CHANCES)),
    "squares, with targets that are missing": compared(functional.mse_loss),
    "sum of absolutes": compared(functional.l1_loss, reduction="sum"),
    "huber": compared(functional.huber_loss, delta=0.5),
    "smooth absolutes, then a mean": lambda y: compared(functional.smooth_l1_loss, reduction="none")(y).mean(),
    "differences by hand": lambda y: ((y[EACH] - MISSING[EACH]) ** 2).mean(),
    "chances of yes": lambda y: functional.binary_cross_entropy_with_logits(y[EACH], (VALUES > 0).to(y)[EACH]),
    "chances, weighted": lambda y: functional.binary_cross_entropy_with_logits(
        y[PLACES], (VALUES > 0).to(y)[PLACES], pos_weight=CHANCES + 1
    ),
    "logarithms of what may be zero elsewhere": lambda y: (y * EACH).abs()[EACH].log().mean(),
    "roots": lambda y: (y.square() * EACH)[EACH].sqrt().sum(),
    "powers": powers,
    "ratios": lambda y: (1.0 / (y * EACH)[EACH] + y[EACH] / MISSING[EACH]).sum(),
    "exponentials": lambda y: (y[EACH] - MISSING[EACH]).exp().mean(),
    "numbers": lambda y: (2 - 3 * y[EACH] + y[EACH] / 4 - 1).square().mean(),
    "a row beside": lambda y: (y[PLACES] * y[0, 0] + CHANCES).square().mean(),
    "masked_select": lambda y: torch.masked_select(y, EACH).mean() + y.masked_select(EACH).sum(),
    "with whole dims behind": lambda y: y[PLACES, :].mean() + y[SAMPLES, ...].mean(),
    "which are right": lambda y: y.mean() * (y[PLACES].detach() > VALUES[PLACES]).to(y.dtype).mean(),
    "how many are positive": lambda y: y.mean() * (VALUES[EACH] > 0).sum(),
    "over a count of the mask": lambda y: y[PLACES].sum() / PLACES.sum(),
    "a mask of what comes out": lambda y: (lambda mask: (y[mask] * 2).mean())(y.detach() > 0),
    "none": lambda y: y[torch.zeros_like(EACH)].sum() + y.sum(),
}


@pytest.mark.parametrize("name", EQUAL)
def test_it_equals_one_device(name):
    found = case(Model(lambda y: EQUAL[name](y)), SHAPE)
    made = possible(found)
    dealt = batch_strategies(made)
    products = [n.name for n in made.graph.nodes if n.op == "aten.mm.default" and n.phase == "forward"]
    assert any(isinstance(p, Shard) for p in dealt[products[0]].inputs), "the batch is not dealt out"
    assert worst(found, plans=1) <= TOLERANCE


def test_a_mean_of_nothing_is_no_number_as_in_torch():
    found = case(Model(lambda y: torch.nan_to_num(y[torch.zeros_like(EACH)].mean(), nan=3.0) + y.sum()), SHAPE)
    assert worst(found) <= TOLERANCE


def test_a_mean_of_many_in_sixteen_bits():
    many = torch.full((300, 300), 2.0, dtype=torch.float16)

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float16))

        def forward(self, x):
            return (x * self.scale)[x > 0].mean()

    graph = capture(Mean(), many)
    values = interpret(graph, source_values(graph, Mean(), many, None))
    assert values[graph.loss] == 2.0 and values[graph.loss].dtype == torch.float16


def in_place(y):
    first = y[EACH]
    first.exp_()
    return first.mean()


def of_shared_memory(y):
    first = y[EACH]
    second = first.detach()
    first *= 2
    return (first * second).sum()


def without_gradients(y):
    first = y[EACH]
    with torch.no_grad():
        first *= 2
    return first.square().sum()


def to_another_dtype(y):
    counts = y.argmax(-1)[PLACES]
    counts *= 1.5
    return y.sum() * counts.sum()


def changed(y):
    mask = y.detach() > 0
    first = y[mask]
    mask &= EACH
    return (first - VALUES[mask]).sum()


def made_of_what_changed(y):
    classes = CLASSES + torch.zeros_like(y[..., 0], dtype=torch.long)
    first = y[classes > 1]
    classes += 1
    return (first - VALUES[classes > 1]).sum()


def at_places_that_changed(y):
    mask = y.detach() > 0
    there = mask.nonzero(as_tuple=True)
    mask &= EACH
    return y[there].sum()


ROWS, AT = "of the places where a mask is set, a tensor whose size depends", "not by all of its dims in order"
OTHER = drawn(BATCH, LENGTH, seed=9) > 0.2


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


REFUSED = {
    "a backward of its own": (
        lambda y: Straight.apply(y[EACH]).sum() + y.sum(),
        "Straight, a function with a backward",
    ),
    "two masks": (lambda y: (y[PLACES] - VALUES[OTHER]).sum(), "use the same tensor as the mask"),
    "masks of other numbers": (
        lambda y: (y[CLASSES > 1] - VALUES[CLASSES > 2]).sum(),
        "use the same tensor as the mask",
    ),
    "masks of what changed": (made_of_what_changed, "use the same tensor as the mask"),
    "places of another order": (lambda y: y[PLACES.nonzero(as_tuple=True)[::-1]].sum(), AT),
    "some dims of places": (lambda y: y[PLACES.nonzero(as_tuple=True)[0]].sum(), AT),
    "places as a table": (lambda y: y[SAMPLES.nonzero()].sum(), AT),
    "places of a part": (lambda y: y[SAMPLES.nonzero()[:2, 0]].sum(), f"a part {ROWS}"),
    "places of many dims in a row": (lambda y: y[PLACES.nonzero().flatten()].sum(), f"flatten {ROWS}"),
    "places apart": (
        lambda y: y[PLACES.nonzero(as_tuple=True)[0], 0, torch.where(PLACES)[1]].sum(),
        "between their dims",
    ),
    "the next places": (lambda y: y[SAMPLES.nonzero().squeeze(-1) + 1].sum(), f"add {ROWS}"),
    "of every dim": (lambda y: y[SAMPLES.nonzero().squeeze()].sum(), f"squeeze {ROWS}"),
    "places by a mask": (lambda y: y[SAMPLES.nonzero()[SAMPLES, 0]].sum(), f"a part {ROWS}"),
    "one of the places": (lambda y: y[SAMPLES.nonzero().squeeze(-1) == 3].sum(), f"eq {ROWS}"),
    "places as numbers": (lambda y: y.sum() * int(SAMPLES.nonzero().squeeze(1)), f"int {ROWS}"),
    "places put together": (lambda y: y[torch.cat([SAMPLES.nonzero()])].sum(), f"cat {ROWS}"),
    "how many places": (lambda y: y.sum() * PLACES.nonzero().shape[0], f"shape {ROWS}"),
    "one place after another": (lambda y: sum(y[i].sum() for i in SAMPLES.nonzero()), f"a loop {ROWS}"),
    "if there are places": (lambda y: y.sum() if SAMPLES.nonzero() else y.mean(), f"the truth {ROWS}"),
    "the number of places": (lambda y: y.sum() * len(SAMPLES.nonzero()), f"the number {ROWS}"),
    "places that changed": (at_places_that_changed, "changed in place since"),
    "how many": (lambda y: y[PLACES].sum() / y[PLACES].shape[0], "the shape of a tensor whose size depends on values"),
    "the number of elements": (lambda y: y[PLACES].numel() * y.sum(), "numel of a tensor whose size depends"),
    "length": (lambda y: len(y[PLACES]) * y.sum(), "len of a tensor whose size depends on values"),
    "put together": (lambda y: torch.cat([y[PLACES], y[PLACES]]).sum(), "cat of a tensor whose size depends"),
    "along what is selected": (lambda y: y[PLACES].softmax(0).sum(), "along the dim whose size depends on values"),
    "the largest": (lambda y: y[PLACES].max(), "max of a tensor whose size depends on values"),
    "products": (lambda y: (y[PLACES] @ y[PLACES].T).sum(), "the T of a tensor|matmul of a tensor"),
    "as many beside": (lambda y: (y[PLACES] * VALUES[0]).sum(), "select from it, too"),
    "scores beside classes": (
        lambda y: functional.cross_entropy(y[PLACES], CLASSES.flatten()),
        "takes scores and classes that it selects",
    ),
    "chances as classes": (
        lambda y: functional.cross_entropy(y[PLACES], VALUES.softmax(-1)[PLACES]),
        "takes scores and classes that it selects",
    ),
    "old words": (lambda y: functional.mse_loss(y[EACH], VALUES[EACH], reduce=True), "use reduction"),
    "a condition": (lambda y: y.sum() if y[PLACES].sum() > 0 else y.mean(), "data-dependent control flow"),
    "a truth value": (lambda y: y.sum() if y[PLACES] else y.mean(), "bool of a tensor whose size depends on values"),
    "written elsewhere": (written(lambda y: y[OTHER]), "where the same tensor as the mask says"),
    "written in another dtype": (written(lambda y: y[PLACES].float()), "in the same dtype"),
    "written for a column": (written(lambda y: y[PLACES], of=(PLACES, 0)), "where the same tensor as the mask says"),
    "functions in place": (in_place, "exp_ of what a mask selects"),
    "in place of shared memory": (of_shared_memory, "may share memory"),
    "in place without gradients": (without_gradients, "in place, without gradients, of what a mask selects"),
    "in place to another dtype": (to_another_dtype, "to another shape or dtype"),
    "into a tensor": (lambda y: torch.add(y[EACH], 1, out=torch.zeros(1)).sum(), "into a tensor of one's own"),
    "unlike dims": (lambda y: (y[..., :1][PLACES] * VALUES[..., 0][PLACES]).sum(), "unlike numbers of dims"),
    "weights of a layer": (lambda y: functional.linear(y, MIX[COLUMNS]).sum(), "linear of a tensor whose size depends"),
    "a layer along it": (lambda y: functional.linear(y[EACH], MIX).sum(), "along the dim whose size depends"),
    "a norm along it": (lambda y: functional.layer_norm(y[EACH], (WIDTH,)).sum(), "along the dim whose size depends"),
    "a mean of whole numbers": (lambda y: y.argmax(-1)[PLACES].mean() * y.sum(), "a mean of .* in torch.int64"),
    "weighted": (
        lambda y: functional.mse_loss(y[EACH], VALUES[EACH], weight=VALUES[EACH]),
        "with weights, by which a mean is divided",
    ),
    "no reduction": (lambda y: functional.mse_loss(y[EACH], VALUES[EACH], reduction="max"), "max is not a valid value"),
    "changed in place": (changed, "changed in place since"),
    "no loss": (lambda y: y[PLACES], "no loss in what"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_in_words(name, monkeypatch):
    """Of masks that are not known: these here would be, as they are constants."""
    monkeypatch.setattr(known, "MOST", -1)
    then, words = REFUSED[name]
    with pytest.raises(CaptureError) as caught:
        capture(Model(then).double(), drawn(*SHAPE))
    said = str(caught.value)
    assert "\n" not in said
    assert re.search(words, said.split(f" at {__file__}")[0]), said  # not in the line of code that it quotes
