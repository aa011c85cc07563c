"""A program as it is played: what ranks do by themselves and what the wire does, in order, at whatever sizes.

Of the same strategies every program is alike: which calls and collectives stand where, and what is bundled, depends on
the values' whole bytes alone. Sizes change only how long each takes, and by which way a collective goes. So a program
is drafted and rewritten once (``score_of``), and played at as many sizes as somebody asks about (``Score.step_s``):

    a call        its node's seconds on every rank; a product that its bias was folded into is the product, a sum over
                  hosts that gives another dtype is the sum
    a conversion  packing and joining are compute: the bytes copied, and the calls made (``packing_calls``); the wire is
                  one stream for all, in the order of issue
    a bundle      one collective of all its bytes
    a sum over hosts of a gradient that the step hands out: on a stream of its own, waited for before the update
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hap.codegen.passes.windows import work_of
from hap.codegen.program import Call, Convert, Instruction, Program, Start, Together, Wait, gradients_alone
from hap.cost_models.collective import collective_coefficients, shares
from hap.cost_models.compute import DEFAULT_MODEL, Calls, ComputeTable, Parts
from hap.cost_models.fold import Cluster
from hap.cost_models.pieces import many_local_bytes
from hap.cost_models.profile import MeasuredDevice
from hap.cost_models.sequence import Local
from hap.cost_models.timeline import Await, Event, Issue
from hap.fabric import Array
from hap.graph import Graph, Phase, Value
from hap.hosts import Device
from hap.hosts_sum import HOSTS_SUM
from hap.placement import GroupSizes, Placement
from hap.plan import Collective, Strategy

_PRODUCT = "aten.mm.default"
_FOLDED = {"hap.addmm.default": _PRODUCT, "aten.addmm.default": _PRODUCT, HOSTS_SUM: HOSTS_SUM}
CALLS = 10  # of a collective
VALUE_CALLS: dict[Collective, int] = {"all_reduce": 1, "all_gather": 3, "reduce_scatter": 2, "all_to_all": 4}
PIECE_VIEWS: dict[Collective, int] = {"all_reduce": 0, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 2}
VIEW = 0.2  # of a call
COPY_EFFICIENCY = 0.8  # of memory bandwidth, as in ``hap.cost_models.collective``


class Work(NamedTuple):
    """What one collective carries, or a slice cuts: so many values of so many bytes together, the largest from one
    placement to the other. ``need``: which conversion it is, where it is no bundle."""

    kind: Collective
    decomposition: str
    values: int
    nbytes: int
    source: Placement
    target: Placement
    need: tuple[Value, Placement, Phase] | None


class _Act(NamedTuple):
    """A collective begins (``issues``) or is waited for, after so many of the pieces of work of the ranks. ``work`` is
    the number of a work; of a sum over hosts, which only begins, that of its call."""

    after: int
    issues: bool
    handle: str
    outputs: str
    work: int
    over_hosts: bool = False


@dataclass(frozen=True, eq=False)
class Score:
    """``calls`` and ``works``: the distinct ones. ``pieces``: what ranks do by themselves, in order, each the number of
    a call, or of a work that is packed, joined or cut, counted from ``len(calls)``; ``labels``: their names and kinds.
    ``acts``: of the wire, in order."""

    calls: tuple[Parts, ...]
    works: tuple[Work, ...]
    pieces: tuple[int, ...]
    labels: tuple[tuple[str, str], ...]
    acts: tuple[_Act, ...]

    def step_s(self, times: Times) -> float:
        """When the last rank and the wire have ended: the clocks alone, of all ranks at once."""
        rows = times.table[np.array(self.pieces, dtype=np.intp)]
        free, wire, outward, done, ends = times.around_s, 0.0, 0.0, 0, dict[str, float]()
        for act in self.acts:
            if act.after > done:
                free = _later(free, rows[done : act.after])
                done = act.after
            if act.over_hosts:
                outward = max(float(free.max()), outward) + float(times.table[act.work].max())
            elif act.issues:
                wire = ends[act.handle] = max(float(free.max()), wire) + times.wire_s[act.work]
            else:
                free = np.maximum(free, ends.pop(act.handle))
        free = np.maximum(_later(free, rows[done:]), outward) + times.update_s
        return max(float(free.max(initial=0.0)), wire)

    def wire_s(self, times: Times) -> float:
        """Of all that the wire does, sums over hosts on a stream of their own left out."""
        return sum(times.wire_s[act.work] for act in self.acts if act.issues and not act.over_hosts)

    def events(self, times: Times) -> Iterator[Event]:
        """The same, event by event."""
        yield Local("step", "forward", times.around_s)
        done = 0
        for act in (*self.acts, None):
            after = len(self.pieces) if act is None else act.after
            for (name, kind), number in zip(self.labels[done:after], self.pieces[done:after], strict=True):
                if number >= len(self.calls) or times.table[number].any():
                    yield Local(name, kind, times.table[number])
            done = after
            if act is not None and act.over_hosts:
                yield Issue(act.handle, act.outputs, "hosts_sum", float(times.table[act.work].max()), stream="hosts")
            elif act is not None and act.issues:
                yield Issue(act.handle, act.outputs, self.works[act.work].kind, times.wire_s[act.work])
            elif act is not None:
                yield Await(act.handle)
        yield from (Await(act.handle) for act in self.acts if act.over_hosts)
        yield Local("optimizer", "update", times.update_s)


def _later(free: Array, rows: Array) -> Array:
    """Clocks (N,) after pieces of work (P, N), one after another."""
    clocks: Array = np.concatenate([free[None, :], rows]).cumsum(axis=0)[-1]
    return clocks


@dataclass(frozen=True, eq=False)
class Times:
    """How long it all takes at some sizes. ``table`` (calls + works, N): every rank's seconds of each call, and of each
    end of each collective; ``wire_s``: of each work on the wire; (N,) of what surrounds the step, and of the update."""

    table: Array
    wire_s: Sequence[float]
    around_s: Array
    update_s: Array

    @classmethod
    def of(cls, score: Score, ways: Sequence[str], cluster: Cluster, sizes: GroupSizes, update_s: Array) -> Times:
        """``ways``: of each of the works."""
        known: dict[object, tuple[float, Array]] = {}
        wires = []
        for work, how in zip(score.works, ways, strict=True):
            key = (work[2:-1], work.kind, how)
            if key not in known:
                known[key] = _wire(work, how, cluster, sizes)
            wires.append(known[key])
        packing = [
            packed if w.kind == "slice" else packed / 2 for w, (_, packed) in zip(score.works, wires, strict=True)
        ]
        rows = [_call_seconds(score.calls, cluster, sizes), np.array(packing).reshape(len(packing), cluster.world_size)]
        around = [d.kind.step_s * d.factor if isinstance(d, MeasuredDevice) else 0.0 for d in cluster.devices]
        return cls(np.concatenate(rows), [seconds for seconds, _ in wires], np.array(around), update_s)


class Apart(NamedTuple):
    """Of a batch before a step's last. ``local``: bytes of the whole, and how it lies, of what is added up."""

    score: Score
    local: tuple[tuple[int, Placement], ...]

    def adding_s(self, cluster: Cluster, sizes: GroupSizes) -> Array:
        return adding_seconds(self.local, cluster, sizes)


