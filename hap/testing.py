"""A pytest plug-in that comes with HAP: plans as golden files, so that a change that costs speed or memory fails.

    def test_gpt2(hap_plan):
        hap_plan.check(model, "cluster.yaml", example_inputs=batch, max_step_regression=0.02)

The golden plan stands beside the test, in ``plans/<test>.plan.json``. ``pytest --hap-update`` writes it; review its
diff as you would review code. A failure shows the words of ``hap diff``. Tests of one folder need names of their own:
one that asks for the golden plan of another fails (where both run in one process, as without ``pytest-xdist``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    import torch

    from hap.axes import Mesh
    from hap.cluster import ClusterSpec
    from hap.mesh_plan import MeshPlan
    from hap.plan import Plan
    from hap.reduce_dtype import ReduceDtype

ASKED = pytest.StashKey[dict[Path, str]]()  # golden plans that a session's tests asked for, and the first that did


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("hap").addoption(
        "--hap-update", action="store_true", help="write the plans found today over the golden ones"
    )


@dataclass
class HapPlan:
    """What the ``hap_plan`` fixture gives. ``folder`` holds the golden plans, ``test`` names them. ``node`` is the
    test's id, ``asked`` the session's golden plans with the ids of their tests."""

    folder: Path
    test: str
    update: bool
    node: str = ""
    asked: dict[Path, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def check(
        self,
        model: torch.nn.Module,
        cluster: ClusterSpec | str | os.PathLike[str],
        example_inputs: Any,
        *,
        example_targets: Any = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        optimizer: str = "adamw",
        effort: Literal["quick", "normal", "thorough"] = "normal",
        mesh: Mesh = "flat",
        gradient_accumulation_steps: int = 1,
        reduce_dtype: ReduceDtype = None,
        max_step_regression: float = 0.02,
        max_memory_regression: float = 0.0,
        name: str | None = None,
    ) -> Plan | MeshPlan:
        """Plan now and compare with the golden plan; fail where the predicted step, or the memory of any one device,
        grew by more than allowed (0.02 = 2%). ``mesh``: of how many axes (``hap.axes``). A second check in one test
        needs a ``name``. A cluster file is looked for beside the test first. Returns today's plan."""
        from hap.axes import plan_axes
        from hap.guard import judge
        from hap.mesh_plan import load_plan

        path = self._path(name)
        if not self.update and not path.exists():
            pytest.fail(f"there is no golden plan {path}; run pytest --hap-update and commit it", pytrace=False)
        golden = None if self.update else load_plan(path)
        found = plan_axes(
            mesh,
            model,
            self._beside(cluster),
            example_inputs=example_inputs,
            example_targets=example_targets,
            loss_fn=loss_fn,
            optimizer=optimizer,
            effort=effort,
            gradient_accumulation_steps=gradient_accumulation_steps,
            reduce_dtype=reduce_dtype,
        )
        if golden is None:
            path.parent.mkdir(exist_ok=True)
            found.save(path)
            return found
        result = judge(
            path.name,
            golden,
            found,
            max_step_regression=max_step_regression,
            max_memory_regression=max_memory_regression,
        )
        if not result.ok:
            pytest.fail(f"{result}\n\nif this is wanted: pytest --hap-update", pytrace=False)
        return found

    def _beside(self, cluster: ClusterSpec | str | os.PathLike[str]) -> ClusterSpec | str | os.PathLike[str]:
        """A file beside the test, wherever pytest was started, or else what was given."""
        if isinstance(cluster, str | os.PathLike) and (path := self.folder.parent / cluster).is_file():
            return path
        return cluster

    def _path(self, name: str | None) -> Path:
        stem = _file_name(f"{self.test}-{name}") if name else self.test
        assert stem not in self.names, f"{stem} is checked twice in one test; give the second check a name"
        self.names.append(stem)
        path = self.folder / f"{stem}.plan.json"
        first = self.asked.setdefault(path, self.node)
        if first != self.node:
            said = f"{path} is the golden plan of {first}; rename {self.node}, or give its check a name of its own"
            pytest.fail(said, pytrace=False)
        return path


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.=-]+", "-", text).strip("-")


@pytest.fixture
def hap_plan(request: pytest.FixtureRequest) -> HapPlan:
    """Golden plans of this test; see ``hap.testing``."""
    stem = _file_name(request.node.name)
    asked = request.config.stash.setdefault(ASKED, {})
    update = bool(request.config.getoption("--hap-update"))
    return HapPlan(request.path.parent / "plans", stem, update, request.node.nodeid, asked)
