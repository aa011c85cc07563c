"""The network of a bed: namespaces, a bridge, and HTB on every end. Needs root and iproute2.

Settings that repeat well (each found by a trap that it avoids): HTB with a 16 KB burst, since a token bucket lets a
whole small message pass at once; a class of its own for pure ACKs, which otherwise queue behind data in every ring;
8 MB of queue with windows capped below it, so that nothing is dropped; no more than 128 KB of a connection in it, with
which Linux once began, since megabytes before a slow link hold up the ACKs that ride on data, and with them what comes
the other way; reno, since bbr misjudges shaped rings. TCP settings belong to the namespace and vanish with it. Nothing
is put into the root namespace, so deleting the namespaces deletes everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import cpu_times
from benchmarks.testbed.errors import TestbedError
from benchmarks.testbed.layout import PREFIX, HostLayout, Layout

RUN = Path("/run/netns")
BURST_BYTES = 16384
QUEUE_BYTES = 8 << 20
ACK_SHARE = 0.05  # of the rate is promised to ACKs; what they leave is the data's
QUANTUM_BYTES = 15140  # ten frames: how HTB takes turns between classes that borrow
TOOLS = ("ip", "tc", "nsenter", "unshare")
TCP = {
    "ipv4/tcp_congestion_control": "reno",
    "ipv4/tcp_wmem": "4096 65536 524288",
    "ipv4/tcp_rmem": "4096 131072 1048576",
    "ipv4/tcp_no_metrics_save": "1",
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_limit_output_bytes": "131072",
    "ipv6/conf/all/disable_ipv6": "1",
}
_CLONE_NEWNET = 0x40000000
_WAIT_S = 5.0


@dataclass(frozen=True)
class Counters:
    """Since boot or since the bed was built; subtract two to know what a measurement went through."""

    drops: int  # packets that a shaped queue dropped
    timeouts: int  # TCP retransmission timeouts, all hosts
    retransmits: int  # TCP segments sent again, all hosts
    steal_s: float  # CPU time that the hypervisor gave to others, all cores
    cpu_s: float  # all CPU time there was, all cores

    def __sub__(self, before: Counters) -> Counters:
        return Counters(
            self.drops - before.drops,
            self.timeouts - before.timeouts,
            self.retransmits - before.retransmits,
            self.steal_s - before.steal_s,
            self.cpu_s - before.cpu_s,
        )

    @property
    def steal_share(self) -> float:
        return self.steal_s / self.cpu_s if self.cpu_s > 0 else 0.0


def missing() -> str | None:
    """Why this process cannot build a bed, in one line; None if it can."""
    if os.geteuid() != 0:
        return "needs root (it makes network namespaces): run it with sudo, or as root in a privileged container"
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"{', '.join(lacking)} not found: apt-get install iproute2 util-linux (or your distribution's packages)"
    trial = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    if trial.returncode:
        return f"this machine refuses network namespaces ({trial.stderr.strip()}): it needs CAP_SYS_ADMIN"
    return None


def build(layout: Layout) -> None:
    """Namespaces, bridge, links, rates. TestbedError with the tool's own words if a command fails."""
    for namespace in layout.namespaces:
        _command(["ip", "netns", "add", namespace])
        _tune(namespace)
        _batch("ip", namespace, ["link set lo up"])
    if len(layout.hosts) == 1:
        return
    _batch("ip", layout.switch, ["link add br0 type bridge stp_state 0 mcast_snooping 0", "link set br0 up"])
    for i, host in enumerate(layout.hosts):
        assert host.up_bytes_per_s is not None and host.down_bytes_per_s is not None
        port = f"p{i}"
        _batch(
            "ip",
            layout.switch,
            [f"link add {port} type veth peer name eth0 netns {host.namespace}", f"link set {port} master br0 up"],
        )
        _batch("ip", host.namespace, [f"addr add {host.address}/16 dev eth0", "link set eth0 up"])
        _batch("tc", host.namespace, shaping("eth0", host.up_bytes_per_s, host.paths))
        _batch("tc", layout.switch, shaping(port, host.down_bytes_per_s))


def shaping(device: str, bytes_per_s: float, paths: Sequence[tuple[str, float]] = ()) -> list[str]:
    """The ``tc`` commands that let ``device`` send at ``bytes_per_s``, and to each address of ``paths`` at its rate."""
    total = round(bytes_per_s * 8)
    ack = max(1, round(total * ACK_SHARE))
    share = (total - ack) // (len(paths) + 1)
    leaves = [(10, 0, ack, total, "pfifo limit 1000"), (20, 1, share, total, f"bfifo limit {QUEUE_BYTES}")]
    for k, (_, rate) in enumerate(paths):
        ceiling = round(rate * 8)
        leaves.append((30 + k, 1, min(share, ceiling), ceiling, f"bfifo limit {QUEUE_BYTES}"))
    common = f"burst {BURST_BYTES} cburst {BURST_BYTES} quantum {QUANTUM_BYTES}"
    commands = [
        f"qdisc add dev {device} root handle 1: htb default 20",
        f"class add dev {device} parent 1: classid 1:1 htb rate {total}bit ceil {total}bit {common}",
    ]
    for minor, priority, rate_bits, ceiling, queue in leaves:
        commands += [
            f"class add dev {device} parent 1:1 classid 1:{minor} htb rate {rate_bits}bit ceil {ceiling}bit "
            f"{common} prio {priority}",
            f"qdisc add dev {device} parent 1:{minor} handle {minor}: {queue}",
        ]
    # Total length of the IP packet below 128 bytes: ACKs without data, and handshakes. Then ARP, then the paths.
    commands += [
        f"filter add dev {device} parent 1: protocol ip prio 1 u32 match u16 0x0000 0xff80 at 2 flowid 1:10",
        f"filter add dev {device} parent 1: protocol arp prio 2 u32 match u32 0 0 flowid 1:10",
    ]
    commands += [
        f"filter add dev {device} parent 1: protocol ip prio 3 u32 match ip dst {address}/32 flowid 1:{30 + k}"
        for k, (address, _) in enumerate(paths)
    ]
    return commands


