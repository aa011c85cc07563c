"""A whole choice: stages, collectives, the update; and what must not matter."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hap.conversion import find_needs
from hap.cost_models import best_decomposition, evaluate
from hap.cost_models.optimizers import update_flops
from hap.errors import ClusterError
from hap.graph import Graph, Value, with_inputs
from hap.plan import Strategy
from tests.cost_models.build import IDEAL, P, R, cluster, data_parallel, relu_step

TWO = cluster([1000, 1000], tflops=[2e-9, 1e-9])  # 2 and 1 kFLOP/s; memory costs nothing, launches neither
SIZES = {"batch": (5, 3)}


def test_stages_by_hand() -> None:
    """relu_step in data parallel. FLOPs: a 256, relu 32, sum 32 | loss reduced | threshold 32, gw 256 | gw reduced.

    Rank 0 has 5/8 at 2 kFLOP/s, rank 1 3/8 at 1 kFLOP/s: 320 * 5/8 / 2000 = 0.1 s against 0.12 s in the first stage,
    288 * 5/8 / 2000 = 0.09 s against 0.108 s in the second. The slower rank counts in each.
    """
    found = evaluate(relu_step(), data_parallel(), SIZES, TWO, model=IDEAL)
    assert found.compute_s == pytest.approx((0.19, 0.228))
    assert found.stages_s == pytest.approx(0.228)
    reduced = [best_decomposition("all_reduce", n, P, R, SIZES, TWO)[1] for n in (4, 64)]
    assert [c.nbytes for c in found.conversions] == [4, 64]
    assert found.communication_s == pytest.approx(sum(reduced))
    assert found.step_s == pytest.approx(0.228 + sum(reduced))


def test_stages_add_the_slowest_of_each() -> None:
    """Speeds 2:1, shares 7:1: the first stage waits for rank 0, the second for rank 1.

    The first as above. Then g and gw run whole on both, 288 FLOP: 0.144 and 0.288 s.
    """
    strategies = dict(data_parallel())
    for name, inputs in {"g": 2, "xt": 1, "gw": 2, "e": 1}.items():
        strategies[name] = Strategy((R,) * inputs, (R,))
    found = evaluate(relu_step(), strategies, {"batch": (7, 1)}, TWO, model=IDEAL)
    kinds = [c.need.collective for c in found.conversions]
    assert kinds == ["all_gather", "all_gather", "all_reduce"]  # b, x, loss
    assert found.stages_s == pytest.approx(0.16 * 7 / 8 + 0.288)
    assert found.compute_s == pytest.approx((0.16 * 7 / 8 + 0.144, 0.32 / 8 + 0.288))


def test_the_update_moves_parameter_gradient_and_state() -> None:
    """AdamW on w, 64 bytes: reads p, g, m, v, writes p, m, v: 7 x 64 at 1 kB/s, and a launch. Sharded 3:1 it is 48."""
    on = cluster([1000, 1000], tflops=[1e6, 1e6], memory_bandwidth="1kB/s", launch="1s")
    whole = evaluate(relu_step(), data_parallel(), SIZES, on, model=IDEAL)
    assert whole.update_s == pytest.approx(1 + 7 * 0.064)
    sharded = evaluate(relu_step(), data_parallel(sharded_parameter=True), {**SIZES, "kept": (3, 1)}, on, model=IDEAL)
    assert sharded.update_s == pytest.approx(1 + 7 * 0.048)
    sgd = evaluate(relu_step(), data_parallel(), SIZES, on, model=IDEAL, optimizer="sgd")
    assert sgd.update_s == pytest.approx(1 + 3 * 0.064)


def test_muon_multiplies_what_it_sees_whole() -> None:
    """Five times 4 x 4 with its transpose, that with itself, and both together with the first: 5 x 3 x 128 FLOP at 2
    and 1 kFLOP/s; rank 1 ends later by more than it waited for. Nothing for a matrix that is looked up."""
    found = evaluate(relu_step(), data_parallel(), SIZES, TWO, model=IDEAL, optimizer="muon")
    without = evaluate(relu_step(), data_parallel(), SIZES, TWO, model=IDEAL)
    more = [a - b for a, b in zip(found.compute_s, without.compute_s, strict=True)]
    assert more == pytest.approx([1920 / 2000, 1920 / 1000])
    assert found.step_s - without.step_s == pytest.approx(1.92)
    slow_launches = cluster([1000, 1000], tflops=[1e6, 1e6], memory_bandwidth="1kB/s", launch="1s")
    found = evaluate(relu_step(), data_parallel(), SIZES, slow_launches, model=IDEAL, optimizer="muon")
    assert found.update_s == pytest.approx(1 + 15 + 7 * 0.064)
    graph = relu_step()
    (w,) = graph.sources("parameter")
    looked_up = [replace(n, op="aten.embedding.default") if Value(w.name) in n.inputs else n for n in graph.nodes]
    assert update_flops("muon", replace(graph, nodes=tuple(looked_up)), w) == 0 < update_flops("muon", graph, w)


def test_slices_are_compute() -> None:
    """x replicated: every rank cuts its rows out of it, 128 bytes x share x 2 at 0.8 of 1 kB/s; no stage ends there."""
    on = cluster([1000, 1000], tflops=[1e6, 1e6], memory_bandwidth="1kB/s")
    strategies = {**data_parallel(), "x": Strategy((), (R,))}
    ideal = {"model": IDEAL}
    before = evaluate(relu_step(), data_parallel(), SIZES, on, **ideal)
    after = evaluate(relu_step(), strategies, SIZES, on, **ideal)
    assert [c.need.collective for c in after.conversions] == ["slice", "all_reduce", "all_reduce"]
    assert after.compute_s[0] - before.compute_s[0] == pytest.approx(2 * 80 / 800)
    assert after.communication_s == pytest.approx(before.communication_s)


def test_needs_may_be_given() -> None:
    graph, strategies = relu_step(), data_parallel()
    assert evaluate(graph, strategies, SIZES, TWO, needs=find_needs(graph, strategies)) == evaluate(
        graph, strategies, SIZES, TWO
    )


def test_what_a_plan_needs() -> None:
    found = evaluate(relu_step(), data_parallel(), SIZES, TWO)
    prediction = found.to_prediction(lower_bound_s=found.step_s / 2)
    assert prediction.gap == pytest.approx(0.5) and prediction.memory_bytes == (440, 376)
    assert prediction.tight == "compute of h1/custom#0"
    assert [(c.value, c.source, c.target, c.collective, c.decomposition) for c in found.to_conversions()] == [
        ("loss", "P", "R", "all_reduce", "ring"),
        ("gw", "P", "R", "all_reduce", "ring"),
    ]


def test_slow_links_are_named() -> None:
    slow = cluster([0.001, 0.001], tflops=[1, 1])
    found = evaluate(relu_step(), data_parallel(), SIZES, slow)
    assert found.tight == "communication, most of all all_reduce of gw"


def test_a_slice_is_no_communication() -> None:
    """Each rank cuts what it holds: slow memory is not the links' fault, though it takes longer than any of them."""
    found = evaluate(relu_step(), {**data_parallel(), "x": Strategy((), (R,))}, SIZES, cluster([0.001, 0.001]))
    longest = max(c.seconds for c in found.conversions)
    costs = [c._replace(seconds=2 * longest) if c.need.collective == "slice" else c for c in found.conversions]
    said = replace(found, conversions=tuple(costs), communication_s=1.0, stages_s=0.5).tight
    assert said == "communication, most of all all_reduce of gw"


