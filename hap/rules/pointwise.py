"""Rules of pointwise operators, and of those that only create or copy.

Any dim of the output may be sharded; an argument that is broadcast along it (the dim is missing or of size 1) is whole.
Which arguments may be partial is each operator's own arithmetic: ``a + b`` is the sum of the parts of both, so PP;
``a * b`` is linear in one at a time, so PR and RP; ``a + 1`` is not linear, so none. Zero is the sum of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from hap.rules.notation import Call, Dim, Row, Rule, Shape, Slot, one_partial, partial_rows, whole_slots

Partials = Callable[[Call], tuple[str, ...]]


def never(call: Call) -> tuple[str, ...]:
    """Not linear in anything."""
    return ()


def all_partial(call: Call) -> tuple[str, ...]:
    """f(a + a', b + b') = f(a, b) + f(a', b')."""
    return ("P" * len(call.inputs),)


def each_partial(call: Call) -> tuple[str, ...]:
    """Linear in each argument while the others are whole."""
    return one_partial(len(call.inputs))


def first_partial(call: Call) -> tuple[str, ...]:
    """Linear in the first argument while the others are whole."""
    return ("P" + "R" * (len(call.inputs) - 1),)


def tail_partial(call: Call) -> tuple[str, ...]:
    """Linear in all but the first argument together: ``where(condition, a, b)``."""
    return ("R" + "P" * (len(call.inputs) - 1),)


def head_partial(call: Call) -> tuple[str, ...]:
    """Linear in all but the last argument together: ``lerp(a, b, weight)``."""
    return ("P" * (len(call.inputs) - 1) + "R",)


def sum_partial(call: Call) -> tuple[str, ...]:
    """``a + b``: both, or one tensor and a scalar that is zero."""
    if len(call.inputs) == 2:
        return ("PP",)
    return ("P",) if call.argument(1, "other", 0) == 0 else ()


def fill_partial(call: Call) -> tuple[str, ...]:
    """``masked_fill(x, mask, value)`` is linear in x where the value is zero."""
    return ("PR",) if call.argument(2, "value") == 0 and len(call.inputs) == 2 else ()


def cast_partial(call: Call) -> tuple[str, ...]:
    """A sum may be taken after a conversion to real or complex numbers, and not after one to integers or booleans."""
    dtype = call.output.dtype
    return ("P",) if dtype.is_floating_point or dtype.is_complex or dtype == call.inputs[0].dtype else ()


def pointwise(partials: Partials = never) -> Rule:
    """Every dim of the output, aligned from the right; partial arguments as ``partials`` says."""

    def rule(call: Call) -> Iterator[Row]:
        for dim, size in enumerate(call.output.shape):
            inputs = tuple(_aligned(call, i, dim) for i in range(len(call.inputs)))
            if size > 1 and any(isinstance(slot, Dim) for slot in inputs):
                yield Row(inputs, tuple(Dim(dim) for _ in call.outputs))
        yield from partial_rows(call, partials(call))

    return rule


def _aligned(call: Call, position: int, dim: int) -> Slot:
    """The slot of an argument when ``dim`` of the output is sharded."""
    shape, out = call.inputs[position].shape, call.output.shape
    own = dim - (len(out) - len(shape))
    return Dim(own) if own >= 0 and shape[own] == out[dim] else "R"


def like(value: float | None) -> Rule:
    """``zeros_like`` and its kin: any dim follows, whatever the argument holds. ``value`` None: not known."""

    def rule(call: Call) -> Iterator[Row]:
        for dim in range(len(call.output.shape)):
            yield Row((Dim(dim),), (Dim(dim),))
        if value == 0:
            yield Row(("R",), ("P",))
            yield Row(("P",), ("P",))

    return rule


def fill(call: Call) -> Iterator[Row]:
    """``fill(x, value)`` with a scalar tensor, which may be partial; any dim follows."""
    for dim in range(len(call.output.shape)):
        yield Row((Dim(dim), "R"), (Dim(dim),))
    yield from partial_rows(call, ("RP",))


def full_like(call: Call) -> Iterator[Row]:
    yield from like(call.argument(1, "fill_value"))(call)


def filled(value: float, size_position: int = 0) -> Rule:
    """``zeros(size)``, ``new_zeros(x, size)``: may be born sharded along any dim, and zeros may be born partial."""

    def rule(call: Call) -> Iterator[Row]:
        yield from _filled(call, value, size_position)

    return rule


def full(call: Call) -> Iterator[Row]:
    yield from _filled(call, call.argument(1, "fill_value"), 0)


def new_full(call: Call) -> Iterator[Row]:
    yield from _filled(call, call.argument(2, "fill_value"), 1)


def scalar(call: Call) -> Iterator[Row]:
    """``scalar_tensor(s)``: the scalar zero may be born partial."""
    if call.argument(0, "s") == 0:
        yield Row((), ("P",))


def whole(call: Call) -> tuple[Row, ...]:
    """Nothing but the all-replicated row."""
    return ()


def _filled(call: Call, value: float, size_position: int) -> Iterator[Row]:
    where = call.find(size_position, "size")
    assert where is not None, f"{call.node.op} without a size"
    inputs = whole_slots(len(call.inputs))
    for dim, size in enumerate(call.output.shape):
        if size > 1:
            yield Row(inputs, (Dim(dim),), (Shape(where, 0),))
    if value == 0:
        yield Row(inputs, ("P",))


_NONLINEAR = """
    abs.default acos.default acosh.default addcdiv.default asin.default asinh.default atan.default atan2.default
    atanh.default bitwise_and.Scalar bitwise_and.Tensor bitwise_left_shift.Tensor bitwise_not.default bitwise_or.Scalar
    bitwise_or.Tensor bitwise_right_shift.Tensor bitwise_xor.Tensor ceil.default celu.default clamp.Tensor clamp.default
    clamp_max.Tensor clamp_max.default clamp_min.Tensor clamp_min.default copysign.Scalar copysign.Tensor cos.default
    cosh.default digamma.default div.Scalar_mode div.Tensor_mode elu.default eq.Scalar eq.Tensor erf.default
    erfc.default erfinv.default exp.default exp2.default expm1.default floor.default floor_divide.default fmax.default
    fmin.default fmod.Scalar fmod.Tensor frac.default gcd.default ge.Scalar ge.Tensor gelu.default gt.Scalar gt.Tensor
    hardsigmoid.default hardswish.default hardtanh.default heaviside.default hypot.default i0.default isfinite.default
    isinf.default isnan.default le.Scalar le.Tensor leaky_relu.default lgamma.default log.default log10.default
    log1p.default log2.default logaddexp.default logaddexp2.default logical_and.default logical_not.default
    logical_or.default logical_xor.default logit.default lt.Scalar lt.Tensor maximum.default minimum.default
    mish.default nan_to_num.default ne.Scalar ne.Tensor polygamma.default pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor
    reciprocal.default relu.default remainder.Scalar remainder.Tensor round.default rsqrt.default rsub.Scalar
    sgn.default sigmoid.default sign.default signbit.default silu.default sin.default sinc.default sinh.default
    softplus.default special_entr.default special_erfcx.default special_i0e.default special_i1.default
    special_i1e.default special_log_ndtr.default special_ndtri.default sqrt.default tan.default tanh.default
    threshold.default trunc.default xlogy.Scalar_Other xlogy.Scalar_Self xlogy.Tensor
