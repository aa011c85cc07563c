"""What was measured of a cluster, as one frozen file, and the cluster as it then is: ``CalibratedCluster``.

A profile holds, per *kind* of device (devices that the cluster file describes alike), the seconds of operator calls at
a few shares of their group and fits by operator and by class for calls that were not measured; per rank a factor by
which it differs from its kind; per ordered pair of ranks latency and bandwidth; per collective and decomposition what
it takes on the wire beside the formula of ``collective`` and what packing costs each kind. Every fit carries its
residual, every measurement its spread. The same file gives the same numbers to the last bit on any machine.

    calibrated = Profile.load("profile.json").calibrate(cluster)      # a ClusterSpec: plan and evaluate as ever

Seconds of a call: measured points joined by lines, else the operator's fit, else its class's; a class that nobody
measured is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pydantic

from hap.cluster import ClusterSpec
from hap.errors import HapError
from hap.fabric import Array, Fabric, Port
from hap.hosts import Delays, Device, delay_s
from hap.plan import Collective

SCHEMA_VERSION = 1
SAME_RATE = 0.1


class ProfileError(HapError):
    """A profile that cannot be read, is of another cluster, or lacks what a plan asks of it."""


class _Frozen(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Fit(_Frozen):
    """``(launch_s + flops * s_per_flop + nbytes * s_per_byte) * factor``; the factor is interpolated between
    ``factors`` at the logarithms of ``sizes`` (the affine seconds). ``residual`` is the median relative error over
    ``samples`` measurements, ``worst`` the largest."""

    launch_s: float
    s_per_flop: float
    s_per_byte: float
    sizes: tuple[float, ...] = ()
    factors: tuple[float, ...] = ()
    residual: float
    worst: float
    samples: int

    def seconds(self, flops: float, nbytes: float) -> float:
        affine = self.launch_s + flops * self.s_per_flop + nbytes * self.s_per_byte
        return affine * between(affine, self.sizes, self.factors)


class CallCurve(_Frozen):
    """One call at rising shares of its group (1.0 alone if it has none). ``spread``: the largest of the points'."""

    shares: tuple[float, ...]
    seconds: tuple[float, ...]
    spread: float

    def at(self, share: float) -> float:
        """On the lines between the points; beyond them on the nearest line, never less than half the first point."""
        if len(self.shares) == 1:
            return self.seconds[0] * max(share / self.shares[0], 0.5) if self.shares[0] < 1 else self.seconds[0]
        i = min(max(int(np.searchsorted(self.shares, share)), 1), len(self.shares) - 1)
        (a, b), (u, v) = self.shares[i - 1 : i + 1], self.seconds[i - 1 : i + 1]
        return max(u + (v - u) * (share - a) / (b - a), 0.5 * self.seconds[0] if share < self.shares[0] else 0.0)


class CopyFit(_Frozen):
    """What packing and joining take on each rank: ``launch_s + whole * s_per_whole + local * s_per_local``, bytes of
    the whole value (where a side of the conversion is whole) and of the rank's shards."""

    launch_s: float
    s_per_whole: float
    s_per_local: float
    residual: float
    samples: int


class UpdateFit(_Frozen):
    """An optimizer's update: ``parameter_s`` for each parameter of which the rank holds any, with what a step takes for
    having it, and ``s_per_byte`` of what it holds. ``residual``: the median relative error over whole models. Of Muon
    this is AdamW's; ``matrix_s`` for each matrix that it makes orthogonal, and ``s_per_flop`` of that, come to it."""

    parameter_s: float
    s_per_byte: float
    residual: float
    samples: int
    matrix_s: float = 0.0
    s_per_flop: float = 0.0


class DeviceKind(_Frozen):
    """Devices that the cluster file describes alike. ``fits`` by ``op/dtype`` and ``class/dtype``; ``copies`` by
    ``collective/decomposition``; ``updates`` by optimizer. ``step_s``: what a step takes beside its calls; ``in_step``:
    by how much calls take longer in a step than alone; ``node_s``: what each takes beside that, views included;
    ``resume_s``: what the calls after a wait for other ranks take longer; ``empty_s``: what a call on nothing
    takes in a step, 0 where none is launched for it."""

    name: str
    memory_bytes: int | None = None
    calls: dict[str, CallCurve]
    fits: dict[str, Fit]
    updates: dict[str, UpdateFit]
    copies: dict[str, CopyFit]
    step_s: float = 0.0
    in_step: float = 1.0
    node_s: float = 0.0
    resume_s: float = 0.0
    empty_s: float = 0.0


