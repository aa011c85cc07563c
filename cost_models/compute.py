"""Seconds of one operator call on one device (a roofline with a launch).

    seconds = launch + max(share * flops / (efficiency * peak),
                           (fixed bytes + share * sharded bytes) / (efficiency * bandwidth))

A sum over hosts, whose work is on the wire, takes its rounds and its bytes, one after the other:

    seconds = launch + rounds * (latency + delay of a message) + bytes / rate

``share`` is the rank's fraction of the dimension group that the strategy shards: one mesh axis, hence one group. All
arithmetic and the bytes of sharded slots scale with it; the bytes of replicated and partial slots do not (a matmul
with a replicated weight reads all of it, however few rows it has). A strategy without a shard does the whole call on
every rank. A rank whose share is zero does nothing if every output is sharded; a partial output it must still fill.

The efficiencies are the fractions of the data sheet that real kernels reach. They are assumed until calibrated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from hap.cost_models.profile import MeasuredDevice
from hap.cost_models.work import OpClass, Work, node_work
from hap.deferral import ONE, Batches
from hap.errors import ClusterError
from hap.fabric import Array
from hap.graph import Graph, Node, Value
from hap.hosts import Device, delay_s
from hap.hosts_sum import message_bytes, outward_bytes
from hap.placement import GroupSizes, Shard
from hap.plan import Strategy

# Matmul: the best shape reaches 0.7 to 0.9 of the data sheet on H100, A100, MI300X (stas00/ml-engineering, MAMF), a
# training step's shapes less. The others: assumed.
_COMPUTE_EFFICIENCY: Mapping[OpClass, float] = {
    "matmul": 0.6,
    "attention": 0.4,
    "conv": 0.5,
    "elementwise": 0.8,
    "reduction": 0.8,
    "index": 0.8,
    "view": 1.0,
}
_MEMORY_EFFICIENCY: Mapping[OpClass, float] = {
    "matmul": 0.8,
    "attention": 0.8,
    "conv": 0.8,
    "elementwise": 0.8,
    "reduction": 0.7,
    "index": 0.5,
    "view": 1.0,
}
# Where a device does not list a dtype: what runs instead, and how fast relative to it. float64 at half of float32 is
# right for CPUs and optimistic for consumer cards, which the catalogue lists; 16-bit types without
# hardware run as float32.
_STAND_IN = {"float64": ("float32", 0.5), "bfloat16": ("float32", 1.0), "float16": ("float32", 1.0)}
_GROUP = re.compile(r"@\w+")
_DTYPE_NAME = {torch.float64: "float64", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class ComputeModel:
    """Fractions of peak arithmetic and of memory bandwidth by op class. ``tf32``: float32 matmuls, attention and
    convolutions run on tensor cores where the device has them (``torch.set_float32_matmul_precision("high")``)."""

    compute_efficiency: Mapping[OpClass, float] = field(default_factory=lambda: dict(_COMPUTE_EFFICIENCY))
    memory_efficiency: Mapping[OpClass, float] = field(default_factory=lambda: dict(_MEMORY_EFFICIENCY))
    tf32: bool = False

    def flops_per_s(self, device: Device, kind: OpClass, dtype: torch.dtype) -> float:
        """Reachable FLOP/s. ClusterError if the device lists neither the dtype nor its stand-in."""
        tf32 = self.tf32 and kind in ("matmul", "attention", "conv")
        return self.compute_efficiency[kind] * peak_flops_per_s(device, dtype, tf32=tf32)

    def bytes_per_s(self, device: Device, kind: OpClass) -> float:
        return self.memory_efficiency[kind] * device.memory_bandwidth_bytes_per_s


DEFAULT_MODEL = ComputeModel()


def peak_flops_per_s(device: Device, dtype: torch.dtype, *, tf32: bool = False) -> float:
    """The device's listed rate for a dtype; integers, booleans and 8-bit floats count as float32."""
    name = _DTYPE_NAME.get(dtype, "float32")
    if name == "float32" and tf32 and "tf32" in device.tflops:
        name = "tf32"
    if name in device.tflops:
        return device.tflops[name] * 1e12
    stand_in, factor = _STAND_IN.get(name, (name, 1.0))
    if stand_in not in device.tflops:
        listed = ", ".join(device.tflops)
        raise ClusterError(
            f"device {device.name} lists no tflops for {name} (only {listed}); add {stand_in} to its tflops"
        )
    return device.tflops[stand_in] * 1e12 * factor


