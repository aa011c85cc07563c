"""A profile made by hand: what calibrated clusters make of it, and what they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

from hap.cost_models import evaluate, node_work, parts_seconds, simulate, split_work
from hap.cost_models.collective import candidates, collective_seconds, formula_coefficients
from hap.cost_models.profile import (
    CalibratedCluster,
    CallCurve,
    CollectiveProfile,
    CopyFit,
    DeviceKind,
    Fit,
    LinkProfile,
    Profile,
    ProfileError,
    RankProfile,
    UpdateFit,
)
from hap.plan import Collective
from tests.cost_models.build import KEPT, P, R, cluster, data_parallel, relu_step

TWO = cluster([1000, 500], tflops=[2, 1], backend="gloo")
KINDS: tuple[Collective, ...] = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice")
WAYS = [(kind, way) for kind in KINDS for way in dict.fromkeys(c.partition("[")[0] for c in candidates(kind, TWO))]


def fit(launch_s: float, per_byte: float = 0.0) -> Fit:
    return Fit(launch_s=launch_s, s_per_flop=0.0, s_per_byte=per_byte, residual=0.0, worst=0.0, samples=1)


def made(**changes: Any) -> Profile:
    kind = DeviceKind(
        name="custom",
        calls={},
        fits={f"{c}/float32": fit(1.0) for c in ("matmul", "elementwise", "reduction")},
        updates={"adamw": UpdateFit(parameter_s=3.0, s_per_byte=0.5, residual=0.0, samples=1)},
        copies={
            f"{k}/{w}": CopyFit(launch_s=0.25, s_per_whole=0.0, s_per_local=0.0, residual=0.0, samples=1)
            for k, w in WAYS
        },
    )
    body = {
        "cluster": TWO.name,
        "cluster_fingerprint": TWO.fingerprint,
        "backend": "gloo",
        "torch_version": "2",
        "conditions": (),
        "kinds": (kind.model_copy(update=changes.pop("kind", {})),),
        "ranks": (
            RankProfile(device="a", kind=0, factor=1.0, spread=0.0),
            RankProfile(device="b", kind=0, factor=2.0, spread=0.0),
        ),
        "links": tuple(
            LinkProfile(source=s, target=1 - s, latency_s=1e-3, bytes_per_s=40e6, spread=0.0) for s in (0, 1)
        ),
        "collectives": tuple(
            CollectiveProfile(
                kind=k,
                decomposition=w,
                sizes=(64.0,),
                factors=(1.5,),
                seconds=(1.0,),
                residual=0.0,
                spread=0.0,
                samples=1,
            )
            for k, w in WAYS
            if k != "slice"
        ),
        "seconds_taken": 1.0,
    }
    return Profile.model_validate({**body, **changes})


def test_calls_are_looked_up_then_fitted() -> None:
    graph, strategies = relu_step(), data_parallel()
    parts = split_work(node_work(graph, graph.by_name["a"]), strategies["a"])
    assert parts.call == "aten.mm.default(float32[8, 4], float32[4, 4]) S(0:1x8x1), R -> S(0:1x8x1)"
    known = made(kind={"calls": {parts.call: CallCurve(shares=(0.25, 0.75), seconds=(2.0, 4.0), spread=0.0)}})
    first, second = known.calibrate(TWO).devices
    assert parts_seconds(parts, 0.5, first) == pytest.approx(3.0)
    assert parts_seconds(parts, 0.5, second) == pytest.approx(6.0)  # the rank's factor
    assert parts_seconds(parts, 0.0, first) == 0.0  # nothing to do
    assert parts_seconds(parts, 0.5, made().calibrate(TWO).devices[0]) == pytest.approx(1.0)


def test_what_was_not_measured_is_refused() -> None:
    graph = relu_step()
    parts = split_work(node_work(graph, graph.by_name["a"]), data_parallel()["a"])
    with pytest.raises(ProfileError, match=r"has no matmul in float32 \(asked for aten.mm.default\)"):
        parts_seconds(parts, 0.5, made(kind={"fits": {}}).calibrate(TWO).devices[0])
    with pytest.raises(ProfileError, match="has no all_reduce by ring; profile again"):
        collective_seconds("all_reduce", "ring", 64, P, R, {}, made(collectives=()).calibrate(TWO))
    with pytest.raises(ProfileError, match="no update of optimizer 'sgd'"):
        evaluate(graph, data_parallel(), {"batch": (5, 3)}, made().calibrate(TWO), optimizer="sgd")


def test_a_step_by_hand() -> None:
    """Every call takes 1 s on rank 0 and 2 s on rank 1: three before the loss, two after; 10 % more in a step, 0.1 s a
    node (views: e and xt), 4 s around; the update of w 3 + 32 s."""
    around = {"in_step": 1.1, "node_s": 0.1, "step_s": 4.0}
    on = made(kind=around).calibrate(TWO)
    found = evaluate(relu_step(), data_parallel(), {"batch": (5, 3)}, on)
    calls = 5 * 1.1 + 7 * 0.1
    assert found.compute_s == pytest.approx((4 + calls + 35, 2 * (4 + calls + 35)))
    assert simulate(relu_step(), data_parallel(), {"batch": (5, 3)}, on).step_s == pytest.approx(found.step_s)


def test_muon_as_measured() -> None:
    """The update as above, and for the one matrix of 1920 FLOP 5 s and 0.01 s each; twice that on rank 1."""
    muon = UpdateFit(parameter_s=3.0, s_per_byte=0.5, residual=0.0, samples=1, matrix_s=5.0, s_per_flop=0.01)
    on = made(kind={"updates": {"adamw": muon, "muon": muon}}).calibrate(TWO)
    found = [evaluate(relu_step(), data_parallel(), {"batch": (5, 3)}, on, optimizer=o) for o in ("muon", "adamw")]
    more = [a - b for a, b in zip(*(f.compute_s for f in found), strict=True)]
    assert more == pytest.approx([24.2, 48.4])


def test_the_timeline_knows_who_is_done_before_others() -> None:
    """The slower rank decides throughout. If the other is done first, nothing changes; if it is itself done when it
    comes, none of its time is spent on the wire, of which there are two collectives, each packed in half a second."""
    graph, strategies, sizes = relu_step(), data_parallel(), {"batch": (5, 3)}

    def step_s(*ahead: float) -> float:
        collectives = tuple(c.model_copy(update={"ahead": ahead}) for c in made().collectives)
        return simulate(graph, strategies, sizes, made(collectives=collectives).calibrate(TWO)).step_s

    found = evaluate(graph, strategies, sizes, made().calibrate(TWO))
    assert len(found.conversions) == 2
    assert step_s(0.0, 0.0) == step_s(1.0, 0.0) == pytest.approx(found.step_s)
    assert step_s(0.0, 1.0) == pytest.approx(found.step_s - (found.communication_s - 2 * 0.5))


def test_collectives_as_measured() -> None:
    """The formula on measured links, 1.5 times, and the slower rank's packing: 0.25 s times its factor."""
    on = made().calibrate(TWO)
    plain = formula_coefficients("all_reduce", "ring", 64, P, R, on)
    assert plain.constant_s == pytest.approx(2 * 1e-3 + 64 / 40e6)  # two steps of 32 bytes; no assumed call overhead
    assert collective_seconds("all_reduce", "ring", 64, P, R, {}, on) == pytest.approx(1.5 * plain.constant_s + 0.5)
    sliced = collective_seconds("slice", "local", 64, R, KEPT, {"kept": (3, 1)}, on)
    assert sliced == pytest.approx(0.5)


