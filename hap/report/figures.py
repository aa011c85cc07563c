"""The figures of ``hap report``, drawn by Plotly on transparent ground so that they suit a light and a dark page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from hap.plan import AsRun
from hap.report.facts import DeviceRow, Facts
from hap.report.measured import Measured
from hap.report.traffic import between, traffic_bytes
from hap.report.words import LEDGER, quantity, ranks_in_words, seconds

# Distinct in both modes and for the colour blind (Okabe and Ito's set, darkened or lightened a little).
COMPUTE, WIRE, WAIT = "#3b82c4", "#e08a2e", "rgba(140,140,135,0.35)"
KINDS = {
    "parameters": "#3b82c4",
    "optimizer": "#7b6fc9",
    "gradients": "#c9629b",
    "activations": "#2f9e77",
    "gathered": "#e08a2e",
    "temporary": "#b0a24a",
}
OTHERS = ("#7b6fc9", "#c9629b", "#b0a24a", "#2f9e77", "#8a5a44", "#6b7a99")
LINE = "rgba(140,140,135,0.28)"
FEW = 16  # devices that the traffic shows one by one
MOST_LAYERS = 40
NEAR = 4  # a device's memory is marked where it is at most this many times what is used
MOST_LABELS = 5
FAINT = 5e-4  # of a step: shorter bars would not be seen


def library() -> str:
    """Plotly's JavaScript, without which the page would need the network."""
    return str(get_plotlyjs())


def name_of(row: DeviceRow) -> str:
    """``rank 2, T4`` or ``ranks 0-3, A100-40GB (4)``."""
    if len(row.ranks) == 1:
        return f"rank {row.ranks[0]}, {row.kind}"
    ranks = ranks_in_words(row.ranks)
    short = ranks if len(ranks) < 18 else f"{row.ranks[0]}, {row.ranks[1]} ..."
    return f"ranks {short}, {row.kind} ({len(row.ranks)})"


Bar = tuple[str, float, float, str]  # row, start, seconds, words
ON_THE_WIRE = "on the wire"


def timeline(facts: Facts, shown: Sequence[int]) -> str:
    """What every class does from the step's beginning to its end, and what is on the wire meanwhile."""
    told, plan = facts.told, facts.plan
    assert told is not None
    names = [name_of(facts.devices[i]) for i in shown]
    if told.as_run is None:
        end, bars = _stages(facts, names, shown)
        rows = names
    else:
        end, bars = told.as_run.step_s, _as_run(told.as_run, names, shown)
        rows = [*names, ON_THE_WIRE]
    figure, least = go.Figure(), FAINT * (end or plan.predicted.step_s)
    for (kind, found), colour in zip(bars.items(), (COMPUTE, WAIT, WIRE), strict=True):
        kept = _joined([bar for bar in found if bar[2] > 0], least)
        figure.add_bar(
            y=[b[0] for b in kept],
            base=[b[1] * 1e3 for b in kept],
            x=[b[2] * 1e3 for b in kept],
            hovertext=[b[3] for b in kept],
            hoverinfo="text",
            orientation="h",
            name=kind,
            marker={"color": colour, "line": {"width": 0}},
        )
    figure.update_layout(barmode="overlay", bargap=0.25)
    figure.update_xaxes(title="ms", range=[0, end * 1e3])
    figure.update_yaxes(categoryorder="array", categoryarray=rows[::-1])
    return _html(figure, 120 + 34 * len(rows))


def _as_run(run: AsRun, names: Sequence[str], shown: Sequence[int]) -> dict[str, list[Bar]]:
    """As the program is run: a row for each class, and one for the wire that all share."""
    bars: dict[str, list[Bar]] = {"compute": [], "waits": [], "collective": []}
    for name, i in zip(names, shown, strict=True):
        times = [0.0, *run.busy_s[i], run.step_s]
        for number, (start, end) in enumerate(pairwise(times)):
            kind = "compute" if number % 2 else "waits"
            words = f"{'computes' if number % 2 else 'waits'} {seconds(end - start)}"
            bars[kind].append((name, start, end - start, words))
    for sent in run.wire:
        more = f" and {sent.values - 1} more" if sent.values > 1 else ""
        words = f"{sent.collective} of {sent.name}{more}<br>{seconds(sent.wire_s)}"
        bars["collective"].append((ON_THE_WIRE, sent.start_s, sent.wire_s, words))
    return bars


