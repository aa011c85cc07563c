"""Layers and functions that few models need: loss and gradients equal one device's, however all is cut."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from hap.capture import capture, interpret, source_values
from hap.graph import Value
from hap.placement import Shard
from tests.zoo.layers import BATCH, WIDTH, Model, NormOfChannels, case, on_one, worst
from tests.zoo.lockstep import TOLERANCE, batch_strategies, possible

SIGNS, CHANNELS = torch.tensor([1, -1]), (BATCH, 3, WIDTH)
IMAGE = (BATCH, 2, 4, WIDTH)
MIX = torch.linspace(-1, 1, WIDTH * WIDTH, dtype=torch.float64).view(WIDTH, WIDTH)
COLUMNS = torch.tensor([True, False, True, True, False, False])


def squares(outer):
    return outer.unsqueeze(1) * outer.unsqueeze(2)


def regular(y):
    """Of every row a matrix that has an inverse, and is positive definite."""
    return squares(y) * 0.1 + torch.eye(WIDTH, dtype=y.dtype)


def normal(mean, covariance):
    return torch.distributions.MultivariateNormal(mean, covariance_matrix=covariance)


def whitened(y):
    apart = y - y.mean(0)
    return torch.linalg.solve_triangular(torch.linalg.cholesky(regular(apart).mean(0)), apart.t(), upper=False).t()


def written(index, value):
    """A function that writes at places of a list."""

    def then(y):
        made = y * 1
        made[index] = value(y)
        return made

    return then


def pieces(y):
    made = y.new_empty(BATCH, WIDTH)
    made[:, 0], made[:, 1:] = y[:, 5], y[:, :5].sin()
    return made


def doubled_in_part(y):
    made = y.clone()
    made[:, 1].mul_(2)
    return made


def doubled_in_part_and_turned(y):
    """Its gradient lies otherwise in memory than what is viewed before."""
    made = y.unflatten(1, (2, 3)) @ torch.ones(3, 5, dtype=y.dtype).triu() + 0
    made[:, :1].mul_(2)
    return made.permute(1, 2, 0).contiguous().sin()


FUNCTIONS = {
    "normalize": functional.normalize,
    "norm": lambda y: y.norm(dim=1) * y.norm() + y.norm(p=3, dim=1),
    "norms of maxima, sums and counts": lambda y: y.norm(p=float("inf"), dim=1) + y.norm(p=1, dim=1) * y.norm(p=0),
    "matrix norm": torch.linalg.matrix_norm,
    "pairwise distance": lambda y: functional.pairwise_distance(y, y.flip(1)),
    "cosine similarity": lambda y: functional.cosine_similarity(y, y.flip(1)),
    "triplet loss": lambda y: functional.triplet_margin_loss(y, y.flip(1), y.roll(1, 1)),
    "cosine embedding loss": lambda y: functional.cosine_embedding_loss(y, y.flip(1) * 0.7 + 1, SIGNS.repeat(4)),
    "hinge embedding loss": lambda y: functional.hinge_embedding_loss(y, SIGNS.repeat(3).expand(BATCH, WIDTH)),
    "lerp": lambda y: torch.lerp(y, y.flip(1), 0.3),
    "lerp by a tensor": lambda y: torch.lerp(y, y.sum(0), y[0].sigmoid()),
    "index_add": lambda y: torch.zeros(3, WIDTH, dtype=y.dtype).index_add(0, torch.arange(BATCH) % 3, y),
    "index_add of columns": lambda y: y.index_add(1, torch.tensor([0, 2, 2]), y[:, :3].tanh(), alpha=2),
    "index_copy": lambda y: y.index_copy(1, torch.tensor([0, 2]), y[:, 3:5].tanh()),
    "index_fill": lambda y: y.index_fill(1, torch.tensor([0, 2]), 3.0),
    "empty, then filled": lambda y: y * torch.empty(WIDTH, dtype=y.dtype).fill_(3) + y.new_empty(WIDTH).fill_(2.0),
    "empty, then zero": lambda y: y + torch.empty_like(y).zero_(),
    "empty, then written": pieces,
    "written in part, then summed": lambda y: doubled_in_part(y).sum(0),
    "written in part, then turned": doubled_in_part_and_turned,
    "linspace": lambda y: y * torch.linspace(0, 1, WIDTH) + torch.logspace(0, 1, WIDTH),
    "prod": lambda y: (y.tanh() + 1.5).prod(),
    "any and all": lambda y: y * (y > 0).any(dim=(0, 1)) * (y > -1).all(dim=(1,), keepdim=True),
    "std_mean": lambda y: sum(torch.std_mean(y, dim=1)) + sum(torch.std_mean(y)),
    "diagonal": lambda y: squares(y).diagonal(1, 1, 2),
    "diagonal of the first dims": lambda y: squares(y).diagonal(0, -3, 1).sum(0),
    "trace": lambda y: torch.trace(y @ y.mT),
    "diag": lambda y: torch.diag_embed(y, 1) + torch.diag(y.sum(0).repeat(2)[:7]),
    "unfold": lambda y: y.unfold(1, 3, 2),
    "unfold of a transpose": lambda y: y.T.unfold(0, 3, 1).sum(2),
    "columns written": written((slice(None), torch.tensor([0, 3])), lambda y: y[:, 1:3].sin()),
    "columns written with a row": written((slice(None), torch.tensor([0, 3])), lambda y: y[0, :2]),
    "columns written with a number": written((slice(None), torch.tensor([5, 3])), lambda y: 2.0),
    "samples written": written(torch.tensor([1, 6]), lambda y: y[2].cos()),
    "one column of each sample written": written((torch.arange(BATCH), torch.arange(BATCH) % WIDTH), lambda y: y[:, 0]),
    "masked_scatter": lambda y: (y * 1).masked_scatter(y.detach() > 0, y.flip(0).sin()),
    "masked_scatter of a longer source": lambda y: y.sin().masked_scatter(COLUMNS, torch.cat([y, y])),
    "tril_indices": lambda y: squares(y)[:, *torch.tril_indices(WIDTH, WIDTH, -1)],
    "triu_indices": lambda y: squares(y)[:, *torch.triu_indices(WIDTH, WIDTH, 1)],
    "tangents": lambda y: torch.func.jvp(lambda x: functional.linear(x, y[:WIDTH], y[0]).tanh(), (y,), (y.sin(),))[1],
    "jacobians in forward mode": lambda y: torch.func.vmap(torch.func.jacfwd(lambda x: functional.linear(x, MIX)))(y),
    "nansum": lambda y: y.where(y > -1, torch.nan).nansum(1) + y.where(y < 1, torch.nan).nanmean(1) + y.nansum(),
    "aminmax": lambda y: torch.stack(y.aminmax()) + torch.stack(y.aminmax(dim=1)).sum(1, keepdim=True),
    "ldexp": lambda y: torch.ldexp(y, torch.arange(WIDTH)),
    "rounded to decimals": lambda y: y + (y.detach().round(decimals=1) - y.detach()),
    "eye of two sizes": lambda y: y @ torch.eye(WIDTH, 3, dtype=y.dtype),
    "inverses of factors": lambda y: torch.cholesky_inverse(torch.linalg.cholesky(regular(y))),
    "solutions by factors": lambda y: torch.cholesky_solve(y.unsqueeze(-1), torch.linalg.cholesky(regular(y))),
    "distances of pairs": lambda y: torch.pdist(y).square().neg().exp().mean().log() + functional.pdist(y.T, 1.0).sum(),
    "inverses": lambda y: torch.linalg.inv(regular(y)) + regular(y).inverse() + torch.inverse(regular(y).sum(0)),
    "cholesky": lambda y: torch.linalg.cholesky(regular(y)) + torch.linalg.cholesky(regular(y).mean(0), upper=True),
    "solutions": lambda y: torch.linalg.solve(regular(y), y.unsqueeze(-1) * y[:, :2].unsqueeze(1), left=True),
    "solutions of rows": lambda y: torch.linalg.solve(regular(y), y.unsqueeze(1), left=False),
    "solutions of vectors": lambda y: torch.linalg.solve(regular(y), y) + torch.linalg.solve(regular(y).sum(0), y[0]),
    "features that are whitened": whitened,
    "normal in many dims": lambda y: normal(y, torch.eye(WIDTH, dtype=y.dtype)).log_prob(y.flip(1)),
    "normal by a covariance": lambda y: normal(y[0], regular(y).mean(0)).log_prob(y),
    "inv_ex": lambda y: torch.linalg.inv_ex(squares(y) * 0.1 + torch.eye(WIDTH, dtype=y.dtype)).inverse,
}


LAYERS = {
    "pooling to one place": (lambda: NormOfChannels(2, nn.AdaptiveAvgPool2d(1)), IMAGE),
    "pooling to one place, by dims": (lambda: NormOfChannels(2, nn.AdaptiveAvgPool2d((1, 1))), IMAGE),
    "pooling to one row": (lambda: NormOfChannels(2, nn.AdaptiveAvgPool2d((1, None))), IMAGE),
    "pooling of sequences": (lambda: NormOfChannels(3, nn.AdaptiveAvgPool1d(1)), CHANNELS),
    "pooling of volumes": (lambda: NormOfChannels(3, nn.AdaptiveAvgPool3d(1)), (BATCH, 3, 2, 2, WIDTH)),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(WIDTH, 4)), (BATCH, WIDTH)),
    "weight norm, second dim": (lambda: parametrizations.weight_norm(nn.Conv1d(3, 4, 3), dim=1), CHANNELS),
    "weight norm of a convolution": (lambda: parametrizations.weight_norm(nn.Conv1d(3, 4, 3)), CHANNELS),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, 4)), (BATCH, WIDTH)),
    "PReLU": (nn.PReLU, (BATCH, WIDTH)),
    "PReLU of channels": (lambda: nn.PReLU(3), CHANNELS),
    "circular padding": (lambda: nn.Conv1d(3, 4, 3, padding=1, padding_mode="circular"), CHANNELS),
    "circular padding of images": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), IMAGE),
    "unfold of images": (lambda: nn.Unfold((2, 2), padding=1, stride=2), IMAGE),
    "fold": (lambda: nn.Sequential(nn.Unfold((2, 2)), nn.Fold((4, WIDTH), (2, 2))), IMAGE),
    "upsampling, nearest": (lambda: nn.Upsample(scale_factor=2), IMAGE),
    "upsampling, linear": (lambda: nn.Upsample(scale_factor=2, mode="linear"), CHANNELS),
    "upsampling, bilinear": (lambda: nn.Upsample(scale_factor=1.5, mode="bilinear"), IMAGE),
    "upsampling, corners": (lambda: nn.Upsample((7, 5), mode="bilinear", align_corners=True), IMAGE),
    "upsampling, bicubic": (lambda: nn.Upsample((3, 9), mode="bicubic"), IMAGE),
    "upsampling, trilinear": (lambda: nn.Upsample(scale_factor=2, mode="trilinear"), (BATCH, 3, 2, 2, WIDTH)),
    "dropout in place": (lambda: nn.Sequential(nn.Dropout(0.4, inplace=True), nn.ReLU(inplace=True)), IMAGE),
    "dropout1d": (lambda: nn.Dropout1d(0.4), CHANNELS),
    "dropout1d without a batch": (lambda: nn.Dropout1d(0.4), (BATCH, WIDTH)),
    "dropout2d": (lambda: nn.Dropout2d(0.4), IMAGE),
    "dropout2d in place": (lambda: nn.Dropout2d(0.4, inplace=True), IMAGE),
    "dropout3d": (lambda: nn.Dropout3d(0.4), (BATCH, 3, 2, 2, WIDTH)),
    "alpha dropout": (lambda: nn.AlphaDropout(0.4), (BATCH, WIDTH)),
    "alpha dropout of channels": (lambda: nn.FeatureAlphaDropout(0.4), IMAGE),
}
CELLS = {
    "GRU cell": (lambda: nn.GRUCell(WIDTH, 4), lambda layer, y: layer(y, layer(y))),
    "LSTM cell": (lambda: nn.LSTMCell(WIDTH, 4), lambda layer, y: layer(y, layer(y))[0]),
    "bilinear": (lambda: nn.Bilinear(WIDTH, WIDTH, 4), lambda layer, y: layer(y, y.flip(1))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    torch.manual_seed(0)
    assert worst(case(Model(FUNCTIONS[name]))) <= TOLERANCE


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    assert worst(case(Model(on_one, make()), shape)) <= TOLERANCE


@pytest.mark.parametrize("name", CELLS)
def test_layers_of_two_tensors(name):
    torch.manual_seed(0)
    make, then = CELLS[name]
    assert worst(case(Model(then, make()))) <= TOLERANCE


@pytest.mark.parametrize(
    "of",
    [
        torch.linalg.inv,
        torch.linalg.cholesky,
        lambda a: torch.linalg.solve(a, a),
        lambda a: torch.linalg.solve(a, a[..., 0]),
    ],
)
def test_where_a_matrix_has_no_inverse_it_is_nan_and_others_are_as_they_are(of):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, a):
            return of(a * self.scale).sum()

    matrices = torch.stack([3 * torch.eye(2), torch.zeros(2, 2)]).double()
    model = Scaled()
    graph = capture(model, matrices)
    (made,) = (n.name for n in graph.nodes if n.op == "aten.where.self" and n.phase == "forward")
    found = interpret(graph, source_values(graph, model, matrices))[Value(made)]
    assert torch.equal(found[0], of(matrices[0])) and found[1].isnan().all()
    with pytest.raises(torch.linalg.LinAlgError):
        of(matrices[1])


ROWS = torch.arange(BATCH)


def order(y):
    return y.detach().sum(-1).argsort(-1)


def put_back(y):
    """As masked autoencoders do."""
    kept, hidden = order(y).split([1, 3], 1)
    made = torch.zeros_like(y)
    made[ROWS[:, None], kept] = y[ROWS[:, None], kept]
    made[ROWS[:, None], hidden] = y.mean((0, 1))
    return made


OF_EACH_ROW = {
    "a place": lambda y: y[ROWS, order(y)[:, 0]],
    "the last place": lambda y: y[ROWS, order(y)[:, 0] - 4],
    "places": lambda y: y[ROWS[:, None], order(y)[:, :2]],
    "pairs of places": lambda y: y[ROWS.view(-1, 1, 1), order(y)[:, :2, None] - torch.arange(2)],
    "the same places": lambda y: y[ROWS[:, None], torch.tensor([[3, 1]])],
    "places of the second dim's": lambda y: y[:, torch.arange(4)[:, None], y.detach().argsort(-1)[0, :, :2]],
    "what is put back": put_back,
}


@pytest.mark.parametrize("name", OF_EACH_ROW)
def test_what_rows_read_and_write_at_places_of_their_own_is_dealt_out_with_them(name):
    found = case(Model(OF_EACH_ROW[name]), (BATCH, 4, WIDTH))
    made = possible(found)
    assert not [n for n in made.graph.nodes if n.op in ("aten.index.Tensor", "aten.index_put.default")]
    dealt, calls = batch_strategies(made), [n.name for n in made.graph.nodes if "gather" in n.op or "scatter" in n.op]
    assert calls and all(isinstance(dealt[call].inputs[0], Shard) for call in calls)
    assert worst(found) <= TOLERANCE


def test_all_places_of_all_rows_are_read_as_they_lie():
    """As masks of Hugging Face's transformers read theirs."""
    places = torch.arange(4)
    found = case(Model(lambda y: y * y[ROWS.view(-1, 1, 1, 1), places.view(1, 1, 1, 4)][:, 0, 0]), (BATCH, 4, WIDTH))
    assert not [n for n in possible(found).graph.nodes if "index" in n.op or "gather" in n.op]
    assert worst(found) <= TOLERANCE
    for others in (places.flip(0), places[:3].repeat_interleave(2)[:4]):
        found = case(Model(lambda y, p=others: y * y[ROWS[:, None], p]), (BATCH, 4, WIDTH))
        assert [n for n in possible(found).graph.nodes if n.op == "aten.gather.default"]
        assert worst(found) <= TOLERANCE


def test_rows_in_another_order_are_read_by_index():
    found = case(Model(lambda y: y[ROWS.flip(0)[:, None], order(y)[:, :2]]), (BATCH, 4, WIDTH))
    assert [n for n in possible(found).graph.nodes if n.op == "aten.index.Tensor"]
    assert worst(found) <= TOLERANCE


def test_what_follows_from_constants_is_read_by_index():
    table = torch.arange(4.0 * BATCH).view(BATCH, 4)
    found = case(
        Model(lambda y: y[:, :2] * table.sin()[ROWS[:, None], torch.arange(1, 3)][..., None]), (BATCH, 4, WIDTH)
    )
    assert [n for n in possible(found).graph.nodes if n.op == "aten.index.Tensor"]
    assert worst(found) <= TOLERANCE
