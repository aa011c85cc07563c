"""The cluster: hosts with devices in rank order, the links between them, and the backend. YAML in, frozen views out.

    name: lab
    backend: nccl                       # or gloo
    hosts:
      - name: big
        devices:
          - {gpu: A100-40GB, count: 2}  # from the catalogue (gpus.csv); any number below may be given to replace it
        link: nvlink                    # or pcie3 | pcie4 | pcie5, or {kind: pcie, bandwidth: 12GB/s, latency: 10us}
        network: {up: 10Gbit/s, down: 10Gbit/s, latency: 30us, curve: {64kB: 400MB/s, 1MB: 1GB/s}}
        price_per_hour: 6.5
      - name: small
        devices:
          - {name: box, tflops: {float32: 8}, memory: 16GB, memory_bandwidth: 300GB/s, launch: 5us}
        network: {bandwidth: 1Gbit/s, latency: 50us}
    links:                              # one direction each, where a pair of hosts has less than their networks
      - {from: big, to: small, bandwidth: 500Mbit/s, latency: 1ms}

Bytes share *ports* (``hap.fabric``): a device's way out and in inside its host, a host's network up and down, a link
between two hosts. Ranks of one host share its network.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import pydantic
import yaml

from hap.errors import ClusterError
from hap.fabric import Array, Fabric, Port
from hap.gpus import suggest
from hap.hosts import (
    Delays,
    Device,
    DeviceSpec,
    Duplex,
    DuplexSpec,
    Frozen,
    HostSpec,
    LinkKind,
    LinkSpec,
    PathSpec,
    delay_s,
    find_delays,
)

Backend = Literal["nccl", "gloo"]


class Link(NamedTuple):
    """What one rank sees towards another when nobody else is talking."""

    bandwidth_bytes_per_s: float
    latency_s: float


class Rates(NamedTuple):
    up_bytes_per_s: float
    down_bytes_per_s: float


@dataclasses.dataclass(frozen=True, eq=False)
class Nvidia:
    """What NCCL asks about its GPUs: the oldest and the newest ``compute_capability`` (80 for 8.0), the slowest kind of
    link inside a host (None where no host has two devices), the number of each rank's host."""

    oldest: int
    newest: int
    inside: LinkKind | None
    host: tuple[int, ...]

    @cached_property
    def most_on_a_host(self) -> int:
        return max(self.host.count(h) for h in range(self.host[-1] + 1))


