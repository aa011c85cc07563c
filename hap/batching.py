"""In how many batches a step's samples are best dealt with: plans for one batch, two, four, ... beside each other.

More and smaller batches need less memory for activations, so less is computed again or gathered twice; and they pay
more for launches, for parameters that every batch gathers, and where devices' shares of few samples are uneven.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from hap.capture.inputs import StepInputs
from hap.errors import CaptureError, InfeasibleError, PlanError
from hap.mesh_plan import MeshPlan
from hap.plan import Plan
from hap.rules.choices import batch_of

AnyPlan = TypeVar("AnyPlan", Plan, MeshPlan)
PATIENCE = 2  # counts in a row that make a step no shorter


def best_batches(whole: StepInputs, plan: Callable[[StepInputs, int], AnyPlan]) -> AnyPlan:
    """Of the plans for several numbers of batches the one with the shortest step as run; of equal ones that with fewer
    batches. ``plan(batch, count)``: for steps of so many such batches. InfeasibleError if none fits; CaptureError or
    PlanError if the whole cannot be captured or planned, or no tensor has a first dim to be dealt out."""
    best: AnyPlan | None = None
    refused: InfeasibleError | None = None
    worse = 0
    for count in counts(_samples(whole)):
        try:
            found = plan(part_of(whole, count), count)
        except InfeasibleError as e:
            refused = refused or e
            continue
        except (CaptureError, PlanError):
            if count == 1:
                raise
            break  # such as a batch norm over one sample, or fewer samples than hosts
        if best is None or _step_s(found) < _step_s(best):
            best, worse = found, 0
        else:
            worse += 1
        if worse == PATIENCE:
            break
    if best is None:
        assert refused is not None
        raise refused
    return best


def counts(samples: int) -> Iterator[int]:
    """Divisors of the number of samples, each at least twice the one before."""
    last = 0
    for count in range(1, samples + 1):
        if samples % count == 0 and count >= 2 * last:
            last = count
            yield count


def part_of(whole: StepInputs, count: int) -> StepInputs:
    """One of so many batches: every tensor whose first dim is the batch's has a part of it."""
    samples = _samples(whole)
    cut = [t[: samples // count] if t.shape[:1] == (samples,) else t for _, t in whole.named]
    return whole.rebuild(cut)


def _samples(whole: StepInputs) -> int:
    found = batch_of(t.shape for _, t in whole.named)
    if found is None:
        raise CaptureError("no example input has a first dim: there is no batch to be dealt with in parts")
    return int(found)


def _step_s(plan: Plan | MeshPlan) -> float:
    return plan.predicted.as_run_s * plan.gradient_accumulation_steps
