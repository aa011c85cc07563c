"""Timing operator calls as programs make them: local shapes, the layout in memory that the graph gives, every share.

A *call* is one operator on given shapes and literals, sharded in one way (``Parts.call``). Of each distinct call of a
graph the seconds are measured at a few shares of its group, on random tensors of this rank's local shapes, so that the
kernels are those that a plan would run. Values keep the order of dims in memory that they have in the whole graph (a
transposed view stays transposed).
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hap.codegen.call import map_leaves
from hap.cost_models.compute import Parts, split_work
from hap.cost_models.fit import Timing
from hap.cost_models.profile import ProfileError
from hap.cost_models.work import node_work
from hap.graph import Graph, Node, Value
from hap.ops import FROM_ONE, resolve, takes_device
from hap.placement import GroupSizes, LocalSize, Placement, Shard, concrete_shape
from hap.plan import Strategy
from hap.rules.localize import localize
from hap.runtime.emulate import Core

SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)  # of a group; the whole is measured by the replicated call
REPEATS = 5
TRIES = 3
TOO_NOISY = 0.5  # median spread (median absolute deviation over median) of a rank's calls, or of the links
FILLER = 1 << 24  # float32 elements that a GPU is kept busy with, about 50 us of an H100
BUSY_S = 2e-4  # beside the host's time: what recording events takes, with room to spare
ENOUGH_S = 4e-3  # of one call: after this long and three times, no more repeats


@dataclass(frozen=True)
class Clock:
    """How seconds of compute are read on a device.

    *Emulated* (``slowdown`` given): CPU time of this thread times the slow-down, the least of the repeats, since
    neighbours on the core only add: what ``hap.runtime.emulate`` and the testbed's deadlines stretch. With a ``core``,
    by which the emulation's seconds are those of a core of full speed, the median of the repeats, each times what
    ``factor`` said before. Otherwise the median of the repeats: wall time on a CPU; on a GPU the longer of what the
    host takes to start a call and what the stream takes to run it, since one goes on while the other does. ``once``,
    which is for whole steps, has both as they come.
    """

    device: torch.device
    slowdown: float | None = None
    core: Core | None = None

    def seconds(self, call: Callable[[], object], repeats: int = REPEATS) -> tuple[float, float]:
        """(seconds, spread) of a call, after one to warm up; the spread is median absolute deviation over median."""
        call()
        factor = self.factor()
        samples: list[float] = []
        while len(samples) < repeats and (len(samples) < 3 or sum(samples) < ENOUGH_S):
            samples.append(self.sample(call))
        middle = statistics.median(samples)
        spread = statistics.median(abs(s - middle) for s in samples) / max(middle, 1e-9)
        return self.of(samples) * factor, spread

    def factor(self) -> float:
        """What samples taken now are to be multiplied by."""
        return 1.0 if self.core is None else self.core.factor()

    def sample(self, call: Callable[[], object]) -> float:
        """``once``, again if the clock stood still meanwhile, as virtual machines' do now and then. ProfileError if it
        goes on standing."""
        once = self._either if self.device.type == "cuda" else self.once
        for _ in range(TRIES):
            if (seconds := once(call)) > 0:
                return seconds
        raise ProfileError("the clock stands still while calls run: nothing can be measured here")

    def _either(self, call: Callable[[], object]) -> float:
        """On a GPU: the host's seconds of a call, or, if longer, the stream's, all of it queued before it begins."""
        torch.cuda.synchronize(self.device)
        begun = time.perf_counter()
        call()
        host_s = time.perf_counter() - begun
        torch.cuda.synchronize(self.device)
        _busy(self.device, 2 * host_s + BUSY_S)
        return max(host_s, self.once(call))

    def of(self, samples: Sequence[float]) -> float:
        """The seconds that samples of ``once`` stand for."""
        if self.slowdown is None:
            return statistics.median(samples)
        return self.slowdown * (min(samples) if self.core is None else statistics.median(samples))

    def once(self, call: Callable[[], object]) -> float:
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3
        now = time.perf_counter if self.slowdown is None else time.thread_time
        start = now()
        call()
        return now() - start


def _busy(device: torch.device, seconds: float) -> None:
    """Queue about so much work, so that what follows is queued before its turn comes."""
    filler, each_s = _filler(device)
    for _ in range(math.ceil(seconds / each_s)):
        filler.add_(1.0)


@functools.lru_cache
def _filler(device: torch.device) -> tuple[torch.Tensor, float]:
    """A tensor, and the seconds that adding to it takes."""
    filler, begin, end = torch.zeros(FILLER, device=device), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    filler.add_(1.0)
    begin.record()
    for _ in range(REPEATS):
        filler.add_(1.0)
    end.record()
    end.synchronize()
    return filler, float(begin.elapsed_time(end)) / 1e3 / REPEATS


def distinct_calls(
    graph: Graph, candidates: Mapping[str, Sequence[Strategy]]
) -> dict[str, tuple[Node, Strategy, Parts]]:
    """Every distinct call of the graph under the strategies that its nodes may take; views apart."""
    found: dict[str, tuple[Node, Strategy, Parts]] = {}
    for node in graph.nodes:
        if node.is_source:
            continue
        work = node_work(graph, node)
        if work.op_class == "view":
            continue
        for strategy in candidates[node.name]:
            parts = split_work(work, strategy)
            found.setdefault(parts.call, (node, strategy, parts))
    return found


def time_calls(
    graph: Graph, candidates: Mapping[str, Sequence[Strategy]], clock: Clock, shares: Sequence[float] = SHARES
) -> Iterator[Timing]:
    """Seconds of every distinct call, at each of ``shares`` (whole atoms, at least one) where it is sharded."""
    layouts = memory_layouts(graph)
    for call, (node, strategy, parts) in distinct_calls(graph, candidates).items():
        for share, sizes in local_sizes(parts, shares):
            run = local_call(graph, node, strategy, sizes, layouts, clock.device)
            seconds, spread = clock.seconds(run)
            flops = parts.fixed_flops + share * parts.shared_flops
            nbytes = parts.fixed_bytes + share * parts.shared_bytes
            yield Timing(call, node.op, parts.op_class, parts.dtype_name, share, flops, nbytes, seconds, spread)


def local_sizes(parts: Parts, shares: Sequence[float]) -> Iterator[tuple[float, GroupSizes]]:
    """The shares, rising, that a call is timed at: whole atoms, at least one; all of it where it has no group."""
    if parts.group is None:
        yield 1.0, {}
        return
    for atoms in sorted({max(1, round(share * parts.n)) for share in shares}):
        yield atoms / parts.n, {parts.group: (atoms,)}


def local_call(
    graph: Graph,
    node: Node,
    strategy: Strategy,
    sizes: GroupSizes,
    layouts: Mapping[Value, Layout],
    device: torch.device,
) -> Callable[[], object]:
    """A function without arguments that runs the node on tensors of the local shapes."""
    args, kwargs = localize(node, strategy, graph)
    made = iter(
        [
            _local_input(graph, value, placement, sizes, layouts[value], device)
            for value, placement in zip(node.inputs, strategy.inputs, strict=True)
        ]
    )
    if node.op in FROM_ONE:
        made = iter([x if x.is_floating_point() else x + 1 for x in made])

    def leaf(item: Any) -> Any:
        return next(made) if isinstance(item, Value) else item.at(sizes, 0) if isinstance(item, LocalSize) else item

    function = resolve(node.op)
    positional = tuple(map_leaves(arg, leaf) for arg in args)
    keywords = {key: map_leaves(arg, leaf) for key, arg in kwargs}
    if takes_device(node.op):
        keywords["device"] = device
    return lambda: function(*positional, **keywords)


@dataclass(frozen=True)
class Layout:
    """How a value lies in memory: its dims from the outermost in, and those that an ``expand`` repeats; its dtype on a
    GPU, if another (statistics of norms in bfloat16 are float32 there, as on the meta device)."""

    order: tuple[int, ...]
    repeated: tuple[int, ...] = field(default=())
    on_gpu: torch.dtype | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        order = sorted(range(tensor.dim()), key=lambda d: (-tensor.stride()[d], d))
        repeated = tuple(d for d in range(tensor.dim()) if tensor.stride(d) == 0 and tensor.shape[d] > 1)
        return cls(tuple(order), repeated, tensor.dtype)

    def make(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of this shape and order: normal numbers, zeros where they may be indices, or true."""
        if device.type == "cuda" and self.on_gpu is not None:
            dtype = self.on_gpu
        stored = [1 if d in self.repeated else shape[d] for d in self.order]
        if dtype.is_floating_point:
            flat = torch.randn(stored, device=device).to(dtype)
        else:
            flat = (
                torch.ones(stored, dtype=dtype, device=device)
                if dtype == torch.bool
                else torch.zeros(stored, dtype=dtype, device=device)
            )
        return flat.permute([self.order.index(d) for d in range(len(shape))]).expand(tuple(shape))


