"""The wheel: holds every module and data file, and works outside the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {"hap": "hap", "cost_models": "hap/cost_models", "search": "hap/search", "codegen": "hap/codegen"}
DATA = (".py", ".csv", ".json", ".typed", ".yaml")


OUTSIDE = """
import torch, hap, hap.api, hap.search, hap.codegen, hap.cost_models
from hap.cluster import ClusterSpec
assert {root!r} not in hap.search.__file__, hap.search.__file__
model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
plan = hap.api.plan(model, ClusterSpec.load("cluster.yaml"), example_inputs=(torch.zeros(8, 6),),
                    loss_fn=lambda out: out.square().mean())
print(plan.world_size, sum(p.numel() for p in model.parameters()) == plan.provenance.parameters)
"""

CLUSTER = """
backend: gloo
hosts:
  - name: box
    devices:
      - {name: fast, tflops: {float32: 0.02}, memory: 1GB, memory_bandwidth: 10GB/s}
      - {name: slow, tflops: {float32: 0.01}, memory: 1GB, memory_bandwidth: 5GB/s}
    link: {bandwidth: 1GB/s, latency: 50us}
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what ships: a build in the checkout leaves a build/ whose old files leak into wheels."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(out)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True, cwd=out)
    (built,) = out.glob("hap-*.whl")
    return built


def test_it_holds_every_module_and_data_file(wheel: Path) -> None:
    shipped = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"{target}/{path.relative_to(ROOT / room).as_posix()}"
        for room, target in ROOMS.items()
        for path in (ROOT / room).rglob("*")
        if path.suffix in DATA or path.name == "py.typed"
    }
    assert sorted(expected - shipped) == []
    assert {"hap/py.typed", "hap/gpus.csv", "hap/search/__init__.py"} <= shipped
    tops = {name.split("/")[0] for name in shipped}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"hap"}
    assert any(name.endswith("licenses/LICENSE") for name in shipped)


def test_it_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    options = ["--no-deps", "--no-index", "--quiet", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True, cwd=tmp_path)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    # -S keeps the editable install out; the dependencies come from the same environment, behind our target.
    path = os.pathsep.join([str(target), sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def python(*arguments: str) -> str:
        command = [sys.executable, "-S", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert python("-m", "hap", "version").strip() == wheel.name.split("-")[1]
    assert python("-c", OUTSIDE.format(root=str(ROOT))) == "2 True\n"
