"""Optimizers of others, some of which look at more than one element at a time."""

from __future__ import annotations

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Signs of momentum, element by element, as others write it."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            one, two = group["betas"]
            for p in group["params"]:
                kept = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(kept.mul(one).add(p.grad, alpha=1 - one).sign_(), alpha=group["lr"])
                kept.mul_(two).add_(p.grad, alpha=1 - two)


class Lars(torch.optim.Optimizer):
    """A step as long as the parameter's norm over the gradient's."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "note": "not an argument"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * float(p.norm() / p.grad.norm()))


class Decaying(Lars):
    """As timm's: only with weight decay is it LARS."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0) -> None:
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                trust = float(p.norm() / p.grad.norm()) if group["weight_decay"] else 1.0
                p.sub_(p.grad + group["weight_decay"] * p, alpha=group["lr"] * trust)


class Factored(torch.optim.Optimizer):
    """As big_vision's Adafactor: of matrices with less than 32 rows or columns it keeps every element's square."""

    def __init__(self, params: Any, lr: float = 1e-2, least: int = 32) -> None:
        super().__init__(params, {"lr": lr, "least": least})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                squares = p.grad.square()
                if min(p.shape) >= group["least"]:
                    squares = squares.mean(1, keepdim=True) * squares.mean(0, keepdim=True) / squares.mean()
                p.sub_(p.grad / squares.sqrt(), alpha=group["lr"])


class Grouped(torch.optim.Optimizer):
    """What it does is said by a group of parameters, as GaLore's rank is."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad - p.grad.mean() if "centred" in group else p.grad, alpha=group["lr"])


class Grower(torch.optim.Optimizer):
    """Finds out how far to step, from all that it has seen, after a while; it is to be told that it trains."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.mode, self.steps, self.seen = "", 0, 0.0

    def train(self) -> None:
        self.mode = "train"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert self.mode == "train"
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                self.seen += float(p.grad.abs().sum())
                p.sub_(p.grad, alpha=group["lr"] * (1.0 if self.steps < 10 else self.seen))


class OwnSgd(torch.optim.SGD):
    """A subclass may do anything: it is tried out."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad - p.grad.mean(0, keepdim=True), alpha=group["lr"])


class Little(torch.optim.SGD):
    """Takes no large matrix."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.numel() > 1000:
                    raise ValueError("too large")
                p.sub_(p.grad, alpha=group["lr"])


class Secret(torch.optim.Optimizer):
    """Needs to be told more than its options say."""

    def __init__(self, params: Any, key: object) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        """Does nothing."""
