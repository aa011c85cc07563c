"""What a reader is told about a plan, on a plan made by hand."""

import pytest

from hap.cluster import ClusterSpec
from hap.plan import Conversion, GroupPlan, Plan, Prediction, Provenance
from hap.report.summary import COPIED, GATHERED, OWNED, SPLIT, batch_group, parameter_lines, parameter_uses, summarize
from hap.report.words import counted, listed, percent, quantity, ranks_in_words, seconds, sizes_in_words, table
from tests.report.plans import cluster_of_1024, thousand

CLUSTER = """
name: pair
backend: gloo
hosts:
  - name: box
    devices:
      - {name: fast, tflops: {float32: 2}, memory: 16MB, memory_bandwidth: 10GB/s}
      - {name: slow, tflops: {float32: 1}, memory: 1MB, memory_bandwidth: 5GB/s}
    link: {bandwidth: 1GB/s, latency: 50us}
"""


def conversion(value: str, source: str, target: str, collective: str, nbytes: int) -> Conversion:
    return Conversion.model_validate(
        {
            "value": value,
            "source": source,
            "target": target,
            "phase": "forward",
            "collective": collective,
            "decomposition": "",
            "nbytes": nbytes,
        }
    )


@pytest.fixture
def plan() -> Plan:
    """A batch of 8 dealt 6 + 2; one parameter copied, two layers' weights gathered, one pair of shards used as such."""
    row, column = "S(0:1x8x4@rows)", "S(1:1x4x2@heads)"
    return Plan(
        provenance=Provenance(
            model="toy",
            model_fingerprint="m",
            parameters=1000,
            cluster="pair",
            cluster_fingerprint="c",
            world_size=2,
            backend="gloo",
            rules_fingerprint="r",
            hap_version="0",
            torch_version="2",
            optimizer="adamw",
        ),
        groups={
            "batch": GroupPlan(n=8, label="batch", sizes=(6, 2)),
            "rows": GroupPlan(n=8, label="rows", sizes=(5, 3)),
            "heads": GroupPlan(n=4, label="h.0.attn.weight dim 1", sizes=(3, 1)),
        },
        strategies={
            "i_args_0": "-> S(0:1x8x1@batch)",
            "p_norm_weight": "-> R",
            "p_h_0_mlp_weight": f"-> {row}",
            "p_h_1_mlp_weight": f"-> {row}",
            "p_h_0_attn_weight": f"-> {column}",
            "mm_1": "S(0:1x8x1@batch), R -> S(0:1x8x1@batch)",
            "mm_2": "R, S(1:1x4x2@heads) -> S(1:1x4x2@heads)",
            "mm_3": "S(0:1x8x1@batch), S(0:1x8x1@batch) -> P",
            "sum_1": "R -> R",
        },
        conversions=(
            conversion("p_h_0_mlp_weight", row, "R", "all_gather", 1500),
            conversion("p_h_1_mlp_weight", row, "R", "all_gather", 1500),
            conversion("mm_1", "P", "R", "all_reduce", 64),
            conversion("mm_1", "R", "S(0:1x8x1@batch)", "slice", 64),
        ),
        predicted=Prediction(
            step_s=0.012,
            compute_s=(0.009, 0.0085),
            communication_s=0.003,
            memory_bytes=(5_000_000, 950_000),
            memory_by_kind=({"parameters": 2500}, {"parameters": 1500}),
            lower_bound_s=0.0108,
            tight="memory of box/slow#0",
        ),
        devices=("box/fast#0", "box/slow#0"),
    )


def test_words_come_from_placements(plan: Plan) -> None:
    assert [(u.pattern, u.words) for u in parameter_uses(plan)] == [
        ("norm_weight", COPIED),
        ("h.*_mlp_weight", GATHERED),
        ("h.*_mlp_weight", GATHERED),
        ("h.*_attn_weight", SPLIT),
    ]


def test_what_one_rank_has_all_of_is_told_apart(plan: Plan) -> None:
    groups = {**plan.groups, "rows": plan.groups["rows"].model_copy(update={"sizes": (0, 8)})}
    uses = parameter_uses(plan.model_copy(update={"groups": groups}))
    assert [u.words for u in uses] == [COPIED, OWNED, OWNED, SPLIT]


