"""What a rank does around a collective: laying out what it sends and putting together what came. No wire is timed.

    python benchmarks/packing.py [--quick --out DIR]

As the runtime does it (``hap/runtime/dealing.py``): ranks with shards of one size are copied by one call. Against a
call for every rank's piece, with all shapes known before (``Case.by_pieces``). Both take turns in one process, on one
core; what comes is the same flat tensor for both, and their results must be equal. A figure is the pieces' time over
the runs': above 1 the runtime's is quicker.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.common import Report, Spread, parse
from hap.codegen.layout import Layout
from hap.plan import Collective
from hap.runtime.transfer import Layouts, transfer

NAME = "packing"
RANK = 1  # whose part is timed
WAYS: dict[Collective, str] = {
    "all_gather": "all_to_all",
    "reduce_scatter": "all_to_all_sum",
    "all_to_all": "direct",
}
RANKS = {"4, two kinds": (5, 5, 1, 1), "4, all different": (5, 4, 2, 1), "16, two kinds": (5,) * 8 + (1,) * 8}
MORE = {"64, even": (3,) * 64, "64, two kinds": (5,) * 32 + (1,) * 32}
VALUES = {
    "one of 9.4 MB": [(768, 3072)],
    "one of 37 kB": [(192, 48)],
    "a bundle of 24, 0.6 MB": [(768, 1), (192, 2), (192, 192), (384, 48)] * 3 + [(768, 4)] * 12,
}
Run = Callable[[], list[torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """One collective on values of some shapes, cut in proportion to ``atoms``. ``dim``: that is sharded where they are
    gathered or scattered; an exchange goes from it to the other."""

    kind: Collective
    shapes: Sequence[tuple[int, int]]
    atoms: Sequence[int]
    dim: int

    @property
    def ranks(self) -> range:
        return range(len(self.atoms))

    def layouts(self, dim: int) -> list[Layout]:
        return [Layout(dim, 1, 1, cut(shape[dim], self.atoms)) for shape in self.shapes]

    def runs(self) -> tuple[Run, Run]:
        """The runtime's and that by pieces, on the same tensors."""
        torch.manual_seed(0)
        wholes = [torch.randn(shape) for shape in self.shapes]
        here, there = self.layouts(self.dim), self.layouts(1 - self.dim)
        if self.kind == "reduce_scatter":
            came = torch.cat(taken(here, wholes, [RANK]))
            return self.as_run(wholes, [(each,) for each in here], came), self.by_pieces(wholes, here, came)
        mine = [each.take(whole, RANK) for each, whole in zip(here, wholes, strict=True)]
        if self.kind == "all_gather":
            came = torch.cat(taken(here, wholes, self.ranks))
            return self.as_run(mine, [(each,) for each in here], came), self.by_pieces(mine, here, came)
        new = [each.take(whole, RANK) for each, whole in zip(there, wholes, strict=True)]
        came = torch.cat(taken(here, new, self.ranks))
        return self.as_run(mine, list(zip(here, there, strict=True)), came), self.by_pieces(mine, there, came)

    def as_run(self, values: Sequence[torch.Tensor], layouts: Sequence[Layouts], came: torch.Tensor) -> Run:
        """``came``: what ``move`` would give."""
        made = transfer(self.kind, RANK, len(self.atoms), values, layouts, WAYS[self.kind], {})
        summed = self.kind == "reduce_scatter"

        def run() -> list[torch.Tensor]:
            sent = made.pack(values)
            results = made.unpack(came if summed else came.view(torch.uint8))
            if self.kind == "all_gather":
                return results  # of what is sent this rank has its own part only
            return [sent, *results]

        return run

    def by_pieces(self, values: Sequence[torch.Tensor], layouts: Sequence[Layout], came: torch.Tensor) -> Run:
        """``layouts``: of what is sent, or of an all-gather's values."""
        shapes = self.coming(values)
        numels = [math.prod(shape) for row in shapes for shape in row]
        before = sum(numels[: RANK * len(values)])

        def run() -> list[torch.Tensor]:
            if self.kind == "all_gather":
                mine = torch.cat([value.reshape(-1) for value in values])
                sent = mine.new_empty(came.numel())
                sent[before : before + mine.numel()] = mine
                results = []
            else:
                results = [torch.cat(taken(layouts, values, self.ranks))]
            parts = came.split(numels)
            for i in range(len(values)):
                pieces = [part.view(row[i]) for part, row in zip(parts[i :: len(values)], shapes, strict=True)]
                results.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim))
            return results

        return run

    def coming(self, values: Sequence[torch.Tensor]) -> list[list[tuple[int, ...]]]:
        """[rank][value]: the shapes of what comes from that rank; of a sum there is one."""
        here = self.layouts(self.dim)
        if self.kind == "reduce_scatter":
            return [[each.local_shape(value.shape, RANK) for each, value in zip(here, values, strict=True)]]
        wholes: list[tuple[int, ...]] = list(self.shapes)
        if self.kind == "all_to_all":
            there = self.layouts(1 - self.dim)
            wholes = [each.local_shape(shape, RANK) for each, shape in zip(there, self.shapes, strict=True)]
        return [[each.local_shape(whole, r) for each, whole in zip(here, wholes, strict=True)] for r in self.ranks]


