"""Which values of a step wait for its last batch, where a step of the optimizer has gradients of several batches.

A gradient is a sum over the batches. What happens to it last, a sum over the ranks mostly, or over the hosts of a mesh
of two axes, is linear, and so may be done once, to the sums that ranks make of their own parts. A value is *deferrable*
if nothing is made of it but gradients, by linear calls alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hap.graph import Graph, TensorMeta, Value
from hap.hosts_sum import HOSTS_SUM

_CALLS = """_to_copy.default _unsafe_view.default add.Tensor alias.default clone.default div.Tensor mul.Tensor
neg.default permute.default reshape.default squeeze.dim squeeze.dims t.default transpose.int unsqueeze.default
view.default"""
LINEAR = frozenset((HOSTS_SUM, *(f"aten.{name}" for name in _CALLS.split())))
_ADDS = "aten.add.Tensor"


def is_linear(op: str, inputs: int) -> bool:
    """Whether a call that reads so many tensors is linear in all of them together."""
    return op in LINEAR and inputs == (2 if op == _ADDS else 1)


def deferrable_values(graph: Graph) -> dict[Value, torch.dtype]:
    """Those of which nothing but gradients is made, by linear calls alone; gradients that nobody reads, too. With the
    dtype of a gradient, in which batches are added up."""
    found: dict[Value, torch.dtype] = {}
    gradients, needed = frozenset(graph.gradients.values()), {graph.loss, *graph.updates.values()}

    def made_into(value: Value) -> torch.dtype | None:
        users = graph.users.get(value, ())
        made = [found.get(Value(u.name)) if is_linear(u.op, len(u.inputs)) else None for u, _ in users]
        if value in needed or None in made or not (made or value in gradients):
            return None
        return graph.meta(value).dtype if value in gradients else made[0]

    for node in reversed(graph.nodes):
        values = () if node.is_source else (Value(node.name, i) for i, m in enumerate(node.outputs) if m is not None)
        found |= {value: dtype for value in values if (dtype := made_into(value)) is not None}
    return found


@dataclass(frozen=True)
class Batches:
    """How many batches a step of the optimizer has, and the values that then travel ``once`` a step, with the dtype in
    which they are added up. Costs are of one batch, the mean over a step's."""

    count: int = 1
    once: Mapping[Value, torch.dtype] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph, count: int) -> Batches:
        return ONE if count == 1 else cls(count, deferrable_values(graph))

    def part(self, value: Value) -> float:
        """Of what its conversions take, what a batch pays."""
        return 1 / self.count if value in self.once else 1.0

    def left_bytes(self, value: Value, meta: TensorMeta) -> int:
        """Of what earlier batches leave of a value that waits."""
        return meta.numel * self.once[value].itemsize


ONE = Batches()
