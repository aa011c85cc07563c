"""Who stores how much: other shares of what inputs are not split in, where the step as run is shorter for it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from benchmarks.planning_pins import Encoder
from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.cost_models.memory import RESERVE_FRACTION
from hap.rules.choices import Choices, choices
from hap.search.found import Found
from hap.search.judge import as_run_s
from hap.search.limits import LIMITS
from hap.search.pins import Pins
from hap.search.planner import Search
from hap.search.problem import Problem
from hap.search.refine import at_sizes
from hap.search.rounding import round_shares
from hap.search.sliding import SAME
from hap.search.storing import or_stored

SHARDED = Pins(placements={"*.weight": "S(0)", "args.*": "S(0)"})


@cache
def layers() -> Choices:
    with torch.device("meta"):
        return choices(capture(Encoder(512, 3), (torch.empty(64, 64, 512),)))


HOST = """
  - name: host{0}
    devices: [{{name: gpu{0}, tflops: {{float32: {1}}}, memory: {2}MB, memory_bandwidth: {3}GB/s}}]
    network: {{bandwidth: 20GB/s, latency: 5us}}"""


def devices(megabytes: int = 16_000) -> ClusterSpec:
    """Two fast ones, the first with so much memory, and one whose memory is slow, so that its update takes long."""
    kinds = ((10, megabytes, 900), (10, 16_000, 900), (6, 16_000, 60))
    hosts = "".join(HOST.format(i, *kind) for i, kind in enumerate(kinds))
    return ClusterSpec.from_yaml(f"name: storing\nbackend: nccl\nhosts:{hosts}")


@cache
def evenly(megabytes: int = 16_000) -> tuple[Search, Found, float]:
    """The search's plan with all that inputs are not split in dealt out evenly, and its step as run."""
    search = Search(Problem.state(layers(), devices(megabytes), "adamw", SHARDED), LIMITS["normal"])
    best = search.run()
    free = stored(search, best)
    even = {name: round_shares((1, 1, 1), layers().groups[name].n) for name in free}
    best = at_sizes(search.problem, best, {**best.sizes, **even})
    return search, best, as_run_s(search.chooser, best)


def stored(search: Search, found: Found) -> list[str]:
    return [name for name in found.groups if name not in search.problem.of_inputs]


def test_a_slow_device_stores_less_where_that_is_shorter() -> None:
    search, best, best_s = evenly()
    assert stored(search, best) and best.fits
    found, seconds = or_stored(search, best, best_s)
    assert seconds is not None and seconds < best_s * (1 - SAME)
    assert seconds == pytest.approx(as_run_s(search.chooser, found), rel=1e-9)
    assert found.strategies == best.strategies and found.fits
    for name in found.sizes:
        if name in stored(search, best):
            assert found.sizes[name][2] < best.sizes[name][2] and sum(found.sizes[name]) == sum(best.sizes[name])
        else:
            assert found.sizes[name] == best.sizes[name]
    again, again_s = or_stored(search, found, seconds)
    assert (again, again_s) == (found, seconds), "nothing else is shorter"


def test_what_does_not_fit_is_not_taken() -> None:
    found = or_stored(*evenly())[0]
    held, before = (one.evaluation.memory_bytes[0] for one in (found, evenly()[1]))
    room = (held + before) // 2
    assert before < room < held
    search, best, best_s = evenly(int(room / (1 - RESERVE_FRACTION) / 1e6))
    kept, _ = or_stored(search, best, best_s)
    assert best.fits and kept.fits and kept.sizes != found.sizes


def test_pinned_sizes_and_ranks_without_a_share_stay() -> None:
    search, best, _ = evenly()
    denied = replace(best, left_out=(2,))
    nothing = {name: round_shares((1, 1, 0), layers().groups[name].n) for name in best.groups}
    denied = at_sizes(search.problem, denied, {**best.sizes, **nothing})
    found, _ = or_stored(search, denied, float("inf"))
    assert all(found.sizes[name][2] == 0 for name in found.groups)
    pins = Pins(placements=SHARDED.placements, sizes={name: best.sizes[name] for name in best.groups})
    fixed = Search(Problem.state(layers(), devices(), "adamw", pins), LIMITS["normal"])
    start = at_sizes(fixed.problem, fixed.run(), best.sizes)
    assert or_stored(fixed, start, float("inf"))[0].sizes.items() >= pins.sizes.items()
    assert or_stored(search, best, None) == (best, None)
