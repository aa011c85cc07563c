"""The file of a plan of two axes: what goes in comes out, and what does not fit together is refused in one line."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hap import plan_file
from hap.capture import capture
from hap.errors import PlanError
from hap.graph import Graph
from hap.mesh_plan import (
    BATCH,
    HostPart,
    MeshExplanation,
    MeshPlan,
    MeshPrediction,
    load_plan,
    parse_plan,
    verify_mesh_plan,
)
from hap.placement import Shard
from hap.plan import GroupPlan, Plan
from tests._support.mesh import make_mesh
from tests._support.mutate import ODD
from tests.test_language import small_plan

RANKS, BATCHES = (2, 1, 3), (4, 1, 3)


@cache
def graph() -> Graph:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.empty(8, 4)
    return capture(model, x, loss_fn=torch.sum, name="tiny")


@cache
def mesh() -> MeshPlan:
    return make_mesh(graph(), RANKS, BATCHES)


def changed(**fields: Any) -> MeshPlan:
    return mesh().model_copy(update=fields)


def refusal(plan: MeshPlan) -> str:
    """What is said of the plan's file, whose checksum is right; alike of the plan itself."""
    with pytest.raises(PlanError) as of_file:
        parse_plan(plan.to_json(), "x.json")
    with pytest.raises(PlanError) as of_plan:
        verify_mesh_plan(plan, "x.json")
    words = str(of_file.value)
    assert words == str(of_plan.value) and words.startswith("x.json: ") and "\n" not in words
    return words.removeprefix("x.json: ")


# ------------------------------------------------------------------------------------------------ there and back


def test_a_plan_comes_back_from_its_text(tmp_path: Path) -> None:
    plan, path = mesh(), tmp_path / "a.plan.json"
    text = plan.to_json()
    again = parse_plan(text)
    assert isinstance(again, MeshPlan) and again == plan and again.to_json() == text
    assert again.checksum == plan.checksum and f'"checksum": "{plan.checksum}"' in text
    plan.save(path)
    assert path.read_text() == text and load_plan(path) == plan


def test_what_was_not_predicted_comes_back_as_nothing() -> None:
    assert mesh().predicted.overlapped_s is None and mesh().predicted.as_run_s == mesh().predicted.step_s == 1.0
    told = MeshPrediction(step_s=2.0, overlapped_s=1.5, sums_s=0.25, arithmetic_s=0.5, lower_bound_s=1.0)
    again = parse_plan(changed(predicted=told).to_json())
    assert again.predicted == told and again.predicted.as_run_s == 1.5 and again.predicted.gap == 0.5


def test_what_explains_a_plan_is_in_its_file_where_there_is_some() -> None:
    assert mesh().explanation is None and "explanation" not in json.loads(mesh().to_json())
    told = MeshExplanation(cluster={"name": "lab"}, sums_s=(0.25,) * 6)
    again = parse_plan(changed(explanation=told).to_json())
    assert isinstance(again, MeshPlan) and again.explanation == told
    short = told.model_copy(update={"sums_s": (0.25,) * 5})
    assert refusal(changed(explanation=short)) == "5 sums over hosts for 6 ranks"


def test_ranks_are_numbered_through_the_hosts() -> None:
    found = [mesh().host_of(rank) for rank in range(6)]
    assert found == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    with pytest.raises(IndexError):
        mesh().host_of(6)


def test_a_host_runs_the_plan_that_it_names() -> None:
    first, second, third = mesh().hosts
    swapped = changed(
        hosts=(first.model_copy(update={"inside": 2}), second, third.model_copy(update={"inside": 0})),
        inside=tuple(reversed(mesh().inside)),
    )
    assert [swapped.inside_of(h) for h in range(3)] == [mesh().inside_of(h) for h in range(3)]
    assert parse_plan(swapped.to_json()) == swapped
    assert mesh().sizes == {BATCH: BATCHES} and mesh().world_size == 6


def test_either_kind_of_plan_is_read_as_what_it_is(tmp_path: Path) -> None:
    path, plain = tmp_path / "plain.json", small_plan()
    plain.save(path)
    for found in (load_plan(path), parse_plan(plain.to_json())):
        assert type(found) is Plan and found == plain


