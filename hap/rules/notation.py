"""What a sharding rule says: rows, their slots and edits, and an einsum-like notation for writing rows in one line.

A *row* is one way to shard one operator call over one mesh axis. It has one *slot* per tensor argument (in the order of
``Node.inputs``) and one per output:

``"R"``  every rank holds the whole tensor; ``"P"``  the tensor is the sum over ranks of what they hold;
``Dim(dim, outer, unit)``  every rank holds a range of the row's atoms along ``dim``.

A sharded dim of size ``o * n * u`` is read as ``o x n x u`` and a rank holds a range of ``n`` (``hap.placement``). A
row has one *base atom* ``(o, n, u)``, all whole; slot ``Dim(d, outer=a, unit=b)`` means that its tensor's dim ``d`` is
sharded as ``(a*o, n, b*u)``. The row applies to a base atom when in every ``Dim`` slot ``a*o`` and ``b*u`` are whole
and ``a*o * n * b*u`` is the dim's size. Examples:

* splitting a fused dim in three: input ``Dim(1, outer=3)``, outputs ``Dim(1)``: (3, 6, 8) of 144 gives (1, 6, 8) of 48;
* ``view`` of (8, 10, 48) as (80, 48): input ``Dim(0)``, output ``Dim(0, unit=10)``: (1, 8, 1) of 8 gives (1, 8, 10).

*Edits* name the literals that become local: ``Shape(arg, output)`` replaces a size list by the local shape of an
output, ``Scale(arg)`` replaces a number (or each of a list) that counts whole atoms, ``k * n``, by ``k * sizes[rank]``.
``Place(arg)`` tells an operator which piece it works on, of the whole or of the piece that the argument says already.
``arg`` is a position in ``args`` or a key of ``kwargs``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, NamedTuple

from hap.errors import RuleError
from hap.graph import Graph, Node, TensorMeta, Value

ONE = Fraction(1)


@dataclass(frozen=True)
class Dim:
    """The slot's tensor is sharded along ``dim``; its atom is the row's, scaled by ``outer`` and ``unit``."""

    dim: int
    outer: Fraction = ONE
    unit: Fraction = ONE

    @cached_property
    def scales(self) -> bool:
        """Whether its atom is another one than the row's."""
        return not self.outer == self.unit == ONE

    def __str__(self) -> str:
        scale = f":{self.outer}x{self.unit}" if self.scales else ""
        return f"S({self.dim}{scale})"


Slot = Literal["R", "P"] | Dim


@dataclass(frozen=True)
class Shape:
    """The size list at ``arg`` becomes the local shape of output number ``output``."""

    arg: int | str
    output: int = 0


@dataclass(frozen=True)
class Scale:
    """The number (or numbers) at ``arg`` counts whole atoms of the row's sharded dim and shrinks with them."""

    arg: int | str


@dataclass(frozen=True)
class Place:
    """None at ``arg`` becomes ``(dim, outer, n, unit, start)``: which piece of output 0, or of an input, a rank has."""

    arg: int
    of_input: int | None = None


Edit = Shape | Scale | Place


@dataclass(frozen=True)
class Row:
    """One way to shard one call; see the module's docstring."""

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot | None, ...]
    edits: tuple[Edit, ...] = ()

    @cached_property
    def slots(self) -> tuple[Slot | None, ...]:
        """Inputs, then outputs."""
        return (*self.inputs, *self.outputs)

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


class Atom(NamedTuple):
    """How a sharded dim of size ``outer * n * unit`` is cut: a rank holds a range of ``n``."""

    outer: int
    n: int
    unit: int


def scale_atom(slot: Dim, base: Atom, size: int) -> Atom | None:
    """The atom that ``base`` means in ``slot``, a dim of ``size``; None if it is not whole or does not fill the dim."""
    if not slot.scales:
        return base if base.outer * base.n * base.unit == size else None
    outer, of_outer = divmod(base.outer * slot.outer.numerator, slot.outer.denominator)
    unit, of_unit = divmod(base.unit * slot.unit.numerator, slot.unit.denominator)
    return None if of_outer or of_unit or outer * base.n * unit != size else Atom(outer, base.n, unit)


def base_atom(slot: Dim, atom: Atom) -> Atom | None:
    """The row's base atom if ``slot`` holds ``atom``; None if it is not whole. Inverse of ``scale_atom``."""
    if not slot.scales:
        return atom
    outer, of_outer = divmod(atom.outer * slot.outer.denominator, slot.outer.numerator)
    unit, of_unit = divmod(atom.unit * slot.unit.denominator, slot.unit.numerator)
    return None if of_outer or of_unit else Atom(outer, atom.n, unit)


