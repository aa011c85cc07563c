"""Whatever draws random numbers, in terms of (seed, site, global element).

    dropout                              hap.dropout.default                    hap.capture.dropout
    rand, rand_like, uniform             hap.rand.default(size, seed, site, None), scaled and shifted
    randn, randn_like, normal            hap.randn.default(size, seed, site, None), scaled and shifted
    randint, randint_like                hap.randint.default(size, low, high, seed, site, None)
    bernoulli of a number p              hap.bernoulli.default(size, p, seed, site, None)
    bernoulli of a tensor p              rand < p
    exponential                          log(rand) / -lambd
    randperm                             the order of random whole numbers, sorted
    rrelu                                x times rand between the slopes, where x is negative
    multinomial                          the classes where p / exponential is largest

The last as in PyTorch: of independent exponential numbers divided by p, class i's is the least with a chance of
p[i] / sum(p), and the next ones are what is drawn after it without replacement.

The seed is an input of the step; sites are numbered in program order. What is not in this list (``poisson``, a range of
more than 2^31 whole numbers) keeps its name, and rules refuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hap.capture.dropout import BACKWARD, FORWARD, is_private, spell_dropout
from hap.capture.rewrite import Expansion, Rewritten, Spelling, rewrite
from hap.capture.seed import with_seed
from hap.draws import LARGEST_RANGE
from hap.graph import Graph, Node, TensorMeta, Value

_REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def canonical_draws(graph: Graph) -> Graph:
    """Every draw that has a spelling; adds the seed if there is one."""
    mine = [n for n in graph.nodes if is_private(graph, n) or (n.op in _SPELLINGS and _is_possible(graph, n))]
    if not mine:
        return graph
    sites = {node.name: site for site, node in enumerate(mine)}
    probabilities = {node.name: float(node.args[1]) for node in mine if node.op == FORWARD}
    graph, seed = with_seed(graph)

    def rule(node: Node, done: Rewritten) -> Node | Expansion | None:
        owner = node.args[1].node if node.op == BACKWARD else node.name
        if owner in probabilities:
            return spell_dropout(node, probabilities[owner], seed, sites[owner])
        if owner not in sites:
            return None
        draws = _Draws(node, done, seed, sites[owner])
        found = _SPELLINGS[node.op](draws)
        return Expansion(draws.nodes, (found,) if isinstance(found, Value) else found)

    return rewrite(graph, rule)


def _is_possible(graph: Graph, node: Node) -> bool:
    if ("randperm" in node.op and node.meta.dtype == torch.int64) or "multinomial" in node.op:
        return True
    if "randint" in node.op:
        low, high = _limits(node)
        return 0 < high - low <= LARGEST_RANGE and not node.meta.dtype.is_complex
    if ".normal." in node.op and {graph.meta(v).dtype for v in node.inputs} - {node.meta.dtype}:
        return False
    return node.meta.dtype in _REAL


def _limits(node: Node) -> tuple[int, int]:
    """The numbers among the first arguments of a ``randint``: both limits, or the upper one."""
    found = [a for a in node.args if isinstance(a, int)]
    return (found[0], found[1]) if len(found) == 2 else (0, found[0])


class _Draws(Spelling):
    """Writes one draw. Numbers are drawn once for it, since it has one site."""

    def __init__(self, node: Node, done: Rewritten, seed: Value, site: int) -> None:
        super().__init__(node)
        self.done, self.seed, self.site = done, seed, site
        self.out = node.meta

    def argument(self, position: int, default: Any = None) -> Any:
        return self.node.args[position] if len(self.node.args) > position else default

    def drawn(self, op: str, meta: TensorMeta, *limits: float) -> Value:
        """``rand``, ``randn``, ``randint`` or ``bernoulli`` of this shape and dtype."""
        args = (meta.shape, *limits, self.seed, self.site, None)
        return self.call(f"hap.{op}.default", args, meta, kwargs=(("dtype", meta.dtype),))

    def moved(self, value: Value, scale: Any, shift: Any) -> Value:
        """``value * scale + shift``, with numbers or tensors that are broadcast."""
        meta = self.meta(value)
        if isinstance(scale, Value) or scale != 1:
            value = self.call("aten.mul.Tensor", (value, scale), meta)
        if isinstance(shift, Value) or shift != 0:
            value = self.call("aten.add.Tensor", (value, shift), meta)
        return value

    def exponential(self, meta: TensorMeta, scale: float) -> Value:
        return self.moved(self.call("aten.log.default", (self.drawn("rand", meta),), meta), -scale, 0)


def _wide(meta: TensorMeta) -> TensorMeta:
    """In float32 at least: of few bits, logarithms and chances come out in few steps."""
    return meta if meta.dtype == torch.float64 else TensorMeta(meta.shape, torch.float32)


def _cast(draws: _Draws, value: Value) -> Value:
    if draws.meta(value).dtype == draws.out.dtype:
        return value
    return draws.call("aten._to_copy.default", (value,), draws.out, kwargs=(("dtype", draws.out.dtype),))


def _rand(draws: _Draws) -> Value:
    return draws.drawn("rand", draws.out)


def _uniform(draws: _Draws) -> Value:
    low, high = float(draws.argument(1, 0.0)), float(draws.argument(2, 1.0))
    return draws.moved(draws.drawn("rand", draws.out), high - low, low)


def _randn(draws: _Draws) -> Value:
    return draws.drawn("randn", draws.out)


def _normal(first: int) -> Callable[[_Draws], Value]:
    """From the argument at ``first`` on: mean and deviation, numbers or tensors that are broadcast."""

    def spell(draws: _Draws) -> Value:
        mean, deviation = draws.argument(first, 0.0), draws.argument(first + 1, 1.0)
        return draws.moved(draws.drawn("randn", draws.out), deviation, mean)

    return spell


def _randint(draws: _Draws) -> Value:
    return draws.drawn("randint", draws.out, *_limits(draws.node))


def _bernoulli(draws: _Draws) -> Value:
    """``(p)``, ``(like, p)`` with a number or a tensor."""
    chance = draws.argument(1, draws.node.args[0])
    if not isinstance(chance, Value):
        return draws.drawn("bernoulli", draws.out, float(chance))
    unit = draws.drawn("rand", _wide(draws.out))
    return _cast(draws, draws.call("aten.lt.Tensor", (unit, chance), TensorMeta(draws.out.shape, torch.bool)))


def _exponential(draws: _Draws) -> Value:
    return _cast(draws, draws.exponential(_wide(draws.out), 1.0 / draws.argument(1, 1.0)))


def _randperm(draws: _Draws) -> Value:
    keys = draws.drawn("randint", draws.out, 0, LARGEST_RANGE)
    return _after_first(draws, "aten.sort.default", (keys, 0, False), draws.out, draws.out)


def _rrelu(draws: _Draws) -> tuple[Value, Value]:
    """``(x, noise, lower, upper, training)``: the output, and the slopes, which in evaluation are all their mean."""
    x, lower, upper = draws.argument(0), float(draws.argument(2, 1 / 8)), float(draws.argument(3, 1 / 3))

    def number(value: float) -> Value:
        meta = TensorMeta((), draws.out.dtype)
        return draws.call("aten.full.default", ((), value), meta, kwargs=(("dtype", meta.dtype),))

    if draws.argument(4, False):
        slopes = draws.moved(draws.drawn("rand", draws.out), upper - lower, lower)
    else:
        slopes = number((lower + upper) / 2)
    one = number(1.0)
    negative = draws.call("aten.le.Scalar", (x, 0), TensorMeta(draws.out.shape, torch.bool))
    slope = draws.call("aten.where.self", (negative, slopes, one), draws.out)
    return draws.call("aten.mul.Tensor", (x, slope), draws.out), slope


def _multinomial(draws: _Draws) -> Value:
    """``(p, count, replacement)`` with p (..., classes)."""
    chances, count, replaced = draws.argument(0), draws.argument(1), draws.argument(2, False)
    meta = _wide(draws.done.meta(chances))
    if not replaced or count == 1:
        ratio = draws.call("aten.div.Tensor", (chances, draws.exponential(meta, 1.0)), meta)
        largest = TensorMeta(draws.out.shape, meta.dtype)
        return _after_first(draws, "aten.topk.default", (ratio, count, -1, True, True), largest, draws.out)
    many = TensorMeta((*draws.out.shape, meta.shape[-1]), meta.dtype)
    one = TensorMeta((*meta.shape[:-1], 1, meta.shape[-1]), draws.done.meta(chances).dtype)
    spread = draws.call("aten.view.default", (chances, one.shape), one)
    ratio = draws.call("aten.div.Tensor", (spread, draws.exponential(many, 1.0)), many)
    return draws.call("aten.argmax.default", (ratio, len(many.shape) - 1, False), draws.out)


def _after_first(draws: _Draws, op: str, args: tuple[Any, ...], *outputs: TensorMeta) -> Value:
    """The second output: where what the first holds was found."""
    return Value(draws.call(op, args, *outputs).node, 1)


_SPELLINGS: Mapping[str, Callable[[_Draws], Value | tuple[Value, Value]]] = {  # a generator is none: others are refused
    "aten.rand.default": _rand,
    "aten.rand.generator": _rand,
    "aten.rand_like.default": _rand,
    "aten.uniform.default": _uniform,
    "aten.randn.default": _randn,
    "aten.randn.generator": _randn,
    "aten.randn_like.default": _randn,
    "aten.normal.float_float": _normal(0),
    "aten.normal.float_Tensor": _normal(0),
    "aten.normal.Tensor_float": _normal(0),
    "aten.normal.Tensor_Tensor": _normal(0),
    "aten.normal_functional.default": _normal(1),
    "aten.randint.default": _randint,
    "aten.randint.low": _randint,
    "aten.randint.generator": _randint,
    "aten.randint.low_generator": _randint,
    "aten.randint_like.default": _randint,
    "aten.randint_like.low_dtype": _randint,
    "aten.bernoulli.default": _bernoulli,
    "aten.bernoulli.p": _bernoulli,
    "aten.bernoulli.Tensor": _bernoulli,
    "aten.exponential.default": _exponential,
    "aten.randperm.default": _randperm,
    "aten.randperm.generator": _randperm,
    "aten.multinomial.default": _multinomial,
    "aten.rrelu_with_noise_functional.default": _rrelu,
}