class ClusterSpec(Frozen):
    """See the module docstring. Ranks are numbered through the hosts and their devices in order."""

    name: str = "cluster"
    backend: Backend = "nccl"
    hosts: tuple[HostSpec, ...]
    links: tuple[PathSpec, ...] = ()

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.hosts:
            raise ValueError("no hosts, so no devices")
        names = [h.name for h in self.hosts]
        for i, host in enumerate(self.hosts):
            if host.name in names[:i]:
                raise ValueError(f"host name {host.name!r} is used twice")
            if host.network is None and len(self.hosts) > 1:
                others = ", ".join(n for n in names if n != host.name)
                raise ValueError(
                    f"host {host.name!r} has no network, so no link to {others}; add network: {{up, down, latency}}"
                )
        pairs = [(p.source, p.target) for p in self.links]
        for i, (source, target) in enumerate(pairs):
            for host_name in (source, target):
                if host_name not in names:
                    raise ValueError(f"links[{i}]: unknown host {host_name!r}{suggest(host_name, names)}")
            if source == target:
                raise ValueError(f"links[{i}]: from and to are both {source!r}; use the host's own link")
            if (source, target) in pairs[:i]:
                raise ValueError(f"links[{i}]: {source!r} to {target!r} is given twice")
            try:
                self._path_delays(self.links[i])
            except ValueError as e:
                raise ValueError(f"links[{i}]: {e}") from None
        return self

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ClusterSpec:
        """Read a YAML file. ClusterError, one line, for everything that is wrong with it."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            reason = e.strerror if isinstance(e, OSError) else "not UTF-8 text"
            raise ClusterError(f"{os.fspath(path)}: cannot read cluster ({reason})") from None
        return cls.from_yaml(text, os.fspath(path))

    @classmethod
    def from_yaml(cls, text: str, origin: str = "cluster") -> ClusterSpec:
        try:
            body = read_yaml(text)
        except ValueError as e:
            raise ClusterError(f"{origin}: {e}") from None
        if not isinstance(body, dict):
            raise ClusterError(f"{origin}: not a cluster description (expected keys such as hosts: and backend:)")
        try:
            return cls.model_validate(body)
        except pydantic.ValidationError as e:
            errors = sorted(e.errors(), key=lambda error: error["type"] != "extra_forbidden")  # a typo explains a lack
            raise ClusterError(f"{origin}: {_explain(errors[0], body)}") from None

    def to_yaml(self) -> str:
        """A description with the same fingerprint."""
        body = self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
        return str(yaml.safe_dump({"name": self.name, "backend": self.backend, **body}, sort_keys=False))

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        return tuple(self._devices())

    def _devices(self) -> Iterator[Device]:
        rank = 0
        for host in self.hosts:
            repeated = [spec for spec in host.devices for _ in range(spec.count)]
            for index, spec in enumerate(repeated):
                yield spec.device(rank, host.name, index, host.outside)
                rank += 1

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @cached_property
    def _by_name(self) -> Mapping[str, HostSpec]:
        return {h.name: h for h in self.hosts}

    @cached_property
    def _paths(self) -> Mapping[tuple[str, str], PathSpec]:
        return {(p.source, p.target): p for p in self.links}

    def host_of(self, rank: int) -> str:
        return self.devices[rank].host

    def network(self, host: str) -> Rates | None:
        """(up, down) that all ranks of ``host`` share towards other hosts; None for an only host that does not say."""
        spec = self._by_name[host].network
        return None if spec is None else Rates(spec.duplex.up_bytes_per_s, spec.duplex.down_bytes_per_s)

    def link(self, src: int, dst: int) -> Link:
        """From rank ``src`` to rank ``dst``. Between hosts: the least of src's up, dst's down and the pair's own
        link, with that link's latency or else the larger of the two hosts' latencies."""
        assert src != dst, "a rank has no link to itself"
        a, b = (self._by_name[self.devices[r].host] for r in (src, dst))
        if a is b:
            assert a.inside is not None
            return Link(min(a.inside.up_bytes_per_s, a.inside.down_bytes_per_s), self._latency_s(a, b))
        assert a.network is not None and b.network is not None
        rates = [a.network.duplex.up_bytes_per_s, b.network.duplex.down_bytes_per_s]
        path = self._paths.get((a.name, b.name))
        if path is not None and path.bandwidth is not None:
            rates.append(path.bandwidth)
        return Link(min(rates), self._latency_s(a, b))

    @cached_property
    def nvidia(self) -> Nvidia | None:
        """None unless NCCL joins GPUs of NVIDIA's alone, all from the catalogue, by links of a known kind. Where a link
        has a curve, that says how NCCL does on it."""
        found = [spec.catalogue_gpu for h in self.hosts for spec in h.devices]
        capabilities = [gpu.compute_capability for gpu in found if gpu is not None and gpu.compute_capability]
        kinds = [h.link_kind for h in self.hosts if h.size > 1]
        if self.backend != "nccl" or len(capabilities) < len(found) or None in kinds or self.fabric.by_size:
            return None
        slowest: LinkKind | None = None if not kinds else "pcie" if "pcie" in kinds else "nvlink"
        host = tuple(i for i, h in enumerate(self.hosts) for _ in range(h.size))
        return Nvidia(min(capabilities), max(capabilities), slowest, host)

    @cached_property
    def fabric(self) -> Fabric:
        """The ports that bytes between ranks share, with the latency of every pair."""
        given = [h.inside for h in self.hosts] + [h.outside for h in self.hosts if len(self.hosts) > 1]
        curves = [d.delays for d in given if d is not None] + [self._path_delays(p) for p in self.links]
        sizes = sorted({size for delays in curves for size, _ in delays})
        return Fabric.build(tuple(self._ports()), self._latencies(0.0), [(s, self._latencies(s)) for s in sizes])

    def _latencies(self, nbytes: float) -> Array:
        """(N, N): what a message of so many bytes waits for beside its bytes over the bandwidth."""
        by_host = [
            [self._latency_s(a, b) + (self._delay_s(a, b, nbytes) if nbytes else 0.0) for b in self.hosts]
            for a in self.hosts
        ]
        host = [i for i, h in enumerate(self.hosts) for _ in range(h.size)]
        latency_s = np.array(by_host)[np.ix_(host, host)]
        np.fill_diagonal(latency_s, 0.0)
        return latency_s

    def _path_delays(self, path: PathSpec) -> Delays:
        if path.curve is None:
            return ()
        assert path.bandwidth is not None
        return find_delays(
            path.curve, path.bandwidth, self._latency_s(*(self._by_name[n] for n in (path.source, path.target)))
        )

    def _delay_s(self, a: HostSpec, b: HostSpec, nbytes: float) -> float:
        """Of a message from host ``a`` to host ``b``: the largest of what it passes."""
        if a is b:
            return delay_s(a.inside.delays, nbytes) if a.inside else 0.0
        assert a.network is not None and b.network is not None
        path = self._paths.get((a.name, b.name))
        passed = [a.network.duplex.delays, b.network.duplex.delays, self._path_delays(path) if path else ()]
        return max(delay_s(delays, nbytes) for delays in passed)

    def _latency_s(self, a: HostSpec, b: HostSpec) -> float:
        """One way between a rank of host ``a`` and another of host ``b``."""
        if a is b:
            return a.inside.latency_s if a.inside else 0.0
        path = self._paths.get((a.name, b.name))
        if path is not None and path.latency is not None:
            return path.latency
        assert a.network is not None and b.network is not None
        return max(a.network.latency, b.network.latency)

    def _ports(self) -> Iterator[Port]:
        everyone = range(self.world_size)
        ranks = {h.name: tuple(r for r in everyone if self.devices[r].host == h.name) for h in self.hosts}
        for host in self.hosts:
            mine, inside = ranks[host.name], host.inside
            for rank in mine if inside is not None and len(mine) > 1 else ():
                assert inside is not None
                peers, name = tuple(r for r in mine if r != rank), self.devices[rank].name
                yield Port(f"{name} out", inside.up_bytes_per_s, (rank,), peers)
                yield Port(f"{name} in", inside.down_bytes_per_s, peers, (rank,))
            others = tuple(r for r in everyone if r not in mine)
            if others:
                assert host.network is not None
                network = host.network.duplex
                yield Port(f"{host.name} network up", network.up_bytes_per_s, mine, others)
                yield Port(f"{host.name} network down", network.down_bytes_per_s, others, mine)
        for path in self.links:
            if path.bandwidth is not None:
                name = f"link {path.source} to {path.target}"
                yield Port(name, path.bandwidth, ranks[path.source], ranks[path.target])

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the meaning: every resolved number and name; not key order, units, counts or formatting."""
        body = {
            "name": self.name,
            "backend": self.backend,
            "devices": [_numbers_of(d) for d in self.devices],
            "hosts": [(h.name, _numbers(h.inside), _numbers(h.outside), h.price_per_hour) for h in self.hosts],
            "links": sorted((p.source, p.target, str(p.bandwidth), str(p.latency)) for p in self.links),
            **self._more,
        }
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()

    @property
    def _more(self) -> dict[str, Any]:
        """What only some descriptions have; others keep the fingerprint that they had before it could be said."""
        ports = [[d.delays if d else () for d in (h.inside, h.outside)] for h in self.hosts]
        paths = [self._path_delays(p) for p in sorted(self.links, key=lambda p: (p.source, p.target))]
        kinds = [h.link.kind if isinstance(h.link, LinkSpec) else None for h in self.hosts]
        unnamed = [
            (h.size > 1 and h.has_unnamed_link, [d.is_unnamed for d in h.devices for _ in range(d.count)])
            for h in self.hosts
        ]
        told = self.backend == "nccl" and any(link or any(own) for link, own in unnamed)
        return {
            **({"delays": (ports, paths)} if any(map(any, ports)) or any(paths) else {}),
            **({"kinds": kinds} if any(kinds) else {}),
            **({"unnamed": unnamed} if told else {}),
        }

    def check_world_size(self, n: int) -> None:
        """ClusterError unless a job of ``n`` ranks has exactly one device for each."""
        if n > self.world_size:
            raise ClusterError(f"{n} ranks, but cluster {self.name!r} describes only {self.world_size} devices")
        if n < self.world_size:
            raise ClusterError(f"{n} ranks, but cluster {self.name!r} describes {self.world_size} devices")


