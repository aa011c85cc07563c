"""One bed: built on entering, gone on leaving, whatever happens in between."""

from __future__ import annotations

import atexit
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import IO, Any, NoReturn, Self

from benchmarks.common import cpu_times
from benchmarks.testbed import cgroup, network, ranks
from benchmarks.testbed.errors import TestbedError
from benchmarks.testbed.layout import Layout, Mode
from benchmarks.testbed.network import Counters
from benchmarks.testbed.ranks import Seat
from benchmarks.testbed.record import Owner, Record, clean, new_id
from hap.cluster import ClusterSpec

FIRST_PORT = 29500


class Testbed:
    """A cluster played on this machine.

        with Testbed(cluster) as bed:
            times = bed.run(measure, 4 << 20, timeout=60)      # [measure(rank, 4 << 20) for each rank]
            texts = bed.run(["python", "train.py"], timeout=60)  # what each rank's process wrote

    ``mode`` says how compute is made unequal: *deadline* (the function paces itself, see ``benchmarks.testbed.pace``)
    or *quota* (the kernel holds it). ``enforced=False`` runs the same on this machine's loopback, without root; only
    deadlines then hold. ``load`` is the layout's. ``not_enforced`` says what of the cluster is not played either way.
    TestbedError if the machine cannot; RankError (from ``run``) for what a rank did.
    """

    __test__ = False  # for pytest: not a test class

    def __init__(
        self, cluster: ClusterSpec, mode: Mode = "deadline", *, enforced: bool = True, load: float | None = None
    ) -> None:
        self.cluster, self.mode, self.enforced = cluster, mode, enforced
        self.layout = Layout.of(cluster, mode, new_id(), load=load)
        self.not_enforced = self.layout.not_enforced(cluster, enforced)
        self.controller: cgroup.Controller | None = None
        self._port = FIRST_PORT
        self._standing = False
        self._handlers: dict[int, Any] = {}

    @classmethod
    def attach(cls, cluster: ClusterSpec, record: Record) -> Testbed:
        """A bed that ``up`` left standing; leaving its context does not take it down."""
        if record.fingerprint != cluster.fingerprint:
            raise TestbedError(f"bed {record.bed_id} was made for cluster {record.cluster!r} as it was then")
        bed = cls(cluster, record.mode)
        bed.layout = Layout.of(cluster, record.mode, record.bed_id)
        bed.controller = record.controller
        bed._port += int(time.monotonic()) % 1000  # beside what another runner may have there
        return bed

    def up(self, owned: bool = True) -> None:
        """Build it. ``owned``: it goes with this process; else it stands until ``down``."""
        if not self.enforced:
            return
        if reason := network.missing():
            raise TestbedError(reason)
        self.controller = cgroup.find()
        if self.controller is None and self.mode == "quota":
            raise TestbedError("quota mode needs a cpu cgroup (v1 or v2) that it can write; use --mode deadline")
        if owned:
            self._guard()
        self._standing = True
        self._record(owned).write()
        try:
            network.build(self.layout)
            if self.controller is not None:
                quotas = {r.rank: 1 / r.slowdown for r in self.layout.ranks} if self.mode == "quota" else {}
                cgroup.create(self.controller, self.layout.bed_id, quotas)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Take it down: processes, namespaces, groups, its file. Twice is fine."""
        if self._standing:
            clean(self.layout.bed_id, self.controller)
            self._standing = False
            self._unguard()

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.down()

    def run(
        self,
        target: Callable[..., Any] | Sequence[str],
        *args: Any,
        timeout: float = 100.0,
        echo: IO[str] | None = None,
    ) -> list[Any]:
        """By rank: ``target(rank, *args)`` in a process with a default Gloo group, or what the command ``target``
        wrote (which ``echo`` gets as it comes). ``timeout`` in seconds. RankError as soon as one rank fails."""
        seats = self._seats()
        if callable(target):
            return ranks.run_function(seats, target, args, timeout)
        assert not args, "a command's arguments are part of it"
        return ranks.run_command(seats, target, timeout, echo)

    def counters(self) -> Counters:
        """What the bed went through so far; subtract two."""
        if not self.enforced:
            return Counters(0, 0, 0, *cpu_times())
        return network.counters(self.layout)

    def throttled_s(self) -> list[float]:
        """Quota mode: seconds that the kernel has held each rank so far."""
        assert self.controller is not None and self.mode == "quota"
        return [cgroup.throttled_s(self.controller, self.layout.bed_id, r.rank) for r in self.layout.ranks]

    def set_rate(self, host: str, direction: str, bytes_per_s: float) -> None:
        """Change a host's "up" or "down" rate while ranks run."""
        assert direction in ("up", "down") and self.enforced
        network.set_rate(self.layout, next(h for h in self.layout.hosts if h.name == host), direction, bytes_per_s)

    @property
    def holds(self) -> str:
        """How compute is made unequal, for a report."""
        if self.mode == "deadline":
            return "deadline: the real kernels run, then the rank waits until nominal time x slow-down"
        what = self.controller.holds if self.controller else "nothing"
        return f"quota: CFS, period {cgroup.PERIOD_US // 1000} ms, on each rank's {what}"

    def _seats(self) -> list[Seat]:
        if self.enforced:
            port, self._port = self._port, self._port + 1
        else:
            port = ranks.free_port()
        return [
            Seat(
                rank.rank,
                rank.core,
                self.layout.hosts[rank.host].namespace if self.enforced else None,
                self.layout.environment(rank, port, self.enforced),
                self.layout.bed_id,
                self.controller if self.enforced else None,
                self.enforced and self.mode == "quota",
            )
            for rank in self.layout.ranks
        ]

    def _record(self, owned: bool) -> Record:
        return Record(
            self.layout.bed_id,
            self.cluster.name,
            self.cluster.fingerprint,
            self.mode,
            time.time(),
            Owner.this() if owned else None,
            self.controller.version if self.controller else 0,
            str(self.controller.parent) if self.controller else "",
        )

    def _guard(self) -> None:
        """SIGTERM and SIGHUP end the process as an exception does, so that ``finally`` and ``__exit__`` run."""
        atexit.register(self.down)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                self._handlers[number] = signal.signal(number, _leave)

    def _unguard(self) -> None:
        atexit.unregister(self.down)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
