"""Who stopped a job, from what its ranks were doing last."""

from __future__ import annotations

import pytest

from hap.diagnosis.finding import Finding
from hap.diagnosis.hang import LEAST_S, find_hang
from hap.diagnosis.run import Run
from hap.run_record import CallKind, State
from tests._support.jobs import job, steady, with_states

NOW = 1000.0
OUTSIDE, FORWARD, BACKWARD = 0, 1, 2


def state(doing: int = BACKWARD, wire: int = 1, entered: int = 40, call: int = 1, **given: float) -> State:
    told = {"ended": 0, "step": 7, "since": NOW - 60, "alive": NOW, **given}
    return State(doing, wire, int(told["ended"]), int(told["step"]), entered, call, told["since"], told["alive"])


def found(*states: State | None, errors: tuple[str | None, ...] = ()) -> tuple[Finding, ...]:
    run = job(*steady([0.1] * len(states), steps=4))
    kinds = {**run.ranks[0].kinds, 2: CallKind(number=2, kind="all_gather", decomposition="pairs", values=1, nbytes=8)}
    run = Run(tuple(r._replace(kinds=kinds) for r in run.ranks), None)
    return find_hang(with_states(run, states, errors), NOW + 1)


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
    run = job(*steady([0.1] * 3, steps=4))
    waiting, gone = state(since=NOW - 0.3), state(wire=0, entered=39, since=NOW - 0.4)
    (one,) = find_hang(with_states(run, (waiting, gone, waiting)), NOW + 60)
    assert (one.syndrome, one.ranks) == ("lost", (1,)) and "others had been in for 0.3 s" in one.summary
    (one,) = find_hang(with_states(run, (waiting, waiting, waiting)), NOW + 60)
    assert (one.syndrome, one.ranks) == ("lost", (0, 1, 2))
    (one,) = find_hang(with_states(run, (state(), state(wire=0, entered=39), state())), NOW + 3600)
    assert one.syndrome == "non-communication hang"  # it hung before it was ended


def test_a_job_with_long_steps_is_given_more_time() -> None:
    run = job(*steady([20.0, 20.0], steps=4))
    standing = [state(since=NOW - 60), state(wire=0, entered=39, since=NOW - 60)]
    assert find_hang(with_states(run, standing), NOW) == ()
    longer = [s._replace(since=NOW - 150) for s in standing]
    assert [f.ranks for f in find_hang(with_states(run, longer), NOW)] == [(1,)]
