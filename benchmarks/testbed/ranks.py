"""Starting the ranks of a bed and hearing from them: functions (forked from one warm server) and commands.

The first rank that fails is reported within a moment, and the others, which would wait for it in a collective until
Gloo gives up, are ended. A rank that died without a word counts as first: what the others then raise ("connection
closed by peer") is its echo.
"""

from __future__ import annotations

import ctypes
import datetime
import multiprocessing
import os
import selectors
import signal
import socket
import struct
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

from benchmarks.testbed import cgroup, network
from benchmarks.testbed.errors import RankError

WARM = ("benchmarks.testbed.server", "torch", "torch.distributed", "numpy", "hap.api", "benchmarks.testbed.ranks")
QUIET = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # a namespace has no name server, and c10d would say so for every socket
    # What a step frees stays with the process, as in a GPU's caching allocator. Given back to the kernel, it would be
    # faulted in anew by every step: some percent of its CPU time in some processes and nothing in others.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # else a step's time depends on the small pages a process got
}
ECHO_S = 0.3  # after a failure: how long other ranks have to say that they failed too
SWEEP_S = 0.05  # how often threads born in a quota's group are let out of it
CALM_S = 0.5  # how often, without quotas, the threads of new process groups are looked for
END_S = 3.0  # a command asked to end has this long
TAIL_LINES = 20
SLICE_NS = 500_000
GLOO_NICE = -10
_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # the system call's number; glibc has no wrapper before 2.41


@dataclass(frozen=True)
class Seat:
    """All that a rank's process needs to take its place. ``namespace`` and ``controller`` are None off a bed."""

    rank: int
    core: int
    namespace: str | None
    environment: Mapping[str, str]
    bed_id: str
    controller: cgroup.Controller | None
    quota: bool

    def take(self) -> None:
        """In the rank's process, first of all: die with the runner, move to core, group and namespace."""
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)  # nanoseconds: sleeps end on time
        _short_slice(libc)
        os.sched_setaffinity(0, {self.core})
        if self.controller is not None:
            cgroup.join(self.controller, self.bed_id, os.getpid())

    def hold(self, pid: int) -> None:
        """From now on the quota applies."""
        if self.quota:
            assert self.controller is not None
            cgroup.join(self.controller, self.bed_id, pid, self.rank)

    def sweep(self, pid: int) -> None:
        if self.quota:
            assert self.controller is not None
            cgroup.free_other_threads(self.controller, self.bed_id, pid)
        else:
            calm(pid)


def _short_slice(libc: ctypes.CDLL) -> None:
    """Ask the scheduler for short turns, so that a rank whose wait is over gets its core from one that computes.

    Before Linux 6.12 the request has no effect, and on other processors it is not made: waits then end less exactly.
    """
    number = _SCHED_SETATTR.get(os.uname().machine)
    if number is not None:
        # struct sched_attr: size, policy (normal), flags, nice, priority, runtime (the slice), deadline, period, clamps
        libc.syscall(number, 0, struct.pack("IIQiIQQQII", 56, 0, 0, 0, 0, SLICE_NS, 0, 0, 0, 0), 0)


def calm(pid: int) -> None:
    """Let Gloo's threads of a process wait for their turn instead of taking it (SCHED_BATCH), and have it soon.

    Gloo's loop that wakes where its rank is just using the same connection, and holds its lock, looks again and again
    until the lock is free; had it taken the core from that rank, it would do so for its whole turn, some milliseconds.
    """
    for task in Path(f"/proc/{pid}/task").glob("*"):
        thread = int(task.name)
        try:
            if "gloo" in (task / "comm").read_text() and os.sched_getscheduler(thread) != os.SCHED_BATCH:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
                if os.geteuid() == 0:
                    os.setpriority(os.PRIO_PROCESS, thread, GLOO_NICE)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile


@dataclass(frozen=True)
class Failure:
    rank: int
    died: bool
    message: str


