"""Models of physics: a Fourier neural operator, whose parameters are complex."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo_models.case import Case, Size, ZooModel

SMALL_BATCH = 7


class SpectralConv(nn.Module):
    """The lowest frequencies of an image, each by a complex matrix of its own (Li et al. 2021, section 4)."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        dtype = torch.get_default_dtype().to_complex()
        shape = (width, width, modes, modes)
        self.up, self.down = (nn.Parameter(torch.randn(shape, dtype=dtype) / width**2) for _ in range(2))
        self.modes = modes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, width, side, side); rows of low frequencies are the first and, negative, the last."""
        spectrum, modes = torch.fft.rfft2(x), self.modes
        up = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :modes, :modes], self.up)
        down = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -modes:, :modes], self.down)
        between = spectrum.shape[2] - 2 * modes
        low = torch.cat([F.pad(up, (0, 0, 0, between)), down], dim=2)
        kept = F.pad(low, (0, spectrum.shape[3] - modes))
        return torch.fft.irfft2(kept, s=x.shape[-2:])


class FourierOperator(nn.Module):
    """Lifts a field and its coordinates, applies layers of ``SpectralConv`` beside a 1 x 1 convolution, projects."""

    def __init__(self, width: int, modes: int, layers: int, hidden: int) -> None:
        super().__init__()
        self.lift = nn.Linear(3, width)
        self.spectral = nn.ModuleList(SpectralConv(width, modes) for _ in range(layers))
        self.beside = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))
        self.hidden, self.out = nn.Linear(width, hidden), nn.Linear(hidden, 1)

    def forward(self, field: torch.Tensor) -> torch.Tensor:
        """(batch, side, side) -> the same."""
        batch, side, _ = field.shape
        along = torch.linspace(0, 1, side, dtype=field.dtype)
        places = torch.stack(torch.meshgrid(along, along, indexing="ij"), -1).expand(batch, side, side, 2)
        h = self.lift(torch.cat([field.unsqueeze(-1), places], -1)).permute(0, 3, 1, 2)
        last = len(self.spectral) - 1
        for number, (spectral, beside) in enumerate(zip(self.spectral, self.beside, strict=True)):
            h = spectral(h) + beside(h)
            h = h if number == last else F.gelu(h)
        return self.out(F.gelu(self.hidden(h.permute(0, 2, 3, 1)))).squeeze(-1)


def relative_l2(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The mean over the batch of |found - wanted| / |wanted|."""
    missed = (found - wanted).flatten(1).norm(dim=1)
    return (missed / wanted.flatten(1).norm(dim=1)).mean()


def fno(size: Size) -> Case:
    """For Darcy flow on 85 x 85: width 32, 12 modes, four layers."""
    model = FourierOperator(32, 12, 4, 128) if size == "real" else FourierOperator(6, 2, 2, 10)
    shape = (64, 85, 85) if size == "real" else (SMALL_BATCH, 8, 8)
    return Case(model, torch.rand(shape), relative_l2, torch.rand(shape))


MODELS = (ZooModel("fno", "FNO-2d (complex)", fno),)
