"""Unequal compute by deadline: what a rank calls between its collectives so that its compute takes as long as on a
slower device.

Both paces have ``settle`` (before the wire is used, and at the end of a step) and ``resume`` (after), which is what
``ParallelModule.set_pace`` takes; compute is what lies between.

- ``hap.runtime.emulate.Throttle`` stretches the CPU time that a section *took*, every time anew. It needs no nominal
  time, but it repeats only as well as this machine's core does, which neighbours slow.
- ``Deadline`` (the default here) runs the real kernels, then waits until *nominal time x slow-down*, where the nominal
  time of each section of a step was measured before. It repeats as long as the real work fits; where a section
  overruns, as when the kernel gives its core to another rank, the next ones are shorter by that, and ``late_s`` (what
  was overrun) and ``missed`` (sections that ended late) say so.

How well either repeats is in ``benchmarks/results/testbed.md``.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from hap.runtime.emulate import Core, Throttle

_SPIN_S = 0.2e-3  # the end of a wait is spun: a sleep may end this much late
_CARRY_S = 4e-3  # what a section overran, up to a tick of the scheduler, is made good in the sections after it ...
_AT_ONCE_S = 0.2e-3  # ... until the wire is waited for: a call that returns in less only issued or found things done
_YIELD_S = 2e-3  # a rank that waited for the wire computes this much later, if its deadline allows: others on its core
_NEEDS = 2.0  # may still be waiting. It allows so if it is this many times what the section takes alone.


class Deadline:
    """Sections of a step end when their nominal time x ``slowdown`` has passed.

    Until ``hold`` (or with no ``nominal_s`` given) it records: sections run unstretched and their CPU time is kept. The
    nominal time of a section is the median of the recorded steps, scaled so that all sections together take what the
    least whole step took: neighbours only make steps longer, now and then all of a run's. (The least of each section by
    itself would favour whoever cuts a step into more of them: the sum of least times is less than the least of sums.)
    With a ``core`` recorded steps are in seconds of a core of full speed, and the nominal time is simply their median.
    Every step must have the same sections.

        pace = Deadline(2.0)
        for _ in range(5):
            with pace.step(): run()
        pace.hold()
        for _ in range(100):
            with pace.step(): run()      # each takes sum(pace.nominal_s) * 2.0 plus its communication
    """

    def __init__(self, slowdown: float, nominal_s: Sequence[float] | None = None, core: Core | None = None) -> None:
        assert slowdown >= 1, f"cannot play a device {1 / slowdown:.3g} times as fast as this machine's core"
        self.slowdown = slowdown
        self.nominal_s: tuple[float, ...] | None = None if nominal_s is None else tuple(nominal_s)
        self.core = core
        self.missed = 0  # sections whose real work took longer than their deadline
        self.sections = 0  # sections held to a deadline so far
        self.late_s = 0.0  # by how much, in all
        self._recorded: list[tuple[float, ...]] = []
        self._step: list[float] = []
        self._index = 0
        self._behind_s = self._settled = 0.0
        self._factor = 1.0
        self.resume()

    def hold(self, nominal_s: Sequence[float] | None = None) -> tuple[float, ...]:
        """From now on hold every section to its nominal time: the given ones, or what was recorded."""
        if nominal_s is None:
            assert self._recorded, "no step was recorded: run some before hold()"
            counts = {len(step) for step in self._recorded}
            assert len(counts) == 1, f"steps with different numbers of sections: {sorted(counts)}"
            medians = [statistics.median(times) for times in zip(*self._recorded, strict=True)]
            steps = [sum(step) for step in self._recorded]
            whole = min(steps) if self.core is None else statistics.median(steps)
            nominal_s = [whole * m / max(sum(medians), 1e-9) for m in medians]
        self.nominal_s = tuple(nominal_s)
        self._index = 0
        return self.nominal_s

    def step(self) -> _Step:
        """A context around one step: begins its first section and ends its last."""
        return _Step(self)

    def settle(self) -> None:
        """End a section."""
        if self.nominal_s is None:
            self._step.append(time.thread_time() - self._cpu_mark)
            return
        assert self._index < len(self.nominal_s), f"a step with more than its {len(self.nominal_s)} sections"
        should_s = self.nominal_s[self._index] * self.slowdown
        end = self._wall_mark + should_s - self._behind_s
        self._index += 1
        self.sections += 1
        late_s = time.perf_counter() - end
        if late_s > 0:
            self.missed += 1
            self.late_s += max(0.0, late_s - self._behind_s)
        else:
            wait_until(end)
        self._settled = time.perf_counter()
        self._behind_s = min(max(0.0, self._settled - end), _CARRY_S)

    def resume(self) -> None:
        """Begin a section. A rank that was late and then waited for the wire has waited that much less: it is late no
        more. One that only issued something would have done so earlier by what it is late: it still is."""
        self._cpu_mark = time.thread_time()
        self._wall_mark = time.perf_counter()
        if self._wall_mark - self._settled > _AT_ONCE_S:
            self._behind_s = 0.0
            self._yield()

    @property
    def resumed_s(self) -> float:
        """When the section began, by ``perf_counter``."""
        return self._wall_mark

    def _yield(self) -> None:
        """Whoever has the last message first would compute at once, and who shares its core would get that message when
        the scheduler next looks, up to 4 ms later; a real device's network does not wait for another's compute."""
        if self.nominal_s is not None and self._index < len(self.nominal_s):
            spare_s = self.nominal_s[self._index] * (self.slowdown - _NEEDS)
            if spare_s > 0:
                time.sleep(min(spare_s, _YIELD_S))

    def resume_after_unseen_wait(self) -> None:
        """The section that began last has waited for the wire where nobody could say so, inside of a library's call: of
        it only the CPU time counts, as its beginning."""
        spent_s = time.thread_time() - self._cpu_mark
        self.resume()
        self._cpu_mark -= spent_s
        self._wall_mark -= spent_s

    def _begin(self) -> None:
        self._step.clear()
        self._index = 0
        self._behind_s = 0.0
        self._factor = self._core_factor()
        self.resume()

    def _end(self) -> None:
        self.settle()
        if self.nominal_s is None:
            factor = (self._factor + self._core_factor()) / 2
            self._recorded.append(tuple(seconds * factor for seconds in self._step))
        else:
            assert self._index == len(self.nominal_s), f"{self._index} sections, not {len(self.nominal_s)}"

    def _core_factor(self) -> float:
        """Only recorded times are in need of it."""
        return 1.0 if self.core is None or self.nominal_s is not None else self.core.factor()


class _Step:
    def __init__(self, pace: Deadline) -> None:
        self._pace = pace

    def __enter__(self) -> Self:
        self._pace._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self._pace._end()


def wait_until(end: float) -> None:
    """Return when ``time.perf_counter()`` reaches ``end``."""
    remaining = end - time.perf_counter()
    if remaining > _SPIN_S:
        time.sleep(remaining - _SPIN_S)
    while time.perf_counter() < end:
        pass


def own_slowdown() -> float:
    """This rank's slow-down on the bed that it runs on; 1 in quota mode, where the kernel holds it, and off a bed."""
    if os.environ.get("HAP_TESTBED_MODE", "quota") == "quota":
        return 1.0
    return float(os.environ["HAP_TESTBED_SLOWDOWN"])


def deadline(nominal_s: Sequence[float] | None = None, core: Core | None = None) -> Deadline:
    """This rank's pace."""
    return Deadline(own_slowdown(), nominal_s, core)


def throttle() -> Throttle:
    """The same by CPU time, for programs whose steps differ."""
    from hap.runtime.emulate import Throttle

    return Throttle(own_slowdown())