class RankProfile(_Frozen):
    """``kind``: index into the profile's kinds. ``factor``: this rank's seconds over its kind's. ``spread``: the median
    spread of its measurements."""

    device: str
    kind: int
    factor: float
    spread: float


class LinkProfile(_Frozen):
    """One ordered pair: ``latency_s`` of an empty message, ``bytes_per_s`` of a large one when nobody else talks.
    ``delays``: (bytes, seconds beside these two) of the sizes in between that were measured, rising."""

    source: int
    target: int
    latency_s: float
    bytes_per_s: float
    spread: float
    delays: Delays = ()


class CollectiveProfile(_Frozen):
    """On the wire: ``factor * formula``, the factor interpolated between ``factors``, logarithm against logarithm of
    ``sizes`` (bytes of the whole value). ``seconds``: what the values of these sizes took, dealt evenly. ``ahead``: for
    which part of its seconds each rank is done before the last one; none where that was not measured."""

    kind: Collective
    decomposition: str
    sizes: tuple[float, ...]
    factors: tuple[float, ...]
    seconds: tuple[float, ...]
    residual: float
    spread: float
    samples: int
    ahead: tuple[float, ...] = ()

    def factor(self, nbytes: float) -> float:
        return math.exp(between(nbytes, self.sizes, [math.log(f) for f in self.factors]))

    def ahead_of(self, ranks: Sequence[int]) -> tuple[float, ...]:
        """``ahead`` of these ranks, of which one is the last."""
        known = [self.ahead[rank] for rank in ranks] if self.ahead else []
        return tuple(part - min(known) for part in known)


