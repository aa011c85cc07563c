"""``hap report`` of a plan of two axes: the hosts and their parts, then every plan inside as if it were of one axis."""

from __future__ import annotations

import html
from collections.abc import Iterator

from hap.errors import PlanError
from hap.mesh_plan import MeshPlan
from hap.report.facts import Facts
from hap.report.measured import Measured
from hap.report.mesh import host_rows, plans_inside, times_in_words
from hap.report.page import compared, drawn, figure, heading, page_of, table, tiled
from hap.report.words import listed, quantity, seconds


def render_mesh_page(plan: MeshPlan, measured: Measured | None = None) -> str:
    """The page. PlanError for a plan that holds no timelines."""
    if any(inside.explanation is None for inside in plan.inside):
        raise PlanError("the plan was made by an older HAP and holds no timelines; plan again")
    from hap.report import figures

    return page_of(plan.provenance, _sections(plan, measured), figures.library())


def _sections(plan: MeshPlan, measured: Measured | None) -> Iterator[str]:
    from hap.report import figures as draw  # Plotly takes a while

    yield heading(plan)
    yield "".join(f"<p>{html.escape(line)}</p>" for line in times_in_words(plan))
    step_s = plan.predicted.as_run_s
    tiles = [(seconds(step_s), "predicted step")]
    if measured is not None:
        tiles.append((seconds(measured.median_s), "measured step (median)"))
    tiles.append((quantity(plan.batch.n / step_s) if step_s else "-", "samples a second"))
    tiles += [(str(len(plan.hosts)), "hosts"), (str(plan.world_size), "ranks")]
    tiles.append((quantity(max(plan.memory_bytes), "B"), "memory of the fullest rank"))
    yield tiled(tiles)
    if measured is not None:
        yield figure("Predicted and measured", compared(step_s, measured), draw.measured(step_s, measured))
    head, *rows = host_rows(plan)
    yield "<h2>Hosts</h2>" + table(tuple(head), [tuple(row) for row in rows], numbers=(1, 2, 3, 4))
    for number, inside, names in plans_inside(plan):
        title = f"Plan {number}, inside {listed(names)}"
        words = "Of one host's part of the step; what a device is busy with includes the sums over hosts."
        yield f'<h1>{html.escape(title)}</h1><p class="quiet">{html.escape(words)}</p>'
        yield from drawn(Facts(inside), None)
