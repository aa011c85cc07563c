"""The planner finds what a person would: data parallel, sharded state, no work for a useless device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.conversion import find_needs
from hap.cost_models.evaluate import evaluate
from hap.errors import InfeasibleError, PlanError
from hap.graph import Graph
from hap.placement import REPLICATE, Shard
from hap.plan import Plan, Strategy, verify_plan
from hap.rules.choices import choices
from hap.search import Pins, plan_graph
from hap.search.limits import Effort
from tests.search.models import cluster, gpt2, mlp

ROOT = Path(__file__).parents[2]


def placements(plan: Plan, kind: str) -> dict[str, object]:
    """Qualified name or path -> placement, of the MLP's sources of one kind."""
    return {n.target: plan.strategy(n.name).outputs[0] for n in graph_of(plan).sources(kind)}


def graph_of(plan: Plan) -> Graph:
    return next(c.graph for c in KNOWN if c.graph.fingerprint == plan.provenance.model_fingerprint)


COMPUTE_BOUND = mlp(batch=4096, width=512)
STATE_BOUND = mlp(batch=8, width=2048)
KNOWN = [COMPUTE_BOUND, STATE_BOUND]


def test_finds_data_parallel_in_proportion_to_speed_where_compute_dominates() -> None:
    plan = plan_graph(COMPUTE_BOUND, cluster((10, "16GB"), (5, "16GB"), (5, "16GB"), network="50GB/s"))
    assert all(p == REPLICATE for p in placements(plan, "parameter").values())
    (x,) = set(placements(plan, "input").values())
    assert isinstance(x, Shard) and x.dim == 0
    sizes = plan.groups[x.group].sizes
    assert sum(sizes) == 4096
    assert sizes[0] == pytest.approx(2048, rel=0.1) and sizes[1] == pytest.approx(sizes[2], rel=0.05)
    assert {c.collective for c in plan.conversions} <= {"all_reduce", "slice"}


def test_shards_state_where_replicas_do_not_fit() -> None:
    state = 4 * sum(n.meta.nbytes for n in STATE_BOUND.graph.sources("parameter"))  # parameter, gradient, 2 of AdamW
    assert state == pytest.approx(134e6, rel=0.01)
    plan = plan_graph(STATE_BOUND, cluster((10, "100MB"), (10, "100MB"), (10, "50MB")))
    assert any(isinstance(p, Shard) for p in placements(plan, "parameter").values())
    assert all(m <= 0.9 * c for m, c in zip(plan.predicted.memory_bytes, (100e6, 100e6, 50e6), strict=True))


def test_replicates_everything_where_talking_costs_more_than_computing() -> None:
    plan = plan_graph(mlp(batch=4, width=16), cluster((10, "1GB"), (10, "1GB"), network="1MB/s", latency="10ms"))
    assert plan.conversions == () and plan.groups == {}


def test_a_device_too_slow_to_help_gets_nothing() -> None:
    plan = plan_graph(COMPUTE_BOUND, cluster((10, "16GB"), (10, "16GB"), (0.001, "16GB"), network="50GB/s"))
    batch = next(g for g in plan.groups.values() if g.label == "batch")
    assert batch.sizes == (2048, 2048, 0)


def test_one_device_needs_no_collective() -> None:
    plan = plan_graph(COMPUTE_BOUND, cluster((10, "16GB")))
    assert [c for c in plan.conversions if c.collective != "slice"] == [] and plan.predicted.communication_s == 0


def test_says_what_an_update_makes_where_the_state_fits_without() -> None:
    """Of 134 MB a quarter, in 144 MB; on CPUs it is none."""
    said = r"adamw state need 134\.2.*MB, and its update 33\.5.*MB; the device holds 144MB"
    on = cluster((10, "160MB"))
    with pytest.raises(InfeasibleError, match=said):
        plan_graph(STATE_BOUND, on)
    plan_graph(STATE_BOUND, on.model_copy(update={"backend": "gloo"}))


def test_says_in_numbers_what_does_not_fit() -> None:
    with pytest.raises(InfeasibleError, match=r"gradients and adamw state need 134\.2.*MB; the 2 devices hold 36MB"):
        plan_graph(STATE_BOUND, cluster((10, "20MB"), (10, "20MB")))
    with pytest.raises(
        InfeasibleError, match=r"^8\.39M parameters, their gradients and .* need .*hold 36MB .*\(2 gpu\)$"
    ):
        plan_graph(STATE_BOUND, cluster((10, "20MB"), (10, "20MB")))
    with pytest.raises(InfeasibleError, match=r"; the device holds 18MB after the reserve \(1 gpu\)$"):
        plan_graph(STATE_BOUND, cluster((10, "20MB")))
    with pytest.raises(InfeasibleError, match=r"devices hold 99MB"):
        plan_graph(STATE_BOUND, cluster((10, "55MB"), (10, "55MB")))


def test_says_what_the_fullest_device_lacks_in_the_plan_that_comes_nearest() -> None:
    """20 MB are enough for each of four devices, and one device would need more than three times as much for all."""
    with pytest.raises(
        InfeasibleError, match=r"^host0/gpu#0 would need 19\.67.*MB and has 10\.8MB in the closest plan"
    ):
        plan_graph(COMPUTE_BOUND, cluster(*[(10, "12MB")] * 4))
    assert max(plan_graph(COMPUTE_BOUND, cluster(*[(10, "30MB")] * 4)).predicted.memory_bytes) < 20e6