class Profile(_Frozen):
    """See the module docstring. ``conditions`` says in words how it was measured, emulation above all."""

    schema_version: int = SCHEMA_VERSION
    cluster: str
    cluster_fingerprint: str
    backend: str
    torch_version: str
    conditions: tuple[str, ...]
    kinds: tuple[DeviceKind, ...]
    ranks: tuple[RankProfile, ...]
    links: tuple[LinkProfile, ...]
    collectives: tuple[CollectiveProfile, ...]
    seconds_taken: float

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """ProfileError if it cannot be written."""
        body = {**self.model_dump(mode="json"), "fingerprint": self.fingerprint}
        try:
            Path(path).write_text(json.dumps(body, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        except OSError as e:
            raise ProfileError(f"{os.fspath(path)}: cannot write ({e.strerror})") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """ProfileError, one line: unreadable, not a profile, of another version, or changed by hand."""
        where = os.fspath(path)
        try:
            body = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as e:
            raise ProfileError(f"{where}: cannot read profile ({e})") from None
        if not isinstance(body, dict) or "schema_version" not in body:
            raise ProfileError(f"{where}: not a profile file (no schema_version)")
        if "provenance" in body:
            raise ProfileError(f"{where}: a plan, not a profile file")
        if body["schema_version"] != SCHEMA_VERSION:
            raise ProfileError(f"{where}: version {body['schema_version']!r}, this HAP reads {SCHEMA_VERSION}")
        claimed = body.pop("fingerprint", None)
        try:
            profile = cls.model_validate(body)
        except pydantic.ValidationError as e:
            first = e.errors()[0]
            raise ProfileError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        if profile.fingerprint != claimed:
            raise ProfileError(f"{where}: content does not match its fingerprint (edited or damaged); profile again")
        return profile

    def part(self, ranks: Sequence[int], cluster: ClusterSpec) -> Profile:
        """What was measured of these ranks, which in ``cluster`` are 0, 1, ... in the order given. What collectives
        take beside their formula stays what it was for all ranks together: for fewer it was not measured."""
        numbers, fields = {rank: i for i, rank in enumerate(ranks)}, {n: getattr(self, n) for n in Profile.model_fields}
        fields["cluster"], fields["cluster_fingerprint"] = cluster.name, cluster.fingerprint
        fields["ranks"] = tuple(self.ranks[rank] for rank in ranks)
        fields["links"] = tuple(
            link.model_copy(update={"source": numbers[link.source], "target": numbers[link.target]})
            for link in self.links
            if link.source in numbers and link.target in numbers
        )
        fields["collectives"] = tuple(c.model_copy(update={"ahead": c.ahead_of(ranks)}) for c in self.collectives)
        return Profile(**fields)

    def calibrate(self, cluster: ClusterSpec) -> CalibratedCluster:
        """The cluster with measured speeds. ProfileError if the profile is of another cluster."""
        if cluster.fingerprint != self.cluster_fingerprint:
            raise ProfileError(
                f"the profile is of cluster {self.cluster!r} as it was then ({self.cluster_fingerprint[:12]}), not of "
                f"this {cluster.name!r} ({cluster.fingerprint[:12]}); profile again"
            )
        fields = {name: getattr(cluster, name) for name in ClusterSpec.model_fields}
        return CalibratedCluster(**fields, profile=self)


@dataclass(frozen=True)
class MeasuredDevice(Device):
    """A device whose kind was measured."""

    kind: DeviceKind = field(hash=False, compare=False, kw_only=True)
    factor: float = field(default=1.0, kw_only=True)

    def call_seconds(
        self, call: str, op: str, op_class: str, dtype: str, share: float, work: tuple[float, float]
    ) -> float:
        """Seconds of a call at a share of its group; ``work`` is (FLOPs, bytes) at that share, for the fits. A rank
        without a share that has nothing to do is asked for ``empty_seconds``."""
        if op_class == "view":
            return self.kind.node_s * self.factor
        curve = self.kind.calls.get(call)
        if curve is not None:
            return (curve.at(share) * self.kind.in_step + self.kind.node_s) * self.factor
        fit = self.kind.fits.get(f"{op}/{dtype}") or self.kind.fits.get(f"{op_class}/{dtype}")
        if fit is None:
            raise ProfileError(
                f"the profile of {self.name} has no {op_class} in {dtype} (asked for {op}); "
                "profile again with the model: hap profile --model FILE.py:FUNCTION"
            )
        return (fit.seconds(*work) * self.kind.in_step + self.kind.node_s) * self.factor

    def empty_seconds(self, op_class: str) -> float:
        """Seconds of a call of this class on nothing; a view takes no more than on something."""
        kind = self.kind
        return (min(kind.node_s, kind.empty_s) if op_class == "view" else kind.empty_s) * self.factor

    def update_seconds(self, optimizer: str, own_bytes: float, flops: float = 0.0) -> float:
        """Seconds of the optimizer's update of one parameter of which the device holds ``own_bytes``; ``flops``: of its
        products (``optimizers``)."""
        if optimizer not in self.kind.updates:
            known = ", ".join(self.kind.updates)
            raise ProfileError(f"the profile has no update of optimizer {optimizer!r} (only {known})")
        fit = self.kind.updates[optimizer]
        products_s = fit.matrix_s + fit.s_per_flop * flops if flops else 0.0
        return (fit.parameter_s + fit.s_per_byte * own_bytes + products_s) * self.factor


class CalibratedCluster(ClusterSpec):
    """A cluster with the profile that was measured on it. Everything that takes a ``ClusterSpec`` takes it, finds
    ``MeasuredDevice`` in ``devices`` and measured rates in ``fabric``; its fingerprint is the plain cluster's."""

    profile: Profile

    @cached_property
    def described(self) -> ClusterSpec:
        """The cluster without the measurement."""
        return ClusterSpec(**{name: getattr(self, name) for name in ClusterSpec.model_fields})

    @cached_property
    def fingerprint(self) -> str:
        return self.described.fingerprint

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        found: list[Device] = []
        for device, rank in zip(self.described.devices, self.profile.ranks, strict=True):
            own = {f.name: getattr(device, f.name) for f in dataclasses.fields(Device)}
            own["tflops"] = {d: rate / rank.factor for d, rate in device.tflops.items()}
            own["memory_bandwidth_bytes_per_s"] = device.memory_bandwidth_bytes_per_s / rank.factor
            found.append(MeasuredDevice(**own, kind=self.profile.kinds[rank.kind], factor=rank.factor))
        return tuple(found)

    @cached_property
    def fabric(self) -> Fabric:
        """The described ports at measured rates: the described one times the geometric mean of measured over described
        bandwidth of the pairs that it limits. Ports described with the same rate that differ by less than
        ``SAME_RATE`` share the mean; a port that limits no pair takes that of all. Latencies and delays are each
        pair's own."""
        plain = self.described
        ratios: dict[str, list[float]] = {}
        ends = [(port, frozenset(port.senders), frozenset(port.receivers)) for port in plain.fabric.ports]
        for link in self.profile.links:
            crossed = [port for port, senders, receivers in ends if link.source in senders and link.target in receivers]
            least = min(p.bytes_per_s for p in crossed)
            for port in crossed:
                if port.bytes_per_s == least:
                    ratios.setdefault(port.name, []).append(math.log(link.bytes_per_s / least))
        factors = _shared({p.name: p.bytes_per_s for p in plain.fabric.ports}, ratios)
        ports = tuple(
            Port(p.name, p.bytes_per_s * math.exp(factors[p.name]), p.senders, p.receivers) for p in plain.fabric.ports
        )
        sizes = sorted({size for link in self.profile.links for size, _ in link.delays})
        return Fabric.build(ports, self._waits(0.0), [(size, self._waits(size)) for size in sizes])

    def _waits(self, nbytes: float) -> Array:
        """(N, N): what a message of so many bytes waits for beside its bytes over the bandwidth."""
        found = np.zeros((self.world_size, self.world_size))
        for link in self.profile.links:
            found[link.source, link.target] = link.latency_s + delay_s(link.delays, nbytes)
        return found

    def collective(self, kind: Collective, decomposition: str) -> CollectiveProfile:
        """What was measured of a collective, of all routings of a name together. ProfileError if nothing was."""
        decomposition = base_name(decomposition)
        for found in self.profile.collectives:
            if (found.kind, found.decomposition) == (kind, decomposition):
                return found
        raise ProfileError(f"the profile has no {kind} by {decomposition}; profile again")

    def copy_rates(self, kind: Collective, decomposition: str) -> tuple[Array, Array, Array]:
        """(launch seconds, seconds per whole byte, seconds per local byte) of packing, by rank; among the first, what
        the next calls take longer where ranks waited for each other."""
        name, rows = f"{kind}/{base_name(decomposition)}", []
        for rank in self.profile.ranks:
            device = self.profile.kinds[rank.kind]
            fit = device.copies.get(name)
            if fit is None:
                raise ProfileError(f"the profile has no {kind} by {decomposition}; profile again")
            launch_s = fit.launch_s + (device.resume_s if kind != "slice" else 0.0)
            rows.append([rank.factor * x for x in (launch_s, fit.s_per_whole, fit.s_per_local)])
        launch, whole, local = np.array(rows).T
        return launch, whole, local


def base_name(decomposition: str) -> str:
    """A decomposition without the ranks that it is told about."""
    return decomposition.partition("[")[0]


def between(x: float, sizes: Sequence[float], factors: Sequence[float]) -> float:
    """The factor at ``x``, linear in log x between the points, constant beyond them; 1 without points."""
    if not sizes:
        return 1.0
    return float(np.interp(math.log(max(x, 1e-30)), [math.log(s) for s in sizes], factors))


def _shared(rates: Mapping[str, float], ratios: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Port -> the logarithm of measured over described rate; see ``CalibratedCluster.fabric``."""
    own = {name: _mean(found) for name, found in ratios.items()}
    overall = _mean([r for found in ratios.values() for r in found])
    factors = {}
    for name, rate in rates.items():
        alike = [own[other] for other, described in rates.items() if described == rate and other in own]
        middle = _mean(alike) if alike else overall
        far = name in own and abs(own[name] - middle) > math.log1p(SAME_RATE)
        factors[name] = own[name] if far else middle
    return factors


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
