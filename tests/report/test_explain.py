"""What is told about a plan: its explanation adds up to its prediction, and every figure is where a reader looks."""

import json
import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from hap import cli
from hap.cluster import ClusterSpec
from hap.codegen.lowering import lower
from hap.cost_models.evaluate import evaluate
from hap.errors import HapError
from hap.plan import Conversion, GroupPlan, Plan
from hap.report.diff import diff
from hap.report.explain import explain, paragraph
from hap.report.explanation import layer_of, needs_of, strategies_of
from hap.report.facts import Facts
from hap.report.node import explain_node, find_node
from hap.report.traffic import between, traffic_bytes
from hap.report.words import ranks_in_words
from hap.search.judge import default_passes, played
from hap.whatif import better_clusters, faster_devices, faster_network, shorter_latency
from tests.report.plans import cluster_of_four, four, thousand
from tests.test_language import small_plan


def test_the_stages_add_up_to_the_predicted_step() -> None:
    for plan in (four()[0], thousand()):
        told = plan.explanation
        assert told is not None
        step_s = sum(max(s.compute_s) + s.wire_s for s in told.stages)
        assert step_s == pytest.approx(plan.predicted.step_s, rel=2e-3)
        for ranks, row in zip(told.classes, Facts(plan).devices, strict=True):
            busy = sum(s.compute_s[told.classes.index(ranks)] for s in told.stages)
            assert busy == pytest.approx(plan.predicted.compute_s[ranks[0]], rel=2e-3) == row.busy_s
        assert sum(told.conversion_s[i] for i in _wires(plan)) == pytest.approx(
            plan.predicted.communication_s, rel=2e-3
        )


def _wires(plan: Plan) -> list[int]:
    return [i for i, c in enumerate(plan.conversions) if c.collective != "slice"]


def test_the_layers_are_the_models_and_hold_its_parameters() -> None:
    plan, graph, _ = four()
    told = plan.explanation
    assert told is not None
    assert [layer.name for layer in told.layers][:3] == ["0", "1", "2"]
    nbytes = sum(n.meta.nbytes for n in graph.sources("parameter"))
    assert sum(layer.parameter_bytes for layer in told.layers) == nbytes
    assert sum(sum(layer.calls.values()) for layer in told.layers) == sum(not n.is_source for n in graph.nodes)


def test_a_thousand_devices_are_four_rows() -> None:
    facts = Facts(thousand())
    assert [(row.kind, len(row.ranks)) for row in facts.devices] == [
        ("A100-40GB", 256),
        ("A100-40GB", 256),
        ("V100-16GB", 256),
        ("T4", 256),
    ]
    assert len(explain(thousand()).splitlines()) < 40


def test_the_step_as_it_is_run_is_that_of_the_program() -> None:
    """Every class is busy for what its calls take, nobody after the end, and the wire carries one thing at a time. It
    is shorter than the same program without passes, played by the same rules; the step with nothing overlapped counts
    no calls of packing and may be shorter still."""
    plan, graph, _ = four()
    assert plan.explanation is not None and plan.explanation.as_run is not None
    run = plan.explanation.as_run
    program = lower(graph, plan)
    timeline = played(graph, plan, program, cluster_of_four())
    passes = [p.name for p in default_passes(program, cluster_of_four())]
    assert run.step_s == pytest.approx(timeline.step_s) == pytest.approx(plan.predicted.as_run_s)
    assert run.step_s < played(graph, plan, program, cluster_of_four(), off=passes).step_s
    for ranks, row in zip(plan.explanation.classes, run.busy_s, strict=True):
        assert sum(b - a for a, b in zip(row[::2], row[1::2], strict=True)) == pytest.approx(
            timeline.busy_s[ranks[0]], rel=1e-4
        )
        assert row[-1] <= run.step_s * (1 + 1e-6)
    for before, after in pairwise(run.wire):
        assert after.start_s >= before.start_s + before.wire_s - 1e-6 * run.step_s
    assert sum(s.values for s in run.wire) == sum(len(s.name.split(", ")) for s in timeline.spans if s.rank is None)


def test_a_manager_reads_one_paragraph() -> None:
    said = paragraph(Facts(four()[0]))
    assert said.startswith(
        "mlp (1.05 M parameters) is trained on 4 devices of cluster 'four': 2 fast, 1 medium and 1 slow. "
        "One step is predicted to take "
    )
    assert "The cluster costs 4.00 an hour" in said and "\n" not in said
    assert "no plan of one axis for all of these devices can take less than" in said
    assert re.search(r"What would help most: [a-z0-9% ]+, by \d+% of a step\.", said)
    assert re.search(r"no plan of one axis runs in less than [0-9.]+ [mu]s on these devices\.", said)


