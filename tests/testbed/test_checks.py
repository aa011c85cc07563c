"""What ``testbed_check.py`` and ``postponed.py`` ask of a bed."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import postponed, testbed_check
from benchmarks.common import Spread
from benchmarks.testbed.layout import GOODPUT
from hap.cluster import ClusterSpec
from hap.runtime.emulate import HostRate


def test_without_a_group_of_its_own_the_quota_alone_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def paced(bed: str, function: Any, variant: str, *others: Any) -> list[list[float]]:
        assert bed == "deadline" and variant != "quota"
        return [[1.0, 1.0, 1.1], [1.0] * 3, [2.0] * 3, [2.0] * 3]

    seen = Spread.of([1.0, 2.0])
    monkeypatch.setattr(testbed_check.network, "missing", lambda: None)
    monkeypatch.setattr(testbed_check.cgroup, "find", lambda: None)
    monkeypatch.setattr(testbed_check, "measure_links", lambda *_: {(0, 1): seen})
    monkeypatch.setattr(
        testbed_check, "measure_collectives", lambda *_: {(k, 4 << 20): seen for k in ("all_reduce", "all_gather")}
    )
    monkeypatch.setattr(testbed_check, "Testbed", lambda cluster, mode: nullcontext(mode))
    monkeypatch.setattr(testbed_check.Rounds, "__call__", lambda self, *given: paced(*given))
    assert testbed_check.main(["--out", str(tmp_path)]) == 0
    body = json.loads((tmp_path / "testbed.json").read_text())
    assert {"link_worst_error", "deadline_step_spread", "throttle_ratio_error"} < set(body["figures"])
    assert set(body["absent"]) == {"quota_step_spread", "quota_run_spread", "quota_ratio_error"}


def test_links_are_shaped_to_the_nominal_rate_and_told_as_they_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    class BedError(Exception):
        pass

    beds, told = list[ClusterSpec](), list[ClusterSpec]()

    def bed(cluster: ClusterSpec) -> None:
        beds.append(cluster)
        raise BedError

    def plan(found: Any, cluster: ClusterSpec, **others: Any) -> Any:
        told.append(cluster)
        return SimpleNamespace(to_json=str, postponed={}, model_copy=lambda update: plan(found, cluster))

    built = SimpleNamespace(model=None, example_inputs=None, loss_fn=None, example_targets=None)
    monkeypatch.setattr(postponed, "cut", lambda *_: built)
    for name in ("capture", "choices"):
        monkeypatch.setattr(postponed, name, lambda *_, **__: None)
    monkeypatch.setattr(postponed, "plan_graph", plan)
    monkeypatch.setattr(postponed, "Testbed", bed)
    with pytest.raises(BedError):
        postponed.run(2048, 100, HostRate(1e9, 1e9, 1e-6), 1, 1)
    up = [(c.network("h0") or (0.0,))[0] for c in (beds[0], told[0])]
    assert up == pytest.approx([12.5e6, 12.5e6 * GOODPUT], rel=1e-4)
