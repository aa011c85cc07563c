"""Calibration: what ``hap profile`` runs on every rank. From the running job to a ``Profile``.

1. every rank times the distinct operator calls of the given graphs, under every strategy and at a few shares
   (``profile_ops``), the optimizer's update, and what a step takes beside its calls (``profile_step``);
2. together they time links in both directions (``profile_wire``);
3. with those links in the formulas, every collective by every decomposition, evenly and unevenly dealt;
4. rank 0 pools what equal devices found, fits, and tells all.

Where devices are emulated (``slowdown`` given), compute is CPU time times this rank's slow-down, as the emulation
stretches it. A measurement that is too noisy is refused: ``TOO_NOISY``.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hap.cluster import ClusterSpec
from hap.cost_models.fit import (
    CopyTiming,
    Timing,
    call_curves,
    fit_collectives,
    fit_copies,
    fit_steps,
    fit_timings,
    fit_update,
    pool,
    with_products,
)
from hap.cost_models.optimizers import KINDS, newton_schulz_flops
from hap.cost_models.profile import DeviceKind, LinkProfile, Profile, ProfileError, RankProfile, UpdateFit
from hap.graph import Graph
from hap.plan import Strategy
from hap.runtime.collectives import Communicator
from hap.runtime.emulate import Core
from hap.runtime.profile_ops import TOO_NOISY, Clock, time_calls
from hap.runtime.profile_step import GraphTiming, ShareTiming, overheads, rested, time_graph, time_share
from hap.runtime.profile_wire import measure_collectives, measure_links

MATRICES = ((64, 64), (256, 1024), (512, 2048))  # float32, whose update by Muon is timed
SAME_KIND = 0.1  # a rank whose calls take this much more or less than its kind's has a factor of its own

Candidates = Mapping[str, Sequence[Strategy]]


def measure(
    cluster: ClusterSpec,
    comm: Communicator,
    graphs: Sequence[tuple[Graph, Candidates]],
    *,
    optimizers: Sequence[str] = ("adamw", "sgd"),
    slowdown: float | None = None,
    core: Core | None = None,
    conditions: Sequence[str] = (),
) -> Profile:
    """Calibrate the cluster on its running ranks; the same profile on every rank. Collective. ``slowdown`` and ``core``
    are those of emulated devices (``Clock``).

    ProfileError if what was measured is too noisy to use; ClusterError if the job has not one rank for each device.
    """
    cluster.check_world_size(comm.world_size)
    started = time.perf_counter()
    clock = Clock(comm.device, slowdown, core)
    timings = [t for graph, candidates in graphs for t in time_calls(graph, candidates, clock)]
    makers = {name: functools.partial(make_optimizer, name) for name in optimizers}
    around = {name: overheads(clock, make) for name, make in makers.items()}
    calls = {t.call: t.seconds for t in timings if t.share == 1.0}
    together = functools.partial(rested, comm.device) if comm.world_size > 1 else _alone
    steps = [time_graph(graph, calls, clock, makers, together) for graph, _ in graphs]
    parts = [time_share(graph, candidates, timings, clock, together) for graph, candidates in graphs]
    muon = time_muon(clock) if "muon" in optimizers else None
    memory = torch.cuda.get_device_properties(comm.device).total_memory if comm.device.type == "cuda" else None
    links = measure_links(comm.device) if comm.world_size > 1 else ()
    bare = _profile(
        cluster,
        [_Rank(timings, around, steps, parts, [], memory, muon)] * cluster.world_size,
        links,
        (),
        (),
        slowdown,
        0.0,
    )
    wire, copies = measure_collectives(bare.calibrate(cluster), comm, clock) if comm.world_size > 1 else ((), ())
    everyone = comm.gather_objects(_Rank(timings, around, steps, parts, list(copies), memory, muon))
    found = _profile(cluster, everyone, links, wire, conditions, slowdown, time.perf_counter() - started)
    text = comm.from_rank_zero(found.model_dump_json())
    profile = Profile.model_validate_json(text)
    _check_noise(profile)
    return profile


@dataclass(frozen=True)
class _Rank:
    """What one rank found: calls; (per step, per parameter) seconds by optimizer; whole graphs; shares; copies."""

    timings: list[Timing]
    around: dict[str, tuple[float, float]]
    steps: list[GraphTiming]
    parts: list[ShareTiming]
    copies: list[CopyTiming]
    memory_bytes: int | None
    muon: list[float] | None  # seconds of an update of ``MATRICES``


def _alone(rest_s: float) -> None:
    """A single rank waits for nobody."""


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    """torch's optimizer of one of the names that plans know (``cost_models.memory``)."""
    match name:
        case "adamw" | "muon":  # of Muon what it is not for; its products are measured by themselves
            return torch.optim.AdamW(parameters, lr=1e-3)
        case "adam":
            return torch.optim.Adam(parameters, lr=1e-3)
        case "sgd":
            return torch.optim.SGD(parameters, lr=1e-3)
        case "sgd+momentum":
            return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
        case "adafactor":
            return torch.optim.Adafactor(parameters, lr=1e-3)
    raise ProfileError(f"unknown optimizer {name!r} (known: {', '.join(KINDS)})")


