"""Generative models, whose step draws random numbers: a variational autoencoder and a diffusion model."""

from __future__ import annotations

import itertools
import math

import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from benchmarks.zoo_models.case import Case, Size, ZooModel

SMALL_BATCH = 7


class Vae(nn.Module):
    """Kingma and Welling 2014: strided convolutions to a normal distribution's mean and deviation, and back."""

    def __init__(self, channels: list[int], side: int, latent: int) -> None:
        """``channels`` of the images and of every layer, each of which halves the side."""
        super().__init__()
        pairs = list(itertools.pairwise(channels))
        self.inward = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.LeakyReLU(0.2)) for a, b in pairs)
        )
        self.shape = (channels[-1], side >> len(pairs), side >> len(pairs))
        self.to_latent = nn.Linear(math.prod(self.shape), 2 * latent)
        self.of_latent = nn.Linear(latent, math.prod(self.shape))
        self.outward = nn.Sequential(
            *(nn.Sequential(nn.ReLU(), nn.ConvTranspose2d(b, a, 4, 2, 1)) for a, b in reversed(pairs))
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, channels, side, side) -> the negative of the evidence's lower bound, its mean over the batch."""
        mean, spread = self.to_latent(self.inward(images).flatten(1)).chunk(2, dim=1)
        found = Normal(mean, F.softplus(spread))
        drawn = self.outward(self.of_latent(found.rsample()).unflatten(1, self.shape))
        divergence = kl_divergence(found, Normal(torch.zeros_like(mean), torch.ones_like(spread))).sum(1)
        return (F.mse_loss(drawn, images, reduction="none").sum((1, 2, 3)) / 2 + divergence).mean()


class Residual(nn.Module):
    """Two convolutions, between which the time's embedding is added; then attention over all places, or none."""

    def __init__(self, channels: int, width: int, time: int, groups: int, attends: bool) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.GroupNorm(groups, channels), nn.SiLU(), nn.Conv2d(channels, width, 3, padding=1))
        self.time = nn.Linear(time, width)
        self.after = nn.Sequential(
            nn.GroupNorm(groups, width), nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(width, width, 3, padding=1)
        )
        self.skip = nn.Identity() if channels == width else nn.Conv2d(channels, width, 1)
        self.norm = nn.GroupNorm(groups, width) if attends else None
        self.qkv, self.out = (nn.Conv2d(width, n * width, 1) if attends else nn.Identity() for n in (3, 1))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.before(x) + self.time(F.silu(time))[:, :, None, None]
        h = self.skip(x) + self.after(h)
        if self.norm is None:
            return h
        q, k, v = self.qkv(self.norm(h)).flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, dim=3)
        found = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2)
        return h + self.out(found.reshape(h.shape))


class Diffusion(nn.Module):
    """Ho et al. 2020: a step draws times and noise, and a U-Net tells the noise from the noisy image."""

    signal: torch.Tensor
    noise: torch.Tensor

    def __init__(self, widths: list[int], blocks: int, attends: int, groups: int, steps: int = 1000) -> None:
        """``widths`` of every resolution; ``attends``: the one whose blocks attend."""
        super().__init__()
        time = 4 * widths[0]
        self.width, self.steps = widths[0], steps
        kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), 0)
        self.register_buffer("signal", kept.sqrt())
        self.register_buffer("noise", (1 - kept).sqrt())
        self.embed = nn.Sequential(nn.Linear(widths[0], time), nn.SiLU(), nn.Linear(time, time))
        self.inward = nn.Conv2d(3, widths[0], 3, padding=1)
        held, at = [widths[0]], widths[0]
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for level, width in enumerate(widths):
            for _ in range(blocks):
                self.down.append(Residual(at, width, time, groups, level == attends))
                at = width
                held.append(at)
            if level + 1 < len(widths):
                self.down.append(nn.Conv2d(at, at, 3, stride=2, padding=1))
                held.append(at)
        self.middle = Residual(at, at, time, groups, True)
        for level, width in reversed(list(enumerate(widths))):
            for _ in range(blocks + 1):
                self.up.append(Residual(at + held.pop(), width, time, groups, level == attends))
                at = width
            if level:
                self.up.append(nn.ConvTranspose2d(at, at, 4, stride=2, padding=1))
        self.outward = nn.Sequential(nn.GroupNorm(groups, at), nn.SiLU(), nn.Conv2d(at, 3, 3, padding=1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, 3, side, side) -> the mean squared error of the noise."""
        times = torch.randint(0, self.steps, (images.shape[0],), device=images.device)
        noise = torch.randn_like(images)
        signal, spread = (table[times][:, None, None, None] for table in (self.signal, self.noise))
        return F.mse_loss(self.found_noise(signal * images + spread * noise, times), noise)

    def found_noise(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        half = self.width // 2
        rates = torch.exp(torch.arange(half, device=x.device, dtype=x.dtype) * (-math.log(10_000) / half))
        angles = times[:, None] * rates
        time = self.embed(torch.cat((angles.sin(), angles.cos()), 1))
        x = self.inward(x)
        held = [x]
        for layer in self.down:
            x = layer(x, time) if isinstance(layer, Residual) else layer(x)
            held.append(x)
        x = self.middle(x, time)
        for layer in self.up:
            x = layer(torch.cat((x, held.pop()), 1), time) if isinstance(layer, Residual) else layer(x)
        return self.outward(x)


def _own(loss: torch.Tensor) -> torch.Tensor:
    return loss


def vae(size: Size) -> Case:
    """64 x 64 images, 256 latent dims."""
    model = Vae([3, 64, 128, 256, 512], 64, 256) if size == "real" else Vae([3, 4, 6], 8, 5)
    side = 64 if size == "real" else 8
    return Case(model, torch.randn(512 if size == "real" else SMALL_BATCH, 3, side, side), _own, None)


def ddpm(size: Size) -> Case:
    """For CIFAR-10: 35.8 million parameters, attention at 16 x 16."""
    if size == "real":
        return Case(Diffusion([128, 256, 256, 256], 2, 1, 32), torch.randn(128, 3, 32, 32), _own, None)
    return Case(Diffusion([4, 6], 1, 1, 2, steps=10), torch.randn(SMALL_BATCH, 3, 8, 8), _own, None)


MODELS = (
    ZooModel("vae", "VAE (convolutional)", vae),
    ZooModel("ddpm", "DDPM (CIFAR-10)", ddpm),
)
