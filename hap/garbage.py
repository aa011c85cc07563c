"""Python's search for cycles, put off while many objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection meanwhile: closures of rules and searches make few cycles, and looking for them among all
    of torch's objects takes time. Afterwards it is as it was before, and what was made meanwhile counts as old: looked
    through with all that is, not at once."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            if not gc.get_freeze_count():  # what others have frozen stays so
                gc.freeze()
                gc.unfreeze()
            gc.enable()
