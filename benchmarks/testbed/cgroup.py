"""CPU shares and quotas of a bed, through cgroup v1 or v2.

    PARENT/hapbed-ID            first among the machine's other work (cpu.shares 200000, cpu.weight 10000)
    PARENT/hapbed-ID/all        ranks without a quota, and with v1 every thread of a rank but its main one
    PARENT/hapbed-ID/rR         rank R's quota

With v1 only a rank's main thread, which computes, is held: Gloo's threads, which move bytes, stay free. v2 holds the
whole process. A period of 10 ms lets a quota act within a step; the kernel refuses quotas below 1 ms.

Gloo's loop spins while a message is there that its rank has not asked for yet, and a rank that is held asks late. The
scheduler places a group that a quota let wait far behind, by up to seconds, and it does not run until who spins has
caught up: without end, if that is for the very message that this rank will ask for. So under quotas the free threads
have little weight (``FREE_SHARES``): they catch up at once, and run in what the quotas leave of a core.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.testbed.errors import TestbedError
from benchmarks.testbed.layout import PREFIX

PERIOD_US = 10_000
LEAST_QUOTA_US = 1_000
LONGEST_PERIOD_US = 100_000
FREE_SHARES = 8  # of cpu.shares, where a rank's group has 1024
_WAIT_S = 5.0


@dataclass(frozen=True)
class Controller:
    """Where this process may make groups: ``parent`` is its own group in the hierarchy that has the cpu controller."""

    version: int
    parent: Path

    def group(self, bed_id: str) -> Path:
        return self.parent / f"{PREFIX}{bed_id}"

    @property
    def holds(self) -> str:
        return "main thread" if self.version == 1 else "process"


def find(mounts: str | None = None, own: str | None = None) -> Controller | None:
    """The cpu controller of this process, or None if there is none that it can write.

    ``mounts`` and ``own`` are the texts of /proc/mounts and /proc/self/cgroup, unless given.
    """
    mounts = Path("/proc/mounts").read_text() if mounts is None else mounts
    own = Path("/proc/self/cgroup").read_text() if own is None else own
    groups = {names: path for _, names, path in (line.split(":", 2) for line in own.splitlines())}
    for line in mounts.splitlines():
        _, folder, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            mine = next((path for names, path in groups.items() if "cpu" in names.split(",")), "/")
            return _writable(Controller(1, _below(Path(folder), mine)))
    for line in mounts.splitlines():
        _, folder, kind, *_ = line.split()
        if kind == "cgroup2":
            # The groups stand under the root: a group that holds processes, as our own does, may not have controlled
            # children ("no internal processes").
            root = Path(folder)
            available = root / "cgroup.controllers"
            if available.is_file() and "cpu" in available.read_text().split():
                return _writable(Controller(2, root))
    return None


def create(controller: Controller, bed_id: str, quotas: dict[int, float]) -> None:
    """Make the groups; ``quotas`` is the share of one core by rank, empty without quotas."""
    top = controller.group(bed_id)
    try:
        if controller.version == 2:
            _write(controller.parent / "cgroup.subtree_control", "+cpu")
        top.mkdir()
        _write(top / ("cpu.shares" if controller.version == 1 else "cpu.weight"), _priority(controller))
        if controller.version == 2:
            _write(top / "cgroup.subtree_control", "+cpu")
        (top / "all").mkdir()
        if quotas and controller.version == 1:
            _write(top / "all" / "cpu.shares", str(FREE_SHARES))
        for rank, share in quotas.items():
            quota_us, period_us = quota(share)
            group = top / f"r{rank}"
            group.mkdir()
            if controller.version == 1:
                _write(group / "cpu.cfs_period_us", str(period_us))
                _write(group / "cpu.cfs_quota_us", str(quota_us))
            else:
                _write(group / "cpu.max", f"{quota_us} {period_us}")
    except OSError as e:
        raise TestbedError(f"cannot set CPU limits in {top}: {e.strerror}") from None


def quota(share: float) -> tuple[int, int]:
    """(quota, period) in microseconds for a share of one core; TestbedError below 1 % of a core."""
    assert 0 < share <= 1
    period_us = max(PERIOD_US, round(LEAST_QUOTA_US / share))
    if period_us > LONGEST_PERIOD_US:
        raise TestbedError(f"a quota of {share:.2%} of a core is too small to repeat; use deadline mode")
    return round(share * period_us), period_us


def join(controller: Controller, bed_id: str, pid: int, rank: int | None = None) -> None:
    """Put a process into its rank's group, or into the common one; with v1 a rank's group takes its main thread."""
    group = controller.group(bed_id) / ("all" if rank is None else f"r{rank}")
    single = controller.version == 1 and rank is not None
    _write(group / ("tasks" if single else "cgroup.procs"), str(pid))


def free_other_threads(controller: Controller, bed_id: str, pid: int) -> None:
    """v1: move every thread but the main one out of its rank's group (threads are born where their parent is)."""
    if controller.version != 1:
        return
    common = controller.group(bed_id) / "all" / "tasks"
    with contextlib.suppress(FileNotFoundError):  # the process ended
        held = set(os.listdir(f"/proc/{pid}/task")) - {str(pid)}
        for thread in sorted(held - set(common.read_text().split())):
            with contextlib.suppress(ProcessLookupError):
                _write(common, thread)


