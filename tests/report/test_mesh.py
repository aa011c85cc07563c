"""What is told about plans of two axes: in words, as a page, as differences, and played."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import hap
from hap import api
from hap.cluster import ClusterSpec
from hap.errors import HapError, PlanError
from hap.guard import judge
from hap.mesh_plan import MeshPlan
from hap.plan import Plan
from hap.report.diff import diff
from hap.report.measured import Measured
from hap.report.mesh import plans_inside, summarize_mesh
from hap.report.mesh_page import render_mesh_page
from tests.report.test_page import browser, needs_chromium

HOST = """
  - name: {name}
    devices: [{{name: {gpu}, count: {count}, tflops: {{float32: {tflops}}}, memory: 2GB, memory_bandwidth: 80GB/s}}]
    link: {{bandwidth: 4GB/s, latency: 10us}}
    network: {{bandwidth: {network}, latency: 50us}}
"""


def cluster(*counts: int, network: str = "1GB/s") -> ClusterSpec:
    """The first host's devices are twice as fast."""
    hosts = ""
    for i, count in enumerate(counts):
        gpu, tflops = ("slow", 0.01) if i else ("fast", 0.02)
        hosts += HOST.format(name=f"h{i}", gpu=gpu, tflops=tflops, count=count, network=network)
    return ClusterSpec.from_yaml(f"name: unequal\nbackend: gloo\nhosts:{hosts}")


@cache
def planned(*counts: int, network: str = "1GB/s", mesh: bool = True) -> Plan | MeshPlan:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)), torch.empty(481, 64)
    given = {"example_inputs": x, "loss_fn": torch.sum, "effort": "quick"}
    on = cluster(*counts, network=network)
    return hap.plan_mesh(model, on, **given) if mesh else hap.plan(model, on, **given)


def of_two(*counts: int, network: str = "1GB/s") -> MeshPlan:
    plan = planned(*counts, network=network)
    assert isinstance(plan, MeshPlan)
    return plan


def test_hosts_that_differ_in_their_place_alone_are_told_about_once() -> None:
    plan = of_two(2, 1, 1)
    assert [names for _, _, names in plans_inside(plan)] == [["h0"], ["h1", "h2"]]
    said = summarize_mesh(plan)
    assert said.count("--- plan ") == 2 and "--- plan 1, inside h1 and h2;" in said
    assert [line.split()[-1] for line in said.splitlines() if re.match(r"h\d ", line)] == ["0", "1", "1"]


def test_ranks_are_those_of_the_job_and_memory_is_of_what_they_have() -> None:
    rows = [line.split() for line in summarize_mesh(of_two(2, 1, 1)).splitlines() if line.endswith(" of 2 GB")]
    assert [row[:2] for row in rows] == [["0", "h0/fast#0"], ["1", "h0/fast#1"], ["2-3", "2"]]
    assert rows[2][2:4] == ["x", "slow"]


def test_ranks_have_names_and_memory_in_order() -> None:
    plan = of_two(2, 1, 1)
    assert plan.devices == ("h0/fast#0", "h0/fast#1", "h1/slow#0", "h2/slow#0")
    inside = [plan.inside_of(h).predicted.memory_bytes for h in range(3)]
    assert plan.memory_bytes == (*inside[0], *inside[1], *inside[2])


def test_every_plan_inside_explains_itself() -> None:
    for inside in of_two(2, 1).inside:
        assert inside.explanation is not None and inside.explanation.as_run is not None
        assert inside.explanation.as_run.step_s == pytest.approx(inside.predicted.as_run_s, rel=1e-6)


# ---- differences


def test_a_plan_is_the_same_as_itself() -> None:
    assert str(diff(of_two(2, 1), of_two(2, 1))) == "the same plan"


def test_another_network_changes_figures_and_no_decision() -> None:
    found = diff(of_two(2, 1), of_two(2, 1, network="500MB/s"))
    figures = {n.name: n for n in found.numbers}
    assert all(figures[name].after > figures[name].before for name in ("sums over hosts", "predicted step"))
    assert found.decisions == () and str(found).endswith("every decision is the same")


def test_hosts_that_come_and_go_are_named() -> None:
    found = diff(of_two(2, 1, 1), of_two(2, 1))
    assert "hosts: h2 gone" in found.decisions
    (parts,) = [line for line in found.decisions if line.startswith("batch between hosts: ")]
    before, after = (plan.batch.sizes for plan in (of_two(2, 1, 1), of_two(2, 1)))
    assert parts.endswith(f"became {after[0]} on h0 and {after[1]} on h1") and f"{before[2]} on h2 became" in parts
    back = diff(of_two(2, 1), of_two(2, 1, 1))
    assert "hosts: h2 new" in back.decisions


def test_what_changes_inside_of_hosts_alike_is_told_once() -> None:
    plan = of_two(2, 1, 1)
    changed = {"recomputed": ({"block": "layer", "what": "cheap", "calls": ("relu",)},)}
    insides = tuple(Plan.model_validate(p.model_dump() | (changed if p.world_size == 1 else {})) for p in plan.inside)
    (line,) = diff(plan, plan.model_copy(update={"inside": insides})).decisions
    assert line == "inside h1 and h2: computed again in the backward pass: nothing; now 1 call of 1 block"


