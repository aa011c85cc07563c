"""Does the clock tell the time? Predicted against measured, three ways:

- *steps*: models x clusters x plans on the testbed in deadline mode, each cluster calibrated once, before its plans are
  made; the profile never sees a plan's step. Needs root; without it links are not enforced, and the report says so.
- *memory*: each rank's peak against what a tracker of every allocation saw in real steps of the zoo's small models.
- *public*: GPU measurements of others; fitted on a stated third, predicted on the rest.

    python benchmarks/accuracy.py [--quick] [--only steps,memory,public] [--cluster equal,both]

Each cluster, the memory and the public data are a *slice*, kept in ``results/accuracy/`` with its commit and CPU. What
the command names is measured anew; the report is made of all slices that are there. ``--only ""`` measures nothing and
makes the tables again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.accuracy_cases import CLUSTERS, MODELS
from benchmarks.accuracy_memory import measure_memory, tell_memory
from benchmarks.accuracy_public import measure_public, tell_public
from benchmarks.accuracy_steps import Row, run_cluster, tell_steps
from benchmarks.common import COLOURS, Report, drawing, machine, parse
from benchmarks.testbed import network

PARTS = ("steps", "memory", "public")
SLICES = ("public", "memory", *CLUSTERS)


def measure(name: str, quick: bool) -> Any:
    """What a slice keeps; plain data."""
    if name == "public":
        return measure_public()
    if name == "memory":
        return measure_memory(quick)
    return run_cluster(name, MODELS[: 2 if quick else None], network.missing() is None)


def take(name: str, quick: bool, folder: Path, commit: str | None) -> None:
    """Measure a slice and keep it. ``commit``: of this code."""
    load, began = os.getloadavg()[0], time.monotonic()
    data = measure(name, quick)
    about = {"commit": commit, "cpu": machine()["cpu"], "quick": quick, "load_before": round(load, 2)}
    folder.mkdir(parents=True, exist_ok=True)
    body = {**about, "seconds": round(time.monotonic() - began, 1), "data": data}
    (folder / f"{name}.json").write_text(json.dumps(body) + "\n", encoding="utf-8")


def chosen(only: str, clusters: str | None, parser: argparse.ArgumentParser) -> list[str]:
    """The slices that a command measures."""
    parts = only.split(",") if only else []
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--only {unknown[0]}: some of {', '.join(PARTS)}")
    names = list(CLUSTERS) if clusters is None else clusters.split(",")
    if unknown := [name for name in names if name not in CLUSTERS]:
        parser.error(f"--cluster {unknown[0]}: some of {', '.join(CLUSTERS)}")
    wanted = [part for part in parts if part != "steps"] + (names if "steps" in parts else [])
    return [name for name in SLICES if name in wanted]


def draw(axis: Any, rows: Sequence[Row]) -> None:
    for colour, name in zip(COLOURS, dict.fromkeys(r.cluster for r in rows), strict=False):
        some = [r for r in rows if r.cluster == name]
        axis.scatter(
            [1e3 * r.measured_s for r in some], [1e3 * r.predicted_s for r in some], s=22, color=colour, label=name
        )
    ends = [1e3 * min(r.measured_s for r in rows) * 0.8, 1e3 * max(r.measured_s for r in rows) * 1.25]
    axis.plot(ends, ends, color="#888888", linewidth=1)
    axis.fill_between(ends, [0.8 * e for e in ends], [1.2 * e for e in ends], color="#dddddd", alpha=0.5, linewidth=0)
    axis.set(xscale="log", yscale="log", xlabel="measured ms", ylabel="predicted ms", title="Step time (band: 20 %)")
    axis.legend()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--cluster", default=None, metavar="NAMES", help=f"of the steps: some of {','.join(CLUSTERS)}")
    options = parse("accuracy", "Predicted against measured: steps, memory, public GPU measurements.", argv, parser)
    report = Report("accuracy", "Predicted against measured", options)
    folder = options.out / "accuracy"
    wanted, stored = chosen(options.extra.only, options.extra.cluster, parser), options.out / "accuracy.json"
    if not wanted and stored.is_file():
        report.taken_by(json.loads(stored.read_text(encoding="utf-8")))
    for name in wanted:
        take(name, options.quick, folder, report.commit)
    found = {n: json.loads((folder / f"{n}.json").read_text()) for n in SLICES if (folder / f"{n}.json").is_file()}
    report.table(
        "Slices",
        ["slice", "commit", "on", "seconds", "load before"],
        [
            [n, f"{s['commit']}{' quick' * s['quick']}", s.get("cpu", "not told"), s["seconds"], s["load_before"]]
            for n, s in found.items()
        ],
    )
    for name in SLICES:
        if name not in found:
            report.missing(f"slice {name}", "not run")
    if "public" in found:
        tell_public(report, found["public"]["data"])
    if "memory" in found:
        tell_memory(report, found["memory"]["data"])
    sessions = {name: found[name]["data"] for name in CLUSTERS if name in found}
    if not sessions:
        report.write(None)
        return
    rows = tell_steps(report, sessions)
    with drawing(1, 1, width=6.0, height=5.0) as (figure, axes):
        draw(axes[0], rows)
        report.write(figure)


if __name__ == "__main__":
    main()