def _stages(facts: Facts, names: Sequence[str], shown: Sequence[int]) -> tuple[float, dict[str, list[Bar]]]:
    """As the cost model adds stages up, nothing beside anything: of plans that do not hold their step as it is run."""
    told, plan = facts.told, facts.plan
    assert told is not None
    bars: dict[str, list[Bar]] = {"compute": [], "waits": [], "collective": []}
    start = 0.0
    for stage in told.stages:
        longest = max(stage.compute_s)
        for name, i in zip(names, shown, strict=True):
            own = stage.compute_s[i]
            bars["compute"].append((name, start, own, f"{stage.layer}<br>compute {seconds(own)}"))
            bars["waits"].append((name, start + own, longest - own, f"waits {seconds(longest - own)}"))
        start += longest
        if stage.conversion is not None:
            c = plan.conversions[stage.conversion]
            words = (
                f"{c.collective} of {c.value}<br>{c.decomposition}, {quantity(c.nbytes, 'B')}, {seconds(stage.wire_s)}"
            )
            bars["collective"] += [(name, start, stage.wire_s, words) for name in names]
            start += stage.wire_s
    return start, bars


def _joined(bars: list[Bar], least: float) -> list[Bar]:
    """Neighbours of one row that are too short to be seen become one bar, so that thousands of stages stay quick."""
    found: list[Bar] = []
    last: dict[str, int] = {}
    for name, start, length, words in bars:
        at = last.get(name)
        if at is not None:
            _, begun, so_far, _ = found[at]
            touching = start - (begun + so_far) <= 1e-9 * max(start, 1e-9)
            if touching and length < least and so_far < 20 * least:
                found[at] = (name, begun, so_far + length, "several, each too short to be seen")
                continue
        last[name] = len(found)
        found.append((name, start, length, words))
    return found


