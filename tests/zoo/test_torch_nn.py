"""Every layer and loss of ``torch.nn`` equals one device however all is cut, or is refused for a reason."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional, modules

from hap.capture import capture, interpret, source_values
from hap.capture.matrices import _correlation, _covariance
from hap.codegen.lowering import lower
from hap.errors import HapError
from hap.graph import Value
from hap.rules.choices import choices
from hap.runtime.lockstep import run_lockstep
from tests._support.plans import make_plan, sizes_for
from tests._support.torch_release import TORCH
from tests.capture.equality import assert_equals_eager
from tests.zoo.layers import BATCH, WIDTH, Model, case, on_one, worst
from tests.zoo.lockstep import TOLERANCE, batch_strategies, drawn, labels

ROWS, SEQUENCE, IMAGE, VOLUME = (BATCH, WIDTH), (BATCH, 4, WIDTH), (BATCH, 4, 4, WIDTH), (BATCH, 2, 4, 4, WIDTH)
SHAPES = {1: SEQUENCE, 2: IMAGE, 3: VOLUME}


def spatial(name, *args, channels=False, **kwargs):
    """The layer in one, two and three dims; ``channels``: how many there are comes first."""
    return {
        f"{name}{dims}d": (
            lambda dims=dims: getattr(nn, f"{name}{dims}d")(*(SHAPES[dims][1:2] if channels else ()), *args, **kwargs),
            SHAPES[dims],
        )
        for dims in (1, 2, 3)
        if hasattr(nn, f"{name}{dims}d")
    }


def on_rows(*names):
    return {name: (getattr(nn, name), ROWS) for name in names}


class Unpooled(nn.Module):
    """What a max pool took, in its place."""

    def __init__(self, dims):
        super().__init__()
        self.pool = getattr(nn, f"MaxPool{dims}d")(2, return_indices=True)
        self.unpool = getattr(nn, f"MaxUnpool{dims}d")(2)

    def forward(self, x):
        return self.unpool(*self.pool(x))


def twice(layer):
    """Called with its argument twice."""
    return lambda: Wrapped(layer(), lambda inner, y: inner(y, y))


class Wrapped(nn.Module):
    def __init__(self, inner, call):
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, y):
        return self.call(self.inner, y)


def first_of(make):
    return lambda: Wrapped(make(), lambda inner, y: inner(y)[0])


def loss(make, *given, of=lambda y: y):
    """A loss of (y, *given), whose targets are drawn and part of the program."""
    return lambda: Wrapped(make(), lambda inner, y: inner(of(y), *given))


WORDS, SPOKEN, SAID = labels(WIDTH - 1, BATCH, 2) + 1, labels(2, BATCH) + 3, labels(3, BATCH)


def spoken(ctc, y, **options):
    """Of (BATCH, 4, WIDTH); sequences of 3 or 4 steps say nothing, or one word or two."""
    return ctc(y.log_softmax(2).transpose(0, 1), WORDS, SPOKEN, SAID, **options)


TOKENS = labels(5, BATCH, 4)
CLASSES, CHANCES = labels(WIDTH, BATCH), drawn(BATCH, WIDTH, seed=3).sigmoid()
SIGNS = labels(2, BATCH) * 2 - 1
LAYERS = {
    **spatial("MaxPool", 2),
    **spatial("AvgPool", 2),
    **spatial("AdaptiveMaxPool", 2),
    **spatial("AdaptiveAvgPool", 2),
    **spatial("LPPool", 2, 2),
    **spatial("FractionalMaxPool", 2, output_size=2),
    **spatial("ReflectionPad", 1),
    **spatial("ReplicationPad", 1),
    **spatial("CircularPad", 1),
    **spatial("ZeroPad", 1),
    **spatial("ConstantPad", 1, 2.0),
    **spatial("BatchNorm", channels=True),
    **spatial("InstanceNorm", channels=True, affine=True),
    **spatial("Conv", 3, 2, channels=True),
    **spatial("ConvTranspose", 3, 2, channels=True),
    **spatial("Dropout", 0.3),
    **{f"MaxUnpool{dims}d": (lambda dims=dims: Unpooled(dims), SHAPES[dims]) for dims in (1, 2, 3)},
    **on_rows("ReLU", "ReLU6", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "Sigmoid", "Tanh", "Tanhshrink"),
    **on_rows("Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "LogSigmoid", "Softplus", "Softsign"),
    **on_rows("Softshrink", "PReLU", "GLU", "Identity", "Flatten"),
    "RReLU": (nn.RReLU, ROWS),
    "Threshold": (lambda: nn.Threshold(0.1, 2.0), ROWS),
    "Softmax": (lambda: nn.Softmax(1), ROWS),
    "Softmin": (lambda: nn.Softmin(1), ROWS),
    "LogSoftmax": (lambda: nn.LogSoftmax(1), ROWS),
    "Softmax2d": (nn.Softmax2d, IMAGE),
    "AlphaDropout": (lambda: nn.AlphaDropout(0.3), ROWS),
    "FeatureAlphaDropout": (lambda: nn.FeatureAlphaDropout(0.3), IMAGE),
    "Dropout": (lambda: nn.Dropout(0.3), ROWS),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), IMAGE),
    "LayerNorm": (lambda: nn.LayerNorm([4, WIDTH]), IMAGE),
    "RMSNorm": (lambda: nn.RMSNorm(WIDTH), IMAGE),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), IMAGE),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), IMAGE),
    "PixelUnshuffle": (lambda: nn.PixelUnshuffle(2), IMAGE),
    "ChannelShuffle": (lambda: nn.ChannelShuffle(2), IMAGE),
    "Upsample": (lambda: nn.Upsample(scale_factor=2), IMAGE),
    "UpsamplingNearest2d": (lambda: nn.UpsamplingNearest2d(scale_factor=2), IMAGE),
    "UpsamplingBilinear2d": (lambda: nn.UpsamplingBilinear2d(scale_factor=2), IMAGE),
    "Unfold": (lambda: nn.Unfold(2), IMAGE),
    "Fold": (lambda: nn.Sequential(nn.Unfold(2), nn.Fold((4, WIDTH), 2)), IMAGE),
    "Unflatten": (lambda: nn.Unflatten(1, (2, 3)), ROWS),
    "Linear": (lambda: nn.Linear(WIDTH, 4), ROWS),
    "Bilinear": (twice(lambda: nn.Bilinear(WIDTH, WIDTH, 4)), ROWS),
    "Embedding": (lambda: Wrapped(nn.Embedding(5, WIDTH), lambda e, y: e(TOKENS) + y.unsqueeze(1)), ROWS),
    "EmbeddingBag": (lambda: Wrapped(nn.EmbeddingBag(5, WIDTH), lambda e, y: e(TOKENS) + y), ROWS),
    "RNN": (first_of(lambda: nn.RNN(WIDTH, 4, batch_first=True)), SEQUENCE),
    "LSTM": (first_of(lambda: nn.LSTM(WIDTH, 4, batch_first=True)), SEQUENCE),
    "GRU": (first_of(lambda: nn.GRU(WIDTH, 4, batch_first=True)), SEQUENCE),
    "RNNCell": (lambda: nn.RNNCell(WIDTH, 4), ROWS),
    "LSTMCell": (first_of(lambda: nn.LSTMCell(WIDTH, 4)), ROWS),
    "GRUCell": (lambda: nn.GRUCell(WIDTH, 4), ROWS),
    "MultiheadAttention": (
        lambda: Wrapped(nn.MultiheadAttention(WIDTH, 2, batch_first=True), lambda a, y: a(y, y, y)[0]),
        SEQUENCE,
    ),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True), SEQUENCE),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True), 2),
        SEQUENCE,
    ),
    "TransformerDecoderLayer": (twice(lambda: nn.TransformerDecoderLayer(WIDTH, 2, 8, batch_first=True)), SEQUENCE),
    "TransformerDecoder": (
        twice(lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 8, batch_first=True), 1)),
        SEQUENCE,
    ),
    "Transformer": (twice(lambda: nn.Transformer(WIDTH, 2, 1, 1, 8, batch_first=True)), SEQUENCE),
    "CosineSimilarity": (lambda: Wrapped(nn.CosineSimilarity(), lambda d, y: d(y, y.flip(1))), ROWS),
    "PairwiseDistance": (lambda: Wrapped(nn.PairwiseDistance(), lambda d, y: d(y, y.flip(1))), ROWS),
    "L1Loss": (loss(nn.L1Loss, CHANCES), ROWS),
    "MSELoss": (loss(nn.MSELoss, CHANCES), ROWS),
    "SmoothL1Loss": (loss(nn.SmoothL1Loss, CHANCES), ROWS),
    "HuberLoss": (loss(nn.HuberLoss, CHANCES), ROWS),
    "PoissonNLLLoss": (loss(nn.PoissonNLLLoss, CHANCES), ROWS),
    "GaussianNLLLoss": (lambda: Wrapped(nn.GaussianNLLLoss(), lambda f, y: f(y, CHANCES, y.square())), ROWS),
    "KLDivLoss": (loss(lambda: nn.KLDivLoss(reduction="batchmean"), CHANCES, of=lambda y: y.log_softmax(1)), ROWS),
    "BCELoss": (loss(nn.BCELoss, CHANCES, of=torch.sigmoid), ROWS),
    "BCEWithLogitsLoss": (loss(nn.BCEWithLogitsLoss, CHANCES), ROWS),
    "SoftMarginLoss": (loss(nn.SoftMarginLoss, SIGNS.unsqueeze(1)), ROWS),
    "MultiLabelSoftMarginLoss": (loss(nn.MultiLabelSoftMarginLoss, CHANCES.round()), ROWS),
    "CrossEntropyLoss": (loss(nn.CrossEntropyLoss, CLASSES), ROWS),
    "LinearCrossEntropyLoss": (loss(lambda: nn.LinearCrossEntropyLoss(WIDTH, WIDTH), CLASSES), ROWS),
    "NLLLoss": (loss(nn.NLLLoss, CLASSES, of=lambda y: y.log_softmax(1)), ROWS),
    "NLLLoss2d": (loss(nn.NLLLoss, labels(4, BATCH, 4, WIDTH), of=lambda y: y.log_softmax(1)), IMAGE),
    "MultiMarginLoss": (loss(nn.MultiMarginLoss, CLASSES), ROWS),
    "MultiLabelMarginLoss": (loss(nn.MultiLabelMarginLoss, labels(WIDTH, BATCH, WIDTH)), ROWS),
    "CTCLoss": (lambda: Wrapped(nn.CTCLoss(), spoken), SEQUENCE),
    "HingeEmbeddingLoss": (loss(nn.HingeEmbeddingLoss, SIGNS.unsqueeze(1)), ROWS),
    "CosineEmbeddingLoss": (
        lambda: Wrapped(nn.CosineEmbeddingLoss(), lambda f, y: f(y, y.flip(1), SIGNS)),
        ROWS,
    ),
    "MarginRankingLoss": (
        lambda: Wrapped(nn.MarginRankingLoss(), lambda f, y: f(y[:, 0], y[:, 1], SIGNS)),
        ROWS,
    ),
    "TripletMarginLoss": (
        lambda: Wrapped(nn.TripletMarginLoss(), lambda f, y: f(y, y.flip(1), y.roll(1, 1))),
        ROWS,
    ),
    "TripletMarginWithDistanceLoss": (
        lambda: Wrapped(nn.TripletMarginWithDistanceLoss(), lambda f, y: f(y, y.flip(1), y.roll(1, 1))),
        ROWS,
    ),
}
DRAWN_INSIDE = {"RReLU"}  # by its kernel, and so not beside one device's
NOT_LAYERS = {
    *[
        "Container",
        "Module",
        "ModuleDict",
        "ModuleList",
        "ParameterDict",
        "ParameterList",
        "Sequential",
        "RNNBase",
        "RNNCellBase",
    ],
    "LinearCrossEntropyOptions",
    "SyncBatchNorm",  # a batch norm of many devices is what every batch norm is here
}
NEWER = {name for name in {*LAYERS, *NOT_LAYERS} if not hasattr(nn, name)}  # than this torch
REFUSED = {  # and why
    "AdaptiveLogSoftmaxWithLoss": (
        lambda: Wrapped(nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 9, [3]), lambda f, y: f(y, y.argmax(-1)).loss),
        "size depends on values|data-dependent control flow",
    ),
    "CrossMapLRN2d": (
        lambda: Wrapped(nn.CrossMapLRN2d(2), lambda f, y: f(y.reshape(BATCH, 2, 3, 1)).sum()),
        "Attempted to set the storage",
    ),
}


def test_every_layer_of_torch_is_here():
    lazy = {name for name in modules.__all__ if name.startswith("Lazy")}  # the layer itself, once it was called
    assert {*LAYERS, *NOT_LAYERS, *REFUSED, *lazy} - NEWER == set(modules.__all__)
    assert TORCH < (2, 13) or not NEWER


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in NEWER | DRAWN_INSIDE])
def test_it_equals_one_device(name):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    assert worst(case(Model(on_one, make()), shape)) <= TOLERANCE


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in NEWER])
def test_in_evaluation_it_is_as_pytorch_has_it(name):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    model = Model(on_one, make()).double().eval()
    assert_equals_eager(model, drawn(*shape), loss_fn=lambda made: made.square().sum() / 7)


@pytest.mark.parametrize("limits", [(), (0.1, 0.3)])
def test_slopes_in_evaluation_are_their_mean(limits):
    found = case(Model(on_one, nn.RReLU(*limits)))
    found.model.layer.eval()
    assert worst(found) <= TOLERANCE
    assert worst(case(Model(lambda y: functional.rrelu(y, *limits)))) <= TOLERANCE


SOME = torch.tensor([[0, 2, -1, 1, 1, 1], [5, -1, 0, 0, 0, 0], [-1] * 6, [3, 1, 4, 0, 2, 5]]).repeat(2, 1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_several_labels_of_which_there_may_be_none(reduction):
    """What lies behind the first -1 counts for nothing."""
    loss = nn.MultiLabelMarginLoss(reduction=reduction)
    assert worst(case(Model(lambda y: loss(y, SOME)))) <= TOLERANCE
    assert worst(case(Model(lambda y: loss(y[0], SOME[0]) + y))) <= TOLERANCE


def test_the_old_words_for_their_reduction_are_refused():
    with pytest.raises(HapError, match="multilabel_margin_loss with size_average or reduce: use reduction"):
        capture(Twice(lambda y: functional.multilabel_margin_loss(y, SOME, size_average=False)), torch.zeros(ROWS))


def test_random_slopes():
    """Between an eighth and a third, alike however they are cut; their gradient is the slope."""
    torch.manual_seed(0)
    slopes = Wrapped(nn.RReLU(), lambda layer, x: layer(x)).double()
    graph = capture(Model(on_one, slopes).double(), drawn(*ROWS), loss_fn=torch.Tensor.sum)
    values = source_values(graph, Model(on_one, slopes).double(), drawn(*ROWS), seed=3)
    found = interpret(graph, values)
    (product,) = [n for n in graph.nodes if n.op == "aten.where.self"]
    slope = found[Value(product.name)]
    inside = slope[slope != 1]
    assert 10 < len(inside) < slope.numel() - 10 and ((inside > 1 / 8) & (inside < 1 / 3)).all()
    possible = choices(graph)
    plan = make_plan(possible, batch_strategies(possible), sizes_for(possible, (5, 2, 1), {BATCH: (5, 2, 1)}))
    result = run_lockstep(lower(graph, plan), values)
    torch.testing.assert_close(result.loss, found[graph.loss], rtol=TOLERANCE, atol=0)
    torch.testing.assert_close(result.gradients["linear.bias"], slope.sum(0), rtol=TOLERANCE, atol=0)


class Twice(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.layer(x * self.scale)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_in_words(name):
    make, why = REFUSED[name]
    with pytest.raises(HapError, match=why):
        choices(capture(Twice(make()), torch.zeros(ROWS)))


BAGS = labels(5, BATCH, 4)
WEIGHTS = drawn(BATCH, 4, seed=5)


@pytest.mark.parametrize(
    "bag",
    [
        lambda table: functional.embedding_bag(BAGS, table, mode="sum"),
        lambda table: functional.embedding_bag(BAGS, table, mode="max"),
        lambda table: functional.embedding_bag(BAGS, table, mode="sum", per_sample_weights=WEIGHTS),
        lambda table: functional.embedding_bag(BAGS, table, mode="mean", padding_idx=2),
        lambda table: functional.embedding_bag(BAGS, table, mode="sum", padding_idx=-1),
        lambda table: functional.embedding_bag(BAGS * 0 + 2, table, mode="mean", padding_idx=2),
        lambda table: functional.embedding_bag(BAGS, table, mode="max", padding_idx=0),
        lambda table: functional.embedding_bag(BAGS * 0, table, mode="max", padding_idx=0),
    ],
)
def test_bags_of_embeddings(bag):
    table = nn.Parameter(drawn(5, 6, seed=1))

    def add(layer, y):
        return bag(layer.weight) + y

    layer = nn.Embedding(5, WIDTH, _weight=table)
    assert worst(case(Model(add, layer))) <= TOLERANCE


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("least", [0.0, 0.5], ids=["free", "clamped"])
@pytest.mark.parametrize("columns", [slice(None), slice(0, 1), 0], ids=["each", "per row", "one dim less"])
def test_gaussian_losses(full, reduction, least, columns):
    def of(y):
        spread = y[:, columns].square() if least else y[:, columns].square() + 0.1
        return functional.gaussian_nll_loss(y, CHANCES, spread, full=full, eps=least or 1e-6, reduction=reduction)

    assert worst(case(Model(of))) <= TOLERANCE


@pytest.mark.parametrize("made", [torch.cov, lambda y: y.cov(correction=0), torch.corrcoef, torch.Tensor.corrcoef])
@pytest.mark.parametrize("of", [torch.t, lambda y: y, lambda y: y[:, 0]], ids=["columns", "rows", "one column"])
def test_covariances(made, of):
    """Over samples or over columns, of one variable, too."""
    assert worst(case(Model(lambda y: made(of(y)).cos().sum() + y))) <= TOLERANCE


@pytest.mark.parametrize("shape", [(3, 5), (1, 4), (3, 1), (5,), ()])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.int64])
def test_covariances_are_those_of_torch(shape, dtype):
    """Of too few observations, too, which PyTorch warns of."""
    x = (5 * drawn(*shape)).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for correction in (0, 1, 7):
            torch.testing.assert_close(
                _covariance(x, correction=correction), x.cov(correction=correction), equal_nan=True
            )
        if dtype == torch.complex128:  # whose parts are cut off at one by themselves
            assert _correlation(x) is None
        else:
            torch.testing.assert_close(_correlation(x), torch.corrcoef(x), equal_nan=True)


def test_weighted_covariances_are_refused():
    with pytest.raises(HapError, match="data-dependent control flow"):
        capture(Twice(lambda y: torch.cov(y.t(), aweights=y[:, 0].square())), torch.zeros(ROWS))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_ctc_losses(reduction, zero_infinity):
    def of(y):
        lengths = [4, 3, 1, 1, 4, 4, 3, 1] if zero_infinity else [4] * BATCH  # too short for two words
        options = {"reduction": reduction, "zero_infinity": zero_infinity, "blank": WIDTH - 1}
        log_probs = y.view(BATCH, 1, WIDTH) * torch.arange(1.0, 5.0, dtype=y.dtype).view(1, 4, 1)
        return functional.ctc_loss(
            log_probs.log_softmax(2).transpose(0, 1), WORDS - 1, tuple(lengths), tuple(SAID.tolist()), **options
        )

    assert worst(case(Model(of))) <= TOLERANCE


def test_targets_one_after_another_are_refused():
    def of(y):
        return functional.ctc_loss(y.log_softmax(2).transpose(0, 1), WORDS.flatten(), SPOKEN, torch.full((BATCH,), 2))

    with pytest.raises(HapError, match="size depends on values"):
        capture(Twice(of), torch.zeros(SEQUENCE))