@dataclass(frozen=True)
class Parts:
    """A call under a strategy, split into what every rank does and what is dealt out by ``group`` (None: nothing).
    ``message_bytes``: of a sum over hosts."""

    op_class: OpClass
    dtype: torch.dtype
    group: str | None
    n: int
    fixed_flops: float
    shared_flops: float
    fixed_bytes: float
    shared_bytes: float
    idle_when_empty: bool  # a rank with no share launches nothing
    work: Work = field(compare=False, repr=False)
    strategy: Strategy = field(compare=False, repr=False)
    message_bytes: float = 0.0

    @cached_property
    def call(self) -> str:
        """The call and how it is sharded, whatever the group is called: the key of what was measured of it."""
        return f"{self.work.call} {_GROUP.sub('', str(self.strategy))}"

    @property
    def op(self) -> str:
        return self.work.node.op if self.work.node is not None else ""

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def split_work(work: Work, strategy: Strategy) -> Parts:
    """How a strategy divides the work. Input and output slots correspond to ``work.read`` and ``work.written``."""
    assert len(strategy.inputs) == len(work.read) and len(strategy.outputs) == len(work.written), "slots do not match"
    if work.op_class == "hosts":
        return _over_hosts(work, strategy)
    shard, shared, fixed = None, 0, 0
    for placement, nbytes in zip((*strategy.inputs, *strategy.outputs), (*work.read, *work.written), strict=True):
        if isinstance(placement, Shard):
            shard, shared = shard or placement, shared + nbytes
        else:
            fixed += nbytes
    if shard is None:
        moved = fixed + work.fetched_bytes
        return Parts(work.op_class, work.dtype, None, 1, work.flops, 0.0, moved, 0, False, work, strategy)
    idle = all(p is None or isinstance(p, Shard) for p in strategy.outputs)
    shared += work.fetched_bytes
    return Parts(work.op_class, work.dtype, shard.group, shard.n, 0.0, work.flops, fixed, shared, idle, work, strategy)


def _over_hosts(work: Work, strategy: Strategy) -> Parts:
    """All ranks wait for what passes the host's way out, whatever their shares."""
    assert work.node is not None
    hosts, ranks = work.node.args[2:]
    (nbytes,), shape, held = work.written, work.metas[0].shape, strategy.inputs[0]
    moved = outward_bytes(nbytes, hosts, 1 if isinstance(held, Shard) else ranks)
    blocks = held.outer if isinstance(held, Shard) and held.dim == shape.index(max(shape)) else None
    message = message_bytes(nbytes, hosts, ranks, blocks)
    return Parts(work.op_class, work.dtype, None, 1, work.flops, 0.0, moved, 0, False, work, strategy, message)


def _sum_seconds(parts: Parts, device: Device) -> float:
    """Of a sum over hosts."""
    if device.outward is None:
        raise ClusterError(f"host {device.host!r} has no network, so nothing can be summed over hosts")
    up, down, latency_s, delays = device.outward
    round_s = latency_s + delay_s(delays, parts.message_bytes)
    return device.launch_s + parts.fixed_flops * round_s + parts.fixed_bytes / min(up, down)


def parts_seconds(parts: Parts, share: float, device: Device, model: ComputeModel = DEFAULT_MODEL) -> float:
    """Seconds on ``device`` for a rank that holds ``share`` in [0, 1] of the group: as measured, if it was."""
    idle = share == 0 and parts.idle_when_empty
    if isinstance(device, MeasuredDevice):
        if idle:
            return device.empty_seconds(parts.op_class)
        work = (parts.fixed_flops + share * parts.shared_flops, parts.fixed_bytes + share * parts.shared_bytes)
        return device.call_seconds(parts.call, parts.op, parts.op_class, parts.dtype_name, share, work)
    if idle or parts.op_class == "view":
        return 0.0
    if parts.op_class == "hosts":
        return _sum_seconds(parts, device)
    arithmetic = (parts.fixed_flops + share * parts.shared_flops) / model.flops_per_s(
        device, parts.op_class, parts.dtype
    )
    traffic = (parts.fixed_bytes + share * parts.shared_bytes) / model.bytes_per_s(device, parts.op_class)
    return device.launch_s + max(arithmetic, traffic)