def test_of_alike_layers_it_is_told_how_many_are_so(plan: Plan) -> None:
    """A plan may keep a weight of every second layer whole."""
    strategies = {**plan.strategies, "p_h_1_mlp_weight": "-> R"}
    conversions = tuple(c for c in plan.conversions if c.value != "p_h_1_mlp_weight")
    mixed = plan.model_copy(update={"strategies": strategies, "conversions": conversions})
    assert [" ".join(line.split()) for line in parameter_lines(mixed)] == [
        f"2 {COPIED}: norm_weight and 1 of 2 h.*_mlp_weight",
        f"1 {GATHERED}: 1 of 2 h.*_mlp_weight",
        f"1 {SPLIT}: h.*_attn_weight",
    ]


def test_the_batch_is_the_group_of_that_name(plan: Plan) -> None:
    assert batch_group(plan) == "batch"
    assert batch_group(plan.model_copy(update={"groups": {"rows": plan.groups["rows"]}})) is None


def test_the_whole_summary(plan: Plan) -> None:
    sizes = {"norm.weight": 20, "h.0.mlp.weight": 1600, "h.1.mlp.weight": 1600, "h.0.attn.weight": 800}
    assert summarize(plan, ClusterSpec.from_yaml(CLUSTER), sizes).splitlines() == [
        "toy: 1 k parameters, adamw, on 2 devices of cluster 'pair' (gloo)",
        "predicted step: 12 ms; no plan of one axis can take less than 10.8 ms (proved, gap 10.0%)",
        "",
        "rank  device       batch    busy     parameters  memory",
        "   0  box/fast#0  6 of 8    9 ms  2.62 kB (65%)  5 MB of 16 MB",  # 20 + 3200 * 5 / 8 + 800 * 3 / 4
        "   1  box/slow#0  2 of 8  8.5 ms  1.42 kB (35%)  950 kB of 1 MB",
        "",
        "what is dealt out:",
        "  batch                          6 + 2  2 calls",
        "  h.*.attn.weight dim 1          3 + 1  1 call",
        "  not dealt: done by every rank         1 call",
        "",
        "parameters:",
        "  2 sharded, gathered for use (ZeRO, FSDP):  h.*_mlp_weight",
        "  1 copied on every rank:                    norm_weight",
        "  1 used in shards (tensor parallel):        h.*_attn_weight",
        "",
        "box/fast#0, the fastest device, takes 75% of the batch",
        "box/slow#0 is full: 95% of its memory",
        "",
        "collectives a step: 2 all_gather (3 kB), 1 all_reduce (64 B)",
        "time: 9 ms of compute on the busiest rank, 3 ms of communication",
        "what limits it: memory of box/slow#0",
    ]


@pytest.mark.parametrize("sizes", [None, {"norm.weight": 20}])
def test_without_the_models_parameters_it_says_what_the_ledger_counts(plan: Plan, sizes: dict[str, int] | None) -> None:
    rows = summarize(plan, None, sizes).splitlines()[3:5]
    assert rows[0].split("  ")[-2:] == ["parameters and inputs", "memory"] and "2.5 kB  5 MB" in rows[1]


def test_where_every_device_does_everything_it_says_that_one_would_do(plan: Plan) -> None:
    whole = {name: "R -> R" if "->" in s and not s.startswith("->") else "-> R" for name, s in plan.strategies.items()}
    strategies = {**whole, "mm_1": "R, R -> R", "mm_2": "R, R -> R", "mm_3": "R, R -> R"}
    alone = plan.model_copy(update={"strategies": strategies, "groups": {}, "conversions": ()})
    said = "nothing is dealt out: every device computes the whole step; box/slow#0 alone would take 8.5 ms"
    assert said in summarize(alone).splitlines()
    assert "nothing is dealt out" not in summarize(plan)


def test_without_a_proof_no_gap_is_printed(plan: Plan) -> None:
    unproved = plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"lower_bound_s": None})})
    text = summarize(unproved)
    assert "proved" not in text and "gap" not in text


def test_the_step_as_it_is_run_comes_first(plan: Plan) -> None:
    predicted = plan.predicted.model_copy(update={"overlapped_s": 0.011})
    lines = summarize(plan.model_copy(update={"predicted": predicted})).splitlines()
    assert lines[1] == "predicted step: 11 ms as it is run"
    assert lines[2] == "nothing overlapped: 12 ms; no plan of one axis can take less than 10.8 ms (proved, gap 10.0%)"


