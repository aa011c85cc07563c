"""In how many batches a step's samples are best dealt with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hap
from hap.api import simulate
from hap.batching import counts, part_of
from hap.capture.inputs import step_inputs
from hap.errors import CaptureError, InfeasibleError
from tests.search.models import cluster


def deep(layers: int = 6, width: int = 256) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU())))


def loss(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def best(on: hap.ClusterSpec, samples: int = 24_000, **given: Any) -> hap.Plan:
    x = torch.empty(samples, 256, device="meta")
    return hap.plan(deep(), on, example_inputs=x, loss_fn=loss, gradient_accumulation_steps="best", **given)


def test_counts_divide_the_samples_and_double_at_least() -> None:
    assert list(counts(48)) == [1, 2, 4, 8, 16, 48]
    assert list(counts(7)) == [1, 7] and list(counts(1)) == [1]


def test_tensors_of_as_many_rows_are_cut_and_others_stay() -> None:
    given = step_inputs((torch.zeros(6, 2), {"mask": torch.zeros(2, 2)}), (torch.zeros(6), torch.zeros(())))
    part = part_of(given, 3)
    assert [tuple(t.shape) for _, t in part.named] == [(2, 2), (2, 2), (2,), ()]


def test_where_memory_is_plenty_one_batch_is_best() -> None:
    plan = best(cluster((1, "16GB"), (1, "16GB")))
    assert plan.gradient_accumulation_steps == 1


def test_where_activations_fill_the_memory_there_are_several() -> None:
    """Nothing is computed again, where with one batch much would be."""
    tight = cluster((1, "150MB"), (1, "150MB"))
    plan = best(tight)
    count = plan.gradient_accumulation_steps
    assert count > 1 and not plan.recomputed
    x = torch.empty(24_000, 256, device="meta")
    alone = hap.plan(deep(), tight, example_inputs=x, loss_fn=loss)
    assert alone.recomputed and alone.predicted.as_run_s > count * plan.predicted.as_run_s
    again = hap.plan(
        deep(), tight, example_inputs=x[: 24_000 // count], loss_fn=loss, gradient_accumulation_steps=count
    )
    assert again.to_json() == plan.to_json(), "it is the plan for such batches"
    simulate(deep(), plan, tight, example_inputs=x[: 24_000 // count], loss_fn=loss)
    with pytest.raises(hap.PlanError, match=f"give one of a step's {count} batches, as it was planned, or plan again"):
        simulate(deep(), plan, tight, example_inputs=x, loss_fn=loss)


def test_what_cannot_be() -> None:
    with pytest.raises(InfeasibleError):
        best(cluster((1, "2MB"), (1, "2MB")), samples=64)
    with pytest.raises(CaptureError, match=r"no example input has a first dim"):
        hap.plan(
            deep(1, 1),
            cluster((1, "1GB")),
            example_inputs=torch.empty((), device="meta"),
            loss_fn=loss,
            gradient_accumulation_steps="best",
        )