def test_what_does_not_fit_is_said() -> None:
    found = evaluate(relu_step(), data_parallel(), SIZES, TWO)
    assert found.fits and found.overfull == ()
    assert not replace(found, usable_bytes=(400, 1000)).fits
    assert replace(found, usable_bytes=(400, 1000)).overfull == (0,)


def test_a_device_without_the_dtype_is_refused() -> None:
    text = TWO.to_yaml().replace("float32", "bfloat16")
    with pytest.raises(ClusterError, match="lists no tflops for float32"):
        evaluate(relu_step(), data_parallel(), SIZES, TWO.from_yaml(text))


# ------------------------------------------------------------------------------------------------ properties


def renamed(graph: Graph, prefix: str) -> Graph:
    def value(v: Value) -> Value:
        return Value(prefix + v.node, v.index)

    nodes = tuple(replace(with_inputs(n, value), name=prefix + n.name) for n in graph.nodes)
    gradients = {t: value(v) for t, v in graph.gradients.items()}
    return replace(graph, name=prefix, nodes=nodes, loss=value(graph.loss), gradients=gradients)


@given(st.text("abcz_", min_size=1, max_size=5), st.permutations(["p", "q"]))
def test_names_do_not_matter(prefix: str, hosts: list[str]) -> None:
    plain = evaluate(relu_step(), data_parallel(), SIZES, TWO)
    strategies = {prefix + n: s for n, s in data_parallel().items()}
    other = cluster([1000, 1000], tflops=[2e-9, 1e-9], names=hosts)
    found = evaluate(renamed(relu_step(), prefix), strategies, SIZES, other)
    assert (found.step_s, found.compute_s, found.memory) == (plain.step_s, plain.compute_s, plain.memory)


@given(st.integers(0, 7))
def test_a_larger_share_takes_a_rank_longer(share: int) -> None:
    less, more = (
        evaluate(relu_step(), data_parallel(), {"batch": (s, 8 - s)}, TWO).compute_s[0] for s in (share, share + 1)
    )
    assert less < more