def _numbers_of(device: Device) -> tuple[Any, ...]:
    """Its fields but the network, which is told of its host."""
    told = dataclasses.asdict(device)
    return tuple(value for name, value in told.items() if name != "outward")


def _numbers(duplex: Duplex | None) -> tuple[float, float, float] | None:
    return None if duplex is None else (duplex.up_bytes_per_s, duplex.down_bytes_per_s, duplex.latency_s)


def read_yaml(text: str) -> Any:
    """What a YAML file says. ValueError, one line, where it is none or gives a key twice."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as e:
        mark, problem = getattr(e, "problem_mark", None), getattr(e, "problem", None) or "cannot be parsed"
        line = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"not YAML{line}: {problem}") from None


class _StrictLoader(yaml.SafeLoader):
    """Safe, and refuses a key given twice, which YAML forbids and PyYAML overlooks."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [k.value for k, _ in node.value if isinstance(k, yaml.ScalarNode)]
        for i, (k, _) in enumerate(node.value):
            if isinstance(k, yaml.ScalarNode) and k.value in keys[:i]:
                raise yaml.constructor.ConstructorError(None, None, f"key {k.value!r} is given twice", k.start_mark)
        return super().construct_mapping(node, deep)


_MODELS: dict[tuple[str, ...], type[Frozen]] = {
    (): ClusterSpec,
    ("hosts",): HostSpec,
    ("hosts", "devices"): DeviceSpec,
    ("hosts", "link"): LinkSpec,
    ("hosts", "network"): DuplexSpec,
    ("links",): PathSpec,
}


