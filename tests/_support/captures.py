"""Steps that ranks capture alike are captured by rank 0, and the others take its graphs: for ``ranks.run_alike``.

Capturing is most of what a small model's rank computes, and three ranks on two cores wait for each other. A graph is
plain data; the nth call that a rank has not captured before is the nth of rank 0, and has to be the same. What every
rank makes of its graph, and does by it, stays its own. That ranks which capture by themselves agree, and that a second
capture is like the first, is for ``tests/capture/test_purity.py`` and the tests that use ``run_ranks``.
"""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import Any

import torch

import hap.capture
import hap.recompile
from hap.capture.autocast import Autocast
from hap.capture.inputs import StepInputs
from hap.graph import Graph

WAIT_S = 60.0
REAL = hap.capture.capture_step


def share_captures(rank: int, folder: str) -> None:
    """From here on in this process."""
    shared = _Shared(rank, Path(folder))
    for module in (hap.capture, hap.recompile):
        module.capture_step = shared  # type: ignore[attr-defined]


class _Shared:
    def __init__(self, rank: int, folder: Path) -> None:
        self._rank, self._folder = rank, folder
        self._known: dict[str, Graph | None] = {}

    def __call__(self, model: torch.nn.Module, inputs: StepInputs, **given: Any) -> Graph:
        call = _call(model, inputs, given)
        if call not in self._known:
            path = self._folder / f"graph{len(self._known)}"
            self._known[call] = (
                self._wait(path, call) if self._rank else self._capture(path, call, model, inputs, given)
            )
        found = self._known[call]
        return REAL(model, inputs, **given) if found is None else found  # what fails, fails on each

    @staticmethod
    def _capture(path: Path, call: str, model: torch.nn.Module, inputs: StepInputs, given: Any) -> Graph | None:
        try:
            graph = REAL(model, inputs, **given)
        except Exception:
            graph = None
        beside = path.with_suffix(".part")
        beside.write_bytes(pickle.dumps((call, graph)))
        os.replace(beside, path)
        return graph

    def _wait(self, path: Path, call: str) -> Graph | None:
        until = time.monotonic() + WAIT_S
        while not path.exists():
            assert time.monotonic() < until, f"rank 0 captures nothing more: {call}"
            time.sleep(0.005)
        expected, found = pickle.loads(path.read_bytes())
        assert call == expected, f"rank {self._rank} captures another call than rank 0: use run_ranks"
        return found


def _call(model: torch.nn.Module, inputs: StepInputs, given: dict[str, Any]) -> str:
    """What the graph depends on, as far as it can be told: ranks are said to run the same code."""
    tensors = [(n, p.shape, p.dtype, p.requires_grad) for n, p in (*model.named_parameters(), *model.named_buffers())]
    modes = [(name, type(module).__name__, module.training) for name, module in model.named_modules()]
    named = [(path, tensor.shape, tensor.dtype) for path, tensor in inputs.named]
    loss = getattr(given.get("loss_fn"), "__qualname__", None)
    return repr(
        (tensors, modes, named, inputs.constants, loss, given.get("outputs"), given.get("name"), Autocast.here())
    )