def test_a_plan_of_version_1_is_explained_without_times() -> None:
    said = explain(small_plan())
    assert "made by an older HAP" in said and "what would help" not in said


def test_layers_end_at_their_number() -> None:
    assert [layer_of(m) for m in ("transformer.h.11.attn.c_attn", "lm_head", "")] == [
        "transformer.h.11",
        "lm_head",
        "(model)",
    ]
    assert ranks_in_words((0, 1, 2, 5, 8, 9)) == "0-2, 5, 8-9"


class TestWhatHelps:
    def test_what_helps_is_judged_by_the_cost_model(self) -> None:
        """Twice the network, shares as they are, is an upper bound of what the plan says."""
        plan, graph, _ = four()
        strategies = strategies_of(plan)
        faster = faster_network(cluster_of_four(), 2.0)
        needs = needs_of(plan, graph, strategies)
        same = evaluate(graph, strategies, plan.sizes, faster, needs=needs).step_s
        assert plan.explanation is not None
        said = {h.change: h.step_s for h in plan.explanation.helps}
        assert said["twice the bandwidth between hosts"] <= same * 1.001 < plan.predicted.step_s
        assert list(said.values()) == sorted(said.values())

    def test_edits_change_what_they_say_and_nothing_else(self) -> None:
        cluster = cluster_of_four()
        edited = faster_devices(cluster, "slow", 1.25)
        assert [d.tflops["float32"] for d in edited.devices] == [2.0, 2.0, 1.0, 0.625]
        assert edited.devices[3].memory_bytes == cluster.devices[3].memory_bytes
        assert edited.link(0, 2) == cluster.link(0, 2)
        assert faster_network(cluster, 2.0, "small").link(0, 2).bandwidth_bytes_per_s == 1e9
        assert shorter_latency(cluster).link(0, 2).latency_s == 25e-6
        assert all(make().world_size == 4 for _, make in better_clusters(cluster))

    def test_a_catalogue_device_keeps_its_other_numbers(self) -> None:
        cluster = ClusterSpec.from_yaml("name: one\nhosts: [{name: a, devices: [{gpu: T4}]}]\n")
        edited = faster_devices(cluster, "T4", 2.0).devices[0]
        assert edited.tflops["float16"] == 2 * cluster.devices[0].tflops["float16"]
        assert edited.memory_bytes == cluster.devices[0].memory_bytes


class TestNode:
    def test_the_chosen_one_is_the_plan_and_differences_are_evaluations(self) -> None:
        plan, graph, found = four()
        name = find_node(graph, "0.weight").name
        report = explain_node(plan, graph, cluster_of_four(), found.strategies[name], "0.weight")
        (chosen,) = [a for a in report.alternatives if a.chosen]
        assert chosen.step_s == pytest.approx(plan.predicted.step_s) and not chosen.new and not chosen.gone
        whole = next(a for a in report.alternatives if a.strategy == "-> R")
        assert whole.step_s is not None and whole.step_s > plan.predicted.step_s
        assert "why: the next best" in str(report) and "every other decision stays" in str(report)
        json.dumps(report.to_json())

    def test_what_neighbours_cannot_feed_has_no_time(self) -> None:
        plan, graph, found = four()
        partial = next(n.name for n in graph.nodes if n.op == "aten.mm.default" and "P" in plan.strategies[n.name])
        user = graph.users[next(v for v in graph.users if v.node == partial)][0][0]
        report = explain_node(plan, graph, cluster_of_four(), found.strategies[user.name], user.name)
        assert any(a.step_s is None and a.why_not for a in report.alternatives)

    def test_a_name_that_is_none(self) -> None:
        with pytest.raises(HapError, match=r"no node '0\.wieght' in the graph; perhaps 0\.weight"):
            find_node(four()[1], "0.wieght")


