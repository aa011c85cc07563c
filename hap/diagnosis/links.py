"""Reading the delay matrix: C4D's rule for slow communication.

``D[s, t]`` are the seconds of a message from rank s to rank t. Beside what they should be, a hot row is a slow sender,
a hot column a slow receiver, a hot cell a slow link between the two. Means are of no use: in a small job the mean of
every column rises when one row is slow, as each column has a cell of it. So a row is hot if two of
its cells are and none contradicts: where links are unequal, a message to a slow receiver takes as long as ever, however
slow its sender has become, so a cell that is not hot contradicts only if it is quicker than those that are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hap.cluster import ClusterSpec
from hap.diagnosis.finding import Finding
from hap.diagnosis.run import Run
from hap.fabric import Array
from hap.routes import league

HOT = 1.5  # times as long as it should take
HOT_CELL = 2.0  # of a single cell, which no other one bears out
NOTICEABLE_S = 2e-3  # less is a scheduler's tick
QUICKER = 0.8  # of a hot cell's seconds: who is quicker than that is not slowed by what slows the hot one


def find_slow_links(run: Run, cluster: ClusterSpec | None) -> tuple[Finding, ...]:
    """From the last probe, beside the first one of the run or, where there is but one, beside the description."""
    if not run.probes or run.world_size < 2:
        return ()
    step, nbytes, last = run.probes[-1]
    if len(run.probes) > 1:
        first_step, _, expected = run.probes[0]
        return hot(run, last, expected, f"as after step {first_step}", since=step)
    if cluster is None:
        return ()
    expected = expected_s(cluster, nbytes)
    # A description may be off for all links alike; that is no link's fault.
    off = max(1.0, float(np.nanmedian(last / expected)))
    return hot(run, last, expected * off, "as the cluster file says" + (f", times {off:.2f}" if off > 1 else ""))


def hot(run: Run, seconds: Array, expected: Array, than: str, since: int | None = None) -> tuple[Finding, ...]:
    """The hot rows, columns and cells of one matrix."""
    others = ~np.eye(run.world_size, dtype=bool)
    ratio = np.where(others, seconds / np.where(others, expected, 1.0), 0.0)
    is_hot = others & (ratio >= HOT) & (seconds - expected >= NOTICEABLE_S)
    rows = [r for r in range(run.world_size) if _is_side(seconds[r, others[r]], is_hot[r, others[r]])]
    columns = [c for c in range(run.world_size) if _is_side(seconds[others[:, c], c], is_hot[others[:, c], c])]
    found = [_side(run, "slow sender", r, float(ratio[r].max()), than, since) for r in rows]
    found += [_side(run, "slow receiver", c, float(ratio[:, c].max()), than, since) for c in columns]
    for source, target in np.argwhere(is_hot & (ratio >= HOT_CELL)).tolist():
        if source not in rows and target not in columns:
            found.append(_cell(run, source, target, float(ratio[source, target]), than, since))
    return tuple(found)


def _is_side(seconds: Array, is_hot: NDArray[np.bool_]) -> bool:
    """Whether a row or column, without its own rank, is hot."""
    if is_hot.sum() < 2:
        return False
    return bool((seconds >= QUICKER * seconds[is_hot].min()).all())


def _side(run: Run, side: str, rank: int, factor: float, than: str, since: int | None) -> Finding:
    sends = side == "slow sender"
    way = "what it sends to any rank" if sends else "what any rank sends to it"
    return Finding(
        "slow sender" if sends else "slow receiver",
        (rank,),
        f"{run.name(rank)}: {way} takes up to {factor:.2f} times as long {than}",
        (f"a hot {'row' if sends else 'column'} of the delay matrix",),
        "its network card, its cable or port, or other traffic on its host; plan again with what was measured (-o)",
        factor=factor,
        since_step=since,
    )


def _cell(run: Run, source: int, target: int, factor: float, than: str, since: int | None) -> Finding:
    return Finding(
        "slow link",
        (source, target),
        f"{run.name(source)} to {run.name(target)}: {factor:.2f} times as long {than}",
        ("a hot cell of the delay matrix: to and from others nothing that would show it is slow",),
        "the path between the two: a switch, a route, a cable; plan again with what was measured (-o)",
        factor=factor,
        since_step=since,
    )


def expected_s(cluster: ClusterSpec, nbytes: int) -> Array:
    """(N, N): what the description says of each message of a probe, with those that are under way beside it."""
    n, fabric = cluster.world_size, cluster.fabric
    found = np.full((n, n), np.nan)
    for pairs in league(n):
        for turn in (1, -1):
            ends = np.array([pair[::turn] for pair in pairs], dtype=np.intp).T
            load = fabric.crossing(ends[0], ends[1], np.full(len(pairs), float(nbytes))) / fabric.rates
            for source, target in ends.T:
                passed = (fabric.senders[:, source] * fabric.receivers[:, target]) > 0
                slowest = float(load[passed].max(initial=0.0))
                found[source, target] = slowest + float(
                    fabric.latency_s[source, target] + fabric.latency_s[target, source]
                )
    return found
