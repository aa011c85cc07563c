"""Rules of the user's own operators: one line of notation, believed after the operator has run on uneven pieces."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hap.errors import HapError, RuleError
from hap.graph import Node, TensorMeta, Value
from hap.ops import resolve
from hap.rules.notation import Call, Einsum, literal_key, parse_einsum, partial_rows
from hap.rules.prove import Proof, Verdict, prove_call, row_strategies, run_whole
from hap.rules.samples import Sampler, sampler
from hap.rules.table import DEFAULT_TABLE, RuleTable, UserRule, call_rows, kinds_of

_WHOLE_DIM = 3  # the size of a dim written as "."
_FIRST_SIZE = 4  # named dims get 4, 5, 6, ...: enough to deal unevenly to three ranks
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
_SAMPLED = ((1.0, False), (1.0, True), (1e-4, True), (1e4, False))  # how wide, whether positive
_MIXED = 3  # tensors: of so many, every mixture of floating-point, whole and boolean numbers is tried


Sizes = Mapping[str, int]


@dataclass(frozen=True)
class _Trial:
    """A call on which the rule is proved, its arguments, and how exact they are."""

    call: Call
    sample: Sampler
    tolerance: float

    def proof(self, rule: UserRule) -> Proof:
        return Proof(table=RuleTable({self.call.node.op: rule}), sample=self.sample, tolerance=self.tolerance)

    def __str__(self) -> str:
        return ", ".join(f"{str(m.dtype).removeprefix('torch.')} {m.shape}" for m in self.call.inputs)


def register_rule(
    op: str,
    notation: str,
    *,
    literals: Sequence[Any] = (),
    samples: Sequence[torch.Tensor] | None = None,
    table: RuleTable = DEFAULT_TABLE,
) -> tuple[Verdict, ...]:
    """Teach HAP to shard ``op``, ``namespace.name.overload``: tensors in call order, then ``literals``.

        register_rule("mylib.scale_rows.default", "b d, b -> b d")
        register_rule("mylib.top.default", "b . -> b .", literals=(2,))

    A name is a dim that may be sharded, ``.`` one that stays whole; where a sharded name is missing on the right the
    output is a partial sum. Which arguments may be partial is found out. Everything is proved by running the operator
    on tensors of 3 to a dozen elements a dim, of every floating dtype, of whole numbers below 3 and of booleans, in
    every mixture that it takes; or on ``samples``, one tensor an argument, where it takes nothing else. RuleError
    names what was refuted, and nothing is then registered. The rule holds for calls with the same literals and kinds
    of numbers. Returns what was proved.
    """
    einsum = parse_einsum(notation)
    trials = tuple(_trials(op, einsum, tuple(literals), samples))
    key = literal_key(trials[0].call.node.args)
    claim = UserRule(notation, einsum, (), key)
    verdicts = [v for trial in trials for v in _proved(trial, claim)]
    found = {p: {_linear(t, claim, p) for t in trials} - {None} for p in _patterns(len(einsum.inputs))}
    partials = tuple(pattern for pattern, held in found.items() if held == {True})
    kinds = tuple(dict.fromkeys(kinds_of(trial.call) for trial in trials))
    table.add(op, UserRule(notation, einsum, partials, key, kinds))
    return tuple(verdicts)


def _proved(trial: _Trial, claim: UserRule) -> Iterator[Verdict]:
    """Every row of the notation on one trial. RuleError at the first that is refuted."""
    proof, call = trial.proof(claim), trial.call
    possible = call_rows(call, proof.table)
    for name, row in zip(claim.einsum.names, claim.einsum.rows(), strict=True):
        if row not in possible:
            continue  # a boolean that would be a partial sum
        for verdict in prove_call(call, tuple(row_strategies(row, call)), proof):
            if not verdict.ok:
                raise RuleError(
                    f"rule {claim.notation!r} of {call.node.op} is wrong for {name!r}: {verdict.strategy} on {trial}: "
                    f"error {verdict.worst_error:.2g}, {verdict.detail}"
                )
            yield verdict


def _trials(
    op: str, einsum: Einsum, literals: tuple[Any, ...], samples: Sequence[torch.Tensor] | None
) -> Iterator[_Trial]:
    """Every kind of arguments on which the operator runs and gives what the rule says. RuleError if there is none."""
    sizes = {name: _FIRST_SIZE + i for i, name in enumerate(einsum.names)} | {".": _WHOLE_DIM}
    if samples is not None:
        yield _given_trial(op, einsum, literals, tuple(x.detach().cpu() for x in samples))
        return
    refusal: RuleError | None = None
    found = False
    for dtypes in _mixtures(len(einsum.inputs)):
        metas = tuple(
            TensorMeta(tuple(sizes[n] for n in term), dtype) for term, dtype in zip(einsum.inputs, dtypes, strict=True)
        )
        floating = next((d for d in dtypes if d.is_floating_point), torch.float64)
        tried = False
        for scale, positive in _SAMPLED if floating == torch.float64 else _SAMPLED[:2]:
            if tried and scale == 1.0:
                continue
            sample = sampler(dtype=floating, positive=positive, scale=scale)
            try:
                call = _sample_call(op, einsum, literals, metas, sample, sizes)
            except RuleError as e:
                refusal = refusal or e
                continue
            found = tried = True
            yield _Trial(call, sample, _TOLERANCES[floating])
    if not found:
        assert refusal is not None
        raise refusal


def _given_trial(op: str, einsum: Einsum, literals: tuple[Any, ...], samples: tuple[torch.Tensor, ...]) -> _Trial:
    """The user's own tensors. RuleError unless they have the dims that the rule names."""
    sizes: dict[str, int] = {}
    shapes = ", ".join(str(tuple(x.shape)) for x in samples)
    if [len(t) for t in einsum.inputs] != [x.dim() for x in samples]:
        raise RuleError(f"samples of {op} are {shapes}, which have other dims than its rule names")
    for term, x in zip(einsum.inputs, samples, strict=True):
        for name, size in zip(term, x.shape, strict=True):
            if name != "." and sizes.setdefault(name, size) != size:
                raise RuleError(f"samples of {op} are {shapes}: {name!r} has two sizes")
    if any(size < 2 for size in sizes.values()):
        raise RuleError(f"samples of {op} are {shapes}: a dim that may be sharded needs at least 2 elements")

    def sample(call: Call, generator: torch.Generator) -> list[torch.Tensor]:
        return [x.clone() for x in samples]

    metas = tuple(TensorMeta(tuple(x.shape), x.dtype) for x in samples)
    tolerance = max((_TOLERANCES[m.dtype] for m in metas if m.dtype in _TOLERANCES), default=1e-10)
    return _Trial(_sample_call(op, einsum, literals, metas, sample, sizes), sample, tolerance)