"""

_BACKWARD = """
    elu_backward.default gelu_backward.default hardsigmoid_backward.default hardswish_backward.default
    hardtanh_backward.default leaky_relu_backward.default logit_backward.default mish_backward.default
    rrelu_with_noise_backward.default sigmoid_backward.default silu_backward.default softplus_backward.default
    tanh_backward.default threshold_backward.default
"""

_COPIES = "alias.default clone.default contiguous.default detach.default lift_fresh_copy.default neg.default"


def _named(names: str, rule: Rule) -> dict[str, Rule]:
    return {f"aten.{name}": rule for name in names.split()}


RULES: Mapping[str, Rule] = {
    **_named(_NONLINEAR, pointwise()),
    **_named(_BACKWARD, pointwise(first_partial)),
    **_named(_COPIES, pointwise(all_partial)),
    **_named("add.Tensor sub.Tensor add.Scalar sub.Scalar", pointwise(sum_partial)),
    **_named("mul.Tensor mul.Scalar", pointwise(each_partial)),
    **_named("div.Tensor div.Scalar", pointwise(first_partial)),
    **_named("where.self", pointwise(tail_partial)),
    **_named("lerp.Scalar", pointwise(all_partial)),
    **_named("lerp.Tensor", pointwise(head_partial)),
    **_named("masked_fill.Scalar", pointwise(fill_partial)),
    **_named("masked_fill.Tensor addcmul.default", pointwise()),
    **_named("_to_copy.default", pointwise(cast_partial)),
    **_named("zeros_like.default zero.default", like(0)),
    **_named("ones_like.default", like(1)),
    **_named("full_like.default fill.Scalar", full_like),
    **_named("fill.Tensor", fill),
    **_named("zeros.default", filled(0)),
    **_named("ones.default", filled(1)),
    **_named("new_zeros.default", filled(0, 1)),
    **_named("new_ones.default", filled(1, 1)),
    **_named("full.default", full),
    **_named("new_full.default", new_full),
    **_named("scalar_tensor.default", scalar),
    **_named(
        "arange.default arange.start arange.start_step eye.default eye.m linspace.default logspace.default", whole
    ),
    **_named("tril_indices.default triu_indices.default", whole),
}
