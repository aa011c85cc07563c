"""Loaded by the server from which ranks are forked, and by nobody else: who loads it ends with its parent, the runner.

multiprocessing's server ends when a pipe from the runner closes, but every rank holds that pipe's end, too. So after a
runner that was killed the server would go on for its ranks, and they for it.
"""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1

ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
