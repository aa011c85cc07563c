"""What ranks do alike: an error on one is raised on all, and what has to be the same is compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

import hap.errors
from hap.codegen.passes.runner import print_program
from hap.codegen.program import Program
from hap.errors import HapError, PlanError, ProgramError
from hap.runtime.collectives import Communicator

T = TypeVar("T")
OTHER = "the program for another batch, mode or call"


def agree_on_program(comm: Communicator, what: str, program: Program) -> None:
    """PlanError on every rank, unless they have the same one. Collective."""
    agree(comm, what, hashlib.sha256(print_program(program).encode()).hexdigest())


def agree(comm: Communicator, what: str, fingerprint: str | None) -> None:
    """PlanError on every rank, naming one whose fingerprint is not the first's. None agrees with all. Collective."""
    found = [(rank, mine) for rank, mine in enumerate(comm.gather_objects(fingerprint)) if mine is not None]
    for rank, mine in found:
        first, expected = found[0]
        if mine != expected:
            raise PlanError(
                f"{what} of rank {rank} differs from rank {first}'s ({mine[:12]}, not {expected[:12]}): "
                "every rank must build the same model with the same example inputs and plan"
            )


def together(comm: Communicator, work: Callable[[], T]) -> T:
    """``work()`` on every rank; if it fails on any, the first failure is raised on all. Collective."""
    result: T | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as e:
        error = e
    told = None if error is None else (type(error).__name__, isinstance(error, HapError), str(error))
    failures = [(rank, *found) for rank, found in enumerate(comm.gather_objects(told)) if found is not None]
    if error is not None and failures[0][0] == comm.rank:
        raise error
    if failures:
        rank, name, ours, message = failures[0]
        if ours:
            raise getattr(hap.errors, name)(message)
        raise ProgramError(f"rank {rank} failed: {name}: {' '.join(message.split())}")
    return result  # type: ignore[return-value]