class Turned(nn.Module):
    """Attention over what was turned in part, as in GPT-NeoX: here all of it, and nothing is left as it was."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.heads, self.turned = heads, width // heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.into(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        first, second = q[..., : self.turned].chunk(2, -1)
        q = torch.cat((torch.cat((-second, first), -1), q[..., self.turned :]), -1)
        mixed = torch.softmax(q @ q.transpose(-1, -2), -1) @ q
        return self.out(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("effort", ["quick", "normal"])
def test_a_value_without_elements_is_planned(effort: Effort) -> None:
    with torch.device("meta"):
        model, x = Turned(64, 4), torch.empty(4, 8, 64)
    graph = capture(model, x, loss_fn=nn.functional.mse_loss, example_targets=x, name="turned")
    assert any(meta is not None and meta.nbytes == 0 for node in graph.nodes for meta in node.outputs)
    plan = plan_graph(choices(graph), ClusterSpec.load(ROOT / "examples" / "cluster-4.yaml"), effort=effort)
    verify_plan(plan)
    assert 0 < plan.predicted.lower_bound_s <= plan.predicted.step_s


class TestPins:
    CLUSTER = cluster((10, "16GB"), (5, "16GB"))

    def test_data_parallel(self) -> None:
        pins = Pins(placements={"*": "R", "args.0": "S(0)", "targets.0": "S(0)"}, ratios=(3, 1))
        plan = plan_graph(STATE_BOUND, self.CLUSTER, pins=pins)
        assert set(placements(plan, "parameter").values()) == {REPLICATE}
        assert all(isinstance(p, Shard) for p in placements(plan, "input").values())
        assert {g.sizes for g in plan.groups.values() if g.n == 8} == {(6, 2)}

    def test_zero(self) -> None:
        plan = plan_graph(COMPUTE_BOUND, self.CLUSTER, pins=Pins(placements={"*": "S(0)"}))
        assert all(isinstance(p, Shard) and p.dim == 0 for p in placements(plan, "parameter").values())

    def test_one_tensor_and_one_group(self) -> None:
        pins = Pins(placements={"*.weight": "S(1)", "0.weight": "S(0)"}, sizes={"0.weight dim 0": (500, 12)})
        plan = plan_graph(COMPUTE_BOUND, self.CLUSTER, pins=pins)
        first, second = (placements(plan, "parameter")[f"{i}.weight"] for i in (0, 2))
        assert isinstance(first, Shard) and first.dim == 0 and plan.groups[first.group].sizes == (500, 12)
        assert isinstance(second, Shard) and second.dim == 1

    @pytest.mark.parametrize(
        ("pins", "message"),
        [
            (Pins(placements={"9.weight": "R"}), "'9.weight' matches no parameter and no input"),
            (Pins(placements={"0.weight": "Shard"}), "none of R, S"),
            (Pins(placements={"0.bias": "S(1)"}), "0.bias cannot be S.1."),
            (Pins(sizes={"batch": (4000, 95)}), "that sum to 4096"),
            (Pins(sizes={"nothing": (1, 1)}), "matches no dimension group"),
            (Pins(ratios=(1, 1, 1)), "must be 2 numbers"),
            (Pins(ratios=(1, -1)), "must be 2 numbers"),
        ],
    )
    def test_refuses_in_one_line(self, pins: Pins, message: str) -> None:
        with pytest.raises((PlanError, InfeasibleError), match=message) as caught:
            plan_graph(COMPUTE_BOUND, self.CLUSTER, pins=pins)
        assert "\n" not in str(caught.value)


def uneven() -> ClusterSpec:
    return cluster((20, "1GB"), (10, "500MB"), (5, "250MB"), network="12GB/s", latency="20us")


def test_a_plan_is_what_the_judge_says_it_is() -> None:
    found = gpt2(layers=2)
    plan = plan_graph(found, uneven())
    verify_plan(plan)
    strategies = {name: Strategy.parse(text) for name, text in plan.strategies.items()}
    assert all(s in found.strategies[name] for name, s in strategies.items())
    regather = plan.provenance.solver["regather"]
    assert [str(n.value) for n in find_needs(found.graph, strategies, regather=regather)] == [
        c.value for c in plan.conversions
    ]
    judged = evaluate(found.graph, strategies, plan.sizes, uneven(), regather=regather)
    assert judged.step_s == plan.predicted.step_s
    assert judged.memory_bytes == plan.predicted.memory_bytes
    assert plan.predicted.lower_bound_s is not None and 0 < plan.predicted.lower_bound_s <= judged.step_s
    assert Plan.from_json(plan.to_json()) == plan


def test_plans_are_byte_identical_whatever_the_hash_seed_and_the_threads() -> None:
    script = (
        "from hap.search import plan_graph\n"
        "from tests.search.models import cluster, mlp\n"
        "c = cluster((10, '100MB'), (10, '100MB'), (10, '50MB'))\n"
        "print(plan_graph(mlp(batch=8, width=2048), c).checksum)"
    )
    here = plan_graph(STATE_BOUND, cluster((10, "100MB"), (10, "100MB"), (10, "50MB"))).checksum
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    threads = "2" if os.environ.get("OMP_NUM_THREADS") != "2" else "1"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == here


def test_without_assertions_plans_are_the_same_to_the_byte() -> None:
    """``python -O`` leaves out what stands in assertions."""
    code = "from tests.search.models import cluster, gpt2; from hap.search import plan_graph; import sys; "
    code += "sys.stdout.write(plan_graph(gpt2(1), cluster((2, '16GB'), (1, '16GB'), network='1GB/s')).to_json())"
    found = [
        subprocess.run([sys.executable, *flags, "-c", code], cwd=ROOT, check=True, capture_output=True).stdout
        for flags in ([], ["-O"])
    ]
    assert found[0] == found[1] and len(found[0]) > 1000