def parts_coefficients(
    parts: Parts, device: Device, model: ComputeModel = DEFAULT_MODEL, *, at_share: float = 0.5
) -> tuple[float, float]:
    """``(fixed_s, per_share_s)``: seconds ~ fixed_s + share * per_share_s.

    The line is the side of the roofline that is active at ``at_share``: exact around there, and nowhere more than the
    true seconds, since the maximum of two lines lies above each; except at a share of zero, where an idle rank costs
    nothing and the line still has its launch. Of a measured device it is the chord around ``at_share``.
    """
    if parts.op_class == "view" and not isinstance(device, MeasuredDevice):
        return 0.0, 0.0
    if isinstance(device, MeasuredDevice):
        low, high = max(1e-3, at_share - 0.05), min(1.0, at_share + 0.05)
        at_low, at_high = (parts_seconds(parts, share, device, model) for share in (low, high))
        slope = (at_high - at_low) / (high - low)
        return at_low - slope * low, slope
    if parts.op_class == "hosts":
        return _sum_seconds(parts, device), 0.0
    flops_per_s = model.flops_per_s(device, parts.op_class, parts.dtype)
    bytes_per_s = model.bytes_per_s(device, parts.op_class)
    arithmetic = (parts.fixed_flops / flops_per_s, parts.shared_flops / flops_per_s)
    traffic = (parts.fixed_bytes / bytes_per_s, parts.shared_bytes / bytes_per_s)
    fixed, slope = max(arithmetic, traffic, key=lambda line: line[0] + at_share * line[1])
    return device.launch_s + fixed, slope


def node_seconds(
    graph: Graph,
    node: Node,
    strategy: Strategy,
    sizes: GroupSizes,
    device: Device,
    rank: int,
    model: ComputeModel = DEFAULT_MODEL,
) -> float:
    """Seconds that ``rank`` spends in the node on ``device``."""
    parts = split_work(node_work(graph, node), strategy)
    return parts_seconds(parts, _share(parts, sizes, rank), device, model)


def node_coefficients(
    graph: Graph,
    node: Node,
    strategy: Strategy,
    device: Device,
    model: ComputeModel = DEFAULT_MODEL,
    *,
    at_share: float = 0.5,
) -> tuple[float, float]:
    """``parts_coefficients`` of a node. To ask for many devices or strategies, keep ``node_work`` and use the parts."""
    return parts_coefficients(split_work(node_work(graph, node), strategy), device, model, at_share=at_share)


def _share(parts: Parts, sizes: GroupSizes, rank: int) -> float:
    return 1.0 if parts.group is None else sizes[parts.group][rank] / parts.n


@dataclass(frozen=True, eq=False)
class Calls:
    """The work of a graph's nodes, found once for every strategy that anybody asks about. ``batches``: of a step of the
    optimizer; a sum over hosts that is made once a step is a part of one for each."""

    graph: Graph
    batches: Batches = ONE
    _work: dict[str, Work] = field(default_factory=dict, repr=False)
    _parts: dict[tuple[str, int], Parts] = field(default_factory=dict, repr=False)
    _kinds: dict[tuple[str, int, bool], int] = field(default_factory=dict, repr=False)
    _alike: dict[object, int] = field(default_factory=dict, repr=False)

    def parts(self, name: str, strategy: Strategy) -> Parts:
        """The work of a node as the strategy divides it."""
        key = (name, id(strategy))  # to hash a strategy takes longer; it is kept by its parts, and so is its id
        if key not in self._parts:
            if name not in self._work:
                self._work[name] = node_work(self.graph, self.graph.by_name[name])
            self._parts[key] = self._of_a_batch(name, split_work(self._work[name], strategy))
        return self._parts[key]

    def _of_a_batch(self, name: str, parts: Parts) -> Parts:
        part = self.batches.part(Value(name)) if parts.op_class == "hosts" else 1.0
        if part == 1.0:
            return parts
        return replace(parts, fixed_flops=part * parts.fixed_flops, fixed_bytes=part * parts.fixed_bytes)

    @cached_property
    def of_the_last(self) -> Calls:
        """The work of a step's last batch, which makes these sums."""
        return self if self.batches is ONE else Calls(self.graph)

    def kind(self, name: str, strategy: Strategy, *, measured: bool) -> int:
        """A number that is the same for calls that take as long at the same sizes. ``measured``: calls of as much work
        may take different times."""
        key = (name, id(strategy), measured)
        if key not in self._kinds:
            parts = self.parts(name, strategy)
            self._kinds[key] = self._alike.setdefault((parts, parts.call if measured else ""), len(self._alike))
        return self._kinds[key]