def set_rate(layout: Layout, host: HostLayout, direction: str, bytes_per_s: float) -> None:
    """Change a live host's "up" or "down" rate: a link that degrades under a running job. Its paths keep theirs, as far
    as they fit into a new "up"."""
    index = layout.hosts.index(host)
    if direction == "up":
        namespace, commands = host.namespace, shaping("eth0", bytes_per_s, host.paths)
    else:
        namespace, commands = layout.switch, shaping(f"p{index}", bytes_per_s)
    _batch("tc", namespace, [c.replace("class add", "class change") for c in commands if c.startswith("class")])


def destroy(namespaces: Iterable[str]) -> None:
    """End every process inside, then delete. What is not there is no error: a second call does nothing."""
    present = [n for n in namespaces if (RUN / n).exists()]
    for namespace in present:
        end_processes(namespace)
    for namespace in present:
        # Deleting can be refused for a moment while a process of it is being reaped.
        deadline = time.monotonic() + _WAIT_S
        while (result := _tool(["ip", "netns", "del", namespace])).returncode and (RUN / namespace).exists():
            if time.monotonic() > deadline:
                raise TestbedError(f"cannot delete network namespace {namespace}: {result.stderr.strip()}")
            time.sleep(0.05)


def existing() -> tuple[str, ...]:
    """Names of all namespaces on this machine that a testbed made."""
    return tuple(sorted(p.name for p in RUN.glob(f"{PREFIX}*"))) if RUN.is_dir() else ()


def processes(namespace: str) -> tuple[int, ...]:
    """Processes inside. Only who a testbed started can be there, since it made the namespace."""
    try:
        wanted = os.stat(RUN / namespace)
    except FileNotFoundError:
        return ()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _inside(int(entry.name), wanted):
            found.append(int(entry.name))
    return tuple(sorted(found))


def end_processes(namespace: str) -> None:
    """Kill what runs inside and wait until it is gone. A pid that was reused meanwhile is not touched."""
    try:
        wanted = os.stat(RUN / namespace)
    except FileNotFoundError:
        return
    deadline = time.monotonic() + _WAIT_S
    while (pids := processes(namespace)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                try:
                    if _inside(pid, wanted):
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                finally:
                    os.close(handle)
        time.sleep(0.02)
    if pids:
        raise TestbedError(f"processes {pids} inside {namespace} do not end")


def enter(namespace: str) -> None:
    """Move this thread, and those it starts later, into a namespace. Unlike ``ip netns exec``, /sys stays mounted."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(RUN / namespace, "rb") as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET):
            raise TestbedError(f"cannot enter {namespace}: {os.strerror(ctypes.get_errno())}")


def counters(layout: Layout) -> Counters:
    """What the bed and the machine have gone through so far."""
    drops = timeouts = retransmits = 0
    for namespace in layout.namespaces:
        for queue in json.loads(_command(["tc", "-n", namespace, "-s", "-j", "qdisc", "show"]) or "[]"):
            if queue["kind"] in ("bfifo", "pfifo"):
                drops += queue["drops"]
        if namespace != layout.switch:
            lines = _command(_within(namespace, ["cat", "/proc/net/netstat", "/proc/net/snmp"])).splitlines()
            timeouts += _field(lines, "TcpExt", "TCPTimeouts")
            retransmits += _field(lines, "Tcp", "RetransSegs")
    return Counters(drops, timeouts, retransmits, *cpu_times())


def _inside(pid: int, namespace: os.stat_result) -> bool:
    try:
        own = os.stat(f"/proc/{pid}/ns/net")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False  # ended meanwhile, or a kernel thread
    return (own.st_dev, own.st_ino) == (namespace.st_dev, namespace.st_ino)


def _field(lines: Sequence[str], table: str, name: str) -> int:
    """A counter of /proc/net/netstat or snmp, where a line of names stands above its line of values."""
    keys, values = [line.split() for line in lines if line.startswith(f"{table}:")]
    return int(values[keys.index(name)])


def _tune(namespace: str) -> None:
    writes = [
        f"if [ -e /proc/sys/net/{key} ]; then echo '{value}' > /proc/sys/net/{key}; fi" for key, value in TCP.items()
    ]
    _command(_within(namespace, ["sh", "-ec", "\n".join(writes)]))


def _within(namespace: str, argv: Sequence[str]) -> list[str]:
    return ["nsenter", f"--net={RUN / namespace}", *argv]


def _batch(tool: str, namespace: str, commands: Sequence[str]) -> None:
    _command([tool, "-n", namespace, "-batch", "-"], "\n".join(commands) + "\n")


def _command(argv: Sequence[str], stdin: str = "") -> str:
    result = _tool(argv, stdin)
    if result.returncode:
        raise TestbedError(f"{' '.join(argv[:6])}: {' '.join(result.stderr.split()) or f'exit {result.returncode}'}")
    return result.stdout


def _tool(argv: Sequence[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, input=stdin, capture_output=True, text=True)
