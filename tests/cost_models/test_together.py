"""Hosts that sum over each other, played: by hand, and against each host alone where nobody waits."""

from __future__ import annotations

import numpy as np
import pytest

from hap.cost_models.sequence import Local
from hap.cost_models.timeline import Await, Event, Issue, Timeline, play
from hap.cost_models.together import play_together


def work(name: str, *seconds: float) -> Local:
    return Local(name, "backward", np.array(seconds))


def late(name: str, seconds: float) -> Issue:
    return Issue(name, name, "hosts_sum", seconds, stream="hosts")


def together(first: list[Event], second: list[Event], sums: str = "s t") -> Timeline:
    """Of a host of two ranks and one of one."""
    return play_together([first, second], [("a0", "a1"), ("b0",)], sums.split())


def test_a_sum_begins_when_the_last_host_has_come_to_it() -> None:
    one: list[Event] = [work("f", 1.0, 2.0), late("s", 4.0), work("g", 1.0, 1.0), Await("s"), work("update", 0.5, 0.5)]
    other: list[Event] = [work("f", 3.0), late("s", 2.0), work("g", 1.0), Await("s"), work("update", 0.5)]
    found = together(one, other)
    sums = [(s.rank, s.start_s, s.end_s) for s in found.spans if s.stream == "communication"]
    assert sums == [(0, 3.0, 7.0), (1, 3.0, 7.0), (2, 3.0, 7.0)]  # as long as where it is longest
    assert found.step_s == 7.5 and found.busy_s == (2.5, 3.5, 4.5) and found.devices == ("a0", "a1", "b0")
    assert found.exposed_s == (4.0, 4.0, 3.0) and found.idle_s == (1.0, 0.0, 0.0)
    assert [(s.name, s.rank) for s in found.critical_path] == [("f", 2), ("s", 0), ("update", 0)]


def test_sums_that_are_waited_for_hold_every_host() -> None:
    found = together([work("s", 1.0, 1.0), work("g", 1.0, 1.0)], [work("f", 2.0), work("s", 3.0), work("g", 1.0)])
    assert found.step_s == 6.0 and found.busy_s == (1.0, 1.0, 3.0)
    assert found.exposed_s == (3.0, 3.0, 3.0)


def test_a_sum_that_one_host_waits_for_is_waited_for_by_all() -> None:
    waiting: list[Event] = [work("s", 2.0, 2.0), work("g", 1.0, 1.0)]
    found = together(waiting, [late("s", 2.0), work("g", 1.0), Await("s")])
    assert {(s.rank, s.start_s) for s in found.spans if s.name == "g"} == {(0, 2.0), (1, 2.0), (2, 2.0)}


def test_one_sum_follows_the_other() -> None:
    def host(*seconds: float) -> list[Event]:
        return [late("s", 2.0), work("g", *seconds), late("t", 1.0), Await("s"), Await("t")]

    found = together(host(1.0, 1.0), host(5.0))
    starts = {s.name: s.start_s for s in found.spans if s.stream == "communication"}
    assert starts == {"s": 0.0, "t": 5.0} and found.step_s == 6.0


def test_a_sum_that_all_wait_for_does_not_wait_for_those_that_nobody_waits_for() -> None:
    """They have communicators of their own (``hap.runtime.hosts``)."""

    def host() -> list[Event]:
        return [late("s", 9.0), work("t", 2.0), work("g", 1.0), late("u", 1.0), Await("s"), Await("u")]

    found = play_together([host(), host()], [("a",), ("b",)], ("s", "t", "u"))
    starts = {s.name: s.start_s for s in found.spans}
    assert starts == {"s": 0.0, "t": 0.0, "g": 2.0, "u": 9.0} and found.step_s == 10.0


def test_hosts_that_come_at_the_same_time_are_as_if_alone() -> None:
    events: list[Event] = [
        work("f", 1.0), Issue("w", "w", "all_reduce", 0.5), late("s", 2.0), work("g", 1.5), Await("w"), late("t", 1.0),
        Await("s"), Await("t"), work("update", 0.25),
    ]  # fmt: skip
    found, alone = play_together([events, events], [("a",), ("b",)], ("s", "t")), play(events, ("a",))
    assert found.step_s == alone.step_s and found.busy_s == alone.busy_s * 2
    assert found.exposed_s == alone.exposed_s * 2
    assert sum(s.seconds for s in found.critical_path) == pytest.approx(found.step_s)


def test_sums_in_different_orders_are_an_error_of_ours() -> None:
    with pytest.raises(AssertionError, match="one order"):
        together([late("s", 1.0), late("t", 1.0)], [late("t", 1.0), late("s", 1.0)])
