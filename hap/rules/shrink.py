"""A call made small, in several sizes, so that it can be run often; its outputs are found by running it.

Sizes that are equal in the call stay equal, sizes of one stay one (they broadcast), and every other size becomes a
small number that has divisors, as a rule must also hold for strided pieces. A literal that equals a size (a number of
classes, of weights) is taken to be that size first, and kept as it is where the operator then refuses to run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hap.graph import TensorMeta
from hap.rules.notation import Call
from hap.rules.prove import call_elements, run_whole
from hap.rules.samples import Sampler

_SIZES = ((6, 8, 4, 9, 10, 12, 14, 15), (8, 6, 9, 4, 12, 10, 15, 14), (9, 4, 6, 8, 12, 15, 10, 14))
_LEAST_LITERAL = 3  # smaller whole numbers are dims, counts and flags rather than sizes
SMALL = 4000  # elements of a call that is run as it is


def small_calls(call: Call, sample: Sampler, seed: int = 0) -> tuple[Call, ...]:
    """Up to three small versions on which the operator runs, and the call itself where it is small. May be empty.

    A version counts when it has outputs of as many dims as the call's, none of which is NaN.
    """
    found = []
    for sizes in _SIZES:
        for candidate in _versions(call, sizes):
            ran = _run(candidate, sample, seed)
            if ran is not None and _alike(ran, call):
                found.append(ran)
                break
    if call_elements(call) <= SMALL:
        own = _run(call, sample, seed)
        if own is not None and _alike(own, call):
            found.append(own)
    return tuple(dict.fromkeys(found))


def _versions(call: Call, sizes: Sequence[int]) -> Iterator[Call]:
    """The call at other sizes: first its literals follow, then they stay."""
    known = dict.fromkeys(size for m in call.inputs for size in m.shape if size > 1)
    small = {size: sizes[i % len(sizes)] for i, size in enumerate(known)}
    inputs = tuple(TensorMeta(tuple(small.get(size, size) for size in m.shape), m.dtype) for m in call.inputs)
    node = call.node
    followed = replace(
        node, args=_follow(node.args, small), kwargs=tuple((k, _follow(v, small)) for k, v in node.kwargs)
    )
    yield Call(followed, inputs)
    if followed != node:
        yield Call(node, inputs)


def _follow(tree: Any, small: Mapping[int, int]) -> Any:
    if type(tree) is tuple:
        return tuple(_follow(item, small) for item in tree)
    if type(tree) is int and tree >= _LEAST_LITERAL:
        return small.get(tree, tree)
    return tree


def _run(call: Call, sample: Sampler, seed: int) -> Call | None:
    """The call with the outputs that it has; None if it does not run, or gives a NaN, which equals nothing."""
    try:
        results = run_whole(call, sample(call, torch.Generator().manual_seed(seed)))
    except Exception:  # an operator may raise anything at sizes that are not its own
        return None
    wanted = call.outputs if len(call.outputs) == len(results) else (None,) * len(results)
    outputs: list[TensorMeta | None] = []
    for result, meta in zip(results, wanted, strict=True):
        if meta is None or not isinstance(result, torch.Tensor):
            outputs.append(None)
            continue
        if result.isnan().any():
            return None
        outputs.append(TensorMeta(tuple(result.shape), result.dtype))
    return Call(replace(call.node, outputs=tuple(outputs)), call.inputs)


def _alike(small: Call, call: Call) -> bool:
    """Whether there are as many outputs, of as many dims."""
    return [o and len(o.shape) for o in small.outputs] == [o and len(o.shape) for o in call.outputs]