def test_from_one_axis_to_two() -> None:
    flat, two = planned(2, 1, mesh=False), of_two(2, 1)
    found = diff(flat, two)
    assert found.decisions == ("a plan of one axis became a plan of two, with batch dealt out between h0 and h1",)
    (back,) = diff(two, flat).decisions
    assert back == "a plan of two, with batch dealt out between h0 and h1 became a plan of one axis"
    figures = {n.name for n in found.numbers}
    assert {"predicted step", "sums over hosts"} <= figures and not {"lower bound", "busiest rank's compute"} & figures


# ---- guards


def changed(plan: MeshPlan, step: float = 1.0, memory: int = 0) -> MeshPlan:
    predicted = plan.predicted.model_copy(update={"overlapped_s": plan.predicted.as_run_s * step})
    last = plan.inside[-1]
    told = last.predicted.model_copy(update={"memory_bytes": tuple(m + memory for m in last.predicted.memory_bytes)})
    insides = (*plan.inside[:-1], last.model_copy(update={"predicted": told}))
    return plan.model_copy(update={"predicted": predicted, "inside": insides})


@pytest.mark.parametrize(
    ("step", "memory", "says"),
    [
        (1.0, 0, ""),
        (0.5, 0, ""),
        (1.03, 0, r"the step grew by 3.0%, from .* \(at most 2.0% allowed\)"),
        (1.0, 1 << 20, r"memory of h1/slow#0 grew by .* of its 2 GB \(at most 0.0% allowed\)"),
    ],
)
def test_step_and_memory_are_guarded(step: float, memory: int, says: str) -> None:
    golden = of_two(2, 1)
    found = judge("x", golden, changed(golden, step, memory), max_step_regression=0.02, max_memory_regression=0.0)
    assert found.ok == (not says) and re.fullmatch(says, "\n".join(found.reasons))


def test_hosts_left_out_are_another_cluster() -> None:
    golden = of_two(2, 1)
    found = judge(
        "x", golden, golden.model_copy(update={"left_out": ("h9",)}), max_step_regression=9, max_memory_regression=9
    )
    (reason,) = found.reasons
    assert reason == "the golden plan leaves out nothing of cluster 'unequal', this one host h9; update it"


# ---- page


@needs_chromium
def test_a_browser_draws_the_figures_of_every_plan_inside(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_mesh_page(of_two(2, 1, 1), Measured((0, 1), (0.1, 0.2))))
    drawn = browser(page, "--dump-dom")
    body = drawn[drawn.index("<main>") :]
    titles = re.findall("<h[12]>(.*?)</h[12]>", body)
    assert titles[:3] == ["Sequential on unequal", "Predicted and measured", "Hosts"]
    assert [t for t in titles if t.startswith("Plan ")] == ["Plan 0, inside h0", "Plan 1, inside h1 and h2"]
    assert titles.count("Timeline") == titles.count("Layers") == 2
    assert body.count('class="main-svg"') >= 1 + 2 * 4


def test_the_page_says_what_the_text_says() -> None:
    plan = of_two(2, 1)
    narrow = {"reduce_dtype": "bfloat16", "solver": {"stopped": True}}
    insides = tuple(p.model_copy(update={"provenance": p.provenance.model_copy(update=narrow)}) for p in plan.inside)
    made = plan.provenance.model_copy(update={"solver": {"stopped": True}})
    assert plan.explanation is not None
    hosts = [{**host, "price_per_hour": 1.5} for host in plan.explanation.cluster["hosts"]]
    told = plan.explanation.model_copy(update={"cluster": {**plan.explanation.cluster, "hosts": hosts}})
    changes = {"inside": insides, "provenance": made, "left_out": ("h9",), "explanation": told}
    page = render_mesh_page(plan.model_copy(update=changes))
    page = page[page.index("<main>") :]
    assert "<p>left out: h9; start the job on the other hosts</p>" in page
    assert "<p>the search was interrupted: another run may find another plan</p>" in page
    assert page.count("<p>gradients are exchanged in bfloat16</p>") == 2
    assert "<b>3.00</b><span>an hour, all hosts</span>" in page


def test_without_plotly_a_page_of_two_axes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "plotly" or n == "hap.report.figures"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("hap.report.figures", raising=False)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(HapError, match=r"^hap report needs plotly: pip install plotly$"):
        render_mesh_page(of_two(2, 1))


def test_a_plan_without_timelines_is_refused() -> None:
    plan = of_two(2, 1)
    bare = plan.model_copy(update={"inside": tuple(p.model_copy(update={"explanation": None}) for p in plan.inside)})
    with pytest.raises(PlanError, match="holds no timelines; plan again"):
        render_mesh_page(bare)


# ---- played


def test_played_together_hosts_take_as_long_as_the_plan_says() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)), torch.empty(481, 64)
    plan, given = of_two(2, 1), {"example_inputs": x, "loss_fn": torch.sum}
    found = api.simulate(model, plan, cluster(2, 1), **given)
    assert found.devices == plan.devices
    assert plan.predicted.as_run_s == pytest.approx(found.step_s, rel=1e-6)
    sums = [s for s in found.spans if s.kind == "hosts_sum"]
    assert {s.rank for s in sums} == {0, 1, 2} and len({(s.name, s.start_s) for s in sums}) == len(sums) / 3
    with pytest.raises(PlanError, match="'unequal'"):
        api.simulate(model, plan, cluster(2, 2), **given)
