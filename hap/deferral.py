"""Which values of a step wait for its last batch, where a step of the optimizer has gradients of several batches.

A gradient is a sum over the batches. What happens to it last, a sum over the ranks mostly, is linear, and so may be
done once, to the sums that ranks make of their own parts. A value is *deferrable* if nothing is made of it but
gradients, by linear calls alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from hap.graph import Graph, Node, Value

_CALLS = """_to_copy.default _unsafe_view.default add.Tensor alias.default clone.default div.Tensor mul.Tensor
neg.default permute.default reshape.default squeeze.dim squeeze.dims t.default transpose.int unsqueeze.default
view.default"""
LINEAR = frozenset(f"aten.{name}" for name in _CALLS.split())
_ADDS = "aten.add.Tensor"


def is_linear(op: str, inputs: int) -> bool:
    """Whether a call that reads so many tensors is linear in all of them together."""
    return op in LINEAR and inputs == (2 if op == _ADDS else 1)


def deferrable_values(graph: Graph) -> frozenset[Value]:
    """Those of which nothing but gradients is made, by linear calls alone; gradients that nobody reads, too."""
    found: set[Value] = set()
    gradients, needed = frozenset(graph.gradients.values()), {graph.loss, *graph.updates.values()}

    def is_made_into_gradients(value: Value) -> bool:
        users = graph.users.get(value, ())
        if value in needed or not (users or value in gradients):
            return False
        return all(is_linear(user.op, len(user.inputs)) and Value(user.name) in found for user, _ in users)

    def add(node: Node) -> None:
        found.update(v for i in range(len(node.outputs)) if is_made_into_gradients(v := Value(node.name, i)))

    for node in reversed(graph.nodes):
        if not node.is_source:
            add(node)
    return frozenset(found)


@dataclass(frozen=True)
class Batches:
    """How many batches a step of the optimizer has, and the values that then travel ``once`` a step. Costs are of one
    batch, the mean over a step's."""

    count: int = 1
    once: frozenset[Value] = frozenset()

    @classmethod
    def of(cls, graph: Graph, count: int) -> Batches:
        return ONE if count == 1 else cls(count, deferrable_values(graph))

    def part(self, value: Value) -> float:
        """Of what its conversions take, what a batch pays."""
        return 1 / self.count if value in self.once else 1.0


ONE = Batches()