def _explain(error: Any, body: Mapping[str, Any]) -> str:
    """One line for the first validation error: where, in the user's words, and what."""
    loc = list(error["loc"])
    kind, where = error["type"], ""
    key = loc.pop() if kind in ("extra_forbidden", "missing") else None
    model = _MODELS.get(tuple(p for p in loc if isinstance(p, str)), ClusterSpec)
    if loc[:1] == ["hosts"] and len(loc) > 1:
        host = body["hosts"][loc[1]]
        name = host.get("name") if isinstance(host, dict) else None
        where, loc = (f"host {name!r}: " if isinstance(name, str) else f"hosts[{loc[1]}]: "), loc[2:]
    path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in loc).lstrip(".")
    where += f"{path}: " if path else ""
    known = [f.alias or n for n, f in model.model_fields.items()]
    match kind:
        case "extra_forbidden":
            return f"{where}unknown key {key!r}{suggest(str(key), known)} (known: {', '.join(known)})"
        case "missing":
            return f"{where}missing key {key!r}"
        case "literal_error":
            return f"{where}must be {error['ctx']['expected'].replace(chr(39), '')}, not {error['input']!r}"
        case "value_error":
            return f"{where}{error['ctx']['error']}"
        case "model_type" | "tuple_type":
            shape = "a list" if kind == "tuple_type" else f"keys and values ({', '.join(known)})"
            return f"{where}expected {shape}, not {error['input']!r}"
        case "string_pattern_mismatch":
            return f"{where}must be letters, digits, '-', '_', '.' and begin with a letter or digit: {error['input']!r}"
    return f"{where}{error['msg'][0].lower()}{error['msg'][1:]}, not {error['input']!r}"