def free_port() -> int:
    """On the loopback, for ranks off a bed; inside a namespace every port is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_function(
    seats: Sequence[Seat], function: Callable[..., Any], args: tuple[Any, ...], timeout: float
) -> list[Any]:
    """``[function(rank, *args) for each rank]``, each in its own process with a default Gloo process group.

    ``function`` stands at a module's top level; arguments and results can be pickled. RankError as in the docstring.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(WARM))
    with _environment(QUIET):  # the server's, so its children's: torch reads it once, when loaded
        forkserver.ensure_running()
    ends: list[Connection] = []
    processes: list[BaseProcess] = []
    try:
        for seat in seats:
            ours, theirs = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(
                target=_main, args=(theirs, seat, function, args, timeout), daemon=True
            )
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        return _results(seats, ends, processes, timeout)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for end in ends:
            end.close()


def run_command(
    seats: Sequence[Seat], argv: Sequence[str], timeout: float | None, echo: IO[str] | None = None
) -> list[str]:
    """Run ``argv`` as every rank; what each wrote (stdout and stderr together). ``echo`` gets it as it comes, each line
    with its rank. RankError for an exit code other than 0 and when ``timeout`` seconds have passed."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for seat in seats:
            processes.append(_start(seat, argv))
        return _outputs(seats, processes, timeout, echo)
    finally:
        _end(processes)


def _main(pipe: Connection, seat: Seat, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> None:
    """A rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; the runner ends us
    seat.take()
    if seat.namespace is not None:
        network.enter(seat.namespace)
    os.environ.update(seat.environment)
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
        seat.hold(os.getpid())
        seat.sweep(os.getpid())
        result = function(seat.rank, *args)
        pipe.send((True, result))
        dist.barrier()  # nobody's sockets close while another still reads from them
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        os._exit(1)  # at once: a process group with an operation under way waits for it


def _results(
    seats: Sequence[Seat], ends: Sequence[Connection], processes: Sequence[BaseProcess], timeout: float
) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[Failure] = []
    started, deadline = time.monotonic(), time.monotonic() + timeout
    while len(results) + len(failures) < len(ends) and (remaining := deadline - time.monotonic()) > 0:
        failed = {f.rank for f in failures}
        waiting = {end: i for i, end in enumerate(ends) if i not in results and i not in failed}
        for seat, process in zip(seats, processes, strict=True):
            if process.pid is not None:
                seat.sweep(process.pid)
        for end in wait(list(waiting), min(remaining, SWEEP_S if seats[0].quota else CALM_S)):
            assert isinstance(end, Connection)
            i = waiting[end]
            try:
                ok, result = end.recv()
            except EOFError:
                failures.append(Failure(i, True, f"rank {i} died without a word ({_death(processes[i])})"))
                continue
            if ok:
                results[i] = result
            else:
                failures.append(Failure(i, False, f"rank {i} raised\n{result}"))
        if failures:
            deadline = min(deadline, time.monotonic() + ECHO_S)
    if failures:
        raise _first(failures)
    if len(results) < len(ends):
        left = [i for i in range(len(ends)) if i not in results]
        raise RankError(left[0], f"ranks {left} did not finish within {time.monotonic() - started:.0f} s")
    _let_end(processes)
    return [results[i] for i in range(len(ends))]


def _first(failures: Sequence[Failure]) -> RankError:
    first = next((f for f in failures if f.died), failures[0])
    others = [f.rank for f in failures if f is not first]
    echo = f"\n(then also rank {', '.join(map(str, others))})" if others else ""
    return RankError(first.rank, first.message.rstrip() + echo)