def test_who_waited_for_others_computes_a_little_longer() -> None:
    """A tenth of a second on the first rank, two on the second; a slice waits for nobody."""
    on = made(kind={"resume_s": 0.1}).calibrate(TWO)
    plain = formula_coefficients("all_reduce", "ring", 64, P, R, on)
    assert collective_seconds("all_reduce", "ring", 64, P, R, {}, on) == pytest.approx(1.5 * plain.constant_s + 0.7)
    assert collective_seconds("slice", "local", 64, R, KEPT, {"kept": (3, 1)}, on) == pytest.approx(0.5)


def test_who_has_no_share_still_makes_every_call_where_that_takes_time() -> None:
    """A CPU's calls on nothing, by the rank's factor; a view is no dearer than on something, a GPU launches nothing."""
    graph, strategies, sizes = relu_step(), data_parallel(), {"batch": (8, 0)}
    matmul, view = (split_work(node_work(graph, graph.by_name[n]), strategies[n]) for n in ("a", "e"))
    for node_s, empty_s, each, of_view in ((0.1, 0.3, 0.6, 0.2), (0.1, 0.0, 0.0, 0.0), (0.5, 0.3, 0.6, 0.6)):
        slow = made(kind={"node_s": node_s, "empty_s": empty_s}).calibrate(TWO).devices[1]
        assert parts_seconds(matmul, 0.0, slow) == pytest.approx(each)
        assert parts_seconds(view, 0.0, slow) == pytest.approx(of_view)
    found, without = (evaluate(graph, strategies, sizes, made(kind=k).calibrate(TWO)) for k in ({"empty_s": 0.3}, {}))
    more = found.compute_s[1] - without.compute_s[1]
    assert more == pytest.approx(3 * 0.6)  # of five calls: two sum over the batch, and their results are whole
    assert found.compute_s[0] == without.compute_s[0]