def test_a_plan_of_two_axes_is_no_plan_of_one(tmp_path: Path) -> None:
    path = tmp_path / "mesh.json"
    mesh().save(path)
    for read, origin in ((lambda: Plan.load(path), path), (lambda: Plan.from_json(mesh().to_json(), "x"), "x")):
        with pytest.raises(PlanError) as said:
            read()
        assert str(said.value).startswith(f"{origin}: a plan of a mesh of two axes; MeshPlan and load_plan")
        assert "\n" not in str(said.value)


@pytest.mark.parametrize("what", ["missing", "not text", "a folder"])
def test_what_cannot_be_read_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    if what == "not text":
        path.write_bytes(b"\xff\xfe\x00")
    elif what == "a folder":
        path.mkdir()
    with pytest.raises(PlanError, match=rf"^{re.escape(str(path))}: cannot read plan \("):
        load_plan(path)


# ------------------------------------------------------------------------------------------------ edited by hand


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"batch": 4, "inside": 0', '"batch": 5, "inside": 0'),
        ('"arithmetic_s": 0.0', '"arithmetic_s": 0.5'),
        ('"name": "host1"', '"name": "host9"'),
        ('"i_args_0": "-> S(0:1x8x1@batch)"', '"i_args_0": "-> R"'),
        ('"label": "batch", "sizes": [4, 1, 3]', '"label": "batches", "sizes": [4, 1, 3]'),
        ('"model": "tiny"', '"model": "large"'),
    ],
)
def test_an_edited_file_is_refused(before: str, after: str) -> None:
    text = mesh().to_json()
    assert before in text
    with pytest.raises(PlanError, match=r"^x: content does not match its checksum \(edited by hand or damaged\)"):
        parse_plan(text.replace(before, after, 1), "x")


@pytest.mark.parametrize("claimed", [None, "0" * 64, ""])
def test_a_file_without_its_checksum_is_refused(claimed: str | None) -> None:
    body = {**json.loads(mesh().to_json()), "checksum": claimed}
    with pytest.raises(PlanError, match="does not match its checksum"):
        parse_plan(json.dumps(body))


@pytest.mark.parametrize("version", [1, 2])
def test_no_older_version_had_two_axes(version: int) -> None:
    """Even with the checksum that such a file had."""
    body = {**json.loads(mesh().to_json()), "schema_version": version}
    body.pop("checksum")
    with pytest.raises(PlanError, match="does not match its checksum"):
        parse_plan(json.dumps({**body, "checksum": plan_file.checksum(body)}))


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("hosts.1.batch", {"hosts": [{"batch": 0}]}),
        ("hosts.1.ranks", {"hosts": [{"ranks": 0}]}),
        ("hosts.1.inside", {"hosts": [{"inside": -1}]}),
        ("hosts.1.color", {"hosts": [{"color": "red"}]}),
        ("surprise", {"surprise": 1}),
        ("predicted.sums_s", {"predicted": {"step_s": 1.0, "sums_s": -1.0, "arithmetic_s": 0.0, "lower_bound_s": 0.0}}),
        ("predicted.arithmetic_s", {"predicted": {"step_s": 1.0, "sums_s": 0.0, "lower_bound_s": 0.0}}),
        ("batch", {"batch": None}),
        ("inside", {"inside": 3}),
    ],
)
def test_a_field_that_is_wrong_is_named(where: str, change: dict[str, Any]) -> None:
    body = json.loads(mesh().to_json())
    body.pop("checksum")
    if "hosts" in change:
        body["hosts"][1].update(change["hosts"][0])
    else:
        body.update(change)
    with pytest.raises(PlanError) as said:
        parse_plan(json.dumps({**body, "checksum": plan_file.checksum(body)}), "x.json")
    assert str(said.value).startswith(f"x.json: {where}: ") and "\n" not in str(said.value)


# ------------------------------------------------------------------------------------------------ what fits together


def test_what_make_mesh_makes_fits_together() -> None:
    verify_mesh_plan(mesh())


