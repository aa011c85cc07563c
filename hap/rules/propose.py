"""Rows for an operator that no rule knows, found by trying every way to cut its arguments and keeping what is proved.

A way shards some tensor arguments along dims of one size, the others whole, or takes some as partial sums. The operator
runs on the pieces, dealt unevenly, with an empty one and with all on one rank; each output is then a piece along some
dim, the whole, or a partial sum, or the way is dropped. What is left goes through the prover (``hap.rules.prove``) on
two, three and four ranks, on every small version of the call, as strided pieces too, and at sizes of numbers from 1e-4
to 1e4, at which functions stop looking linear that do so near zero.

This is proof by examples: an operator that behaves in another way only for values that were not tried is not found out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hap.graph import TensorMeta
from hap.placement import PARTIAL, REPLICATE, Placement, Shard
from hap.rules.notation import Call, Dim, Row, Slot
from hap.rules.prove import TOLERANCE, Proof, deal_input, mismatch, prove_call, row_strategies, run_whole
from hap.rules.samples import Sampler, sampler, size_vectors
from hap.rules.shrink import small_calls
from hap.rules.table import RuleTable

MOST_WAYS = 5000  # ways to cut the arguments that are tried
_SCALES = (1e-4, 1e4)
_RANKS = 3


@dataclass(frozen=True)
class FixedRule:
    """The same rows for every call."""

    rows: tuple[Row, ...]

    def __call__(self, call: Call) -> tuple[Row, ...]:
        return self.rows


@dataclass(frozen=True)
class Proposal:
    """The rows that were proved, and in words why there are no more."""

    rows: tuple[Row, ...]
    detail: str


def propose(call: Call) -> Proposal:
    """Every row of the call that is proved, the all-replicated one left out as always."""
    versions, positive = _small_versions(call)
    if not versions:
        return Proposal((), "it does not run on small float64 tensors of its arguments' structure")
    if len(versions) < 2:
        return Proposal((), "it runs on one small version of its arguments only, and a proof takes two")
    sample = sampler(positive=positive)
    if not _repeats(versions[0], sample):
        return Proposal((), "it gives other results when it is called again, or changes its arguments")
    if _count(versions[0]) > MOST_WAYS:
        return Proposal((), f"its arguments can be cut in more than {MOST_WAYS} ways")
    candidates = tuple(_candidates(versions[0], sample))
    proved = tuple(row for row in candidates if all(holds(row, small, positive) for small in versions))
    if not proved:
        return Proposal((), f"none of {_count(versions[0])} ways to cut its arguments gives what the whole gives")
    return Proposal(proved, f"{len(proved)} of {_count(versions[0])} ways proved on {len(versions)} small versions")


def _small_versions(call: Call) -> tuple[tuple[Call, ...], bool]:
    """Small calls, and whether they need positive numbers."""
    for positive in (False, True):
        versions = small_calls(call, sampler(positive=positive))
        if versions:
            return versions, positive
    return (), False


def holds(row: Row, call: Call, positive: bool = False) -> bool:
    """Whether the prover finds nothing against the row on this call."""
    table = RuleTable({call.node.op: FixedRule((row,))})
    strategies = tuple(row_strategies(row, call))
    proofs = [Proof(n, seed, table=table, sample=sampler(positive=positive)) for seed, n in enumerate((2, 3, 4))]
    for scale in _SCALES:
        sample = sampler(scale=scale, positive=positive)
        whole = run_whole(call, sample(call, torch.Generator().manual_seed(0)))
        if all(_finite(out) for out in whole):
            proofs.append(Proof(3, 0, table=table, sample=sample))
    return bool(strategies) and all(v.ok for proof in proofs for v in prove_call(call, strategies, proof))


def _finite(out: object) -> bool:
    return not isinstance(out, torch.Tensor) or bool(out.isfinite().all())


def _repeats(call: Call, sample: Sampler) -> bool:
    inputs = sample(call, torch.Generator().manual_seed(0))
    before = [x.clone() for x in inputs]
    first, second = run_whole(call, inputs), run_whole(call, inputs)
    pairs = [*zip(first, second, strict=True), *zip(before, inputs, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))


def _sizes(call: Call) -> tuple[int, ...]:
    return tuple(dict.fromkeys(size for m in call.inputs for size in m.shape if size > 1))


def _count(call: Call) -> int:
    """How many ways ``_ways`` yields."""
    sharded = sum(math.prod(1 + m.shape.count(size) for m in call.inputs) - 1 for size in _sizes(call))
    return sharded + len(_partial_patterns(len(call.inputs)))


def _ways(call: Call) -> Iterator[tuple[Slot, ...]]:
    """Slots of the arguments: along dims of one size, or partial."""
    for size in _sizes(call):
        options: list[list[Slot]] = [
            ["R", *(Dim(dim) for dim, n in enumerate(m.shape) if n == size)] for m in call.inputs
        ]
        for way in itertools.product(*options):
            if any(isinstance(slot, Dim) for slot in way):
                yield way
    for pattern in _partial_patterns(len(call.inputs)):
        yield tuple("P" if letter == "P" else "R" for letter in pattern)


def _partial_patterns(count: int) -> tuple[str, ...]:
    """Each argument alone, then all together; of up to four arguments every choice."""
    if count <= 4:
        return tuple("".join(p) for p in itertools.product("RP", repeat=count) if "P" in p)
    alone = tuple("R" * i + "P" + "R" * (count - i - 1) for i in range(count))
    return (*alone, "P" * count)


def _candidates(call: Call, sample: Sampler) -> Iterator[Row]:
    """Each way with what its outputs turn out to be. A way whose call fails on a piece is none."""
    inputs = sample(call, torch.Generator().manual_seed(1))
    whole = run_whole(call, inputs)
    for way in _ways(call):
        if any(slot == "P" and m.dtype == torch.bool for slot, m in zip(way, call.inputs, strict=True)):
            continue
        outputs = _outputs(call, way, inputs, whole)
        if outputs is not None and not _says_little(way, outputs, whole):
            yield Row(way, outputs)


def _says_little(way: tuple[Slot, ...], outputs: tuple[Slot | None, ...], whole: Sequence[Any]) -> bool:
    """Whether the samples cannot show that a row with partial sums holds.

    A partial argument that changes no output may change it for other values (``x == -100``), and zero is the sum of
    zeros whatever the operator does (``x > 1e9``).
    """
    if "P" in way and any(slot not in ("P", None) for slot in outputs):
        return True
    return any(slot == "P" and not out.any() for slot, out in zip(outputs, whole, strict=True))


def _outputs(
    call: Call, way: tuple[Slot, ...], inputs: Sequence[torch.Tensor], whole: Sequence[Any]
) -> tuple[Slot | None, ...] | None:
    """The outputs' slots under ``way``; None if there are none that hold for every dealing."""
    n = next((m.shape[s.dim] for s, m in zip(way, call.inputs, strict=True) if isinstance(s, Dim)), 0)
    options = [_output_slots(meta, n) for meta in call.outputs]
    generator = torch.Generator().manual_seed(2)
    for sizes in size_vectors(n, _RANKS) if n else ((),):
        dealt = [
            deal_input(x, _placement(slot, n), sizes, _RANKS, generator) for x, slot in zip(inputs, way, strict=True)
        ]
        try:
            pieces = [run_whole(call, [d[rank] for d in dealt]) for rank in range(_RANKS)]
        except Exception:  # whatever a kernel raises on a piece
            return None
        for i, found in enumerate(options):
            options[i] = [s for s in found if s is None or _is(s, [p[i] for p in pieces], whole[i], n, sizes)]
        if not all(options):
            return None
    return tuple(found[0] for found in options)


def _output_slots(meta: TensorMeta | None, n: int) -> list[Slot | None]:
    """What an output may be, best first."""
    if meta is None:
        return [None]
    sharded = [Dim(dim) for dim, size in enumerate(meta.shape) if n and size == n]
    plain: list[Slot] = ["R"] if meta.dtype == torch.bool else ["R", "P"]
    return [*sharded, *plain]


def _placement(slot: Slot, n: int) -> Placement:
    if isinstance(slot, Dim):
        return Shard(slot.dim, 1, n, 1, "g")
    return PARTIAL if slot == "P" else REPLICATE


def _is(slot: Slot, pieces: list[torch.Tensor], whole: torch.Tensor, n: int, sizes: tuple[int, ...]) -> bool:
    """Whether the pieces are what ``slot`` says of the whole."""
    if not isinstance(slot, Dim) and any(piece.shape != whole.shape for piece in pieces):
        return False
    return mismatch(pieces, whole, _placement(slot, n), sizes) <= TOLERANCE


def still_hold(call: Call, rows: Sequence[Row]) -> bool:
    """Whether every one of ``rows``, proved in the past, is proved now."""
    versions, positive = _small_versions(call)
    return bool(versions) and all(holds(row, small, positive) for small in versions for row in rows)
