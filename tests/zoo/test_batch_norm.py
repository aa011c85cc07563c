"""Batch norm in training has the statistics of the global batch, however unevenly the batch is dealt."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from hap.batch_norm import batch_norm_squares
from hap.capture import capture
from hap.errors import CaptureError
from hap.rules.choices import choices
from tests.zoo.lockstep import TOLERANCE, captured, case_of, data_parallel_error, drawn, labels

BATCH, CLASSES = 8, 5


def tower(**options):
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6, **options),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, CLASSES),
    )


def case(model):
    torch.manual_seed(0)
    return case_of(model, drawn(BATCH, 3, 6, 6), functional.cross_entropy, labels(CLASSES, BATCH))


@pytest.mark.parametrize("sizes", [(5, 2, 1), (0, 7, 1), (8, 0, 0), (3, 3, 2)])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.3, "eps": 1e-2}, {"affine": False}, {"track_running_stats": False}]
)
def test_loss_gradients_and_running_statistics_equal_one_device(sizes, options):
    assert data_parallel_error(case(tower(**options)), sizes) <= TOLERANCE


def test_over_a_matrix_of_features():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES))
    found = case_of(model, drawn(BATCH, 4), functional.cross_entropy, labels(CLASSES, BATCH))
    assert data_parallel_error(found, (4, 3, 1)) <= TOLERANCE


def test_a_batch_norm_in_evaluation_is_an_affine_map_of_its_running_statistics():
    model = tower()
    model[1].eval()
    model[1].running_mean.copy_(torch.arange(6.0))
    graph = captured(case(model))
    assert graph.updates == {}
    assert not [n for n in graph.nodes if n.op == "hap.batch_norm_squares.default"]
    assert data_parallel_error(case(model), (5, 2, 1)) <= TOLERANCE


def test_frozen_affine_weights_get_no_gradient():
    model = tower()
    model[1].requires_grad_(False)
    assert data_parallel_error(case(model), (5, 2, 1)) <= TOLERANCE


def test_the_batch_the_channels_and_the_space_may_be_cut():
    found = choices(captured(case(tower())))
    (node,) = [n for n in found.graph.nodes if n.op == "hap.batch_norm.default"]
    cut = {s.inputs[0].dim for s in found.strategies[node.name] if hasattr(s.inputs[0], "dim")}
    assert {0, 1} <= cut


def test_sums_of_squares_keep_their_digits_where_the_mean_is_large():
    x = torch.tensor([[1e6 + 1.0], [1e6 - 1.0]], dtype=torch.float32)
    assert batch_norm_squares(x, torch.tensor([1e6])).tolist() == [2.0]  # E[x^2] - mean^2 would give 0 or 131072


def test_statistics_of_a_half_precision_input_are_in_float32():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).to(torch.bfloat16)
    graph = capture(model, torch.zeros(6, 4, dtype=torch.bfloat16), loss_fn=lambda y: y.float().square().mean())
    (squares,) = [n for n in graph.nodes if n.op == "hap.batch_norm_squares.default"]
    assert squares.meta.dtype == torch.float32


def test_one_value_a_channel_is_refused_as_pytorch_does():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises((CaptureError, ValueError), match=r"Expected more than 1 value|one value a channel"):
        capture(model, torch.zeros(1, 4), loss_fn=torch.sum)
