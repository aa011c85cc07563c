"""``hap report`` of a plan of two axes: the hosts and their parts, then every plan inside as if it were of one axis."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator

from hap.errors import PlanError
from hap.mesh_plan import MeshPlan
from hap.report.explain import hourly_price
from hap.report.facts import Facts, described
from hap.report.measured import Measured
from hap.report.mesh import head_lines, host_rows, plans_inside
from hap.report.page import (
    compared,
    drawing,
    drawn,
    figure,
    heading,
    of_batches,
    page_of,
    table,
    tiled,
    whole_step_s,
)
from hap.report.summary import headline
from hap.report.words import listed, quantity, seconds


def render_mesh_page(plan: MeshPlan, measured: Measured | None = None) -> str:
    """The page. PlanError for a plan that holds no timelines."""
    if any(inside.explanation is None for inside in plan.inside):
        raise PlanError("the plan was made by an older HAP and holds no timelines; plan again")
    return page_of(plan.provenance, _sections(plan, measured), str(drawing().library()))


def _sections(plan: MeshPlan, measured: Measured | None) -> Iterator[str]:
    yield heading(plan)
    yield _paragraphs(head_lines(plan))
    step_s, of = plan.predicted.as_run_s, of_batches(plan)
    tiles = [(seconds(whole_step_s(plan)), f"predicted step{of}")]
    if measured is not None:
        tiles.append((seconds(measured.median_s), f"measured step{of} (median)"))
    tiles.append((quantity(plan.batch.n / step_s) if step_s else "-", "samples a second"))
    tiles += [(str(len(plan.hosts)), "hosts"), (str(plan.world_size), "ranks")]
    tiles.append((quantity(max(plan.memory_bytes), "B"), "memory of the fullest rank"))
    told = plan.explanation
    if told is not None and (price := hourly_price(described(told.cluster, plan.world_size))) is not None:
        tiles.append((f"{price:.2f}", "an hour, all hosts"))
    yield tiled(tiles)
    if measured is not None:
        drawn_steps = drawing().measured(whole_step_s(plan), measured)
        yield figure("Predicted and measured", compared(plan, measured), drawn_steps)
    head, *rows = host_rows(plan)
    yield "<h2>Hosts</h2>" + table(tuple(head), [tuple(row) for row in rows], numbers=(1, 2, 3, 4))
    for number, inside, names in plans_inside(plan):
        title = f"Plan {number}, inside {listed(names)}"
        words = (
            "Of one host's part of the step, its ranks counted from 0; what a device is busy with includes the sums "
            "over hosts."
        )
        yield f'<h1>{html.escape(title)}</h1><p class="quiet">{html.escape(words)}</p>'
        yield _paragraphs(headline(inside))
        yield from drawn(Facts(inside), None)


def _paragraphs(lines: Iterable[str]) -> str:
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)
