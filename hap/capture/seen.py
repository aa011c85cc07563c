"""Tensors as they were."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Seen(NamedTuple):
    """A tensor, and how often it had been changed in place."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def now(cls, tensor: torch.Tensor) -> Seen:
        return cls(tensor, tensor._version)

    @property
    def is_unchanged(self) -> bool:
        return self.tensor._version == self.version
