"""The plan file: its schema, its canonical text, its limits, its versions."""

import difflib
import json
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
import torch

import hap
from hap import plan_file
from hap.cluster import ClusterSpec
from hap.errors import PlanError
from hap.plan import AsRun, GroupPlan, Plan
from tests.test_language import small_plan

HERE = Path(__file__).parent
SCHEMA = Path(hap.__file__).with_name("plan.schema.json")


def test_the_shipped_schema_is_the_classes() -> None:
    made = json.dumps(plan_file.schema(), indent=1, sort_keys=True) + "\n"
    assert SCHEMA.read_text() == made, "run: python -m hap.plan_file > hap/plan.schema.json"


def test_a_plan_file_agrees_with_the_schema_and_a_wrong_one_does_not() -> None:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    body = json.loads(small_plan().to_json())
    jsonschema.validate(body, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**body, "surprise": 1}, schema)


def test_one_changed_decision_is_one_changed_line_beside_the_checksum() -> None:
    plan = small_plan()
    groups = {"g0": GroupPlan(n=8, label="batch", sizes=(4, 3, 1))}
    before, after = (p.to_json().splitlines() for p in (plan, plan.model_copy(update={"groups": groups})))
    changed = [line for line in difflib.unified_diff(before, after, n=0, lineterm="") if line[0] in "+-"][2:]
    assert [line[:14] for line in changed] == ['-  "g0": {"n":', '+  "g0": {"n":', '- "checksum": ', '+ "checksum": ']


def test_a_thousand_sizes_stand_on_one_line() -> None:
    text = plan_file.render({"sizes": [0] * 1024, "names": ["x" * 40] * 9, "flat": {"n": 1, "sizes": [1, 2]}})
    assert [len(line) < 200 for line in text.splitlines()].count(False) == 1
    assert ' "flat": {"n": 1, "sizes": [1, 2]},' in text.splitlines()


def test_version_1_is_read() -> None:
    old = Plan.load(HERE / "version-1.plan.json")
    assert old == small_plan() and old.explanation is None
    damaged = (HERE / "version-1.plan.json").read_text().replace('"step_s": 2.0', '"step_s": 1.5')
    with pytest.raises(PlanError, match="does not match its checksum"):
        Plan.from_json(damaged)


def test_version_2_is_read_as_a_plan_that_does_not_know_its_step_as_it_is_run() -> None:
    old = Plan.load(HERE / "version-2.plan.json")
    assert old.explanation is not None and old.explanation.as_run is None and old.explanation.stages
    assert old.predicted == small_plan().predicted and old.predicted.as_run_s == old.predicted.step_s == 2.0
    assert Plan.from_json(old.to_json()) == old and '"schema_version": 3' in old.to_json()
    damaged = (HERE / "version-2.plan.json").read_text().replace('"step_s": 2.0', '"step_s": 1.5')
    with pytest.raises(PlanError, match="does not match its checksum"):
        Plan.from_json(damaged)


@pytest.mark.parametrize(
    "busy", [((0.0, 1.0),), ((0.0,),) * 3, ((1.0, 0.5),) * 3], ids=["a row too few", "no end", "ends before it begins"]
)
def test_what_is_told_of_the_step_as_it_is_run_makes_sense(busy: tuple[tuple[float, ...], ...]) -> None:
    old = Plan.load(HERE / "version-2.plan.json")
    assert old.explanation is not None
    told = old.explanation.model_copy(update={"as_run": AsRun(step_s=2.0, wire=(), busy_s=busy)})
    with pytest.raises(PlanError, match=r"rows of compute|begin and end"):
        Plan.from_json(old.model_copy(update={"explanation": told}).to_json())


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        (99, "run: pip install --upgrade hap"),
        (0, "run: hap plan MODEL --cluster CLUSTER.yaml -o x.plan.json"),
        ("1", "run: hap plan MODEL --cluster CLUSTER.yaml -o x.plan.json"),
        (True, "run: hap plan MODEL"),
    ],
)
def test_other_versions_are_refused_with_what_to_run(version: object, remedy: str) -> None:
    text = json.dumps({**json.loads(small_plan().to_json()), "schema_version": version})
    with pytest.raises(PlanError) as refusal:
        Plan.from_json(text, "x.plan.json")
    assert remedy in str(refusal.value) and "this HAP reads 1 to 3" in str(refusal.value)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"schema_version": 3, "a": ' + "[" * 20 + "]" * 20 + "}",
        '{"schema_version": 3, "schema_version": 2}',
        '{"schema_version": 3, "a": NaN}',
        '{"schema_version": 3, "a": 1e999}',
        '{"schema_version": 3, "a": ' + "9" * 5000 + "}",
        '{"schema_version": 3, "a": "\\ud800"}',
        "\ufeff{}",
    ],
    ids=["deep", "deeper than a plan", "key twice", "NaN", "infinite", "huge", "surrogate", "byte order mark"],
)
def test_what_is_no_plan_is_refused_before_any_field_is_read(text: str) -> None:
    with pytest.raises(PlanError, match=r"^x\.json: (not a|nested)"):
        Plan.from_json(text, "x.json")


def test_what_is_proved_of_the_step_as_it_is_run_is_in_the_file_where_it_is_known() -> None:
    plan = small_plan()
    assert "overlapped_bound_s" not in plan.to_json() and plan.predicted.gap_as_run is None
    predicted = plan.predicted.model_copy(update={"overlapped_s": 2.0, "overlapped_bound_s": 1.5})
    proved = plan.model_copy(update={"predicted": predicted})
    assert '"overlapped_bound_s": 1.5' in proved.to_json() and proved.predicted.gap_as_run == 0.25
    assert Plan.from_json(proved.to_json()) == proved


def test_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_file, "MAX_CHARACTERS", 100)
    with pytest.raises(PlanError, match="more than any plan has"):
        Plan.from_json(small_plan().to_json())


def test_what_is_told_per_rank_is_told_of_every_rank() -> None:
    short = small_plan().predicted.model_copy(update={"memory_bytes": (1, 1)})
    with pytest.raises(PlanError, match="2 memories for 3 ranks"):
        Plan.from_json(small_plan().model_copy(update={"predicted": short}).to_json())


@pytest.mark.parametrize("effort", ["quick", "normal"])
def test_plan_and_compile_make_the_same_file(effort: Literal["quick", "normal"]) -> None:
    """So a plan made offline is told by its checksum to be the one that a job would make."""
    cluster = ClusterSpec.from_yaml(
        "backend: gloo\nhosts: [{name: a, devices: [{tflops: {float32: 1}, memory: 1GB, memory_bandwidth: 9GB/s}]}]"
    )
    model, batch = torch.nn.Linear(4, 2), torch.zeros(8, 4)
    arguments: dict[str, Any] = {"example_inputs": batch, "loss_fn": torch.Tensor.mean, "effort": effort}
    offline = hap.plan(model, cluster, **arguments)
    assert hap.compile(model, cluster, **arguments).plan.to_json() == offline.to_json()
    assert offline.explanation is not None and bool(offline.explanation.helps) == (effort == "normal")
