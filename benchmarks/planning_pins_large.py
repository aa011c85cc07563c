"""Whether a pin that a user might try leads to a shorter step of a published model than the search finds by itself.

The cases are those of ``planning.py`` on up to 128 devices, all of which take part here. Each is planned as it is, with
the pins of ``planning_pins.py``, and with every kind of weight (of alike layers, by its name without numbers) pinned to
be whole, or to lie in shards of one of its first two dims. A pin takes choices away, so none should end shorter.

    python benchmarks/planning_pins_large.py [--only gpt2@mix-4,bert@hap]
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.common import Report, parse
from benchmarks.planning_cases import USUAL, asked, captured, cluster, titled
from benchmarks.planning_pins import PINS, Beside, beside
from hap.graph import Graph
from hap.rules.choices import choices
from hap.search.judge import TIE

NAME = "planning_pins_large"
QUICK = ("vgg19@mix-4",)
PLACEMENTS = ("R", "S(0)", "S(1)")
PROCESSES = 2


def pins_of(graph: Graph) -> Iterator[tuple[str, Mapping[str, str]]]:
    """By name: those of ``planning_pins.py``, then those of every kind of weight."""
    inputs = "args" if any(n.target.startswith("args") for n in graph.sources("input")) else "kwargs"
    for placements in PINS.values():
        named = {pattern.replace("args", inputs): placement for pattern, placement in placements.items()}
        yield ", ".join(f"{pattern}: {placement}" for pattern, placement in named.items()), named
    weights = [n for n in graph.sources("parameter") if len(n.meta.shape) > 1]
    for kind in dict.fromkeys(re.sub(r"\.\d+\.", ".*.", n.target) for n in weights):
        for placement in PLACEMENTS:
            yield f"{kind}: {placement}", {kind: placement}


def compared(case: str) -> Beside:
    torch.set_num_threads(1)
    model, _, name = case.partition("@")
    on = cluster(name)
    graph = captured(model, on.world_size)
    return beside(choices(graph), on, dict(pins_of(graph)), case)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", metavar="CASES", help="such as gpt2@mix-4, separated by commas")
    options = parse(NAME, "Published models with simple pins.", parser=parser, selects=("--only",))
    cases = asked(options.extra.only, parser) or (QUICK if options.quick else USUAL)
    report = Report(NAME, "Published models with simple pins beside the search's own plans", options)
    rows = dict[str, Beside]()
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        for case, row in zip(cases, pool.map(compared, cases), strict=True):
            rows[case] = row
            print(f"{case}: {row.worst:+.2%} by {row.shortest}", flush=True)
    by_all = [row.behind(pin) for row in rows.values() for pin in row.pinned_s]
    report.figure("cases", len(rows))
    report.figure("plans with a pin", len(by_all))
    report.figure("a pin is shorter by over 1 %", sum(behind > TIE for behind in by_all))
    report.figure("cases where a pin is", sum(row.worst > TIE for row in rows.values()))
    report.figure("worst", max(by_all))
    cells = []
    for case, row in rows.items():
        model, _, name = case.partition("@")
        told = (f"{1e3 * row.run_s:.1f}", len(row.pinned_s), row.shortest, f"{row.worst:+.2%}")
        cells.append((titled(model), name, *told))
    columns = ("model", "cluster", "as run ms", "pins", "shortest pin", "longer than with it")
    report.table("The plan beside the shortest of those with a pin", columns, cells)
    report.write(None)


if __name__ == "__main__":
    main()
