"""Mixtures of experts as people write them, small ones, for tests: what becomes of the rows is the test's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

ROWS, WIDTH, INNER, EXPERTS, EACH = 12, 6, 8, 4, 2
T = torch.Tensor
Then = Callable[["Mixture", T, T], T]


class Straight(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: object, x: T) -> T:
        return x.sign()

    @staticmethod
    def backward(ctx: object, g: T) -> T:
        return g


class Expert(nn.Module):
    """Several spellings of what experts are."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up, self.down = kind, nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.gate, self.fused = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, 2 * INNER)
        self.norm, self.rms = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, elementwise_affine=True)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: T) -> T:
        match self.kind:
            case "gated":
                return self.down(functional.silu(self.gate(x)) * self.up(x))
            case "in place":
                h = self.up(x).add_(0.1)
                h *= 2
                return self.down(functional.relu(h, inplace=True))
            case "cast in place":
                h = self.up(x).float()
                h *= self.up.weight[:, 0]
                return self.down(h.type_as(x))
            case "fused":
                a, b = self.fused(self.norm(x)).chunk(2, dim=-1)
                return self.down(functional.gelu(a) * b)
            case "normed":
                return self.scale * self.down(torch.tanh(self.up(self.rms(x))))
            case "by hand":
                x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
                parts = self.up(x).view(-1, 2, INNER // 2).softmax(-1)
                return torch.cat([self.down(parts.reshape(-1, INNER)), x[:, :1]], dim=-1)[:, : x.shape[-1]].to(x.dtype)
        return self.down(self.up(x).tanh())


class Mixture(nn.Module):
    def __init__(self, then: Then, kind: str = "plain") -> None:
        super().__init__()
        self.router, self.out, self.other = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Expert(kind) for _ in range(EXPERTS))
        self.first = nn.Parameter(torch.rand(EXPERTS, WIDTH, INNER) - 0.5)
        self.second = nn.Parameter(torch.rand(EXPERTS, INNER, WIDTH) - 0.5)
        self.each = nn.Parameter(torch.rand(EXPERTS) + 0.5)
        self.then = then

    def routed(self, x: T) -> tuple[T, T]:
        weight, ids = self.router(x).softmax(-1).topk(EACH, dim=-1)
        return weight, ids

    def forward(self, x: T, labels: T, ids: T) -> T:
        return functional.cross_entropy(self.out(self.then(self, x, ids)), labels)


def batch() -> tuple[T, T, T]:
    """``ids`` (rows, 2): no two in a row are alike, and some are of no expert."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=g)
    ids = torch.stack([torch.randperm(EXPERTS + 2, generator=g)[:EACH] for _ in range(ROWS)])
    return x, torch.randint(0, 3, (ROWS,), generator=g), ids


def mixture(then: Then, kind: str = "plain") -> Mixture:
    torch.manual_seed(0)
    return Mixture(then, kind).double()


def by_where(m: Mixture, x: T, _: T) -> T:
    weight, ids = m.routed(x)
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        row, nth = torch.where(ids == e)
        y[row] += weight[row, nth, None] * expert(x[row])
    return y
