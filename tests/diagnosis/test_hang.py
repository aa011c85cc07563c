"""Who stopped a job, from what its ranks were doing last."""

from __future__ import annotations

import pytest

from hap.diagnosis.finding import Finding
from hap.diagnosis.hang import LEAST_S, find_hang
from hap.diagnosis.run import Run
from hap.run_record import DONE, RAISED, STOPPED, CallKind, State
from tests._support.jobs import job, steady, with_states

NOW = 1000.0
OUTSIDE, FORWARD, BACKWARD = 0, 1, 2


def state(doing: int = BACKWARD, wire: int = 1, entered: int = 40, call: int = 1, **given: float) -> State:
    told = {"ended": 0, "step": 7, "since": NOW - 60, "alive": NOW, **given}
    return State(doing, wire, int(told["ended"]), int(told["step"]), entered, call, told["since"], told["alive"])


def found(
    *states: State | None,
    errors: tuple[str | None, ...] = (),
    seen: float | None = NOW + 1,
    hosts: tuple[str, ...] | None = None,
) -> tuple[Finding, ...]:
    """``hosts``: the names of the ranks' hosts, by default one host."""
    run = job(*steady([0.1] * len(states), steps=4))
    kinds = {**run.ranks[0].kinds, 2: CallKind(number=2, kind="all_gather", decomposition="pairs", values=1, nbytes=8)}
    names = hosts or ("one",) * len(states)
    named = (r._replace(head=r.head.model_copy(update={"host": n})) for r, n in zip(run.ranks, names, strict=True))
    run = Run(tuple(r._replace(kinds=kinds) for r in named), None)
    return find_hang(with_states(run, states, errors, seen))


def test_the_rank_that_never_comes_is_the_one_that_computes() -> None:
    (one,) = found(state(), state(), state(wire=0, entered=39), state())
    assert (one.syndrome, one.ranks) == ("non-communication hang", (2,))
    assert "in the backward part of step 7" in one.summary and "since 60 s" in one.summary
    assert any("rank 0" in line and "all_reduce by ring" in line for line in one.evidence)


def test_a_rank_that_stands_between_steps_is_said_to() -> None:
    (one,) = found(state(FORWARD), state(OUTSIDE, wire=0, entered=38))
    assert (one.syndrome, one.ranks) == ("non-communication hang", (1,)) and "between two steps" in one.summary


def test_all_in_one_collective_is_the_networks_fault() -> None:
    (one,) = found(state(), state(), state())
    assert (one.syndrome, one.ranks) == ("communication hang", (0, 1, 2))
    assert "all_reduce by ring (1,049 kB) of step 7" in one.summary


def test_who_is_left_in_an_earlier_collective_is_named() -> None:
    (one,) = found(state(entered=41), state(), state(entered=41))
    assert (one.syndrome, one.ranks) == ("communication hang", (1,))


def test_who_has_left_a_collective_in_which_most_are_left_is_named() -> None:
    (one,) = found(state(), state(), state(entered=41), state())
    assert (one.syndrome, one.ranks) == ("communication hang", (2,)) and "what it sent does not come" in one.next_step


def test_other_collectives_are_another_program() -> None:
    (one,) = found(state(), state(call=2), state())
    assert (one.syndrome, one.ranks) == ("desync", (1,))


def test_all_ranks_outside_wait_for_something_else() -> None:
    (one,) = found(*[state(OUTSIDE, wire=0)] * 3)
    assert (one.syndrome, one.ranks) == ("non-communication hang", (0, 1, 2)) and "file system" in one.next_step


def test_no_sign_of_life_is_a_lost_process() -> None:
    (one,) = found(state(), state(wire=0, alive=NOW - 55), state())
    assert (one.syndrome, one.ranks) == ("lost", (1,)) and "55 s before" in one.evidence[0]


def test_what_others_raise_when_a_rank_goes_is_not_their_fault() -> None:
    gone = state(wire=0, alive=NOW - 0.4)
    left = state(ended=2)
    (one,) = found(left, gone, left, errors=("Connection closed by peer", None, "Connection closed by peer"))
    assert (one.syndrome, one.ranks) == ("lost", (1,))