@dataclass(frozen=True)
class Call:
    """A node together with the metas of its tensor arguments: all that a rule may look at."""

    node: Node
    inputs: tuple[TensorMeta, ...]

    @property
    def outputs(self) -> tuple[TensorMeta | None, ...]:
        return self.node.outputs

    @property
    def output(self) -> TensorMeta:
        return self.node.meta

    def find(self, position: int, name: str) -> int | str | None:
        """Where the argument called ``name`` stands: a position, a keyword, or None where the call leaves it out."""
        if position < len(self.node.args):
            return position
        return name if any(k == name for k, _ in self.node.kwargs) else None

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """The argument called ``name``, however it was passed."""
        where = self.find(position, name)
        if where is None:
            return default
        return self.node.args[where] if isinstance(where, int) else self.node.kwarg(where)

    def dim_argument(self, position: int, ndim: int, name: str = "dim", default: int = 0) -> int:
        """A dim argument, counted from the front."""
        dim: int = self.argument(position, name, default)
        return dim % ndim if ndim else 0


Rule = Callable[[Call], Iterable[Row]]


def make_call(node: Node, graph: Graph) -> Call:
    return Call(node, tuple(graph.meta(v) for v in node.inputs))


def literal_key(tree: Any) -> Any:
    """A nested argument with its values forgotten: equal for two calls that differ only in which tensors they read."""
    if isinstance(tree, Value):
        return "*"
    if isinstance(tree, (tuple, list)):
        return tuple(literal_key(item) for item in tree)
    return type(tree).__name__, tree if tree == tree else "nan"


def call_key(call: Call) -> Any:
    """Calls with equal keys have the same rows and run the same kernels."""
    node = call.node
    return (
        node.op,
        literal_key(node.args),
        tuple((k, literal_key(v)) for k, v in node.kwargs),
        call.inputs,
        node.outputs,
    )


def partial_rows(call: Call, patterns: Iterable[str]) -> Iterator[Row]:
    """Rows without a sharded dim: each pattern has one letter per tensor argument, and every output is partial."""
    outputs = tuple(None if o is None else "P" for o in call.outputs)
    for pattern in patterns:
        assert len(pattern) == len(call.inputs), f"{call.node.op}: pattern {pattern} for {len(call.inputs)} tensors"
        yield Row(tuple("P" if c == "P" else "R" for c in pattern), outputs)  # type: ignore[arg-type]


def whole_slots(count: int) -> tuple[Slot, ...]:
    """That many whole tensors."""
    return tuple("R" for _ in range(count))


def one_partial(count: int) -> tuple[str, ...]:
    """Patterns of an operator that is linear in each argument while the others are whole: PRR, RPR, RRP."""
    return tuple("R" * i + "P" + "R" * (count - i - 1) for i in range(count))


@dataclass(frozen=True)
class Einsum:
    """A parsed notation such as ``"m k, k n -> m n"``: the dims of each tensor argument and of each output by name.

    A name may be sharded wherever it stands; an output in which a sharded name does not stand is partial, so a name
    absent on the right is a contraction. ``.`` is a dim that stays whole. Names are separated by blanks.
    """

    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Every shardable name in order of first appearance on the left."""
        return tuple(dict.fromkeys(name for term in self.inputs for name in term if name != "."))

    def rows(self) -> tuple[Row, ...]:
        """One row per name."""
        return tuple(
            Row(
                tuple(Dim(term.index(name)) if name in term else "R" for term in self.inputs),
                tuple(Dim(term.index(name)) if name in term else "P" for term in self.outputs),
            )
            for name in self.names
        )

    def matches(self, call: Call) -> bool:
        """Whether the call has the tensors and numbers of dims the notation speaks of."""
        outputs = tuple(o for o in call.outputs if o is not None)
        return (
            len(outputs) == len(call.outputs)
            and _ranks(self.inputs) == tuple(len(m.shape) for m in call.inputs)
            and _ranks(self.outputs) == tuple(len(m.shape) for m in outputs)
        )


def parse_einsum(notation: str) -> Einsum:
    """Parse ``"m k, k n -> m n"``. RuleError if it is malformed."""
    left, arrow, right = notation.partition("->")
    if not arrow or "->" in right:
        raise RuleError(f"rule {notation!r}: write inputs -> outputs, such as 'm k, k n -> m n'")
    inputs, outputs = _terms(left), _terms(right)
    for term in (*inputs, *outputs):
        for name in term:
            if name != "." and not name.isidentifier():
                raise RuleError(f"rule {notation!r}: {name!r} is not a name")
            if name != "." and term.count(name) > 1:
                raise RuleError(f"rule {notation!r}: {name!r} stands twice in one tensor")
    known = {name for term in inputs for name in term}
    for name in (name for term in outputs for name in term):
        if name not in known and name != ".":
            raise RuleError(f"rule {notation!r}: {name!r} stands on the right only")
    return Einsum(inputs, outputs)


def einsum(notation: str) -> Rule:
    """The rule of an operator that is linear in each argument, so that one partial argument passes through."""
    parsed = parse_einsum(notation)

    def rule(call: Call) -> Iterator[Row]:
        assert parsed.matches(call), f"{call.node.op} {call.inputs} is not {notation}"
        yield from parsed.rows()
        yield from partial_rows(call, one_partial(len(call.inputs)))

    return rule


def _terms(side: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(term.split()) for term in side.split(","))


def _ranks(terms: Sequence[Sequence[str]]) -> tuple[int, ...]:
    return tuple(len(term) for term in terms)
