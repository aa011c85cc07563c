"""Families of models as Hugging Face has them, small: whatever plan deals them out, they are as on one device.

``benchmarks/families.py`` goes through all of them.
"""

import subprocess
import sys

import pytest

from benchmarks.common import ROOT
from benchmarks.families import Row, main
from benchmarks.families_one import compared
from benchmarks.zoo_models.families import NotBuilt, build, families
from benchmarks.zoo_models.reference import Outcome, one_device
from tests.zoo.lockstep import TOLERANCE

KINDS = {
    "bamba": "language",  # attention and states in turn
    "deepseek_v3": "language",  # latent attention, experts in groups
    "rwkv": "language",  # a scan in plain tensors
    "swinv2": "images",  # shifted windows
    "xlnet": "language",  # relative positions
}


@pytest.mark.parametrize("name", KINDS)
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
