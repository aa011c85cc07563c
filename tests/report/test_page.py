"""The HTML page: self-contained, drawn by a real browser without network, for 4 devices and for 1,024.

Screenshots were looked at when the page was made (light and dark); here a browser must have drawn every figure.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hap import cli
from hap.errors import HapError, PlanError
from hap.plan import Plan
from hap.report.measured import Measured, StepLog, load_run
from hap.report.page import render_page
from tests.report.plans import four, thousand
from tests.test_language import small_plan

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OFFLINE = ("--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND")
DARK = ("--blink-settings=preferredColorScheme=0",)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (apt-get install chromium)")


def plan_of(devices: int) -> Plan:
    return four()[0] if devices == 4 else thousand()


def browser(page: Path, *options: str) -> str:
    assert CHROMIUM is not None
    command = [CHROMIUM, *OFFLINE, "--virtual-time-budget=8000", "--window-size=1200,2600", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout


@needs_chromium
@pytest.mark.parametrize("devices", [4, 1024])
def test_a_browser_without_network_draws_every_figure(devices: int, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_page(plan_of(devices)))
    drawn = browser(page, "--dump-dom")
    body = drawn[drawn.index("<main>") :]
    assert re.findall("<h2>(.*?)</h2>", body)[:4] == ["Timeline", "Memory", "Traffic", "Layers"]
    assert body.count('class="main-svg"') >= 4 and body.count('<g class="barlayer') >= 3
    assert "heatmaplayer" in body and body.count('class="point"') > 20
    first = "fast" if devices == 4 else "A100-40GB (256)"  # equal devices share a row; the four hold unlike shares
    assert first in body


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark(dark: bool, tmp_path: Path) -> None:
    from PIL import Image

    page, shot = tmp_path / "report.html", tmp_path / "shot.png"
    page.write_text(render_page(plan_of(4)))
    browser(page, f"--screenshot={shot}", *(DARK if dark else ()))
    image = Image.open(shot).convert("L")
    assert (image.getpixel((5, 5)) < 60) == dark  # type: ignore[operator]
    assert len(set(image.resize((300, 650)).tobytes())) > 60, "the page is nearly blank"


def test_nothing_is_fetched_and_names_are_escaped() -> None:
    plan = plan_of(4)
    named = plan.provenance.model_copy(update={"model": "<script>alert(1)</script>"})
    page = render_page(plan.model_copy(update={"provenance": named}))
    assert not re.search(r"<(script|img|iframe)[^>]+src=|<link|@import|url\(http", page[page.index("</head>") :])
    assert "<script src" not in page and "<link" not in page[: page.index("<script>")]
    assert "<script>alert(1)" not in page and "&lt;script&gt;alert(1)" in page


def test_the_page_is_the_same_every_time_but_for_ids() -> None:
    def stripped(page: str) -> str:
        return re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "ID", page)

    assert stripped(render_page(plan_of(4))) == stripped(render_page(plan_of(4)))


def test_a_run_stands_beside_the_prediction(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "run")
    for step in range(4):
        with log.step(step):
            pass
    assert load_run(tmp_path / "run").steps == (0, 1, 2, 3)
    step_s = plan_of(4).predicted.as_run_s
    page = render_page(plan_of(4), Measured(tuple(range(12)), (9.0, 9.0, 9.0, *(2 * step_s,) * 9)))
    assert "predicted / measured = 0.50" in page and "(median of 9;" in page


BROKEN = (None, "", "a,b\n1,2\n", "step,seconds\n", "step,seconds\n1,x\n", "step,seconds\n1,-1\n")


@pytest.mark.parametrize("text", BROKEN)
def test_a_run_that_cannot_be_read(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "steps.csv").write_text(text)
    with pytest.raises(HapError, match=r"steps\.csv: "):
        load_run(tmp_path)


def test_a_plan_of_version_1_is_refused() -> None:
    with pytest.raises(PlanError, match="plan again"):
        render_page(small_plan())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_of(4).save(tmp_path / "x.plan.json")
    with pytest.raises(SystemExit) as exit_:
        cli.main(["report", str(tmp_path / "x.plan.json"), "--json"])
    assert not exit_.value.code and '"report"' in capsys.readouterr().out
    assert (tmp_path / "x.html").read_text().startswith("<!doctype html>")
