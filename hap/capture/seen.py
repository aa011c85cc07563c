"""Tensors as they were."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hap.capture.selected import SelectionError


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

    @property
    def as_it_was(self) -> torch.Tensor:
        """SelectionError if it no longer is."""
        if not self.is_unchanged:
            raise SelectionError("rows for experts of a tensor that was changed in place since: change a copy of it")
        return self.tensor
