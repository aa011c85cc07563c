"""The demo's script, on less than README's first command runs: planned, trained, beside one device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hap.build import build_from

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_its_model_is_what_the_profile_measures() -> None:
    built = build_from(f"{EXAMPLES}/train_gpt2.py:build")
    assert sum(p.numel() for p in built.model.parameters()) == pytest.approx(3.2e6, rel=0.01)


def test_it_trains_as_one_device_does() -> None:
    less = ["--steps", "6", "--layers", "1", "--width", "32", "--sequence", "16"]
    run = ["run", "--cluster", f"{EXAMPLES}/cluster-4.yaml", f"{EXAMPLES}/train_gpt2.py", *less]
    done = subprocess.run([sys.executable, "-m", "hap", *run], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    differences = re.search(r"relative difference (\S+) of the loss, (\S+) of a gradient", done.stdout)
    assert differences and max(map(float, differences.groups())) < 1e-4
    assert re.search(r"predicted / measured = \d+\.\d\d", done.stdout)


def test_a_plan_for_what_is_emulated_needs_its_profile() -> None:
    words = [f"{EXAMPLES}/train_gpt2.py", "--cluster", f"{EXAMPLES}/cluster-4.yaml", "--plan", "x.plan.json"]
    launched = {**os.environ, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=launched, check=False)
    assert done.returncode == 2 and "error: --plan without a GPU for every rank needs the --profile" in done.stderr
