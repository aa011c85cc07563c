"""Rules of the user's own operators: one line of notation, believed after the operator has run on uneven pieces."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hap.errors import HapError, RuleError
from hap.graph import Node, TensorMeta, Value
from hap.ops import resolve
from hap.rules.notation import Call, Einsum, literal_key, parse_einsum, partial_rows
from hap.rules.prove import Proof, Verdict, prove_call, row_strategies
from hap.rules.table import DEFAULT_TABLE, RuleTable, UserRule

_WHOLE_DIM = 3  # the size of a dim written as "."
_FIRST_SIZE = 4  # named dims get 4, 5, 6, ...: enough to deal unevenly to three ranks


def register_rule(
    op: str, notation: str, *, literals: Sequence[Any] = (), table: RuleTable = DEFAULT_TABLE
) -> tuple[Verdict, ...]:
    """Teach HAP to shard ``op``, ``namespace.name.overload``: tensors in call order, then ``literals``.

        register_rule("mylib.scale_rows.default", "b d, b -> b d")
        register_rule("mylib.top.default", "b . -> b .", literals=(2,))

    A name is a dim that may be sharded, ``.`` one that stays whole; where a sharded name is missing on the right the
    output is a partial sum. Which arguments may be partial is found out. Everything is proved by running the operator
    on float64 tensors of 3 to a dozen elements a dim; RuleError names what was refuted, and nothing is then registered.
    The rule holds for calls with the same literals. Returns what was proved.
    """
    einsum = parse_einsum(notation)
    call = _sample_call(op, einsum, tuple(literals))
    key = literal_key(call.node.args)
    proof = Proof(table=RuleTable({op: UserRule(notation, einsum, (), key)}))
    verdicts: list[Verdict] = []
    for name, row in zip(einsum.names, einsum.rows(), strict=True):
        verdicts += prove_call(call, tuple(row_strategies(row, call)), proof)
        wrong = next((v for v in verdicts if not v.ok), None)
        if wrong is not None:
            reason = f"error {wrong.worst_error:.2g}, {wrong.detail}"
            raise RuleError(f"rule {notation!r} of {op} is wrong for {name!r}: {wrong.strategy}: {reason}")
    found = tuple(_linear_in(call, UserRule(notation, einsum, (), key)))
    table.add(op, UserRule(notation, einsum, found, key))
    return tuple(verdicts)


def _sample_call(op: str, einsum: Einsum, literals: tuple[Any, ...]) -> Call:
    """A small call of ``op``; its outputs are found by running it."""
    sizes = {name: _FIRST_SIZE + i for i, name in enumerate(einsum.names)} | {".": _WHOLE_DIM}
    metas = tuple(TensorMeta(tuple(sizes[n] for n in term), torch.float64) for term in einsum.inputs)
    values = tuple(Value(f"x{i}") for i in range(len(metas)))
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(m.shape, dtype=m.dtype, generator=generator) for m in metas]
    try:
        result = resolve(op)(*tensors, *literals)
    except HapError:
        raise
    except Exception as e:  # the user's operator may raise anything
        shapes = ", ".join(str(m.shape) for m in metas)
        raise RuleError(f"{op} does not run on {shapes} {literals or ''}: {type(e).__name__}: {e}") from None
    results = result if isinstance(result, (tuple, list)) else (result,)
    outputs = tuple(TensorMeta(tuple(r.shape), r.dtype) if isinstance(r, torch.Tensor) else None for r in results)
    expected = tuple(tuple(sizes[n] for n in term) for term in einsum.outputs)
    if tuple(o and o.shape for o in outputs) != expected:
        found = ", ".join(str(o and o.shape) for o in outputs)
        raise RuleError(f"{op} gives {found} where its rule says {', '.join(map(str, expected))}")
    return Call(Node("proof", op, (*values, *literals), (), outputs), metas)


def _linear_in(call: Call, rule: UserRule) -> Iterator[str]:
    """The patterns of partial arguments that hold: each alone, all together."""
    count = len(call.inputs)
    alone = ("R" * i + "P" + "R" * (count - i - 1) for i in range(count))
    for pattern in dict.fromkeys(itertools.chain(alone, ("P" * count,) if count else ())):
        candidate = UserRule(rule.notation, rule.einsum, (pattern,), rule.literals)
        (row,) = partial_rows(call, (pattern,))
        (verdict,) = prove_call(
            call, tuple(row_strategies(row, call)), Proof(table=RuleTable({call.node.op: candidate}))
        )
        if verdict.ok:
            yield pattern
