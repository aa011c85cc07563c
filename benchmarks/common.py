"""The frame of every benchmark: options, the machine, spread, and the three files that a run leaves.

    python benchmarks/NAME.py [--quick --out DIR]

writes ``NAME.json`` (command, commit, machine, spread, figures, absent), ``NAME.md`` (the tables) and ``NAME.png`` into
``benchmarks/results/`` unless ``--out`` says otherwise. A figure that this machine cannot measure is absent, with the
reason; none is ever estimated. A quick run needs a folder of its own, as does one of some cases where these would take
the place of all.

    options = parse("links", "What a link carries.")
    report = Report("links", "What a link carries", options)
    report.figure("goodput_worst_error", 0.03, Spread.of(samples))
    report.table("Links", ["link", "median"], rows)
    with drawing(1, 2) as (figure, axes):
        ...
        report.write(figure)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NOISY_STEAL = 0.05  # more than this share of the CPU time went to other machines: the run should be repeated
FOLDERS = ("--out", "--rows", "--keep")  # options that name one of this machine
COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#6c5b7b", "#00798c", "#a05a2c")


@dataclass(frozen=True)
class Options:
    quick: bool
    out: Path
    command: str  # as it can be typed again, from the root of the checkout
    extra: argparse.Namespace
    some: bool = False  # of the cases only, and the result would have no others


@dataclass(frozen=True)
class Spread:
    """Of repeated measurements of one thing, in its unit."""

    n: int
    least: float
    median: float
    most: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        assert samples and all(math.isfinite(s) for s in samples)
        return cls(len(samples), min(samples), statistics.median(samples), max(samples))

    @property
    def relative(self) -> float:
        """(most - least) / median."""
        return (self.most - self.least) / self.median


def parse(
    name: str,
    description: str,
    argv: Sequence[str] | None = None,
    parser: argparse.ArgumentParser | None = None,
    selects: Sequence[str] = (),
) -> Options:
    """The options that all benchmarks have; ``parser`` may bring more, found in ``extra``. ``selects``: those by which
    some cases are chosen, where a result keeps no others. SystemExit for bad ones, and for ``--quick`` without a folder
    of its own."""
    parser = argparse.ArgumentParser() if parser is None else parser
    parser.prog, parser.description, parser.allow_abbrev = f"python benchmarks/{name}.py", description, False
    parser.add_argument("--quick", action="store_true", help="fewer cases, about a minute on two cores")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="default: benchmarks/results")
    given = sys.argv[1:] if argv is None else list(argv)
    extra = parser.parse_args(given)
    if extra.quick and _same(extra.out, RESULTS):
        parser.error("--quick: a few cases do not stand for all in benchmarks/results; --out another folder")
    shown = ["python", f"benchmarks/{name}.py", *without_folders(given)]
    some = any(word.partition("=")[0] in selects for word in given)
    return Options(extra.quick, extra.out, shlex.join(shown), extra, some)


def machine() -> dict[str, Any]:
    """What the figures were taken on. No names of hosts or people."""
    found: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
    }
    with contextlib.suppress(OSError):
        found["gpus"] = _gpus()
    return found


def commit() -> str | None:
    """The checkout's commit, with ``+`` if files differ from it (results do not count); None outside a checkout."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)benchmarks/results")
    return head + ("+" if changed else "")


