"""A plan for another model says what differs, as far as it can tell."""

from __future__ import annotations

import pytest
import torch

from hap.capture import capture
from hap.errors import PlanError
from hap.graph import Graph
from hap.rules.choices import choices
from hap.same_model import check_model
from tests._support.mesh import make_mesh
from tests._support.plans import greedy_strategies, make_plan, replicated_plan, sizes_for


class Scaled(torch.nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(4, 4)
        self.scale = torch.tensor([scale, 2.0])

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.mix(x) if mask is None else self.mix(x) * mask
        return (y * self.scale.sum()).square().mean()


def graph(rows: int = 8, scale: float = 1.0, masked: bool = False) -> Graph:
    x = torch.zeros(rows, 4)
    return capture(Scaled(scale), {"x": x, "mask": x} if masked else {"x": x})


def test_inputs_sizes_and_what_no_plan_tells() -> None:
    found = choices(graph())
    dealt = make_plan(found, greedy_strategies(found, {"kwargs.x": (0, 8)}), sizes_for(found, (2, 1)))
    whole = replicated_plan(graph())
    check_model(whole, graph())
    for plan, given, said in (
        (whole, graph(masked=True), r"is not for this 'Scaled': only this has i_kwargs_mask and 2 more \("),
        (replicated_plan(graph(masked=True)), graph(), r": only the plan's has i_kwargs_mask and 2 more \("),
        (dealt, graph(rows=6), r": i_kwargs_x is \(6, 4\), and its dim 0 was 8 \("),
        (make_mesh(graph(), (1, 1), (5, 3)), graph(rows=6), r": i_kwargs_x is \(6, 4\), and its dim 0 was 8 \("),
        (whole, graph(rows=6), r": with other shapes, operators, outputs or constants, of which"),
        (dealt, graph(scale=3.0), r": with other shapes, operators, outputs or constants, of which"),
    ):
        with pytest.raises(PlanError, match=said):
            check_model(plan, given)
