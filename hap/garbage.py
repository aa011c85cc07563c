"""Python's search for cycles, put off while many objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection meanwhile: closures of rules and searches make few cycles, and looking for them among all
    of torch's objects takes time. Afterwards it is as it was before."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