class Report:
    """Collects what a benchmark found; ``write`` leaves the files and prints the tables. To be made before anything is
    measured: ``commit`` is that of the code that was loaded, and load and stolen time count from here."""

    def __init__(self, name: str, title: str, options: Options) -> None:
        self.name, self.title, self.options = name, title, options
        self.commit = commit()
        self._spare_others()
        self.figures: dict[str, float] = {}
        self.absent: dict[str, str] = {}
        self.chosen: dict[str, str] = {}
        self._spread: dict[str, Spread] = {}
        self._text: list[str] = []
        self._machine = machine()
        self._load_before = os.getloadavg()[0]
        self._cpu_before = cpu_times()
        self._began = time.monotonic()
        self._taken_by: dict[str, Any] = {}

    def _spare_others(self) -> None:
        """SystemExit where a run of some cases would replace the stored result of another command."""
        path = self.options.out / f"{self.name}.json"
        if self.options.some and _same(path.parent, RESULTS) and path.is_file():
            stored = json.loads(path.read_text(encoding="utf-8"))["command"]
            if stored != self.options.command:
                raise SystemExit(
                    f"error: some cases would replace {path.name} of `{stored}` in benchmarks/results; --out DIR"
                )

    def taken_by(self, body: Mapping[str, Any]) -> None:
        """The measurements are those of a run that left this JSON: it says when, where and by what they were taken."""
        self._taken_by = {name: body[name] for name in ("command", "commit", "machine")}

    def figure(self, name: str, value: float, spread: Spread | None = None) -> None:
        """A number under the name by which others look it up, and the spread of the measurements behind it."""
        assert math.isfinite(value) and name not in self.figures, name
        self.figures[name] = value
        if spread is not None:
            self._spread[name] = spread

    def spread(self, name: str, spread: Spread) -> None:
        """Of a measurement that is no figure of its own."""
        self._spread[name] = spread

    def choice(self, name: str, chosen: str) -> None:
        """What was chosen among several ways, in the JSON's ``chosen``."""
        assert name not in self.chosen, name
        self.chosen[name] = chosen

    def missing(self, name: str, reason: str) -> None:
        """A figure that this machine cannot measure."""
        self.absent[name] = reason

    def text(self, paragraph: str) -> None:
        self._text.append(paragraph)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Numbers are right-aligned; format them before."""
        self._text.append(f"### {title}\n\n{markdown_table(columns, rows)}")

    def write(self, picture: Figure | None) -> Path:
        """The JSON's path. Prints the tables and where the files are."""
        out = self.options.out
        out.mkdir(parents=True, exist_ok=True)
        body = self.body()
        path = out / f"{self.name}.json"
        path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        if picture is not None:
            picture.savefig(out / f"{self.name}.png", dpi=110, metadata={"Software": None})
        (out / f"{self.name}.md").write_text(self._markdown(body, picture is not None), encoding="utf-8")
        print("\n\n".join(self._text))
        print(f"\nwrote {self.name}.json, .md{', .png' if picture is not None else ''} in {out}")
        return path

    def body(self) -> dict[str, Any]:
        stolen, total = (now - before for now, before in zip(cpu_times(), self._cpu_before, strict=True))
        return {
            "command": self.options.command,
            "commit": self.commit,
            "machine": self._machine
            | {
                "load_before": round(self._load_before, 2),
                "load_after": round(os.getloadavg()[0], 2),
                "steal": round(stolen / total, 4) if total > 0 else 0.0,
                "seconds": round(time.monotonic() - self._began, 1),
            },
            "spread": {
                name: {"n": s.n, "min": s.least, "median": s.median, "max": s.most, "relative": s.relative}
                for name, s in self._spread.items()
            },
            "figures": self.figures,
            "absent": self.absent,
            **self._taken_by,
            **({"chosen": self.chosen} if self.chosen else {}),
        }

    def _markdown(self, body: Mapping[str, Any], has_picture: bool) -> str:
        about = body["machine"]
        lines = [
            f"# {self.title}",
            f"`{body['command']}` at commit {body['commit']}: {about['cores']} cores of {about['cpu']}, "
            f"{about['kernel']}, torch {about['torch']}; load {about['load_before']} before and {about['load_after']} "
            f"after, {about['steal']:.1%} of the CPU time stolen, {about['seconds']:.0f} s.",
        ]
        if about["steal"] > NOISY_STEAL:
            lines.append(f"**More than {NOISY_STEAL:.0%} was stolen: repeat this run before quoting it.**")
        if has_picture:
            lines.append(f"![{self.title}]({self.name}.png)")
        rows = [(name, f"{value:.4g}", self._shown(name)) for name, value in self.figures.items()]
        if rows:
            lines.append(markdown_table(["figure", "value", "spread (max - min) / median of n"], rows))
        lines += self._text
        lines += [f"Not measured: `{name}`: {reason}." for name, reason in self.absent.items()]
        return "\n\n".join(lines) + "\n"

    def _shown(self, name: str) -> str:
        spread = self._spread.get(name)
        return "" if spread is None else f"{spread.relative:.1%} of {spread.n}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """GitHub's tables, padded so that they read well as text too. The first column is left-aligned."""
    cells = [[str(c) for c in row] for row in (columns, *rows)]
    assert all(len(row) == len(columns) for row in cells)
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(columns))]
    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    lines = [cells[0], rule, *cells[1:]]
    padded = [
        [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        for row in lines
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


@contextlib.contextmanager
def drawing(rows: int, columns: int, width: float = 5.0, height: float = 4.0) -> Iterator[tuple[Figure, list[Any]]]:
    """A figure and its axes, row by row, in the style of all our pictures; saved by ``Report.write``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: dict[Any, Any] = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e4e4e4",
        "axes.axisbelow": True,
        "axes.prop_cycle": plt.cycler(color=COLOURS),
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "legend.frameon": False,
        "font.size": 9,
        "figure.constrained_layout.use": True,
    }
    with plt.rc_context(style):
        figure, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False)
        yield figure, [axis for row in axes for axis in row]
        plt.close(figure)


def cpu_times() -> tuple[float, float]:
    """(stolen by the hypervisor, all there was) since boot, seconds over all cores; zeros where nobody counts."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return 0.0, 0.0
    ticks = [int(n) for n in stat.read_text().splitlines()[0].split()[1:]]
    second = os.sysconf("SC_CLK_TCK")
    return ticks[7] / second, sum(ticks[:8]) / second


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    argv = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(argv, capture_output=True, text=True).stdout.splitlines()


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    except OSError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _same(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve()


def without_folders(given: Sequence[str]) -> list[str]:
    """Where files lie belongs to a person's machine."""
    kept, skip = [], False
    for word in given:
        if skip:
            skip = False
        elif word in FOLDERS:
            skip = True
        elif not word.startswith(tuple(f"{option}=" for option in FOLDERS)):
            kept.append(word)
    return kept
