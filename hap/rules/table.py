"""The rule table: operator name -> rule, the builtin families and the user's own, and ``rows``, which asks it.

The all-replicated row is implicit in every rule. An operator without a rule is refused by name (``MissingRuleError``):
replicating it silently would be sound and would hide why a plan is slow, and a random operator would not even be sound.
"""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hap.errors import MissingRuleError, RuleError
from hap.graph import Graph, Node
from hap.ops import why_untried
from hap.rules import (
    attention,
    batch_norm,
    complex_numbers,
    convolution,
    ctc,
    draws,
    dropout,
    experts,
    hosts_sum,
    indexing,
    linalg,
    matmul,
    normalisation,
    parts,
    pointwise,
    reduction,
    view,
    windows,
)
from hap.rules.notation import Call, Einsum, Row, Rule, Slot, literal_key, make_call, partial_rows

_FAMILIES = (
    attention,
    batch_norm,
    complex_numbers,
    convolution,
    ctc,
    draws,
    dropout,
    experts,
    hosts_sum,
    indexing,
    linalg,
    matmul,
    normalisation,
    parts,
    pointwise,
    reduction,
    view,
    windows,
)
BUILTIN: Mapping[str, Rule] = {op: rule for family in _FAMILIES for op, rule in family.RULES.items()}


@dataclass(frozen=True)
class UserRule:
    """A rule from notation. ``partials``: the patterns that running the operator showed to hold (``"PR"``).

    ``literals``: ``literal_key`` of the arguments that it was proved with; it holds for no others. ``kinds``: those of
    numbers (``kinds_of``) that it was proved with, empty if that was not asked.
    """

    notation: str
    einsum: Einsum
    partials: tuple[str, ...]
    literals: Any
    kinds: tuple[tuple[str, ...], ...] = ()

    def __call__(self, call: Call) -> Iterable[Row]:
        node = call.node
        known = not self.kinds or kinds_of(call) in self.kinds
        if not known or not self.einsum.matches(call) or literal_key(node.args) != self.literals or node.kwargs:
            shapes = ", ".join(f"{str(m.dtype).removeprefix('torch.')} {m.shape}" for m in call.inputs)
            raise MissingRuleError(
                f"{node.op} ({node.name}), called in module {node.module!r}, has the rule {self.notation!r}, proved "
                f"for other dims, kinds of numbers or literals than those of this call: {shapes}; {node.args}"
            )
        return (*self.einsum.rows(), *partial_rows(call, self.partials))


def kinds_of(call: Call) -> tuple[str, ...]:
    """What kind of numbers each tensor argument holds."""
    return tuple(
        "floating" if m.dtype.is_floating_point else "boolean" if m.dtype == torch.bool else "whole"
        for m in call.inputs
    )


@dataclass
class RuleTable:
    """Every rule known: the builtin ones and ``user``, operator name -> rule, which may not redefine a builtin one."""

    user: dict[str, Rule] = field(default_factory=dict)

    def find(self, op: str) -> Rule | None:
        return self.user.get(op) or BUILTIN.get(op)

    def add(self, op: str, rule: Rule) -> None:
        if op in BUILTIN:
            raise RuleError(f"{op} has a builtin rule")
        self.user[op] = rule

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the text of the builtin rules and of the user's."""
        digest = hashlib.sha256()
        for entry in sorted(importlib.resources.files("hap.rules").iterdir(), key=lambda e: e.name):
            if entry.name.endswith(".py"):
                digest.update(entry.name.encode() + entry.read_bytes())
        for op in sorted(self.user):
            digest.update(repr((op, self.user[op])).encode())
        return digest.hexdigest()


DEFAULT_TABLE = RuleTable()


def rows(node: Node, graph: Graph, table: RuleTable = DEFAULT_TABLE) -> tuple[Row, ...]:
    """Every way to shard the call but the all-replicated one. MissingRuleError if the operator has no rule."""
    return call_rows(make_call(node, graph), table)


def call_rows(call: Call, table: RuleTable = DEFAULT_TABLE) -> tuple[Row, ...]:
    """``rows`` of a call whose metas are at hand. Rows in which a boolean would be partial are dropped."""
    node = call.node
    rule = table.find(node.op)
    if rule is None:
        where = f", called in module {node.module!r}," if node.module else ""
        why = why_untried(node.op)
        raise MissingRuleError(
            f"operator {node.op} ({node.name}){where} has no sharding rule"
            + ("; " if why is None else f", and none can be discovered: {why}; ")
            + f'add one with hap.register_rule("{node.op}", ...) or '
            + (f'let HAP find one: hap.discover_rule("{node.op}")' if why is None else "do without it")
        )
    found = tuple(row for row in dict.fromkeys(rule(call)) if not _partial_boolean(row, call))
    for row in found:
        assert len(row.inputs) == len(call.inputs), f"{node.op}: {row} for {len(call.inputs)} tensors"
        assert len(row.outputs) == len(call.outputs), f"{node.op}: {row} for {len(call.outputs)} outputs"
    return found


def rules_fingerprint(table: RuleTable = DEFAULT_TABLE) -> str:
    """Changes whenever a rule does; a plan carries it."""
    return table.fingerprint


def _partial_boolean(row: Row, call: Call) -> bool:
    slots: tuple[Slot | None, ...] = row.slots
    metas = (*call.inputs, *call.outputs)
    return any(s == "P" and m is not None and m.dtype == torch.bool for s, m in zip(slots, metas, strict=True))