def test_ports_have_measured_rates() -> None:
    """Both pairs are limited by the second host's 500 Mbit/s = 62.5 MB/s and reach 40; the first host's ports, which
    limit nobody, are assumed to be as much slower than described."""
    rates = {p.name: p.bytes_per_s for p in made().calibrate(TWO).fabric.ports}
    assert rates["h1 network up"] == pytest.approx(40e6) and rates["h1 network down"] == pytest.approx(40e6)
    assert rates["h0 network up"] == pytest.approx(80e6)


def test_messages_of_measured_sizes_wait_as_measured() -> None:
    """A pair's delays: 2 ms at 16 bytes, 1 ms at 64; in the ring's two steps each sends half a value."""
    delays = ((16, 2e-3), (64, 1e-3))
    links = tuple(LinkProfile(**{**k.model_dump(), "delays": delays}) for k in made().links)
    on = made(links=links).calibrate(TWO)
    assert [(size, f.latency_s[0, 1]) for size, f in on.fabric.by_size] == [(16, 3e-3), (64, pytest.approx(2e-3))]

    def ring_s(nbytes: int) -> float:
        return formula_coefficients("all_reduce", "ring", nbytes, P, R, on).constant_s

    assert ring_s(16) == pytest.approx(2 * (1e-3 + 1e-3) + 16 / 40e6)  # messages of 8 bytes: half of the delay
    assert ring_s(32) == pytest.approx(2 * (1e-3 + 2e-3) + 32 / 40e6)
    assert ring_s(64) == pytest.approx(2 * (1e-3 + 2e-3) + 64 / 40e6)  # longer ones are not said to wait less


def test_a_profile_is_of_one_cluster() -> None:
    on = made().calibrate(TWO)
    assert isinstance(on, CalibratedCluster) and on.fingerprint == TWO.fingerprint and on.described == TWO
    with pytest.raises(ProfileError, match="profile again"):
        made().calibrate(cluster([1000, 400], tflops=[2, 1], backend="gloo"))


def test_the_file_keeps_every_bit(tmp_path: Path) -> None:
    profile = made(seconds_taken=0.1 + 0.2)
    profile.save(tmp_path / "p.json")
    again = Profile.load(tmp_path / "p.json")
    assert again == profile and again.fingerprint == profile.fingerprint
    strategies, sizes = data_parallel(), {"batch": (5, 3)}
    one, two = (evaluate(relu_step(), strategies, sizes, p.calibrate(TWO)).step_s for p in (profile, again))
    assert one == two


def test_bad_files_are_refused_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    made().save(path)
    body = json.loads(path.read_text())
    for change, message in (
        ({"schema_version": 99}, "version 99, this HAP reads 1"),
        ({"backend": "other"}, "does not match its fingerprint"),
        ({"kinds": 3}, "kinds"),
    ):
        path.write_text(json.dumps({**body, **change}))
        with pytest.raises(ProfileError, match=message):
            Profile.load(path)
    path.write_text('{"kinds"')
    with pytest.raises(ProfileError, match="cannot read profile"):
        Profile.load(path)