def _mixtures(count: int) -> Iterator[tuple[torch.dtype, ...]]:
    """Dtypes of so many arguments: all floating first, then with fewer and fewer of them."""
    kinds = sorted(itertools.product((0, 1, 2), repeat=count), key=lambda k: sum(map(bool, k)))
    for kind in kinds if count <= _MIXED else kinds[: 1 + 2 * count]:
        for floating in _TOLERANCES if 0 in kind else (torch.float64,):
            yield tuple((floating, torch.int64, torch.bool)[k] for k in kind)


def _sample_call(
    op: str, einsum: Einsum, literals: tuple[Any, ...], metas: tuple[TensorMeta, ...], sample: Sampler, sizes: Sizes
) -> Call:
    """A call of ``op``; its outputs are found by running it, and must have the sizes of the names on the right."""
    call = Call(Node("proof", op, (*(Value(f"x{i}") for i in range(len(metas))), *literals)), metas)
    function = resolve(op)
    on = ", ".join(f"{str(m.dtype).removeprefix('torch.')} {m.shape}" for m in metas)
    try:
        result = function(*sample(call, torch.Generator().manual_seed(0)), *literals)
    except HapError:
        raise
    except Exception as e:  # the user's operator may raise anything
        said = " ".join(str(e).split())
        raise RuleError(f"{op} does not run on {on} {literals or ''}: {type(e).__name__}: {said}") from None
    results = result if isinstance(result, (tuple, list)) else (result,)
    if not all(r.isfinite().all() for r in results if isinstance(r, torch.Tensor)):
        raise RuleError(f"{op} gives NaN or infinity on {on}, which proves nothing; pass samples")
    outputs = tuple(TensorMeta(tuple(r.shape), r.dtype) if isinstance(r, torch.Tensor) else None for r in results)
    expected = [tuple(sizes.get(n) if n != "." else None for n in term) for term in einsum.outputs]
    if not _as_expected([None if o is None else o.shape for o in outputs], expected):
        found = ", ".join(str(o and o.shape) for o in outputs)
        says = ", ".join(str(tuple("." if n is None else n for n in term)) for term in expected)
        raise RuleError(f"{op} gives {found} where its rule says {says}".replace("'.'", "."))
    return replace(call, node=replace(call.node, outputs=outputs))


def _as_expected(found: Sequence[tuple[int, ...] | None], expected: Sequence[tuple[int | None, ...]]) -> bool:
    return len(found) == len(expected) and all(
        shape is not None
        and len(shape) == len(term)
        and all(n in (None, size) for size, n in zip(shape, term, strict=True))
        for shape, term in zip(found, expected, strict=True)
    )


def _patterns(count: int) -> Iterator[str]:
    """Which arguments may be partial: each alone, all together."""
    alone = ("R" * i + "P" + "R" * (count - i - 1) for i in range(count))
    yield from dict.fromkeys(itertools.chain(alone, ("P" * count,) if count else ()))


def _linear(trial: _Trial, claim: UserRule, pattern: str) -> bool | None:
    """Whether the pattern holds on the trial; None where that shows nothing.

    A boolean is never partial; and zero is the sum of zeros whatever the operator does.
    """
    call = trial.call
    rule = UserRule(claim.notation, claim.einsum, (pattern,), claim.literals)
    (row,) = partial_rows(call, (pattern,))
    if row not in call_rows(call, trial.proof(rule).table):
        return None
    if not all(out.any() for out in run_whole(call, trial.sample(call, torch.Generator().manual_seed(0)))):
        return None
    return all(v.ok for v in prove_call(call, tuple(row_strategies(row, call)), trial.proof(rule)))
