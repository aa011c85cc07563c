"""One host of a cluster description: its devices, the link inside it, its network. ``hap.cluster`` shows the format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
import pydantic

from hap.gpus import DTYPES, Gpu, catalogue, find_gpu, suggest
from hap.units import format_rate, format_size, format_time, parse_rate, parse_size, parse_time

DEFAULT_LAUNCH_S = 5e-6  # assumed: one kernel launch, the order of magnitude of CUDA's and of a CPU operator call
# Gen3 x16 as NCCL assumes (src/graph/topo.h: 12 GB/s); later generations double, assumed.
PCIE_BYTES_PER_S = {"pcie3": 12e9, "pcie4": 24e9, "pcie5": 48e9}
PCIE_LATENCY_S = 5.7e-6  # NCCL src/graph/tuning.cc, ring, simple protocol, one hop
NVLINK_LATENCY_S = 3.4e-6  # same
NVLINK_EFFICIENCY = 0.8  # torch/_inductor/comm_analysis.py: 120, 240, 370, 720 of 150, 300, 450, 900 GB/s

LinkKind = Literal["nvlink", "pcie"]


def parse_curve(given: Any) -> dict[int, float]:
    """``{1MB: 5GB/s, 64MB: 11GB/s}``: bytes of a message -> bytes/s, smallest first."""
    if not isinstance(given, dict) or not given:
        raise ValueError(
            f"expected rates by the size of a message, such as {{1MB: 5GB/s, 64MB: 11GB/s}}, not {given!r}"
        )
    found = {parse_size(size): parse_rate(rate) for size, rate in given.items()}
    if len(found) < len(given):
        raise ValueError("a size is given twice")
    return dict(sorted(found.items()))


def format_curve(curve: Mapping[int, float]) -> dict[str, str]:
    return {format_size(size): format_rate(rate) for size, rate in curve.items()}


Rate = Annotated[float, pydantic.BeforeValidator(parse_rate), pydantic.PlainSerializer(format_rate)]
Size = Annotated[int, pydantic.BeforeValidator(parse_size), pydantic.PlainSerializer(format_size)]
Time = Annotated[float, pydantic.BeforeValidator(parse_time), pydantic.PlainSerializer(format_time)]
Curve = Annotated[dict[int, float], pydantic.BeforeValidator(parse_curve), pydantic.PlainSerializer(format_curve)]
Delays = tuple[tuple[float, float], ...]  # (bytes of a message, seconds beside latency and bytes / bandwidth)


def find_delays(curve: Mapping[int, float] | None, bytes_per_s: float, latency_s: float) -> Delays:
    """What messages of the sizes of ``curve`` take longer than a latency and a bandwidth say. ValueError if any would
    be faster."""
    found = []
    for size, rate in (curve or {}).items():
        plain_s = latency_s + size / bytes_per_s
        if size / rate < plain_s * (1 - 1e-9):
            raise ValueError(
                f"curve: {format_size(size)} at {format_rate(rate)} is more than latency and bandwidth allow, "
                f"{format_rate(float(f'{size / plain_s:.4g}'))}"
            )
        found.append((float(size), max(0.0, size / rate - plain_s)))
    return tuple(found)


def delay_s(delays: Delays, nbytes: float) -> float:
    """Straight lines from nothing at no bytes through the points, flat beyond them."""
    sizes, seconds = zip((0.0, 0.0), *delays, strict=True)
    return float(np.interp(nbytes, sizes, seconds))


class Duplex(NamedTuple):
    """A two-way port. ``delays`` are those of either way, beside the slower of the two."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float
    delays: Delays = ()


@dataclass(frozen=True)
class Device:
    """One accelerator. ``name`` is "host/gpu#i" with i counted inside the host; ``tflops`` maps dtype to TFLOP/s;
    ``outward``: its host's network, which the host's devices share."""

    rank: int
    name: str
    host: str
    gpu: str
    tflops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    launch_s: float
    outward: Duplex | None = field(default=None, compare=False)