def test_the_first_exception_is_the_one_outside_of_the_wire() -> None:
    (one,) = found(state(ended=2), state(wire=0, ended=2), errors=("Connection closed", "ValueError: a broken sample"))
    assert (one.syndrome, one.ranks) == ("raised", (1,)) and "ValueError: a broken sample" in one.summary


@pytest.mark.parametrize(
    "states",
    [
        (state(since=NOW - 1), state(since=NOW - 1)),  # it runs
        (state(since=NOW - LEAST_S + 1), state(since=NOW - 60)),  # it is slow, maybe
        (state(ended=1), state(ended=1, alive=NOW - 60)),  # it ended
        (state(ended=1), state(since=NOW - 1)),  # one rank has still something to do
        (None, None),  # nothing is known
    ],
)
def test_what_runs_or_has_ended_does_not_hang(states: tuple[State | None, ...]) -> None:
    assert found(*states) == ()


def test_processes_that_all_went_at_once_were_ended() -> None:
    waiting, gone = state(since=NOW - 0.3), state(wire=0, entered=39, since=NOW - 0.4)
    (one,) = found(waiting, gone, waiting, seen=NOW + 60)
    assert (one.syndrome, one.ranks) == ("lost", (1,)) and "others had been in for 0.3 s" in one.summary
    (one,) = found(waiting, waiting, waiting, seen=NOW + 60)
    assert (one.syndrome, one.ranks) == ("lost", (0, 1, 2))
    (one,) = found(state(), state(wire=0, entered=39), state(), seen=NOW + 3600)
    assert one.syndrome == "non-communication hang"  # it hung before it was ended


def test_a_job_with_long_steps_is_given_more_time() -> None:
    run = job(*steady([20.0, 20.0], steps=4))
    standing = [state(since=NOW - 60), state(wire=0, entered=39, since=NOW - 60)]
    assert find_hang(with_states(run, standing, seen=NOW)) == ()
    longer = [s._replace(since=NOW - 150) for s in standing]
    assert [f.ranks for f in find_hang(with_states(run, longer, seen=NOW))] == [(1,)]


# ---- clocks of other hosts, and copies

MOVES = state(since=NOW - 1)


def later(told: State, seconds: float) -> State:
    """The same by a clock that is so far ahead, or as long afterwards."""
    return told._replace(since=told.since + seconds, alive=told.alive + seconds)


@pytest.mark.parametrize("apart_s", [6.0, 60.0, -3600.0])
def test_clocks_of_hosts_and_the_times_of_copies_may_be_apart(apart_s: float) -> None:
    hosts, other = ("a", "a", "b"), later(MOVES, apart_s)
    assert found(MOVES, MOVES, other, hosts=hosts, seen=None) == ()
    (one,) = found(state(), state(wire=0, entered=39), later(state(), apart_s), hosts=hosts, seen=None)
    assert (one.syndrome, one.ranks) == ("non-communication hang", (1,)) and "since 60 s" in one.summary


def test_a_copy_of_a_job_that_runs_stays_one() -> None:
    assert found(MOVES, MOVES, seen=None) == ()
    assert [f.syndrome for f in found(MOVES, MOVES, seen=NOW + 6)] == ["lost"]  # not a copy: they would have gone on


def test_a_copy_may_take_its_time() -> None:
    assert found(MOVES, later(MOVES, 3), later(MOVES, 8), seen=None) == ()
    stands = state(wire=0, entered=39)
    (one,) = found(later(state(), -8), stands, later(state(), 8), seen=None)
    assert (one.syndrome, one.ranks) == ("non-communication hang", (1,))


def test_a_rank_that_went_is_found_in_a_copy_as_others_stand_since() -> None:
    gone = state(wire=0, entered=39, since=NOW - 61, alive=NOW - 60)
    for hosts in (("one",) * 3, ("a", "b", "a"), ("a", "a", "b")):
        assert [(f.syndrome, f.ranks) for f in found(state(), gone, state(), hosts=hosts, seen=None)] == [
            ("lost", (1,))
        ]


