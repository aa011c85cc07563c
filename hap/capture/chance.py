"""Chance that a program would not have: what is decided once, while the model is captured, would be so in every step.

A model that draws by PyTorch is captured as one that draws (``hap.capture.draws``). One that asks Python's or NumPy's
random numbers gets an answer from them here, and one that seeds PyTorch's would have the same numbers each step, where
a program goes on from its own seed. Both are refused; generators of its own, a ``random.Random``, are not seen.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from hap.errors import CaptureError

_SEEDING = (
    *((module, name) for module in (torch, torch.random) for name in ("manual_seed", "seed")),
    *((torch.cuda, name) for name in ("manual_seed", "manual_seed_all")),
)


@contextlib.contextmanager
def no_chance(subject: str) -> Iterator[None]:
    """While active, seeding PyTorch raises; at the end, CaptureError if others' random numbers were drawn."""
    before = {name: state() for name, state in _others()}
    kept = [(module, name, getattr(module, name)) for module, name in _SEEDING]
    for module, name, _ in kept:
        setattr(module, name, _refuse)
    try:
        yield
    finally:
        for module, name, function in kept:
            setattr(module, name, function)
    for name, state in _others():
        if name in before and repr(state()) != repr(before[name]):
            raise CaptureError(
                f"cannot capture {subject}: it draws from {name}, and what it drew would be so in every step: "
                "draw with torch, or outside of the model"
            )


def _others() -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "Python's random numbers", random.getstate
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        yield "NumPy's random numbers", lambda: numpy.random.get_state(legacy=False)["state"]


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "the model seeds PyTorch's random numbers, and a program draws by a seed of its own: "
        "draw what is to be the same in every step outside of the model, and keep it as a buffer"
    )
