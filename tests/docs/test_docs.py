"""Every code block of the documentation runs, page by page and in order, in an empty folder.

``python`` is run in one namespace for each page; a block with a ``title`` is written to a file; ``console`` lines are
commands of HAP or pytest that must succeed. ``text`` is not run, and is not used for anything that could be.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hap import cli
from hap.cluster import ClusterSpec

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted((REPOSITORY / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.M | re.S)
START = (REPOSITORY / "docs" / "index.md").read_text()


def blocks(page: Path) -> list[tuple[str, str | None, str]]:
    return [(kind, title or None, body) for kind, title, body in BLOCK.findall(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for title, body in re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', START, re.M | re.S):
        (tmp_path / title).write_text(body)  # what the first page makes is there on the others
    if page.stem == "plan":
        (tmp_path / "runs").mkdir()
    namespace: dict[str, object] = {"__name__": "docs"}
    for kind, title, body in blocks(page):
        if title is not None:
            (tmp_path / title).parent.mkdir(exist_ok=True)
            (tmp_path / title).write_text(body)
            if kind == "python":
                compile(body, title, "exec")
            elif "hosts:" in body:
                ClusterSpec.load(title)
        elif kind == "python":
            torch.manual_seed(0)
            exec(compile(body, f"{page.name}", "exec"), namespace)
        elif kind == "console":
            for line in body.strip().splitlines():
                assert line.startswith("$ "), line
                command(shlex.split(line[2:]))
        else:
            assert kind in ("yaml", "text"), f"{kind} is not run"
    sys.modules.pop("model", None)


def command(words: list[str]) -> None:
    """One line of a console block: in this process where it can be."""
    if words[0] == "pytest":
        assert pytest.main([*words[1:], "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]) == 0, words
        sys.modules.pop("test_plans", None)
        return
    if words[:2] == ["hap", "run"]:
        module = [sys.executable, "-m", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(module, capture_output=True, text=True, env=environment, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        return
    assert words[0] == "hap", words
    try:
        cli.main(words[1:])
    except SystemExit as exit_:
        found = exit_.code == 1 and words[1] == "diagnose"  # a toy is slower than planned
        assert found or not exit_.code, words


def test_links_between_pages_and_images_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": (\w+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == [p.name for p in PAGES]


@pytest.mark.long
def test_the_steps_of_the_workflow_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As GitHub runs them, ``bash -e``, in a repository with a golden plan: 0 while it holds, 1 once it got worse."""
    import yaml

    monkeypatch.chdir(tmp_path)
    for title, body in re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', START, re.M | re.S):
        (tmp_path / title).write_text(body)
    (tmp_path / "plans").mkdir()
    entry = {"model": "../model.py:build", "cluster": "../cluster.yaml", "effort": "quick"}
    (tmp_path / "plans" / "check.yaml").write_text(yaml.safe_dump({"desk.plan.json": entry}))
    command(["hap", "check", "plans", "--update"])
    workflow = yaml.safe_load((REPOSITORY / "examples" / "ci" / "plans.yml").read_text())
    steps = {step["name"]: step["run"] for step in workflow["jobs"]["plans"]["steps"] if "run" in step}
    assert list(steps) == ["Install", "Compare"]  # the first is run where there is a network
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def compare() -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bash", "-e", "-c", steps["Compare"]], capture_output=True, text=True, env=environment)

    assert compare().returncode == 0
    assert [found["ok"] for found in json.loads((tmp_path / "plans.json").read_text())] == [True]
    (tmp_path / "model.py").write_text((tmp_path / "model.py").read_text().replace("256", "512"))
    worse = compare()
    assert worse.returncode == 1 and "desk.plan.json: WORSE" in worse.stdout and "the step grew by" in worse.stdout
    assert [found["ok"] for found in json.loads((tmp_path / "plans.json").read_text())] == [False]
    sys.modules.pop("model", None)
