"""What the testbed refuses, and what its ranks report."""

from __future__ import annotations

from hap.errors import HapError


class TestbedError(HapError):
    """This machine cannot play the cluster as asked: no root, no tool, no cgroup, a rate out of reach."""

    __test__ = False  # for pytest: not a test class


class RankError(Exception):
    """A rank raised, died, exited with another code than 0 or did not finish in time; ``rank`` is the first that did.

    Not a refusal: it comes from the code that ran, so it carries that code's traceback or last lines.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(rank, message)
        self.rank, self.message = rank, message

    def __str__(self) -> str:
        return self.message
