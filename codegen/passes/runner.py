"""The passes of a compiled program: ``Program -> Program``, in a fixed order, each to be switched off by its name.

    outcome = run_passes(program, standard_passes(limit_bytes=4 << 20), off=("overlap",))
    outcome.program
    print(outcome.diff("bucket"))     # what that pass changed, as a unified diff of the printed programs
    for change in outcome.changes: print(change.name, change.seconds, change.diff)

All of them preserve numerics: the same operators on the same numbers; only where and how values travel changes, and
with it the order in which a bundle's sums are made, and a bias is added inside the product, as eager PyTorch adds it.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from hap.codegen.passes.bucket import LIMIT_BYTES, Choose, bucket_collectives
from hap.codegen.passes.fuse import fuse_calls
from hap.codegen.passes.hoist import hoist_batch_sums
from hap.codegen.passes.overlap import AHEAD, overlap_collectives, prefetch_parameters
from hap.codegen.passes.prune import remove_dead_code, remove_renames
from hap.codegen.passes.recompute import recompute_calls
from hap.codegen.passes.sink import sink_results
from hap.codegen.program import Call, Convert, Instruction, Program, Start, Together, Wait, verify_program
from hap.errors import PlanError


class Pass(NamedTuple):
    """A rewriting with its options bound."""

    name: str
    rewrite: Callable[[Program], Program]


@dataclass(frozen=True)
class Change:
    """What one pass did: the program before and after it, and the seconds it took."""

    name: str
    seconds: float
    before: Program
    after: Program

    @property
    def diff(self) -> str:
        """A unified diff of the printed programs; empty if the pass changed nothing. Made when asked for."""
        before, after = (print_program(p).splitlines() for p in (self.before, self.after))
        files = f"before {self.name}", f"after {self.name}"
        return "\n".join(difflib.unified_diff(before, after, *files, lineterm="", n=1))


@dataclass(frozen=True)
class Outcome:
    """``stages``: the program before the first pass and after each; ``seconds``: what each took, by name."""

    names: tuple[str, ...]
    stages: tuple[Program, ...]
    seconds: Mapping[str, float]

    @property
    def program(self) -> Program:
        return self.stages[-1]

    @property
    def changes(self) -> tuple[Change, ...]:
        """One for each pass that ran, in order."""
        around = zip(self.names, self.stages, self.stages[1:], strict=False)
        return tuple(Change(name, self.seconds[name], before, after) for name, before, after in around)

    def diff(self, name: str) -> str:
        """What a pass changed, as a unified diff; empty if nothing."""
        return self.changes[self.names.index(name)].diff


def standard_passes(
    *, limit_bytes: int = LIMIT_BYTES, choose: Choose | None = None, ahead: int = AHEAD
) -> tuple[Pass, ...]:
    """The passes that ``hap.compile`` runs, in order."""
    return (
        Pass("renames", remove_renames),
        Pass("dead_code", remove_dead_code),
        Pass("recompute", recompute_calls),
        Pass("fuse", fuse_calls),
        Pass("hoist", hoist_batch_sums),
        Pass("sink", sink_results),
        Pass("bucket", partial(bucket_collectives, limit_bytes=limit_bytes, choose=choose)),
        Pass("prefetch", partial(prefetch_parameters, ahead=ahead)),
        Pass("overlap", overlap_collectives),
    )


def run_passes(program: Program, passes: Sequence[Pass], *, off: Sequence[str] = (), verify: bool = True) -> Outcome:
    """Every pass but those named in ``off``, each verified unless the outcome is only timed. PlanError for an unknown
    name."""
    known = [p.name for p in passes]
    for name in off:
        if name not in known:
            raise PlanError(f"there is no pass {name!r} to switch off (there are {', '.join(known)})")
    stages, seconds, names = [program], dict[str, float](), []
    for name, rewrite in passes:
        if name in off:
            continue
        start = time.perf_counter()
        stages.append(rewrite(stages[-1]))
        seconds[name] = time.perf_counter() - start
        names.append(name)
        if verify:
            verify_program(stages[-1])
    return Outcome(tuple(names), tuple(stages), seconds)


def print_program(program: Program) -> str:
    """One line for each instruction: for diffs and for reading."""
    lines = []
    for title, part in (("forward", program.forward), ("backward", program.backward)):
        lines += [f"{title}:", *(f"    {_line(instruction)}" for instruction in part)]
    return "\n".join(lines)


def _line(instruction: Instruction) -> str:
    made = ", ".join(name or "_" for name in instruction.outputs)
    match instruction:
        case Call():
            return f"{made} = {instruction.op}({', '.join(instruction.inputs)})"
        case Convert():
            return f"{made} = {instruction.kind}/{instruction.decomposition}({instruction.input})"
        case Together():
            return f"{made} = {_work(instruction)}"
        case Start():
            return f"{made} = start {_work(instruction.work)}"
        case Wait():
            return f"{made} = wait {instruction.handle}"


def _work(work: Together) -> str:
    return f"{work.kind}/{work.decomposition}({', '.join(work.inputs)})"