def test_a_plan_inside_that_is_wrong_is_refused() -> None:
    broken = mesh().inside[2]
    name, group = next((n, g) for n, g in broken.groups.items())
    groups = {**broken.groups, name: group.model_copy(update={"sizes": (group.n, 1, 0)})}
    inside = (*mesh().inside[:2], broken.model_copy(update={"groups": groups}))
    assert refusal(changed(inside=inside)) == f"sizes ({group.n}, 1, 0) sum to {group.n + 1}, not {group.n}"


def test_a_plan_inside_that_no_host_runs_is_looked_at_too() -> None:
    broken = mesh().inside[0].model_copy(update={"devices": ()})
    assert refusal(changed(inside=(*mesh().inside, broken))) == "0 devices for 2 ranks"


def test_hosts_have_all_ranks() -> None:
    few = mesh().provenance.model_copy(update={"world_size": 5})
    assert refusal(changed(provenance=few)) == "hosts of [2, 1, 3] ranks for 5"
    assert refusal(changed(hosts=())) == "hosts of [] ranks for 6"


@pytest.mark.parametrize(("n", "sizes"), [(8, (3, 2, 3)), (9, (4, 1, 3)), (8, (4, 1, 3, 0)), (8, (4, 4))])
def test_the_hosts_parts_are_the_batch(n: int, sizes: tuple[int, ...]) -> None:
    batch = GroupPlan(n=n, label="batch", sizes=sizes)
    assert refusal(changed(batch=batch)) == f"the hosts' parts [4, 1, 3] are not a batch of {n}"


def with_host(number: int, **fields: Any) -> tuple[HostPart, ...]:
    hosts = list(mesh().hosts)
    hosts[number] = hosts[number].model_copy(update=fields)
    return tuple(hosts)


def test_every_host_has_a_plan_for_its_ranks() -> None:
    assert refusal(changed(hosts=with_host(1, inside=3))) == "host host1 of 1 ranks has no plan inside"
    assert refusal(changed(hosts=with_host(2, inside=0))) == "host host2 of 3 ranks has no plan inside"
    hosts = with_host(0, ranks=3)[0], mesh().hosts[1], with_host(2, ranks=2)[2]  # six as before
    assert refusal(changed(hosts=hosts)) == "host host0 of 3 ranks has no plan inside"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense", "not a strategy: 'nonsense'"),
        ("-> Q", "Q"),
        ("-> S(0:1x8x1@other)", "between hosts -> S(0:1x8x1@other) shards something else than the batch of 8"),
        ("-> S(0:1x4x2@batch)", "between hosts -> S(0:1x4x2@batch) shards something else than the batch of 8"),
        ("S(0:1x7x1@batch) -> R", "between hosts S(0:1x7x1@batch) -> R shards something else than the batch of 8"),
    ],
)
def test_hosts_shard_the_batch_and_nothing_else(text: str, words: str) -> None:
    said = refusal(changed(between={**mesh().between, "i_args_0": text}))
    assert said.startswith("i_args_0: ") and words in said


def test_a_shard_of_the_batch_in_other_atoms_is_one() -> None:
    """As rows of a view are: three columns of every sample."""
    shard = Shard(0, 2, 8, 3, BATCH)
    verify_mesh_plan(changed(between={**mesh().between, "i_args_0": f"-> {shard}"}))


def test_any_wrong_leaf_is_refused_in_a_line_or_comes_back_as_it_is() -> None:
    """One value of the file replaced by an odd one, under a right checksum: never a traceback."""
    source, became = random.Random(0), {"refused": 0, "read": 0}
    text = mesh().to_json()
    for _ in range(600):
        body: Any = json.loads(text)
        body.pop("checksum")
        holder, key = body, source.choice(list(body))
        while isinstance(holder[key], (dict, list)) and holder[key] and source.random() < 0.9:
            holder = holder[key]
            key = source.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        holder[key] = source.choice(ODD)
        try:
            body["checksum"] = plan_file.checksum(body)
            plan = parse_plan(json.dumps(body), "x.json")
        except PlanError as e:
            assert str(e).startswith("x.json: ") and "\n" not in str(e)
            became["refused"] += 1
            continue
        assert parse_plan(plan.to_json()) == plan
        became["read"] += 1
    assert min(became.values()) > 10, became
