"""Calls of the backward pass that run later than autograd has them, or sooner, where that makes the step shorter.

The backward pass is one chain of calls, of which each needs the one before, and beside it calls that lead to no other
product: those that make weights' gradients. Autograd makes each as soon as it can, after the product of the chain that
reads the same. If its result is sent, that is mostly right, as the wire should have work; but where the wire has some
already, or nothing is sent, or little for the time that it takes, the chain had better go on: what it leads to, that
will be sent or waited for, is then there sooner. And where the wire has none, the chain had better wait. With a the
compute and b the wire of such a call,

    postponed     the calls with b <= a part of a
    each runs     as soon as the wire has work for longer than it takes, and the chain to the next send;
                  while a collective is waited for, if there is time, or what sends nothing begun then at least
                  (``over``); before what reads its result; else at the end
    goes ahead    of a product of the chain: what is sent, postponed or not, where the wire would have nothing to do
                  until both are made; of several the one with most b for its a

which is Johnson's rule for two machines in a row (S. M. Johnson 1954: what takes the first machine for longer than the
second comes last), with a chain. With all calls postponed they fill what is waited for on the chain (a mixture's
exchanges) and go ahead as the wire needs. When things end is estimated by one clock for the compute of the busiest rank
and one for the wire, with small results bundled before they are sent. For each part of ``PARTS``, with and without
going ahead and ``over``, the order so found is played as it would run, and the shortest is taken if its memory fits:
what a postponed call reads lives longer.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from hap.codegen.passes.bucket import LIMIT_BYTES
from hap.codegen.passes.windows import is_product
from hap.codegen.program import Call, Convert, Instruction, Program
from hap.graph import Graph
from hap.hosts_sum import HOSTS_SUM
from hap.order import Postponed
from hap.search.changed import Change
from hap.search.found import Found
from hap.search.score import score_of
from hap.search.tempo import Tempo, played_s, played_wire_s, unplaced

if TYPE_CHECKING:
    from hap.search.planner import Search

PARTS = (0.0, 1.0, math.inf)  # of a call's compute, which its wire is at most
WAITING = 0.01  # of the busiest rank's compute, and of all collectives: where less is waited, nothing is gained
WORTH = 5e-3  # of the step


def or_postponed(search: Search, best: Found, overlapped_s: float | None) -> tuple[Found, float | None]:
    """``best``, or if it is shorter as run, the same with some calls of the backward pass at other places."""
    if overlapped_s is None or not search.limits.mixtures:
        return best, overlapped_s
    problem = search.problem
    if overlapped_s <= (1 + WAITING) * max(*best.evaluation.compute_s, played_wire_s(problem, best)):
        return best, overlapped_s
    if any(n.op == HOSTS_SUM for n in problem.choices.graph.nodes):
        return best, overlapped_s  # hosts, whose plans differ, make their sums in one order
    search.progress.say("asking which gradients can wait")
    plain = replace(best, postponed={})
    backward, shorter, met = _Backward.of(search, plain), list[tuple[float, Found]](), list[Postponed]([{}])
    for over, part, ahead in itertools.product((False, True), PARTS, (False, True)):
        search.progress.check()
        postponed = backward.postponed(part, ahead=ahead, over=over)
        if postponed in met:
            continue
        met.append(postponed)
        tried = replace(best, postponed=postponed)  # of what its evaluation says the order changes memory alone
        tried_s = played_s(problem, tried)
        if tried_s < overlapped_s * (1 - WORTH):
            shorter.append((tried_s, tried))
    for tried_s, tried in sorted(shorter, key=lambda one: one[0]):
        if (found := Change.of(problem, tried, {}).found).fits:
            return found, tried_s
    return best, overlapped_s


@dataclass(frozen=True, eq=False)
class _Unit:
    """A product that leads to no other one, and what alone is made of it: numbers of instructions, the seconds that
    they take, and those of what they send."""

    members: tuple[int, ...]
    compute_s: float
    wire_s: float


@dataclass(frozen=True, eq=False)
class _Backward:
    """The backward part of a program before its collectives are placed; seconds of each instruction, of the busiest
    rank and on the wire."""

    graph: Graph
    program: Program
    compute_s: Sequence[float]
    wire_s: Sequence[float]
    _orders: dict[object, Postponed] = field(default_factory=dict)  # by what is postponed, and how

    @classmethod
    def of(cls, search: Search, best: Found) -> _Backward:
        problem, tempo = search.problem, Tempo(search.problem, best)
        program = unplaced(problem, best, tempo.sizes)
        measured = problem.facts.compute.is_measured
        score = score_of(
            program, problem.choices.graph, best.strategies, problem.facts.calls.of_the_last, measured=measured
        )
        times = tempo.times(score, tempo.update_s)
        rows = times.table[np.array(score.pieces, dtype=np.intp)]
        pieces = iter(rows[:, rows.sum(axis=0).argmax()].tolist())
        wires = iter([times.wire_s[act.work] for act in score.acts if act.issues])
        compute_s, wire_s = [], []
        for instruction in (*program.forward, *program.backward):
            sends = isinstance(instruction, Convert) and instruction.kind != "slice"
            compute_s.append(next(pieces) + (next(pieces) if sends else 0.0))
            wire_s.append(next(wires) if sends else 0.0)
        first = len(program.forward)
        return cls(problem.choices.graph, program, compute_s[first:], wire_s[first:])

    @property
    def part(self) -> tuple[Instruction, ...]:
        return self.program.backward

    @cached_property
    def needs(self) -> list[tuple[int, ...]]:
        """Of every instruction those that make what it reads."""
        made = {name: at for at, i in enumerate(self.part) for name in i.outputs if name is not None}
        return [tuple(sorted({made[name] for name in i.inputs if name in made})) for i in self.part]

    @cached_property
    def readers(self) -> list[list[int]]:
        """Of every instruction those that read what it makes."""
        found: list[list[int]] = [[] for _ in self.part]
        for at, needs in enumerate(self.needs):
            for need in needs:
                found[need].append(at)
        return found

    @cached_property
    def leads(self) -> list[bool]:
        """Whether a product follows from an instruction."""
        found = [False] * len(self.part)
        for at in reversed(range(len(self.part))):
            if found[at] or is_product(self.part[at]):
                for before in self.needs[at]:
                    found[before] = True
        return found

    @cached_property
    def units(self) -> tuple[_Unit, ...]:
        """In program order."""
        found = []
        for first, instruction in enumerate(self.part):
            if not is_product(instruction) or self.leads[first]:
                continue
            members, reading, looked_at = {first: None}, list(self.readers[first]), set[int]()
            heapq.heapify(reading)
            while reading:
                at = heapq.heappop(reading)
                if at not in looked_at and all(n in members or n < first for n in self.needs[at]):
                    members[at] = None
                    for reader in self.readers[at]:
                        heapq.heappush(reading, reader)
                looked_at.add(at)
            compute_s, wire_s = (sum(of[m] for m in members) for of in (self.compute_s, self.wire_s))
            found.append(_Unit(tuple(members), compute_s, wire_s))
        return tuple(found)

    @cached_property
    def first(self) -> list[int]:
        """Of the units, where each begins."""
        return [unit.members[0] for unit in self.units]

    def postponed(self, part: float, *, ahead: bool, over: bool = False) -> Postponed:
        """With those units postponed whose wire is at most this part of their compute; ``ahead``: some go ahead of the
        chain; ``over``: some take longer than what is waited for."""
        late = tuple(unit for unit in self.units if unit.wire_s <= part * unit.compute_s)
        key = tuple(unit.members[0] for unit in late), ahead, over
        if key not in self._orders:
            self._orders[key] = _Order(self, {m: unit for unit in late for m in unit.members}, ahead, over).run()
        return self._orders[key]

    @cached_property
    def nodes(self) -> list[tuple[str, ...]]:
        """Of every instruction the node of a call of the backward pass; none of a conversion, or of a call of the
        forward pass."""
        found: list[tuple[str, ...]] = []
        for instruction in self.part:
            name = next((name for name in instruction.outputs if name is not None), None)
            node = None if name is None else self.graph.by_name[self.program.held[name].value.node]
            is_such = isinstance(instruction, Call) and node is not None and node.phase == "backward"
            found.append((node.name,) if is_such and node is not None else ())
        return found


@dataclass(eq=False)
class _Order:
    """The part with some units postponed, in the making: ``clock_s`` of compute, ``wire_s`` until when the wire has
    work; ``waiting``: the postponed units that could have run, and how many other calls had by then (-1 for those that
    go ahead)."""

    backward: _Backward
    unit_of: dict[int, _Unit]
    ahead: bool
    over: bool
    clock_s: float = 0.0
    wire_s: float = 0.0
    waiting: dict[_Unit, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    calls: int = 0  # that ran where they always do
    moved: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def sent_s(self) -> dict[int, float]:
        """Instructions that are not postponed, and what begins on the wire there. What nobody reads, and is small, goes
        with what follows, as by ``passes.bucket``, and begins where the last of a bundle is made."""
        backward, found = self.backward, dict[int, float]()
        bundles: dict[object, tuple[int, int]] = {}  # what is alike -> the last of an open bundle, and its bytes
        for at, convert in enumerate(backward.part):
            if at in self.unit_of or not backward.wire_s[at] or not isinstance(convert, Convert):
                continue
            found[at] = backward.wire_s[at]
            meta = backward.program.held[convert.input].meta
            if backward.leads[at] or meta.nbytes > LIMIT_BYTES:
                continue
            last, nbytes = bundles.get((convert.kind, meta.dtype), (at, LIMIT_BYTES))
            if nbytes + meta.nbytes <= LIMIT_BYTES:
                found[at] += found.pop(last)
                nbytes += meta.nbytes
            else:
                nbytes = meta.nbytes
            bundles[convert.kind, meta.dtype] = at, nbytes
        return found

    def run(self) -> Postponed:
        backward = self.backward
        for at, until_send_s in enumerate(self._until_send()):
            if at in self.done:
                continue
            if at in self.unit_of:
                if at == self.unit_of[at].members[0]:
                    self.waiting.setdefault(self.unit_of[at], self.calls)
                continue
            for need in backward.needs[at]:
                if need not in self.done:
                    self._postpone(self.unit_of[need], at)
            self._fill(self.wire_s - until_send_s, at)
            if self.ahead:
                self._go_ahead(at)
            self._keep(at)
        for unit in tuple(self.waiting):
            self._postpone(unit, len(backward.part))
        return self.moved

    def _go_ahead(self, at: int) -> None:
        """Where a product of the chain is: what is sent and could run first does, while the wire would have nothing to
        do before both are made; what is sent for longest, for what it takes, is the first."""
        backward = self.backward
        if not (is_product(backward.part[at]) and backward.leads[at]):
            return
        ready = {unit: None for unit in self.waiting if unit.wire_s}
        for unit in backward.units[bisect.bisect(backward.first, at) :]:
            if not self._could_run(unit):
                break
            if unit.wire_s and unit.members[0] not in self.done:
                ready[unit] = None
        for unit in sorted(ready, key=lambda u: u.compute_s / u.wire_s):
            starved = self.wire_s < self.clock_s + backward.compute_s[at] + unit.compute_s
            if starved and unit.members[0] not in self.done:
                self.waiting[unit] = -1
                self._postpone(unit, at)

    def _could_run(self, unit: _Unit) -> bool:
        """Whether all that it needs is there, or small: such calls run with it."""
        backward, pending = self.backward, list(unit.members)
        while pending:
            for need in backward.needs[pending.pop()]:
                if need in unit.members or need in self.done:
                    continue
                if need in self.unit_of or backward.wire_s[need] or is_product(backward.part[need]):
                    return False
                pending.append(need)
        return True

    def _next_call(self, at: int) -> str:
        """The first call from there on that runs where it always does."""
        others = (i for i in range(at, len(self.backward.part)) if i not in self.unit_of and i not in self.done)
        return next((n for i in others for n in self.backward.nodes[i]), "")

    def _until_send(self) -> list[float]:
        """Seconds from each instruction to the next one that sends, without postponed ones."""
        found, seconds = [], math.inf
        for at in reversed(range(len(self.backward.part))):
            if at not in self.unit_of:
                seconds = 0.0 if at in self.sent_s else seconds + self.backward.compute_s[at]
            found.append(seconds)
        return found[::-1]

    def _keep(self, at: int) -> None:
        """An instruction runs where it always does."""
        backward = self.backward
        self.clock_s += backward.compute_s[at]
        if at in self.sent_s:
            self.wire_s = max(self.wire_s, self.clock_s) + self.sent_s[at]
            if backward.leads[at]:  # and is waited for
                self._fill(self.wire_s, at)
                self.clock_s = max(self.clock_s, self.wire_s)
        self.calls += len(backward.nodes[at])
        self.done.add(at)

    def _fill(self, until_s: float, at: int) -> None:
        """What has time until then runs before that instruction, the longest waiting first; some of what sends nothing
        even if it takes longer: it would otherwise come at the end."""
        for unit in tuple(self.waiting):
            if unit not in self.waiting:
                continue
            if self.clock_s + unit.compute_s <= until_s or (self.over and not unit.wire_s and self.clock_s < until_s):
                self._postpone(unit, at)

    def _postpone(self, unit: _Unit, at: int) -> None:
        """It runs before that instruction, or at the end, and before it what it needs of others."""
        backward = self.backward
        for need in (n for member in unit.members for n in backward.needs[member]):
            if need in self.unit_of and need not in self.done and need not in unit.members:
                self._postpone(self.unit_of[need], at)
        if self.waiting.pop(unit, self.calls) < self.calls:
            until = self._next_call(at)
            names = [n for member in unit.members for n in backward.nodes[member]]
            self.moved[until] = (*self.moved.get(until, ()), *names)
        self.done.update(unit.members)
        self.clock_s += unit.compute_s
        if unit.wire_s:
            self.wire_s = max(self.wire_s, self.clock_s) + unit.wire_s
