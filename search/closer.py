"""A closer look at what a glance found, in the process that works beside the search where that has time.

A plan is sent without its strategies, which are known there: what is found of one plan is remembered by which of the
candidates it takes, and a copy of a strategy is none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from hap.plan import Strategy
from hap.search.found import Found
from hap.search.least_bound import LeastBound
from hap.search.problem import Problem
from hap.search.progress import Progress


class Sent(NamedTuple):
    """``found`` without its strategies, and which of the candidates they are (``Found.picks``)."""

    found: Found
    picks: tuple[int, ...]

    @classmethod
    def of(cls, problem: Problem, found: Found) -> Sent:
        return cls(replace(found, strategies={}), found.picks(problem.facts.candidates))

    def on(self, problem: Problem) -> Found:
        pairs = zip(problem.facts.candidates.items(), self.picks, strict=True)
        strategies: Mapping[str, Strategy] = {name: options[pick] for (name, options), pick in pairs}
        return replace(self.found, strategies=strategies)


class Helper(LeastBound):
    """What works beside the search: on bounds, and on closer looks that it is offered."""

    def closer_s(self, number: int, sent: Sent, seconds: float, check: Callable[[], None]) -> float:
        """As the search of that cluster has it, which is not told on the terminal. ``check`` may end it."""
        search = replace(self.searches[number], progress=Progress(after_s=float("inf"), asked=check))
        return search.look_closer_s(sent.on(search.problem), seconds)