def _let_end(processes: Sequence[BaseProcess]) -> None:
    """Ranks that gave their result leave together; who does not in time is killed by the caller."""
    deadline = time.monotonic() + END_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _death(process: BaseProcess) -> str:
    process.join(1.0)
    code = process.exitcode
    if code is None:
        return "still running"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _start(seat: Seat, argv: Sequence[str]) -> subprocess.Popen[bytes]:
    def prepare() -> None:  # in the child, before it becomes the command
        seat.take()
        seat.hold(os.getpid())

    # Not `ip netns exec`, which mounts /sys anew and so hides cgroup files from the command.
    inside = [] if seat.namespace is None else ["nsenter", f"--net={network.RUN / seat.namespace}"]
    return subprocess.Popen(
        [*inside, *argv],
        env={**os.environ, **QUIET, "PYTHONUNBUFFERED": "1", **seat.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=prepare,
        start_new_session=True,  # a terminal's Ctrl-C is the runner's to handle
    )


def _outputs(
    seats: Sequence[Seat], processes: Sequence[subprocess.Popen[bytes]], timeout: float | None, echo: IO[str] | None
) -> list[str]:
    readers = [_Lines(seat.rank, echo) for seat in seats]
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout if timeout is not None else float("inf")
    failed_at = float("inf")
    with selectors.DefaultSelector() as selector:
        for i, process in enumerate(processes):
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ, i)
        while len(codes) < len(processes) and time.monotonic() < min(deadline, failed_at + ECHO_S):
            for key, _ in selector.select(SWEEP_S) if selector.get_map() else ():
                data = os.read(key.fd, 1 << 16)
                readers[key.data].add(data)
                if not data:
                    selector.unregister(key.fileobj)
            for i, process in enumerate(processes):
                seats[i].sweep(process.pid)
                code = _code(process)
                if code is not None and i not in codes:
                    codes[i] = code
                    failed_at = min(failed_at, time.monotonic() if code else failed_at)
        for key in list(selector.get_map().values()):  # what ended ranks wrote last
            if key.data in codes:
                os.set_blocking(key.fd, False)
                while data := _read_now(key.fd):
                    readers[key.data].add(data)
    for reader in readers:
        reader.add(b"")
    if bad := {i: code for i, code in codes.items() if code}:
        raise _first([Failure(i, code < 0, f"rank {i} {_ended(code)}\n{readers[i].tail}") for i, code in bad.items()])
    if len(codes) < len(processes):
        left = [i for i in range(len(processes)) if i not in codes]
        raise RankError(left[0], f"ranks {left} did not finish within {timeout:g} s\n{readers[left[0]].tail}")
    return [reader.text for reader in readers]


def _ended(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _read_now(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return b""


def _code(process: subprocess.Popen[bytes]) -> int | None:
    """A rank's exit code as ``poll`` has it, without reaping: its number stays its group's until ``_end`` is done."""
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask what still runs in the ranks' groups to end, be it a rank or what one has left; then make it."""
    groups = {process.pid for process in processes}
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        for group in _living(groups):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.killpg(group, signal_number)
        deadline = time.monotonic() + END_S
        while _living(groups) and time.monotonic() < deadline:
            time.sleep(0.02)
    for process in processes:
        process.poll()
        if process.stdout is not None:
            process.stdout.close()


def _living(groups: set[int]) -> set[int]:
    """Those of the process groups in which something still runs."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            state, _, group, *_ = entry.read_text(errors="replace").rpartition(")")[2].split()
            if state != "Z":
                found.add(int(group))
    return found & groups


class _Lines:
    """What one rank wrote, echoed by whole lines with its rank before each."""

    def __init__(self, rank: int, echo: IO[str] | None) -> None:
        self._rank, self._echo = rank, echo
        self._data, self._shown = bytearray(), 0

    def add(self, data: bytes) -> None:
        """No data: the rank has ended, so a last line without its newline is shown too."""
        self._data += data
        end = self._data.rfind(b"\n") + 1 if data else len(self._data)
        for line in self._data[self._shown : end].decode(errors="replace").splitlines() if self._echo else ():
            print(f"[rank {self._rank}] {line}", file=self._echo, flush=True)
        self._shown = max(self._shown, end)

    @property
    def text(self) -> str:
        return self._data.decode(errors="replace")

    @property
    def tail(self) -> str:
        return "\n".join(self.text.splitlines()[-TAIL_LINES:])


@contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