def memory_layouts(graph: Graph) -> dict[Value, Layout]:
    """The layout of every value when the whole graph runs, found on the meta device."""
    held: dict[Value, torch.Tensor] = {}
    found: dict[Value, Layout] = {}
    for node in graph.nodes:
        if node.is_source:
            results: Sequence[Any] = [torch.empty(node.meta.shape, dtype=node.meta.dtype, device="meta")]
        else:
            results = _on_meta(node, held)
        for index, (meta, result) in enumerate(zip(node.outputs, results, strict=False)):
            if meta is not None:
                held[Value(node.name, index)] = result
                found[Value(node.name, index)] = Layout.of(result)
    return found


def _on_meta(node: Node, held: Mapping[Value, torch.Tensor]) -> Sequence[Any]:
    """The outputs on the meta device. Operators of our own have no meta kernel of their device: contiguous outputs."""
    if node.op.startswith("hap."):
        return [None if m is None else torch.empty(m.shape, dtype=m.dtype, device="meta") for m in node.outputs]
    leaf = lambda item: held[item] if isinstance(item, Value) else item  # noqa: E731
    keywords = {key: map_leaves(arg, leaf) for key, arg in node.kwargs}
    if takes_device(node.op):
        keywords["device"] = torch.device("meta")
    result = resolve(node.op)(*(map_leaves(arg, leaf) for arg in node.args), **keywords)
    return result if isinstance(result, (tuple, list)) else [result]


def _local_input(
    graph: Graph, value: Value, placement: Placement, sizes: GroupSizes, layout: Layout, device: torch.device
) -> torch.Tensor:
    meta = graph.meta(value)
    shape = concrete_shape(meta.shape, placement, sizes, 0) if isinstance(placement, Shard) else meta.shape
    return layout.make(shape, meta.dtype, device)
