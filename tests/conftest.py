"""What holds for every test: hypothesis repeats itself and is not timed; a rule that a test registers goes with it;
what was imported is no garbage; and GPUs are not seen, here or in processes that tests start:
``benchmarks/gpu_check.py`` is the test of those."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import hypothesis
import pytest

from hap.rules.table import DEFAULT_TABLE

hypothesis.settings.register_profile("hap", deadline=None, derandomize=True)
hypothesis.settings.load_profile("hap")


def pytest_collection_finish() -> None:
    """Graphs and plans that files keep are many long-lived objects, which collections would look at over and over."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture(autouse=True)
def rules_as_they_were() -> Iterator[None]:
    """The package's table of rules is part of a plan's fingerprint."""
    before = dict(DEFAULT_TABLE.user)
    yield
    DEFAULT_TABLE.user.clear()
    DEFAULT_TABLE.user.update(before)