def test_what_is_proved_of_the_step_as_it_is_run_stands_beside_it(plan: Plan) -> None:
    predicted = plan.predicted.model_copy(update={"overlapped_s": 0.01, "overlapped_bound_s": 0.0092})
    line = summarize(plan.model_copy(update={"predicted": predicted})).splitlines()[1]
    least = "no plan of one axis runs in less than 9.2 ms on these devices (proved, gap 8.0%)"
    assert line == f"predicted step: 10 ms as it is run; {least}"


def test_a_shorter_plan_by_the_clock_of_the_bound_is_named(plan: Plan) -> None:
    """12 ms with nothing overlapped, and another plan of 11: 1 - 10.8 / 11 of it may be left."""

    def lines(**solver: float) -> list[str]:
        predicted = plan.predicted.model_copy(update={"overlapped_s": 0.0105})
        made = plan.provenance.model_copy(update={"solver": {**plan.provenance.solver, **solver}})
        return summarize(plan.model_copy(update={"predicted": predicted, "provenance": made})).splitlines()

    told = "by that clock another plan that was found is shorter, 11 ms (gap 1.8%); this one was chosen as it is run"
    assert lines(least_step_s=0.011)[3] == told
    assert not any("by that clock" in line for line in (*lines(), *lines(least_step_s=0.012)))


def test_a_thousand_devices_are_told_by_kind() -> None:
    lines = summarize(thousand(), cluster_of_1024()).splitlines()
    assert len(lines) < 40 and max(map(len, lines)) < 140
    found = [line.split()[:5] for line in lines if " x " in line and " of 8192 " in line]
    assert found == [
        ["0-255", "256", "x", "A100-40GB", "12"],
        ["256-511", "256", "x", "A100-40GB", "11"],
        ["512-767", "256", "x", "V100-16GB", "7"],
        ["768-1023", "256", "x", "T4", "2"],
    ]
    assert "of the batch go 72% to 512 A100-40GB, 22% to 256 V100-16GB and 6% to 256 T4" in lines
    assert any(" x 11 + " in line and line.strip().startswith("batch") for line in lines)


def test_sizes_of_many_ranks_are_runs() -> None:
    assert sizes_in_words((3, 0, 1)) == "3 + 0 + 1"
    assert sizes_in_words((5,) * 10 + (2,) + (4,) * 9) == "10 x 5 + 2 + 9 x 4"
    assert sizes_in_words(tuple(range(20))) == "0 + 1 + 2 + 3 + 4 + 5 + 14 more ranks"


def test_a_device_left_out_is_named(plan: Plan) -> None:
    groups = {**plan.groups, "batch": GroupPlan(n=8, label="batch", sizes=(8, 0))}
    text = summarize(plan.model_copy(update={"groups": groups}))
    assert "box/slow#0 gets no part of the batch" in text


def test_quantities() -> None:
    assert [seconds(s) for s in (0, -1e-19, 2.5e-8, 8.52e-5, 0.4123, 1.374, 4000)] == [
        "0 s",
        "0 s",
        "25 ns",
        "85.2 us",
        "412 ms",
        "1.37 s",
        "4000 s",
    ]
    assert [quantity(q, "B") for q in (0, 7, 12_000, 3_290_000, 64e9)] == ["0 B", "7 B", "12 kB", "3.29 MB", "64 GB"]
    assert quantity(3_290_000) == "3.29 M" and quantity(7) == "7"
    assert percent(1, 3) == "33%" and percent(1, 0) == "-"


def test_lists_and_tables() -> None:
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert listed(["a", "b", "c"], limit=2) == "a, b and 1 more"
    assert ranks_in_words([0, 1, 2, 8]) == "0-2, 8"
    assert ranks_in_words([r for r in range(36) if r % 4 < 3]) == "0-2, 4-6, 8-10, 12-14, 16-18, 20-22 and 9 more"
    assert counted(1, "layer") == "1 layer" and counted(2, "layer") == "2 layers"
    assert table([["a", "bb"], ["ccc", "d"]], right=(1,)) == ["a    bb", "ccc   d"]
