"""One line on a terminal about a search that takes long. What it says never changes what is found."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TextIO

AFTER_S = 2.0  # nothing is said about a search that takes less


@dataclass
class Progress:
    """Overwrites one line of ``stream``, if that is a terminal."""

    stream: TextIO = field(default_factory=lambda: sys.stderr)
    after_s: float = AFTER_S
    _width: int = 0

    def __post_init__(self) -> None:
        self.began = time.monotonic()

    def say(self, text: str) -> None:
        elapsed = time.monotonic() - self.began
        if elapsed < self.after_s or not self.stream.isatty():
            return
        line = f"planning, {elapsed:.0f} s: {text}"
        self.stream.write("\r" + line.ljust(self._width))
        self.stream.flush()
        self._width = len(line)

    def done(self) -> None:
        """Leaves the terminal as it was."""
        if self._width:
            self.stream.write("\r" + " " * self._width + "\r")
            self.stream.flush()
            self._width = 0