def test_a_host_that_went_is_found_where_the_others_are() -> None:
    gone = [state(wire=wire, since=NOW - 61, alive=NOW - 60) for wire in (0, 1)]
    (one,) = found(state(), *gone, state(), hosts=("a", "b", "b", "a"), seen=None)
    assert (one.syndrome, one.ranks) == ("lost", (1, 2)) and "no older than the others'" in one.summary
    waits = state(since=NOW - 8)
    assert found(waits, *gone, waits, hosts=("a", "b", "b", "a"), seen=None) == ()  # its clock may be late


def test_a_rank_of_this_machine_that_is_silent_is_found_before_others_have_stood_for_long() -> None:
    waits, gone = state(since=NOW - 6), state(wire=0, entered=39, since=NOW - 6.2, alive=NOW - 6.1)
    assert [(f.syndrome, f.ranks) for f in found(waits, gone)] == [("lost", (1,))]
    assert found(waits, gone, seen=None) == ()


# ---- ranks that ended, or were stopped


def test_who_ended_before_what_others_wait_in_keeps_them() -> None:
    ended = state(OUTSIDE, wire=0, entered=39, ended=DONE, step=6, since=NOW - 60)
    (one,) = found(state(), ended, state())
    assert (one.syndrome, one.ranks) == ("ended early", (1,))
    assert one.summary.endswith("came to its end after step 6, while others wait in step 7")
    assert found(MOVES, ended, MOVES) == ()  # they may still go on
    left = state(ended=RAISED)
    (one,) = found(left, ended, left, errors=("Connection closed by peer", None, "Connection closed by peer"))
    assert (one.syndrome, one.ranks) == ("ended early", (1,))
    (one,) = found(MOVES, ended, state(wire=0, since=NOW - 1), seen=NOW + 60)  # the launcher ended the others
    assert (one.syndrome, one.ranks) == ("ended early", (1,))
    (one,) = found(left, ended, state(wire=0, ended=RAISED), errors=("", None, "ValueError: a broken sample"))
    assert (one.syndrome, one.ranks) == ("raised", (2,))


def test_a_job_that_was_stopped_is_not_accused() -> None:
    """Whoever was in the wire comes to know later, or is killed, or raises as others have gone."""
    stopped, moved = state(wire=0, ended=STOPPED, since=NOW - 1), state(since=NOW - 1, alive=NOW + 30)
    assert found(stopped, stopped, stopped, seen=NOW + 3600) == ()
    assert found(stopped, moved, moved._replace(ended=RAISED), seen=NOW + 3600) == ()
    assert found(stopped, moved, moved._replace(ended=STOPPED), seen=NOW + 3600) == ()


def test_what_hung_before_it_was_stopped_did_so() -> None:
    stopped = state(wire=0, entered=39, ended=STOPPED)
    for other in (state(alive=NOW + 0.5), state(ended=RAISED, alive=NOW + 0.5), state(ended=STOPPED)):
        (one,) = found(other, stopped, other, seen=NOW + 3600)
        assert (one.syndrome, one.ranks) == ("non-communication hang", (1,)) and "since 60 s" in one.summary


def test_who_waits_still_for_one_that_was_stopped_does() -> None:
    stopped = state(OUTSIDE, wire=0, entered=39, ended=STOPPED, since=NOW - 60, alive=NOW - 59)
    assert [(f.syndrome, f.ranks) for f in found(state(), stopped, state())] == [("ended early", (1,))]
    assert found(state(), stopped, state(), seen=NOW + 3600) == ()


def test_who_raised_after_a_long_wait_waited_for_the_one_that_never_comes() -> None:
    (one,) = found(state(ended=RAISED), state(wire=0, entered=39, alive=NOW + 0.9), errors=("a timeout", None))
    assert (one.syndrome, one.ranks) == ("non-communication hang", (1,))


def test_who_waits_still_while_another_raised_is_not_lost() -> None:
    (one,) = found(state(ended=RAISED), state(), state(wire=0, alive=NOW - 20))
    assert (one.syndrome, one.ranks) == ("lost", (2,))
    for seen in (NOW + 1, None):  # here, and in a copy
        (one,) = found(state(ended=RAISED), state(), errors=("a timeout", None), seen=seen)
        assert (one.syndrome, one.ranks) == ("raised", (0,))