def memory(facts: Facts, shown: Sequence[int]) -> str:
    """Bytes of every class at the peak of its fullest device, stacked by kind; beside each bar what the device has,
    and a mark there where it is not far off."""
    rows = [facts.devices[i] for i in shown]
    names = [name_of(row) for row in rows]
    used = [sum(row.memory_by_kind.values()) for row in rows]
    most = max(used, default=0) or 1
    scale, unit = next((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")) if most >= s)
    figure = go.Figure()
    kinds = dict.fromkeys([*KINDS, *(k for row in rows for k in row.memory_by_kind)])
    for kind in kinds:
        amounts = [row.memory_by_kind.get(kind, 0) for row in rows]
        if any(amounts):
            figure.add_bar(
                y=names,
                x=[a / scale for a in amounts],
                orientation="h",
                name=LEDGER.get(kind, kind),
                hovertext=[f"{LEDGER.get(kind, kind)} {quantity(a, 'B')}" for a in amounts],
                hoverinfo="text",
                marker={"color": KINDS.get(kind, WAIT), "line": {"width": 0}},
            )
    figure.add_scatter(
        y=names,
        x=[u / scale for u in used],
        mode="text",
        text=[f" {_of(u, row.capacity_bytes)}" for u, row in zip(used, rows, strict=True)],
        textposition="middle right",
        hoverinfo="skip",
        showlegend=False,
    )
    near = [c if c is not None and c <= NEAR * most else None for c in (row.capacity_bytes for row in rows)]
    if any(near):
        figure.add_scatter(
            y=names,
            x=[None if c is None else c / scale for c in near],
            mode="markers",
            name="what it has",
            hoverinfo="skip",
            marker={"symbol": "line-ns", "size": 20, "line": {"width": 2.5, "color": "#8a8982"}},
        )
    furthest = max([1.3 * most, *(1.03 * c for c in near if c is not None)])
    figure.update_layout(barmode="stack", bargap=0.25)
    figure.update_xaxes(title=unit, range=[0, furthest / scale])
    figure.update_yaxes(categoryorder="array", categoryarray=names[::-1])
    return _html(figure, 120 + 34 * len(names))


def _of(used: int, capacity: int | None) -> str:
    return quantity(used, "B") + (f" of {quantity(capacity, 'B')}" if capacity else "")


def traffic(facts: Facts, shown: Sequence[int]) -> str:
    """Bytes from class to class; devices of few classes one by one."""
    plan = facts.plan
    matrix = traffic_bytes(plan)
    if plan.world_size <= FEW:
        names = list(plan.devices)
    else:
        rows = [facts.devices[i] for i in shown]
        matrix, names = between(matrix, tuple(row.ranks for row in rows)), [name_of(row) for row in rows]
    words = [
        [f"{names[i]} to {names[j]}<br>{quantity(matrix[i, j], 'B')}" for j in range(len(names))]
        for i in range(len(names))
    ]
    texts = [[quantity(v, "B") if v else "" for v in row] for row in matrix.tolist()]
    figure = go.Figure(
        go.Heatmap(
            z=np.where(matrix > 0, matrix, np.nan).tolist(),
            x=names,
            y=names,
            text=texts if len(names) <= 12 else None,
            texttemplate="%{text}" if len(names) <= 12 else None,
            hovertext=words,
            hoverinfo="text",
            xgap=2,
            ygap=2,
            zmin=0,
            colorscale=[[0.0, "rgba(59,130,196,0.15)"], [1.0, "rgba(59,130,196,0.85)"]],
            colorbar={"title": "bytes", "outlinewidth": 0, "tickformat": ".2s"},
        )
    )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(tickangle=-30, showgrid=False)
    return _html(figure, 220 + 30 * len(names))


def layers(facts: Facts) -> str:
    """Every layer's seconds, and how its operator calls are dealt out."""
    rows = facts.layers
    if len(rows) > MOST_LAYERS:
        heaviest = sorted(rows, key=lambda r: -r.count * (r.forward_s + r.backward_s + r.wire_s))[:MOST_LAYERS]
        rows = tuple(row for row in rows if row in heaviest)
    names = [f"{row.name} x {row.count}" if row.count > 1 else row.name for row in rows]
    figure = make_subplots(cols=2, shared_yaxes=True, horizontal_spacing=0.03, column_widths=[0.55, 0.45])
    for kind, colour in (("forward", "#7fb2e0"), ("backward", COMPUTE), ("wire", WIRE)):
        each = [getattr(row, f"{kind}_s") for row in rows]
        figure.add_bar(
            y=names,
            x=[s * row.count * 1e3 for s, row in zip(each, rows, strict=True)],
            orientation="h",
            name="collectives" if kind == "wire" else kind,
            legendgroup="time",
            hovertext=[f"{seconds(s)} each" for s in each],
            hoverinfo="text",
            marker={"color": colour, "line": {"width": 0}},
            row=1,
            col=1,
        )
    for label, colour in _labels(facts):
        counts = [_calls(row.calls, label, facts) for row in rows]
        figure.add_bar(
            y=names,
            x=[count / max(1, sum(row.calls.values())) * 100 for count, row in zip(counts, rows, strict=True)],
            orientation="h",
            name=label or "not dealt",
            legendgroup="dealt",
            hovertext=[f"{label or 'not dealt'}: {count} calls" for count in counts],
            hoverinfo="text",
            marker={"color": colour, "line": {"width": 0}},
            row=1,
            col=2,
        )
    figure.update_layout(barmode="stack", bargap=0.25)
    figure.update_xaxes(title="ms, all of them", row=1, col=1)
    figure.update_xaxes(title="% of calls", range=[0, 100], row=1, col=2)
    figure.update_yaxes(autorange="reversed", type="category")
    return _html(figure, 160 + 26 * len(names))


def _labels(facts: Facts) -> list[tuple[str, str]]:
    """What calls are dealt by, the commonest first, with colours; rare ones together as ``other dims``."""
    total: dict[str, int] = {}
    for row in facts.layers:
        for label, count in row.calls.items():
            total[label] = total.get(label, 0) + count * row.count
    dealt = sorted((label for label in total if label not in ("", "batch")), key=lambda label: -total[label])
    found = [("batch", "#4aa3a0")] if "batch" in total else []
    found += list(zip(dealt[:MOST_LABELS], OTHERS, strict=False))
    if len(dealt) > MOST_LABELS:
        found.append(("other dims", OTHERS[-1]))
    return [*found, ("", WAIT)] if "" in total else found


def _calls(calls: object, label: str, facts: Facts) -> int:
    assert isinstance(calls, dict)
    if label != "other dims":
        return int(calls.get(label, 0))
    named = [name for name, _ in _labels(facts)]
    return sum(count for name, count in calls.items() if name not in named)


def measured(predicted_s: float, run: Measured) -> str:
    """Every measured step, and the prediction."""
    figure = go.Figure()
    figure.add_scatter(
        x=list(run.steps),
        y=[s * 1e3 for s in run.seconds],
        mode="lines+markers",
        name="measured",
        line={"color": COMPUTE, "width": 2},
        marker={"size": 5},
    )
    figure.add_hline(
        y=predicted_s * 1e3,
        line={"color": WIRE, "width": 2, "dash": "dash"},
        annotation={"text": "predicted", "xanchor": "right", "yanchor": "top", "showarrow": False},
    )
    figure.update_xaxes(title="step")
    figure.update_yaxes(title="ms", rangemode="tozero")
    return _html(figure, 300)


def _html(figure: go.Figure, height: int) -> str:
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 10, "r": 10, "t": 40, "b": 40},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12, "color": "#77766f"},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        hoverlabel={"align": "left"},
    )
    figure.update_xaxes(gridcolor=LINE, zerolinecolor=LINE, automargin=True)
    figure.update_yaxes(gridcolor="rgba(0,0,0,0)", zerolinecolor=LINE, automargin=True)
    config = {"displaylogo": False, "responsive": True, "displayModeBar": False}
    drawn = figure.to_html(full_html=False, include_plotlyjs=False, include_mathjax=False, config=config)
    return str(drawn)
