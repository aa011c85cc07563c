"""What beds exist: one file each, written before anything is built, removed after everything is gone.

So a runner that was killed leaves its file, and ``clean`` finds all that belongs to it. Its owner is told by pid and
start time, since pids are used again.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.testbed import cgroup, network
from benchmarks.testbed.layout import PREFIX, Mode

FOLDER = Path("/run/hap-testbed")


@dataclass(frozen=True)
class Owner:
    pid: int
    start: int  # clock ticks since boot

    @classmethod
    def this(cls) -> Owner:
        start = _start(os.getpid())
        assert start is not None
        return cls(os.getpid(), start)

    @property
    def alive(self) -> bool:
        return _start(self.pid) == self.start


@dataclass(frozen=True)
class Record:
    """``owner`` is the process whose end is the bed's, None for one that ``up`` left standing."""

    bed_id: str
    cluster: str
    fingerprint: str
    mode: Mode
    created: float  # seconds since the epoch
    owner: Owner | None
    cgroup_version: int
    cgroup_parent: str

    @property
    def path(self) -> Path:
        return folder() / f"{self.bed_id}.json"

    @property
    def controller(self) -> cgroup.Controller | None:
        return cgroup.Controller(self.cgroup_version, Path(self.cgroup_parent)) if self.cgroup_parent else None

    def write(self) -> None:
        folder().mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".new")
        partial.write_text(json.dumps(asdict(self), indent=1))
        partial.rename(self.path)

    @property
    def leftover(self) -> bool:
        """Its owner is gone and did not take it down."""
        return self.owner is not None and not self.owner.alive


def folder() -> Path:
    return FOLDER if FOLDER.parent.is_dir() else Path(tempfile.gettempdir()) / FOLDER.name


def new_id() -> str:
    return secrets.token_hex(3)


def records() -> tuple[Record, ...]:
    """All that are written down, oldest first."""
    found = []
    for path in folder().glob("*.json") if folder().is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # taken down meanwhile
            body = json.loads(path.read_text())
            owner = Owner(**body.pop("owner")) if body["owner"] else body.pop("owner")
            found.append(Record(**body, owner=owner))
    return tuple(sorted(found, key=lambda r: (r.created, r.bed_id)))


def unrecorded() -> tuple[str, ...]:
    """Ids that have a namespace or a group, but no file. A file is there first, so these have lost theirs."""
    known = {r.bed_id for r in records()}
    ids = {name.removeprefix(PREFIX).split("-")[0] for name in network.existing()}
    controller = cgroup.find()
    if controller is not None:
        ids.update(cgroup.existing(controller))
    return tuple(sorted(i for i in ids - known if not i.startswith("trial-")))


def clean(bed_id: str, controller: cgroup.Controller | None) -> None:
    """End and remove everything of a bed. Doing it twice, or for a half-built one, is fine.

    Signals wait until it is done: a second Ctrl-C does not leave half of it.
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        network.destroy(n for n in network.existing() if n.startswith(f"{PREFIX}{bed_id}-"))
        if controller is not None:
            _end_members(controller, bed_id)
            cgroup.destroy(controller, bed_id)
        (folder() / f"{bed_id}.json").unlink(missing_ok=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _end_members(controller: cgroup.Controller, bed_id: str) -> None:
    deadline = time.monotonic() + 5.0
    while (pids := cgroup.members(controller, bed_id)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                try:
                    if pid in cgroup.members(controller, bed_id):
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                finally:
                    os.close(handle)
        time.sleep(0.02)


def _start(pid: int) -> int | None:
    """When a process started, None if it has ended (a zombie has)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])
