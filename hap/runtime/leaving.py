"""The end of a process whose collectives went through Gloo.

Gloo's threads drop the tensors of a collective when they are done with it, and need Python's lock for that; the program
may have gone on by then. An interpreter that is ending gives nobody the lock, and ends such a thread in a way that
aborts the process: a rank that came to its end fails (pytorch issue 190489; ``destroy_process_group`` does not help
while anybody holds a group). So before the interpreter ends they get the lock once more.
"""

from __future__ import annotations

import atexit
import time
from functools import cache

PAUSE_S = 0.1  # far more than a thread takes to drop some tensors


@cache
def pause_at_exit() -> None:
    """Registered once, however many communicators ask."""
    atexit.register(lambda: time.sleep(PAUSE_S))