def time_muon(clock: Clock) -> list[float]:
    """Seconds of an update of each of ``MATRICES``."""
    found = []
    for shape in MATRICES:
        matrix = torch.nn.Parameter(torch.randn(shape, device=clock.device))
        matrix.grad = torch.randn(shape, device=clock.device)
        found.append(clock.seconds(torch.optim.Muon([matrix], lr=1e-3).step)[0])
    return found


def _profile(
    cluster: ClusterSpec,
    everyone: Sequence[_Rank],
    links: tuple[LinkProfile, ...],
    wire: Any,
    conditions: Sequence[str],
    slowdown: float | None,
    seconds: float,
) -> Profile:
    kinds: dict[object, list[int]] = {}
    for d in cluster.devices:
        numbers = (d.gpu, tuple(d.tflops.items()), d.memory_bandwidth_bytes_per_s, d.launch_s)
        kinds.setdefault(numbers, []).append(d.rank)
    made: list[DeviceKind] = []
    ranks: dict[int, RankProfile] = {}
    for members in kinds.values():
        pooled, factors = pool([everyone[r].timings for r in members])
        for rank, factor in zip(members, factors, strict=True):
            spread = statistics.median([t.spread for t in everyone[rank].timings] or [0.0])
            own = factor if abs(factor - 1) > SAME_KIND else 1.0
            ranks[rank] = RankProfile(device=cluster.devices[rank].name, kind=len(made), factor=own, spread=spread)
        equals = [everyone[r] for r in members]
        made.append(_kind(cluster.devices[members[0]].gpu, pooled, equals))
    return Profile(
        cluster=cluster.name,
        cluster_fingerprint=cluster.fingerprint,
        backend=cluster.backend,
        torch_version=torch.__version__,
        conditions=tuple(conditions),
        kinds=tuple(made),
        ranks=tuple(ranks[r] for r in range(cluster.world_size)),
        links=links,
        collectives=fit_collectives(wire),
        seconds_taken=seconds,
    )


def _kind(name: str, pooled: list[Timing], members: Sequence[_Rank]) -> DeviceKind:
    ran = [*zip(*(m.steps for m in members), strict=True), *zip(*(m.parts for m in members), strict=True)]
    in_step, node_s = fit_steps(
        calls=[statistics.median(s.calls_s for s in same) for same in ran],
        nodes=[same[0].nodes for same in ran],
        seconds=[statistics.median(s.seconds for s in same) for same in ran],
    )
    empty_s = float(statistics.median(s.empty_s for m in members for s in m.parts))
    return DeviceKind(
        name=name,
        memory_bytes=members[0].memory_bytes,
        calls=call_curves(pooled),
        fits=fit_timings(pooled),
        updates={optimizer: _update(optimizer, members) for optimizer in members[0].around},
        copies=fit_copies([t for m in members for t in m.copies]),
        step_s=float(statistics.median(step_s for m in members for step_s, _ in m.around.values())),
        in_step=in_step,
        node_s=node_s,
        resume_s=float(statistics.median(s.resume_s for m in members for s in m.parts)),
        empty_s=empty_s * in_step + node_s if empty_s > 0 else 0.0,
    )


def _alike(members: Sequence[_Rank]) -> list[tuple[GraphTiming, ...]]:
    """The same graph's timings on every member, graph by graph."""
    return list(zip(*(m.steps for m in members), strict=True))


def _update(optimizer: str, members: Sequence[_Rank]) -> UpdateFit:
    each = statistics.median([m.around[optimizer][1] for m in members])
    graphs = _alike(members)
    fit = fit_update(
        parameters=[1, *(same[0].parameters for same in graphs)],
        nbytes=[0, *(same[0].nbytes for same in graphs)],
        seconds=[each, *(statistics.median([s.updates[optimizer] for s in same]) for same in graphs)],
    )
    muon = [m.muon for m in members if m.muon is not None]
    if optimizer != "muon" or not muon:
        return fit
    flops, nbytes = [newton_schulz_flops(*shape) for shape in MATRICES], [4 * math.prod(shape) for shape in MATRICES]
    return with_products(fit, flops, nbytes, [statistics.median(same) for same in zip(*muon, strict=True)])


def _check_noise(profile: Profile) -> None:
    for rank in profile.ranks:
        if rank.spread > TOO_NOISY:
            raise ProfileError(
                f"{rank.device}: repeats of the same call differ by {rank.spread:.0%}: something else runs there"
            )
    for link in profile.links:
        if link.spread > TOO_NOISY:
            raise ProfileError(
                f"link from rank {link.source} to {link.target}: repeats differ by {link.spread:.0%}; is it in use?"
            )