@dataclass(frozen=True)
class ComputeTable:
    """All devices at once: ``seconds`` gives one number per rank. Equals ``parts_seconds`` rank by rank."""

    devices: Sequence[Device]
    model: ComputeModel = DEFAULT_MODEL
    _rates: dict[tuple[OpClass, torch.dtype], tuple[Array, Array]] = field(default_factory=dict, init=False, repr=False)
    _sums: dict[Parts, Array] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def is_measured(self) -> bool:
        return any(isinstance(d, MeasuredDevice) for d in self.devices)

    @cached_property
    def launch_s(self) -> Array:
        return np.array([d.launch_s for d in self.devices])

    def rates(self, kind: OpClass, dtype: torch.dtype) -> tuple[Array, Array]:
        """(FLOP/s, bytes/s) of every rank."""
        if (kind, dtype) not in self._rates:
            flops = np.array([self.model.flops_per_s(d, kind, dtype) for d in self.devices])
            self._rates[kind, dtype] = flops, np.array([self.model.bytes_per_s(d, kind) for d in self.devices])
        return self._rates[kind, dtype]

    def _sum_seconds(self, parts: Parts) -> Array:
        """Of a sum over hosts, on every rank, whatever their shares."""
        if parts not in self._sums:
            self._sums[parts] = np.array([_sum_seconds(parts, d) for d in self.devices])
        return self._sums[parts]

    def seconds(self, parts: Parts, shares: Array) -> Array:
        """Seconds of every rank, given every rank's share of ``parts.group`` (ones if it has none)."""
        if self.is_measured:
            pairs = zip(shares.tolist(), self.devices, strict=True)
            return np.array([parts_seconds(parts, share, device, self.model) for share, device in pairs])
        if parts.op_class == "view":
            return np.zeros(len(self.devices))
        if parts.op_class == "hosts":
            return self._sum_seconds(parts)
        flops_per_s, bytes_per_s = self.rates(parts.op_class, parts.dtype)
        arithmetic = (parts.fixed_flops + shares * parts.shared_flops) / flops_per_s
        traffic = (parts.fixed_bytes + shares * parts.shared_bytes) / bytes_per_s
        seconds: Array = self.launch_s + np.maximum(arithmetic, traffic)
        return seconds * (shares > 0) if parts.idle_when_empty else seconds

    def of_many(self, calls: Sequence[Parts], shares: Array) -> Array:
        """``seconds`` of so many calls (C, N) by shares (C, N)."""
        if self.is_measured:
            return np.array([self.seconds(parts, row) for parts, row in zip(calls, shares, strict=True)])
        kinds: dict[tuple[OpClass, torch.dtype], int] = {}
        by_rate = [parts.op_class not in ("view", "hosts") for parts in calls]
        rows = [
            kinds.setdefault((parts.op_class, parts.dtype), len(kinds) + 1) if counts else 0
            for parts, counts in zip(calls, by_rate, strict=True)
        ]
        no_rate = np.full(len(self.devices), np.inf)
        rates = [(no_rate, no_rate), *(self.rates(*kind) for kind in kinds)]
        flops, shared_flops, nbytes, shared_bytes = np.array(
            [(p.fixed_flops, p.shared_flops, p.fixed_bytes, p.shared_bytes) for p in calls], dtype=np.float64
        ).T[:, :, None]
        arithmetic = (flops + shares * shared_flops) / np.array([flops_per_s for flops_per_s, _ in rates])[rows]
        traffic = (nbytes + shares * shared_bytes) / np.array([bytes_per_s for _, bytes_per_s in rates])[rows]
        seconds: Array = self.launch_s + np.maximum(arithmetic, traffic)
        idle = np.array([p.idle_when_empty for p in calls])[:, None] & (shares <= 0)
        seconds = np.where(idle | ~np.array(by_rate)[:, None], 0.0, seconds)
        for row, parts in enumerate(calls):
            if parts.op_class == "hosts":
                seconds[row] = self._sum_seconds(parts)
        return seconds
