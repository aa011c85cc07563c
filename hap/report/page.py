"""``hap report``: a plan as one self-contained HTML page, light or dark as the reader's system is, without network.

Figures are Plotly's, its library embedded; the page brings its own style. Devices that do the same are one row, so
that a thousand devices are as readable as four; beyond ``MOST_ROWS`` classes the smallest are left out, and the page
says so.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType

from hap.errors import HapError, PlanError
from hap.mesh_plan import MeshPlan
from hap.plan import Plan, Provenance
from hap.report.explain import hourly_price, paragraph
from hap.report.facts import DeviceRow, Facts
from hap.report.measured import Measured, load_run
from hap.report.words import percent, quantity, ranks_in_words, seconds

__all__ = ["load_run", "render_page"]

MOST_ROWS = 24

STYLE = """
:root { color-scheme: light dark; --ground: #fcfcfb; --card: #ffffff; --ink: #1c1c1a; --quiet: #63635e;
        --line: #e3e2dd; }
@media (prefers-color-scheme: dark) { :root { --ground: #161615; --card: #1f1f1d; --ink: #ececea; --quiet: #a3a29b;
        --line: #383835; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; } main > h1:not(:first-child) { margin-top: 56px; }
h2 { font-size: 18px; margin: 36px 0 4px; }
p { margin: 4px 0 12px; max-width: 78ch; } .quiet { color: var(--quiet); font-size: 13px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin: 20px 0; }
.tile, .figure { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.tile { padding: 12px 16px; } .tile b { display: block; font-size: 22px; font-weight: 600; }
.tile span { color: var(--quiet); font-size: 13px; }
.figure { padding: 8px; overflow: hidden; }
table { border-collapse: collapse; font-size: 13px; width: 100%; } .scroll { overflow-x: auto; }
td, th { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--quiet); font-weight: 500; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.js-plotly-plot .plotly text { fill: var(--ink) !important; }
.js-plotly-plot .plotly .hovertext text { fill: #1c1c1a !important; }
.js-plotly-plot .plotly .hovertext path { fill: #f4f3ef !important; stroke: #8a8982 !important; }
"""


def render_page(plan: Plan, measured: Measured | None = None) -> str:
    """The page. PlanError for a plan of version 1, which holds no explanation; HapError without Plotly."""
    facts = Facts(plan)
    if facts.told is None:
        raise PlanError("the plan was made by an older HAP and holds no timeline; plan again")
    return page_of(plan.provenance, _sections(facts, measured), str(drawing().library()))


def drawing() -> ModuleType:
    """``hap.report.figures``. HapError without Plotly, which takes a while to import."""
    try:
        from hap.report import figures
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] != "plotly":
            raise
        raise HapError("hap report needs plotly: pip install plotly") from None
    return figures


def page_of(made: Provenance, sections: Iterable[str], library: str) -> str:
    """A page with these sections; ``library`` draws its figures."""
    body, title = "\n".join(sections), html.escape(f"{made.model} on {made.cluster}")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style>'
        f"<script>{library}</script></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def _shown(devices: tuple[DeviceRow, ...]) -> tuple[int, ...]:
    """Indices of the classes that are drawn: all, or the largest, in order."""
    if len(devices) <= MOST_ROWS:
        return tuple(range(len(devices)))
    largest = sorted(range(len(devices)), key=lambda i: (-len(devices[i].ranks), i))[:MOST_ROWS]
    return tuple(sorted(largest))


def _sections(facts: Facts, measured: Measured | None) -> Iterator[str]:
    yield heading(facts.plan)
    yield f"<p>{html.escape(paragraph(facts))}</p>"
    yield _tiles(facts, measured)
    yield from drawn(facts, measured)


def heading(plan: Plan | MeshPlan) -> str:
    made = plan.provenance
    return (
        f"<h1>{html.escape(made.model)} on {html.escape(made.cluster)}</h1>"
        f'<p class="quiet">HAP {html.escape(made.hap_version)}, plan {plan.checksum[:12]}</p>'
    )


def drawn(facts: Facts, measured: Measured | None) -> Iterator[str]:
    """The figures and tables of a plan of one axis."""
    draw = drawing()
    made, shown = facts.plan.provenance, _shown(facts.devices)
    if len(shown) < len(facts.devices):
        ranks = sum(len(facts.devices[i].ranks) for i in shown)
        yield (
            f'<p class="quiet">The {len(shown)} largest of {len(facts.devices)} classes of devices are drawn, '
            f"{ranks} of {facts.plan.world_size} devices.</p>"
        )
    if measured is not None:
        step_s = whole_step_s(facts.plan)
        yield figure("Predicted and measured", compared(facts.plan, measured), draw.measured(step_s, measured))
    batches = facts.plan.gradient_accumulation_steps
    when = "one step" if batches == 1 else f"the last of a step's {batches} batches"
    words = f"What every device does in {when}; those that do the same are one row."
    if facts.told is not None and facts.told.as_run is not None:
        words += " The wire is everybody's; what it carries beside compute costs no time."
    words += " Drag to zoom, click twice to return."
    yield figure("Timeline", words, draw.timeline(facts, shown))
    words = "At its peak, by what takes it; a grey mark is where a device is full."
    yield figure("Memory", words, draw.memory(facts, shown))
    together = "" if facts.plan.world_size <= draw.FEW else ", all devices of a class together"
    words = f"Bytes from row to column in one step{together}."
    yield figure("Traffic", words, draw.traffic(facts, shown))
    words = "Left: seconds of the slowest device. Right: operator calls, by which dim their work is dealt out."
    yield figure("Layers", words, draw.layers(facts))
    yield _tables(facts)
    if made.assumptions:
        items = "".join(f"<li>{html.escape(a)}</li>" for a in made.assumptions)
        yield f'<h2>Assumed</h2><ul class="quiet">{items}</ul>'


def _tiles(facts: Facts, measured: Measured | None) -> str:
    predicted = facts.plan.predicted
    fullest = max(facts.devices, key=lambda d: d.memory_bytes / (d.capacity_bytes or 1))
    tiles = [(seconds(whole_step_s(facts.plan)), f"predicted step{of_batches(facts.plan)}")]
    if measured is not None:
        tiles.append((seconds(measured.median_s), f"measured step{of_batches(facts.plan)} (median)"))
    if facts.batch and predicted.as_run_s:
        tiles.append((quantity(facts.batch / predicted.as_run_s), "samples a second"))
    tiles.append((_busy(facts), "busy, the busiest device"))
    if fullest.capacity_bytes:
        tiles.append((f"{fullest.memory_bytes / fullest.capacity_bytes:.0%}", f"of {fullest.names[0]}'s memory"))
    if (price := hourly_price(facts.cluster)) is not None:
        tiles.append((f"{price:.2f}", "an hour, all hosts"))
    return tiled(tiles)


def tiled(tiles: Iterable[tuple[str, str]]) -> str:
    """Figures with what each is of."""
    inner = "".join(f'<div class="tile"><b>{html.escape(n)}</b><span>{html.escape(w)}</span></div>' for n, w in tiles)
    return f'<div class="tiles">{inner}</div>'


def _busy(facts: Facts) -> str:
    """How much of the step the busiest device computes: as the step is run, where the plan tells, of several batches in
    the last one; else with nothing overlapped."""
    run, predicted = None if facts.told is None else facts.told.as_run, facts.plan.predicted
    if run is None:
        busiest_s, step_s = max(predicted.compute_s), predicted.step_s
    else:
        busiest_s, step_s = max(sum(row[1::2]) - sum(row[::2]) for row in run.busy_s), run.step_s
    return percent(busiest_s, step_s)


def whole_step_s(plan: Plan | MeshPlan) -> float:
    """Predicted seconds of a step with all its batches."""
    return plan.gradient_accumulation_steps * plan.predicted.as_run_s


def of_batches(plan: Plan | MeshPlan) -> str:
    """What a step is of, where it has several batches."""
    batches = plan.gradient_accumulation_steps
    return "" if batches == 1 else f" of {batches} batches"


def compared(plan: Plan | MeshPlan, measured: Measured) -> str:
    """Prediction and measurement of whole steps, in words."""
    (low, high), predicted_s = measured.spread_s, whole_step_s(plan)
    other = measured.other_plan
    return (
        f"Step{of_batches(plan)}: predicted {seconds(predicted_s)}, measured {seconds(measured.median_s)} (median of "
        f"{len(measured.counted)}; 80% of steps took {seconds(low)} to {seconds(high)}); "
        f"predicted / measured = {predicted_s / measured.median_s:.2f}."
    ) + ("" if other is None else f" The run was of another plan, {other[:12]}.")


def figure(title: str, words: str, drawn: str) -> str:
    return f'<h2>{html.escape(title)}</h2><p class="quiet">{html.escape(words)}</p><div class="figure">{drawn}</div>'


def _tables(facts: Facts) -> str:
    rows = [
        (
            row.collective,
            row.decomposition,
            row.phase,
            str(row.count),
            quantity(row.nbytes, "B"),
            "-" if row.seconds is None else seconds(row.seconds),
            row.largest,
        )
        for row in facts.collectives
    ]
    head = ("collective", "performed as", "pass", "number", "bytes", "time", "longest")
    parts = ["<h2>Collectives</h2>", table(head, rows, numbers=(3, 4, 5))] if rows else []
    devices = [
        (
            ranks_in_words(row.ranks),
            row.kind,
            "all" if row.batch is None else str(row.batch),
            seconds(row.busy_s),
            seconds(row.idle_s),
            quantity(row.memory_bytes, "B"),
        )
        for row in facts.devices[: 4 * MOST_ROWS]
    ]
    columns = ("ranks", "device", "batch each", "busy", "waits", "memory")
    parts += ["<h2>Devices</h2>", '<p class="quiet">Seconds are with nothing overlapped.</p>']
    parts.append(table(columns, devices, numbers=(2, 3, 4, 5)))
    if facts.told and facts.told.helps:
        step = facts.plan.predicted.step_s or 1.0
        helps = [(h.change, seconds(h.step_s), f"{h.step_s / step - 1:+.1%}") for h in facts.told.helps]
        parts += ["<h2>What would help</h2>", table(("change", "step", "difference"), helps, numbers=(1, 2))]
    return "\n".join(parts)


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], numbers: tuple[int, ...]) -> str:
    def line(cells: tuple[str, ...], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=n' if i in numbers else ''}>{html.escape(cell)}</{tag}>" for i, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{line(head, "th")}</tr></thead><tbody>{body}</tbody></table></div>'