def adding_seconds(local: Sequence[tuple[int, Placement]], cluster: Cluster, sizes: GroupSizes) -> Array:
    """Seconds of every rank (N,) for adding such values up: one call each, which reads two tensors and writes one."""
    own = many_local_bytes(local, sizes, cluster.world_size)
    rates = np.array([DEFAULT_MODEL.bytes_per_s(d, "elementwise") for d in cluster.devices])
    launches = np.array([d.launch_s for d in cluster.devices])
    found: Array = np.where(own > 0, launches + 3 * own / rates, 0.0).sum(axis=0)
    return found


def _call_seconds(calls: Sequence[Parts], cluster: Cluster, sizes: GroupSizes) -> Array:
    """(calls, N)."""
    if not calls:
        return np.zeros((0, cluster.world_size))
    atoms = {group: np.array(s, dtype=np.float64) for group, s in sizes.items()}
    ones = np.ones(cluster.world_size)
    given = np.array([ones if p.group is None else atoms[p.group] / p.n for p in calls])
    return ComputeTable(cluster.devices).of_many(calls, given)


def _wire(work: Work, how: str, cluster: Cluster, sizes: GroupSizes) -> tuple[float, Array]:
    """Seconds on the wire, and of packing and joining on every rank (N,)."""
    n, ranks = cluster.world_size, cluster.fabric.world_size
    form = collective_coefficients(work.kind, how, work.nbytes, work.source, work.target, cluster, sizes=sizes)
    rho, sigma = shares(work.source, sizes, n), shares(work.target, sizes, n)
    packing, seconds = np.zeros(n), form.constant_s
    for stage in form.stages:
        if stage.in_memory:
            packing = packing + stage.rows(rho, sigma)
        else:
            seconds += stage.seconds(rho, sigma)
    if work.kind != "slice" and ranks > 1:
        calls = packing_calls(work.kind, work.values, ranks)
        packing = packing + flat_copies(work.kind, cluster.devices) * work.nbytes
        packing = packing + calls * np.array([d.launch_s for d in cluster.devices])
    return seconds, packing


def packing_calls(kind: Collective, values: int, ranks: int) -> float:
    """As how many small calls of PyTorch packing and joining take (``hap/runtime/transfer.py``): ``CALLS`` for each
    collective, assumed; ``VALUE_CALLS`` for each value, its copies and one for its views; and of several values
    ``PIECE_VIEWS`` of every rank's piece of each, ``VIEW`` of a call each, assumed."""
    pieces = ranks if values > 1 else 0
    return CALLS + values * (VALUE_CALLS[kind] + pieces * PIECE_VIEWS[kind] * VIEW)


