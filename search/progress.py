"""One line on a terminal about a search that takes long, and a budget of seconds for those who ask for one.

What the line says never changes what is found. A budget does: where it ends a search, the plan depends on the machine.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

from hap.errors import PlanError

AFTER_S = 2.0  # nothing is said about a search that takes less


class OutOfTime(Exception):
    """The budget is spent. Caught where the search was started; nobody else sees it."""


@dataclass
class Progress:
    """Overwrites one line of ``stream``, if that is a terminal. ``budget_s`` seconds after it was made, by ``clock``,
    the next ``check`` raises OutOfTime. ``asked`` is called by every check, and may raise, too. PlanError for a budget
    that is not above 0."""

    stream: TextIO = field(default_factory=lambda: sys.stderr)
    after_s: float = AFTER_S
    budget_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    asked: Callable[[], None] = lambda: None
    _width: int = 0

    def __post_init__(self) -> None:
        if self.budget_s is not None and not 0 < self.budget_s < math.inf:
            raise PlanError(f"the budget must be a number of seconds above 0, not {self.budget_s:g}")
        self.began = self.clock()

    def check(self) -> None:
        """Asked between two pieces of work."""
        if self.budget_s is not None and self.clock() - self.began >= self.budget_s:
            raise OutOfTime
        self.asked()

    def say(self, text: str | Callable[[], str]) -> None:
        """The line, once the search is long enough under way; looks at the budget, too. A text that takes some work is
        asked for only where it is seen."""
        self.check()
        elapsed = self.clock() - self.began
        if elapsed < self.after_s or not self.stream.isatty():
            return
        line = f"planning, {elapsed:.0f} s: {text if isinstance(text, str) else text()}"
        self.stream.write("\r" + line.ljust(self._width))
        self.stream.flush()
        self._width = len(line)

    def done(self) -> None:
        """Leaves the terminal as it was."""
        if self._width:
            self.stream.write("\r" + " " * self._width + "\r")
            self.stream.flush()
            self._width = 0