class TestDiff:
    def test_the_same(self) -> None:
        assert str(diff(small_plan(), small_plan())) == "the same plan"

    def test_words_and_numbers(self) -> None:
        old = small_plan()
        groups = {"g0": GroupPlan(n=8, label="batch", sizes=(4, 3, 1))}
        predicted = old.predicted.model_copy(update={"step_s": 1.0})
        new = old.model_copy(update={"groups": groups, "predicted": predicted})
        found = diff(old, new)
        assert found.decisions == ("batch: 5 + 2 + 1 became 4 + 3 + 1",)
        assert [(n.name, n.change) for n in found.numbers] == [("predicted step", -0.5)]
        assert str(found).splitlines()[0].split() == ["predicted", "step", "2", "s", "->", "1", "s", "-50.0%"]
        assert json.loads(json.dumps(found.to_json()))["same"] is False

    def test_the_bound_of_the_step_as_it_is_run(self) -> None:
        old = small_plan()
        predicted = old.predicted.model_copy(update={"overlapped_s": 1.0, "overlapped_bound_s": 0.5})
        found = diff(old, old.model_copy(update={"predicted": predicted}))
        assert [(n.name, n.before, n.after) for n in found.numbers if "bound" in n.name] == [
            ("lower bound as run", 0.0, 0.5)
        ]

    def test_what_it_was_made_for(self) -> None:
        old = small_plan()
        made = old.provenance.model_copy(update={"cluster_fingerprint": "e", "optimizer": "sgd"})
        said = str(diff(old, old.model_copy(update={"provenance": made})))
        assert "another cluster: c (f) became c (e)" in said and "optimizer: adamw became sgd" in said
        assert "every decision is the same" in said

    def test_collectives_that_are_performed_otherwise(self) -> None:
        plan = four()[0]
        ways = {"all_reduce": "ring", "all_gather": "two_level"}
        old, new = (
            plan.model_copy(
                update={
                    "conversions": tuple(
                        c.model_copy(update={"decomposition": way or ways.get(c.collective, c.decomposition)})
                        for c in plan.conversions
                    )
                }
            )
            for way in (None, "pairs")
        )
        kinds = Counter(c.collective for c in plan.conversions if c.collective in ways)
        found = [line for line in diff(old, new).decisions if "now by pairs" in line]
        assert kinds and {f"{n} {kind} performed by {ways[kind]}; now by pairs" for kind, n in kinds.items()} <= {
            *found
        }
        assert "every decision is the same" not in str(diff(old, new))

    def test_group_names_alone_are_no_difference(self) -> None:
        old = small_plan()
        renamed = {name: text.replace("@g0", "@g7") for name, text in old.strategies.items()}
        new = old.model_copy(update={"groups": {"g7": old.groups["g0"]}, "strategies": renamed})
        assert diff(old, new).decisions == ()


class TestTraffic:
    def plan(self, **changes: str) -> Plan:
        """A value of 80 bytes dealt 5 + 2 + 1, converted once."""
        one = {"value": "mm", "source": "S(0:1x8x1@g0)", "target": "R", "phase": "forward", "decomposition": "pairs"}
        conversion = Conversion.model_validate({**one, "collective": "all_gather", "nbytes": 80, **changes})
        return small_plan().model_copy(update={"conversions": (conversion,)})

    @pytest.mark.parametrize(
        ("decomposition", "expected"),
        [
            ("pairs", [[0, 50, 50], [20, 0, 20], [10, 10, 0]]),
            ("all_to_all", [[0, 50, 50], [20, 0, 20], [10, 10, 0]]),
            ("ring", [[0, 60, 0], [0, 0, 70], [30, 0, 0]]),
            ("padded", [[0, 100, 0], [0, 0, 100], [100, 0, 0]]),
            ("relay[0]", [[0, 60, 70], [20, 0, 0], [10, 0, 0]]),
        ],
    )
    def test_all_gather(self, decomposition: str, expected: list[list[float]]) -> None:
        np.testing.assert_allclose(traffic_bytes(self.plan(decomposition=decomposition)), expected)

    def test_the_others(self) -> None:
        scatter = self.plan(
            source="P", target="S(0:1x8x1@g0)", collective="reduce_scatter", decomposition="all_to_all_sum"
        )
        np.testing.assert_allclose(traffic_bytes(scatter), [[0, 20, 10], [50, 0, 10], [50, 20, 0]])
        ring = self.plan(source="P", collective="all_reduce", decomposition="ring")
        np.testing.assert_allclose(traffic_bytes(ring).sum(), 4 * 80)
        owners = self.plan(source="P", collective="all_reduce", decomposition="owners[0]")
        np.testing.assert_allclose(traffic_bytes(owners), [[0, 80, 80], [80, 0, 0], [80, 0, 0]])

    def test_classes_add_up(self) -> None:
        matrix = traffic_bytes(self.plan())
        np.testing.assert_allclose(between(matrix, ((0, 1), (2,))), [[70, 70], [20, 0]])

    def test_a_way_that_does_not_exist(self) -> None:
        with pytest.raises(HapError, match="has no decomposition 'magic'"):
            traffic_bytes(self.plan(decomposition="magic"))


def test_json_of_everything(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    four()[0].save(tmp_path / "a.plan.json")
    for arguments in (["explain", "a.plan.json"], ["diff", "a.plan.json", "a.plan.json"]):
        with pytest.raises(SystemExit):
            cli.main([arguments[0], *(str(tmp_path / a) for a in arguments[1:]), "--json"])
        assert json.loads(capsys.readouterr().out)
