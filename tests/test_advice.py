"""``hap advise``: every way planned, beside what is there now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from hap.advice import HELPS, NOW, Advice, Option, advise
from hap.build import BuiltModel
from hap.cluster import ClusterSpec
from hap.errors import HapError
from tests.test_cli import invoke

TWO = """
name: two
backend: gloo
hosts:
  - name: left
    devices: [{name: fast, count: 2, tflops: {float32: 2, bfloat16: 8}, memory: 800MB, memory_bandwidth: 100GB/s}]
    link: {bandwidth: 10GB/s, latency: 5us}
    network: {bandwidth: 1Gbit/s, latency: 50us}
  - name: right
    devices: [{name: old, tflops: {float32: 0.05, bfloat16: 0.05}, memory: 800MB, memory_bandwidth: 10GB/s}]
    network: {bandwidth: 100Mbit/s, latency: 100us}
"""


def net(width: int = 512, batch: int = 256) -> BuiltModel:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        inputs, targets = torch.empty(batch, width), torch.empty(batch, width)
    return BuiltModel(model, (inputs,), targets, nn.functional.mse_loss)


def names(found: Advice) -> list[str]:
    return [option.name for option in found.options]


def test_the_slow_device_is_advised_against() -> None:
    told: list[str] = []
    found = advise(net(), ClusterSpec.from_yaml(TWO), effort="quick", progress=told.append)
    assert found.best is not None and found.best.name.startswith("without right/old#0")
    assert found.best.how == "hap plan --leave-out" and (found.gain(found.best) or 0) > 0.01
    speeds = [o.samples_per_s for o in found.options if o.samples_per_s is not None]
    assert speeds == sorted(speeds, reverse=True) and found.gain(found.now) == 0
    assert "bfloat16 autocast" in names(found) and "two axes" in names(found) and "4 batches a step" in names(found)
    kinds = {o.name: o.trains for o in found.options}
    assert kinds["bfloat16 autocast"] == "the same, rounded" and kinds["4 batches a step"] == "larger batches"
    assert sum(o.trains == "the same, on other hardware" for o in found.options) <= HELPS
    assert kinds["gradients exchanged in bfloat16"] == "the same, rounded"
    assert told[0] == NOW and len(told) == 8
    assert {o.name: o.why_not for o in found.options if o.samples_per_s is None} == {
        "the batch in parts": "whole it is fastest",
        "the batch in parts, slow devices left out": "whole it is fastest",
    }
    text = str(found)
    assert (
        text.startswith("without right/old#0 is ") and "trains the same: hap plan --leave-out" in text.splitlines()[0]
    )


@pytest.mark.long
def test_what_does_not_fit_whole_may_fit_in_parts() -> None:
    """Activations of 8,192 samples fill the devices, and those of a part do not."""
    small = TWO.replace("memory: 800MB", "memory: 80MB")
    found = advise(net(batch=8192), ClusterSpec.from_yaml(small), effort="quick")
    assert found.now.samples_per_s is None and found.now.why_not
    assert found.best is not None and found.best.name.startswith("the batch in ")
    assert found.gain(found.best) is None and found.best.how in str(found)
    assert found.options[-1].samples_per_s is None


def test_nothing_is_advised_where_nothing_helps() -> None:
    def option(name: str, speed: float | None, trains: str = "the same") -> Option:
        return Option(name, trains, "hap plan", 2, speed)  # type: ignore[arg-type]

    assert Advice((option("x", 9.0, "larger batches"), option(NOW, 5.0), option("y", 4.0))).best is None
    assert Advice((option("y", 5.01), option(NOW, 5.0))).best is None  # no more than rounding
    best = Advice((option("y", 6.0), option(NOW, 5.0))).best
    assert best is not None and best.name == "y"
    assert str(Advice((option(NOW, 5.0),))).startswith("nothing that trains the same is faster")


def test_ways_that_are_none_here_are_told_with_the_reason() -> None:
    alike = TWO[: TWO.index("    network")].replace("bfloat16: 8", "float64: 1")
    found = advise(net(), ClusterSpec.from_yaml(alike), effort="quick")
    told = {o.name: (o.trains, o.why_not) for o in found.options if o.samples_per_s is None}
    assert told["two axes"] == ("the same", "there is one host")
    assert told["slow devices left out"] == ("the same", "no device is better left out")
    assert told["autocast"] == ("the same, rounded", "not all devices are described with bfloat16 or float16")
    assert all(reason in str(found) for _, reason in told.values())


def test_gradients_that_are_narrow_already_are_exchanged_as_they_are() -> None:
    built = net()
    built.model.bfloat16()
    narrow = BuiltModel(built.model, (built.example_inputs[0].bfloat16(),), built.example_targets, built.loss_fn)
    found = advise(narrow, ClusterSpec.from_yaml(TWO), effort="quick")
    assert {o.name: o.why_not for o in found.options}["gradients in bfloat16"] == "no gradient is wider"


@pytest.mark.long
def test_what_fits_in_no_way_is_refused() -> None:
    tiny = TWO.replace("memory: 800MB", "memory: 1MB")
    with pytest.raises(HapError, match=r"33.595392MB; the 3 devices hold"):
        advise(net(), ClusterSpec.from_yaml(tiny), effort="quick")


def test_the_command_prints_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(TWO)
    (tmp_path / "advised_model.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef build():\n"
        "    x = torch.zeros(64, 32)\n"
        "    return {'model': nn.Linear(32, 32), 'example_inputs': (x,), 'example_targets': x,"
        " 'loss_fn': nn.functional.mse_loss}\n"
    )
    given = ["advise", f"{tmp_path}/advised_model.py:build", "-c", f"{tmp_path}/c.yaml"]
    code, out, _ = invoke(capsys, *given)
    assert code == 0 and NOW in out and "samples/s" in out
    code, out, _ = invoke(capsys, *given, "--json")
    body = json.loads(out)
    assert code == 0 and {"best", "options"} == set(body) and any(o["name"] == NOW for o in body["options"])
