"""Families of models as Hugging Face has them, small: whatever plan deals them out, they are as on one device.

``benchmarks/families.py`` goes through all of them.
"""

import subprocess
import sys

import pytest
import torch

from benchmarks.common import ROOT
from benchmarks.families import Row, main
from benchmarks.families_one import compared
from benchmarks.zoo_models.families import NotBuilt, build, families
from benchmarks.zoo_models.reference import Outcome, one_device, worst_error
from tests.zoo.lockstep import TOLERANCE

KINDS = {
    "bamba": "language",  # attention and states in turn
    "big_bird": "language",  # becomes another module in its first call
    "deepseek_v3": "language",  # latent attention, experts in groups
    "rwkv": "language",  # a scan in plain tensors
    "swinv2": "images",  # shifted windows
    "xlnet": "language",  # relative positions
}
LONG = ("bamba", "rwkv")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in KINDS])
def test_a_family_equals_one_device(name):
    found = compared(build(KINDS[name], name))
    assert found["error"] <= TOLERANCE, found["where"]
    assert found["dealt"] > 0.9 and found["nodes"] > 100


def test_a_wrong_gradient_is_seen(monkeypatch):
    def off(case, seed):
        right = one_device(case, seed)
        name = min(right.gradients)
        return Outcome(right.loss, {**right.gradients, name: right.gradients[name] * 1.01}, right.buffers)

    monkeypatch.setattr("benchmarks.families_one.one_device", off)
    assert compared(build("language", "gpt2"))["error"] > 1e-3


def test_what_cannot_be_built_says_why():
    with pytest.raises(NotBuilt, match="million parameters"):
        build("language", "gemma4")
    assert ("language", "llama") in families() and ("images", "vit") in families()


def test_what_is_refused_is_told_in_its_words():
    command = [sys.executable, "benchmarks/families_one.py", "language", "jetmoe", "6"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert said.startswith('{"refused": "cannot capture') and "data-dependent control flow" in said
    assert str(ROOT) not in said


def test_an_unequal_family_fails_the_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("benchmarks.families._row", lambda kind, name: Row(kind, name, nodes=9, error=1e-6, where="w"))
    assert main(["--only", "gpt2", "--out", str(tmp_path)]) == 1
    assert "NOT EQUAL" in capsys.readouterr().out
    assert (tmp_path / "families.json").is_file()


def test_a_crash_fails_the_run_and_an_unknown_name_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("benchmarks.families._row", lambda kind, name: Row(kind, name, failed="AssertionError"))
    assert main(["--only", "gpt2", "--out", str(tmp_path)]) == 1
    with pytest.raises(SystemExit):
        main(["--only", "gpt22", "--out", str(tmp_path)])
    assert "no such family: gpt22" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "own", "equal"),
    [
        (9e-11, 0.0, True),
        (3e-9, 0.0, False),
        (3e-9, 3e-9, True),
        (3e-8, 3e-9, False),
        (3e-9, 1.0, True),
        (1e-3, 1e-3, False),
    ],
)
def test_no_more_is_allowed_than_pytorch_rounds_itself(error, own, equal):
    assert Row("images", "swiftformer", error=error, own=own).equal is equal


def test_a_centred_running_mean_is_zero_but_a_wrong_one_is_not():
    def after(mean):
        made = {"n.running_mean": torch.tensor([mean]), "n.running_var": torch.tensor([4.0])}
        return Outcome(torch.tensor(1.0), {"w": torch.tensor([1.0])}, made)

    assert worst_error(after(-3e-16), after(1e-16))[0] == 0.0
    assert worst_error(after(1e-3), after(1e-16)) == (float("inf"), "n.running_mean")
    assert worst_error(after(1.01), after(1.0))[0] > 5e-3