@contextlib.contextmanager
def released(controller: Controller, bed_id: str, rank: int) -> Iterator[None]:
    """The calling process, which is rank ``rank``, out of its quota for the while: what is not measured is not held."""
    join(controller, bed_id, os.getpid())
    try:
        yield
    finally:
        join(controller, bed_id, os.getpid(), rank)


def throttled_s(controller: Controller, bed_id: str, rank: int) -> float:
    """Seconds that the quota has held a rank so far."""
    stat = (controller.group(bed_id) / f"r{rank}" / "cpu.stat").read_text().split()
    found = dict(zip(stat[::2], stat[1::2], strict=True))
    return int(found["throttled_time"]) / 1e9 if controller.version == 1 else int(found["throttled_usec"]) / 1e6


def existing(controller: Controller) -> tuple[str, ...]:
    """Ids of the beds that have groups here."""
    return tuple(sorted(p.name.removeprefix(PREFIX) for p in controller.parent.glob(f"{PREFIX}*")))


def destroy(controller: Controller, bed_id: str) -> None:
    """Remove the groups. The processes in them have ended; the kernel may take a moment to say so."""
    top = controller.group(bed_id)
    for group in (*_children(top), top):
        deadline = time.monotonic() + _WAIT_S
        while group.exists():
            try:
                group.rmdir()
            except OSError as e:
                if time.monotonic() > deadline:
                    raise TestbedError(f"cannot remove {group}: {e.strerror}") from None
                time.sleep(0.02)


def members(controller: Controller, bed_id: str) -> tuple[int, ...]:
    """Processes in the groups of a bed."""
    found: set[int] = set()
    for group in _children(controller.group(bed_id)):
        with contextlib.suppress(OSError):
            found.update(int(p) for p in (group / "cgroup.procs").read_text().split())
    return tuple(sorted(found))


def _children(top: Path) -> Iterator[Path]:
    if top.is_dir():
        yield from sorted(p for p in top.iterdir() if p.is_dir())


def _priority(controller: Controller) -> str:
    return "200000" if controller.version == 1 else "10000"


def _below(mount: Path, mine: str) -> Path:
    """Our group's folder; in a container its path may be the host's and not there."""
    folder = mount / mine.lstrip("/")
    return folder if folder.is_dir() else mount


def _writable(controller: Controller) -> Controller | None:
    trial = controller.parent / f"{PREFIX}trial-{os.getpid()}"
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError:
        return None
    return controller


def _write(path: Path, text: str) -> None:
    path.write_text(text)
