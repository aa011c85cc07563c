"""What a model keeps in Python and changes as it goes: a program's calls have that of the step it was made of.

A temperature that falls from step to step, a count that says whose turn it is, are found where ``Kept`` looks. A count
that nothing reads does no harm, and a cache that knows for what length it was made changes once: so where something has
changed from the traced call to the next, the steps after it are traced, too, and refused if they come to another one.

What the first call makes of constants alone and keeps, a table of angles, the second has as a constant. What
functions under ``functools.lru_cache`` keep of a trace, where ``Kept`` finds them, is forgotten after each call: nobody
else could use it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hap.capture.kept import Kept, put, tensors_in
from hap.capture.torch_private import has_values, is_traced, pytree, untraced
from hap.errors import CaptureError
from hap.graph import Graph

_STEPS = 3  # that are traced by themselves: the second again, of which a trace has the first one's writes, too


class Calls:
    """Those of one trace: the last is what is traced. ``start``: where each begins; else where the one before ended."""

    def __init__(self, roots: Sequence[object], start: Kept | None = None) -> None:
        self._roots, self._start = roots, start
        self.first: Kept | None = None
        self.before = Kept(())

    def begin(self) -> None:
        if self._start is not None:
            self._start.restore()
        self.before = Kept(self._roots)
        self.first = self.first or self.before

    def end(self, known: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """``known``: the value of a traced tensor that is the same in every step."""
        now = Kept(self._roots)
        for container, key, value in tensors_in(now.parts):
            items = value if type(value) is tuple else (value,)
            made = [known(i) if isinstance(i, torch.Tensor) and not has_values(i) else None for i in items]
            if any(one is not None for one in made):
                old = self.before.inside(container, key)
                olds = old if type(old) is tuple and len(old) == len(items) else (old,) * len(items)
                new = tuple(i if m is None else _same(m, o) for i, m, o in zip(items, made, olds, strict=True))
                put(container, key, new if type(value) is tuple else new[0])
        forget_cached((*self.before.caches, *now.caches))


def _same(value: torch.Tensor, old: Any) -> torch.Tensor:
    """The old one, if that is equal: what stays is the same tensor from call to call."""
    with untraced():
        is_old = isinstance(old, torch.Tensor) and has_values(old) and torch.equal(old, value)
    return old if is_old else value


def steady(traced: Callable[[Calls], Graph], roots: Sequence[object], subject: str) -> Graph:
    """What ``traced`` returns, if the calls that follow come to the same. CaptureError."""
    calls = Calls(roots)
    graph = traced(calls)
    before, now = calls.first or calls.before, calls.before
    for step in range(_STEPS):
        if not (changed := before.changed(now)):
            break
        if traced(Calls(roots, now)).fingerprint != graph.fingerprint:
            what = "the number" if isinstance(now.marks.get(changed[0]), (int, float)) else "what it keeps as"
            remedy = "keep it in a buffer, or give what decides as an input"
            raise CaptureError(
                f"cannot capture {subject}: the forward pass changes {what} {changed[0]!r}, and the step with it, "
                f"but a program's steps are all alike: {remedy if step else 'run the model once before'}"
            )
        before, now = now, Kept(roots)
    return graph


def forget_cached(caches: Iterable[Any]) -> None:
    """What functions under ``functools.lru_cache`` keep, where that has tensors of a trace."""
    for function in caches:
        held = gc.get_referents(function) if function.cache_info().currsize else []
        results = [r for one in held for r in (one.values() if isinstance(one, dict) else [one])]
        leaves = (leaf for r in results for leaf in pytree.tree_leaves(r))
        if any(isinstance(leaf, torch.Tensor) and is_traced(leaf) for leaf in leaves):
            function.cache_clear()
