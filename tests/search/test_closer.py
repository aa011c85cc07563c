"""Closer looks at other clusters that are offered to the process beside the search, and taken, or dropped."""

from __future__ import annotations

import pytest

from hap.search import fewer
from hap.search.beside import Question
from hap.search.closer import Sent
from hap.search.fewer import Tried
from tests.search.test_fewer import mixed, nested


def _unasked() -> None:
    """What is offered is called with what may end it."""


def test_a_closer_look_in_the_other_process_is_the_one_that_is_taken_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offered while another cluster is planned for; of a plan that is made of the very same candidates."""
    monkeypatch.setattr(fewer, "FEWEST_NODES", 0)
    tried = nested(mixed("1GB/s"))
    try:
        assert tried.glance(0) and tried.beside is not None
        search, found, seconds = tried.searches[0], tried.looks[0], tried.seen[0]
        there = Sent.of(search.problem, found).on(search.problem)
        assert all(there.strategies[name] is one for name, one in found.strategies.items())
        other = tried.beside.answer(tried.beside.ask("closer_s", 0, Sent.of(search.problem, found), seconds, _unasked))
        assert other == search.look_closer_s(found, seconds)
    finally:
        tried.close()


@pytest.mark.parametrize(("part", "is_offered"), [(1.05, True), (0.95, False), (1.2, False)])
def test_what_will_probably_decide_is_offered(part: float, is_offered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cluster whose step looks like this part of that of the one that is planned: not of one that will be planned
    for anyway, nor of one that will not."""
    tried = nested(mixed("1GB/s"))
    offers: list[object] = []
    try:
        assert tried.glance(0) and tried.beside is not None
        monkeypatch.setattr(Tried, "compute_s", lambda self, number: 0.0)
        monkeypatch.setattr(tried.beside, "offer", lambda *given: offers.append(given))
        tried.offer_closer([0], tried.looks_s(0) / part)
    finally:
        tried.close()
    assert bool(offers) == is_offered


def test_what_was_offered_is_dropped_before_the_bound_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters are looked at no more by then: the answer would only wait."""
    monkeypatch.setattr(fewer, "FEWEST_NODES", 0)
    tried = nested(mixed("1GB/s"))
    try:
        assert tried.glance(0) and tried.beside is not None
        tried.offered = 0, Question(99, "closer_s", (), offered=True)
        dropped: list[Question] = []
        monkeypatch.setattr(tried.beside, "drop", dropped.append)
        assert tried.raised_bound_s() > 0.0 and dropped == [tried.offered[1]]
    finally:
        tried.close()
