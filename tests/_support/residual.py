"""A small model with a norm, a softmax and a residual in float64, and the pins that make it data parallel, ZeRO or
tensor parallel on three ranks."""

import torch
from torch import nn

from hap.capture import capture
from hap.graph import Graph
from hap.search.pins import Pins

PINS = {
    "data parallel": Pins(placements={"*": "R", "args.*": "S(0)"}),
    "ZeRO, one device idle": Pins(placements={"*": "S(0)", "args.*": "S(0)"}, ratios=(4, 1, 0)),
    "tensor parallel": Pins(placements={"wide.weight": "S(0)", "narrow.weight": "S(1)", "args.*": "R"}),
}


class Residual(nn.Module):
    """A norm, two linear layers around a nonlinearity, a residual, a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.wide = nn.Linear(12, 20)
        self.narrow = nn.Linear(20, 12)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = x + self.narrow(torch.tanh(self.wide(self.norm(x))))
        return nn.functional.mse_loss(torch.softmax(out, -1), y)


def captured() -> tuple[Residual, tuple[torch.Tensor, torch.Tensor], Graph]:
    """Model, batch of 11 and graph, the same every time."""
    torch.manual_seed(0)
    model = Residual().double()
    batch = (torch.randn(11, 12, dtype=torch.float64), torch.rand(11, 12, dtype=torch.float64))
    return model, batch, capture(model, batch)
