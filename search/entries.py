"""Sums of priced things over who pays for them: sparse, added up in one order."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hap.fabric import Array


@dataclass
class Entries:
    """(payer, what, weight (W,), or a number if W is 1) many times; ``what`` is numbered in order of appearance."""

    width: int
    numbers: dict[object, int] = field(default_factory=dict)
    places: dict[tuple[int, int], int] = field(default_factory=dict)
    weights: list[Array | float] = field(default_factory=list)

    def add(self, payer: int, what: object, weight: Array | float) -> None:
        place = (payer, self.numbers.setdefault(what, len(self.numbers)))
        if place in self.places:
            self.weights[self.places[place]] = self.weights[self.places[place]] + weight
        else:
            self.places[place] = len(self.weights)
            self.weights.append(weight)

    def sum(self, values: Array, payers: int) -> Array:
        """values (what, R) -> (W, R, payers): weighted."""
        if not self.places:
            return np.zeros((self.width, values.shape[1], payers))
        payer, what = self._where
        total = np.empty((self.width, values.shape[1], payers))
        for r, of_rank in enumerate(np.ascontiguousarray(values.T)[:, what]):
            for w, weights in enumerate(self._table):
                total[w, r] = np.bincount(payer, of_rank * weights, payers)
        return total

    @cached_property
    def _where(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(payer, what) of every entry."""
        payer, what = np.array(list(self.places), dtype=np.int64).T
        return np.ascontiguousarray(payer), np.ascontiguousarray(what)

    @cached_property
    def _table(self) -> Array:
        """(W, entries)."""
        return np.ascontiguousarray(np.array(self.weights).reshape(len(self.weights), self.width).T)