class Frozen(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy that is as checked as one that was read, and remembers nothing of what was worked out from the old
        fields (devices, ports, fingerprint), which pydantic's own would take along. pydantic.ValidationError if
        ``update`` makes no sense."""
        copied = super().model_copy(update=update, deep=deep)
        given = copied.model_dump(exclude_unset=True, by_alias=False, warnings=False)  # quantities as they are written
        return type(self).model_validate({**(update or {}), **given}, by_name=True)


class DeviceSpec(Frozen):
    """``count`` equal devices: a catalogue ``gpu`` (other keys replace its numbers) or a complete set of numbers."""

    gpu: str | None = None
    name: str | None = None
    count: int = pydantic.Field(default=1, ge=1, le=4096, strict=True)
    tflops: dict[str, float] | None = None
    memory: Size | None = None
    memory_bandwidth: Rate | None = None
    launch: Time = DEFAULT_LAUNCH_S

    @pydantic.field_validator("tflops", mode="before")
    @classmethod
    def _positive(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not given:
            raise ValueError(f"expected TFLOP/s by dtype, such as {{float32: 15.7}}, not {given!r}")
        for dtype, value in given.items():
            if dtype not in DTYPES:
                raise ValueError(f"unknown dtype {dtype!r}{suggest(str(dtype), DTYPES)} (known: {', '.join(DTYPES)})")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{dtype} must be a number of TFLOP/s, more than zero, not {value!r}")
        return given

    @pydantic.model_validator(mode="after")
    def _complete(self) -> Self:
        if self.gpu is not None:
            find_gpu(self.gpu)
            if self.name is not None:
                raise ValueError("give gpu (from the catalogue) or name (of your own), not both")
            return self
        if missing := [k for k in ("tflops", "memory", "memory_bandwidth") if getattr(self, k) is None]:
            raise ValueError(f"without a gpu from the catalogue it needs {' and '.join(missing)}")
        return self

    @property
    def catalogue_gpu(self) -> Gpu | None:
        return None if self.gpu is None else find_gpu(self.gpu)

    @property
    def label(self) -> str:
        return find_gpu(self.gpu).name if self.gpu is not None else self.name or "custom"

    @property
    def is_unnamed(self) -> bool:
        """It is called like one of the catalogue, and is none: NCCL's own model is not asked."""
        return self.gpu is None and self.name in catalogue()

    def device(self, rank: int, host: str, index: int, outward: Duplex | None = None) -> Device:
        """The device with its numbers resolved."""
        gpu = self.catalogue_gpu
        memory = self.memory or (gpu.memory_bytes if gpu else 0)
        bandwidth = self.memory_bandwidth or (gpu.memory_bandwidth_bytes_per_s if gpu else 0.0)
        assert memory > 0 and bandwidth > 0
        tflops = {**(gpu.tflops if gpu else {}), **(self.tflops or {})}
        ordered = {d: float(tflops[d]) for d in DTYPES if d in tflops}
        name = f"{host}/{self.label}#{index}"
        return Device(rank, name, host, self.label, ordered, memory, bandwidth, self.launch, outward)


class DuplexSpec(Frozen):
    """``bandwidth`` both ways, or ``up`` (sending) and ``down`` (receiving): of the largest messages. ``curve``: what
    smaller ones reach when alone, all that they wait for included."""

    bandwidth: Rate | None = None
    up: Rate | None = None
    down: Rate | None = None
    latency: Time
    curve: Curve | None = None

    @pydantic.model_validator(mode="after")
    def _either(self) -> Self:
        one, two = self.bandwidth is not None, (self.up is not None, self.down is not None)
        if not (one and not any(two)) and not (not one and all(two)):
            raise ValueError("give bandwidth, or both up and down")
        self.duplex  # noqa: B018  (raises if the curve is too fast)
        return self

    @property
    def duplex(self) -> Duplex:
        up, down = self.up or self.bandwidth, self.down or self.bandwidth
        assert up and down
        return Duplex(up, down, self.latency, find_delays(self.curve, min(up, down), self.latency))


class LinkSpec(DuplexSpec):
    """The link inside a host in numbers; ``kind`` says what it is, which NCCL's own model asks."""

    kind: LinkKind | None = None


class PathSpec(Frozen):
    """What limits bytes from one host to another beside their networks; one direction."""

    source: str = pydantic.Field(alias="from")
    target: str = pydantic.Field(alias="to")
    bandwidth: Rate | None = None
    latency: Time | None = None
    curve: Curve | None = None

    @pydantic.model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.bandwidth is None and self.latency is None:
            raise ValueError("give bandwidth, latency or both")
        if self.curve is not None and self.bandwidth is None:
            raise ValueError("a curve needs a bandwidth, that of the largest messages")
        return self


class HostSpec(Frozen):
    name: str = pydantic.Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    devices: tuple[DeviceSpec, ...]
    link: str | LinkSpec | DuplexSpec | None = None  # becomes a LinkSpec
    network: DuplexSpec | None = None
    price_per_hour: float | None = pydantic.Field(default=None, ge=0, allow_inf_nan=False, strict=True)

    @pydantic.field_validator("link", mode="wrap")
    @classmethod
    def _named_or_explicit(cls, given: Any, handler: Any) -> Any:
        if not isinstance(given, (str, dict, DuplexSpec, type(None))):
            raise ValueError(f"expected a name such as nvlink, or {{bandwidth: 12GB/s, latency: 10us}}, not {given!r}")
        if isinstance(given, DuplexSpec) and not isinstance(given, LinkSpec):
            given = given.model_dump(exclude_unset=True)
        return LinkSpec.model_validate(given) if isinstance(given, dict) else handler(given)

    @pydantic.model_validator(mode="after")
    def _linked(self) -> Self:
        if not self.devices:
            raise ValueError("no devices")
        if self.link is None and self.size > 1:
            raise ValueError(f"its {self.size} devices have no link; add link: nvlink, pcie3 or {{bandwidth, latency}}")
        self.inside  # noqa: B018  (raises if the name is unknown or does not fit the devices)
        return self

    @property
    def size(self) -> int:
        return sum(d.count for d in self.devices)

    @property
    def outside(self) -> Duplex | None:
        """The port that its devices share towards other hosts."""
        return None if self.network is None else self.network.duplex

    @property
    def link_kind(self) -> LinkKind | None:
        """What the host's own link is; None where only numbers are given, or it is none of NVIDIA's."""
        if isinstance(self.link, DuplexSpec):
            return self.link.kind if isinstance(self.link, LinkSpec) else None
        if self.link == "nvlink":
            return "nvlink"
        return "pcie" if self.link in PCIE_BYTES_PER_S else None

    @property
    def has_unnamed_link(self) -> bool:
        """It is given in numbers that one with a name may have, and is of no known kind."""
        explicit = isinstance(self.link, LinkSpec) and self.link.latency in (NVLINK_LATENCY_S, PCIE_LATENCY_S)
        return explicit and self.link_kind is None

    @property
    def inside(self) -> Duplex | None:
        """Each device's port inside the host, or None if the host does not say."""
        if self.link is None or isinstance(self.link, DuplexSpec):
            return self.link.duplex if self.link else None
        if self.link in PCIE_BYTES_PER_S:
            rate = PCIE_BYTES_PER_S[self.link]
            return Duplex(rate, rate, PCIE_LATENCY_S)
        if self.link not in ("nvlink", "xgmi"):
            known = ("nvlink", "xgmi", *PCIE_BYTES_PER_S)
            raise ValueError(
                f"unknown link {self.link!r}{suggest(self.link, known)} "
                f"(known: {', '.join(known)}, or {{bandwidth: 12GB/s, latency: 10us}})"
            )
        rates: list[float] = []
        for spec in self.devices:
            gpu = spec.catalogue_gpu
            if gpu is None or gpu.link != self.link or gpu.link_bytes_per_s is None:
                raise ValueError(f"{spec.label} has no {self.link} in the catalogue; give {{bandwidth, latency}}")
            rates.append(gpu.link_bytes_per_s * NVLINK_EFFICIENCY)
        return Duplex(min(rates), min(rates), NVLINK_LATENCY_S)
