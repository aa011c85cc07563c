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
from hap.plan import Layer, Plan
from hap.report.facts import Facts
from hap.report.measured import Measured, StepLog, load_run
from hap.report.page import render_page
from hap.report.words import percent, seconds
from hap.run_record import Head, StepLine, rank_file
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
    assert load_run(tmp_path / "run", plan_of(4)).steps == (0, 1, 2, 3)
    step_s = plan_of(4).predicted.as_run_s
    page = render_page(plan_of(4), Measured(tuple(range(12)), (9.0, 9.0, 9.0, *(2 * step_s,) * 9)))
    assert "predicted / measured = 0.50" in page and "(median of 9;" in page


def test_of_several_batches_whole_steps_are_compared() -> None:
    plan = plan_of(4).model_copy(update={"gradient_accumulation_steps": 4})
    step_s = plan.predicted.as_run_s
    page = render_page(plan, Measured((0, 1), (4 * step_s, 4 * step_s)))
    assert "predicted / measured = 1.00" in page and "<span>measured step of 4 batches (median)</span>" in page
    assert f"<b>{seconds(4 * step_s)}</b><span>predicted step of 4 batches</span>" in page


def test_of_a_record_the_batches_of_a_step_are_added_up(tmp_path: Path) -> None:
    plan = plan_of(4)
    write_records(tmp_path, 4, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert load_run(tmp_path, plan).seconds == (0.1, 0.2, 0.3, 0.4, 0.5)  # after the last one nothing came
    found = load_run(tmp_path, plan.model_copy(update={"gradient_accumulation_steps": 2}))
    assert found.steps == (0, 1) and found.seconds == pytest.approx((0.3, 0.7))
    with pytest.raises(HapError, match="no whole step"):
        load_run(tmp_path, plan.model_copy(update={"gradient_accumulation_steps": 6}))


def write_records(folder: Path, ranks: int, batches: list[float]) -> None:
    for rank in range(ranks):
        head = Head(rank=rank, world_size=ranks, device=f"d{rank}", host="h", pid=1, began=0.0)
        lines = [
            StepLine(step=i, at_s=0.0, seconds=s, parts=(("backward", 0, 1),), wire_s=0.0, outside_wire_s=0.0)
            for i, s in enumerate(batches)
        ]
        rank_file(folder, rank, "jsonl").write_text("".join(line.line() for line in [head, *lines]))


def test_a_run_of_another_plan_is_refused_or_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(4)
    write_records(tmp_path, 2, [0.1, 0.2, 0.3])
    with pytest.raises(HapError, match=r"a run of 2 ranks, and the plan is for 4$"):
        load_run(tmp_path, plan)
    (tmp_path / "steps.csv").write_text("step,seconds\n0,0.1\n\n")  # and a blank line says nothing
    small_plan().save(tmp_path / "plan.json")
    with pytest.raises(HapError, match=f"a run of {small_plan().world_size} ranks, and the plan is for 4$"):
        load_run(tmp_path, plan)
    other = plan.model_copy(update={"devices": ("a", "b", "c", "d")})
    other.save(tmp_path / "plan.json")
    plan.save(tmp_path / "x.plan.json")
    with pytest.raises(SystemExit):
        cli.main(["report", str(tmp_path / "x.plan.json"), "--run", str(tmp_path)])
    assert "a run of another plan than" in capsys.readouterr().err
    assert f"The run was of another plan, {other.checksum[:12]}." in (tmp_path / "x.html").read_text()
    plan.save(tmp_path / "plan.json")
    assert load_run(tmp_path, plan) == Measured((0,), (0.1,), None)


def test_nobody_is_busy_for_longer_than_the_step() -> None:
    plan = plan_of(4)
    assert plan.explanation is not None and plan.explanation.as_run is not None
    run = plan.explanation.as_run
    longest = max(sum(b - a for a, b in zip(row[::2], row[1::2], strict=True)) for row in run.busy_s)
    slower = plan.predicted.model_copy(update={"compute_s": (2 * plan.predicted.as_run_s,) * 4})
    page = render_page(plan.model_copy(update={"predicted": slower}))
    assert f"<b>{percent(longest, run.step_s)}</b><span>busy, the busiest device</span>" in page
    assert "Seconds are with nothing overlapped." in page[page.index("<h2>Devices</h2>") :]


def test_layers_apart_that_are_alike_are_bars_of_their_own() -> None:
    plan = plan_of(4)
    assert plan.explanation is not None
    one = Layer(name="", forward_s=1.0, backward_s=1.0, wire_s=0.0, parameter_bytes=8, calls={"batch": 2})
    other = one.model_copy(update={"parameter_bytes": 16})
    layers = tuple((other if i in (3, 6) else one).model_copy(update={"name": f"a-b.{i}"}) for i in range(9))
    told = plan.explanation.model_copy(update={"layers": layers})
    rows = Facts(plan.model_copy(update={"explanation": told})).layers
    assert [row.name for row in rows] == ["a-b.0-2", "a-b.3", "a-b.4-5", "a-b.6", "a-b.7-8"]
    assert [row.count for row in rows] == [3, 1, 2, 1, 2]
    assert '"a-b.4-5 x 2"' in render_page(plan.model_copy(update={"explanation": told}))


def test_memory_is_named_for_what_the_ledger_counts() -> None:
    page = render_page(plan_of(4))
    assert '"name":"parameters and inputs"' in page and '"name":"parameters"' not in page


def test_plans_that_differ_in_a_dot_have_pages_of_their_own(tmp_path: Path) -> None:
    for name in ("gpt2.b8.json", "gpt2.b16.plan.json"):
        plan_of(4).save(tmp_path / name)
        with pytest.raises(SystemExit):
            cli.main(["report", str(tmp_path / name)])
    assert sorted(p.name for p in tmp_path.glob("*.html")) == ["gpt2.b16.html", "gpt2.b8.html"]


BROKEN = (None, "", "a,b\n1,2\n", "step,seconds\n", "step,seconds\n1,x\n", "step,seconds\n1,-1\n")


@pytest.mark.parametrize("text", BROKEN)
def test_a_run_that_cannot_be_read(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "steps.csv").write_text(text)
    with pytest.raises(HapError, match=r"steps\.csv: "):
        load_run(tmp_path, plan_of(4))


def test_a_plan_of_version_1_is_refused() -> None:
    with pytest.raises(PlanError, match="plan again"):
        render_page(small_plan())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_of(4).save(tmp_path / "x.plan.json")
    with pytest.raises(SystemExit) as exit_:
        cli.main(["report", str(tmp_path / "x.plan.json"), "--json"])
    assert not exit_.value.code and '"report"' in capsys.readouterr().out
    assert (tmp_path / "x.html").read_text().startswith("<!doctype html>")