def flat_copies(kind: Collective, devices: Sequence[Device | MeasuredDevice]) -> Array:
    """Beside the stages in memory: seconds a byte (N,) of copying a sum to a flat tensor, read and written."""
    if kind != "all_reduce":
        return np.zeros(len(devices))
    found: Array = 2 / (COPY_EFFICIENCY * np.array([d.memory_bandwidth_bytes_per_s for d in devices]))
    return found


def score_of(
    program: Program, graph: Graph, strategies: Mapping[str, Strategy], calls: Calls, *, measured: bool
) -> Score:
    """Of a program as its passes leave it. ``measured``: calls of as much work may take different times."""
    writer = _Writer(program, graph, strategies, calls, measured)
    parts: tuple[tuple[Phase, Sequence[Instruction]], ...] = (
        ("forward", program.forward),
        ("backward", program.backward),
    )
    for phase, part in parts:
        for number, instruction in enumerate(part):
            if isinstance(instruction, Call):
                writer.call(instruction, phase)
            else:
                writer.exchange(instruction, f"{phase} {number}")
    first = len(writer.calls)
    pieces = tuple(number if is_call else first + number for is_call, number in writer.pieces)
    return Score(tuple(writer.calls), tuple(writer.works), pieces, tuple(writer.labels), tuple(writer.acts))


@dataclass
class _Writer:
    """A score in the making; ``pieces``: whether a call, and its number or its work's."""

    program: Program
    graph: Graph
    strategies: Mapping[str, Strategy]
    of: Calls
    measured: bool
    calls: list[Parts] = field(default_factory=list)
    works: dict[Work, int] = field(default_factory=dict)
    pieces: list[tuple[bool, int]] = field(default_factory=list)
    labels: list[tuple[str, str]] = field(default_factory=list)
    acts: list[_Act] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)  # kind of a call -> its place among the calls
    _alike: dict[object, int] = field(default_factory=dict)

    def call(self, call: Call, phase: Phase) -> None:
        name = self._made(call)
        if call.op == HOSTS_SUM and call.outputs[0] in self.handed_out:
            self.acts.append(_Act(len(self.pieces), True, name, name, self._kind(name), over_hosts=True))
            return
        self.pieces.append((True, self._kind(name)))
        self.labels.append((name, phase))

    def exchange(self, instruction: Instruction, place: str) -> None:
        match instruction:
            case Convert(kind="slice"):
                self._piece(f"slice {instruction.output}", "slice", self._number(Together((instruction,), "local")))
            case Convert() | Together():
                work = work_of(instruction)
                assert work is not None
                self._start(place, work)
                self._wait(place, work)
            case Start(handle=handle, work=work):
                self._start(handle, work)
            case Wait(handle=handle, work=work):
                self._wait(handle, work)

    @cached_property
    def handed_out(self) -> frozenset[str | None]:
        return frozenset(gradients_alone(self.program))

    def _kind(self, name: str) -> int:
        """The number of the node's call."""
        kind = self.of.kind(name, self.strategies[name], measured=self.measured)
        if kind not in self._numbers:
            self._numbers[kind] = len(self.calls)
            self.calls.append(self.of.parts(name, self.strategies[name]))
        return self._numbers[kind]

    def _made(self, call: Call) -> str:
        """The node whose work a call is: of several that became one the product, or the sum over hosts, that went into
        it, the last one before its own."""
        output = call.outputs[0] or next(name for name in call.outputs if name is not None)
        name = self.program.held[output].value.node
        if call.op not in _FOLDED:
            return name
        node = self.graph.by_name[name]
        while node.op != _FOLDED[call.op]:
            node = self.graph.by_name[node.inputs[0].node]
        return node.name

    def _start(self, handle: str, work: Together) -> None:
        number = self._number(work)
        self._piece(f"pack {handle}", work.kind, number)
        self.acts.append(_Act(len(self.pieces), True, handle, ", ".join(work.outputs), number))

    def _wait(self, handle: str, work: Together) -> None:
        number = self._number(work)
        self.acts.append(_Act(len(self.pieces), False, handle, "", number))
        self._piece(f"join {handle}", work.kind, number)

    def _piece(self, label: str, kind: str, number: int) -> None:
        self.pieces.append((False, number))
        self.labels.append((label, kind))

    def _number(self, work: Together) -> int:
        """Of what is carried, among the works; conversions of as many bytes between the same ends once."""
        held = self.program.held
        nbytes = [held[m.input].meta.nbytes for m in work.members]
        largest = work.members[max(range(len(nbytes)), key=nbytes.__getitem__)]
        alone = len(nbytes) == 1
        key = (work.kind, work.decomposition, len(nbytes), sum(nbytes), largest.source, largest.target)
        if (key, alone) not in self._alike:
            need = (held[largest.output].value, largest.target, largest.phase) if alone else None
            self._alike[key, alone] = len(self.works)
            self.works[Work(*key, need)] = len(self.works)
        return self._alike[key, alone]