def taken(layouts: Sequence[Layout], values: Sequence[torch.Tensor], ranks: Sequence[int]) -> list[torch.Tensor]:
    """Flat pieces: all values' of a rank, then those of the next."""
    return [each.take(value, r).reshape(-1) for r in ranks for each, value in zip(layouts, values, strict=True)]


def cut(extent: int, atoms: Sequence[int]) -> tuple[int, ...]:
    """As near to proportional as whole numbers come."""
    ends = [round(extent * sum(atoms[: r + 1]) / sum(atoms)) for r in range(len(atoms))]
    return tuple(b - a for a, b in zip([0, *ends[:-1]], ends, strict=True))


def timed(runs: Sequence[Run], rounds: int) -> list[list[float]]:
    """[run][round] -> seconds, in turn; short runs several times for each sample."""
    begin = time.perf_counter()
    runs[0]()
    times = max(1, round(2e-3 / (time.perf_counter() - begin)))
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, into in zip(runs, seconds, strict=True):
            begin = time.perf_counter()
            for _ in range(times):
                run()
            into.append((time.perf_counter() - begin) / times)
    return seconds


def main() -> None:
    options = parse(NAME, "Packing for collectives: by runs of equal shards, and piece by piece.")
    report = Report(NAME, "Packing by runs of equal shards, and piece by piece", options)
    torch.set_num_threads(1)
    ranks = RANKS if options.quick else RANKS | MORE
    rounds = 5 if options.quick else 15
    rows, ratios = [], []
    for kind, (values, shapes), (name, atoms), dim in product(WAYS, VALUES.items(), ranks.items(), (0, 1)):
        label = f"{kind} {'from dim' if kind == 'all_to_all' else 'dim'} {dim}, {values}, {name}"
        both = Case(kind, shapes, atoms, dim).runs()
        for ours, plain in zip(*(run() for run in both), strict=True):
            assert torch.equal(ours.view(torch.uint8), plain.view(torch.uint8)), label
        runs, pieces = timed(both, rounds)
        each = Spread.of([b / a for a, b in zip(runs, pieces, strict=True)])
        report.figure(label, each.median, each)
        ratios.append(each.median)
        us = [f"{1e6 * statistics.median(t):,.0f}" for t in (pieces, runs)]
        rows.append((label, *us, f"{each.median:.2f}"))
    report.figure("least", min(ratios))
    report.figure("median", statistics.median(ratios))
    report.table("Pack and unpack, one rank", ["collective", "pieces us", "runs us", "pieces / runs"], rows)
    report.write(None)


if __name__ == "__main__":
    main()
