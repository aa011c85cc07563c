"""The tables of README.md, made from ``benchmarks/results/*.json`` and put between their marks.

    python benchmarks/readme.py            # or: make readme
    python benchmarks/readme.py --check    # 1 if README is not what the results say

A mark is ``<!-- NAME -->`` ... ``<!-- /NAME -->``; what stands between is replaced. Numbers are quoted as the
benchmarks wrote them, with the command that prints them; a benchmark that was not run says so in one line.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import RESULTS, ROOT, markdown_table

README = ROOT / "README.md"
_OVER_BEST = re.compile(r"over_best_baseline_([^_]+)_(.+)")
FITTED = "fitted on a third of each group, forms chosen on the same data"
Body = Mapping[str, Any]


def race(body: Body) -> str:
    """How many times as fast as the best baseline: a row for each model, a column for each cluster."""
    figures = body["figures"]
    found = {match.groups(): value for name, value in figures.items() if (match := _OVER_BEST.fullmatch(name))}
    models = list(dict.fromkeys(model for model, _ in found))
    clusters = list(dict.fromkeys(cluster for _, cluster in found))
    rows = [[model, *(f"{found[model, c]:.2f}" if (model, c) in found else "-" for c in clusters)] for model in models]
    lines = [markdown_table(["", *(c.replace("_", " ") for c in clusters)], rows)]
    slower = sorted(value for value in found.values() if value < 1)
    words = f"Slower than the best baseline in {len(slower)} of {len(found)} cases" if slower else "Nowhere slower"
    words += f", at worst {slower[0]:.2f} times as fast." if slower else "."
    if (mean := figures.get("geomean_over_best_baseline_unequal")) is not None:
        words += f" Geometric mean of the unequal clusters: {mean:.2f}."
    if (most := figures.get("best_over_equal_ddp")) is not None:
        words += f" Over plain DDP with equal batches: up to {most:.1f}."
    return "\n\n".join([*lines, words, *_fewer(body), *_commits(body), _source("race", body)])


def _fewer(body: Body) -> list[str]:
    """What is won over those that keep all devices, where HAP's plans leave some out, and which cases were raced before
    others did, too."""
    cases = body.get("cases") or ()
    there = [case for case in cases if "one device" in case["entries"]]
    before = dict.fromkeys(case["cluster"] for case in cases if "one device" not in case["entries"])
    words = []
    if kept := [_over_all(case) for case in there if case["cluster"] != "equal"]:
        words.append(
            f"Over the best of those that keep all devices, where the others took part, too: {min(kept):.2f} to "
            f"{max(kept):.2f}, geometric mean {statistics.geometric_mean(kept):.2f}."
        )
    if fewer := [case for case in there if ", without " in case["shape"]]:
        alone = sum(case["shape"].startswith("batch on one,") for case in fewer)
        told = f", in {alone} of these all but one" if alone else ""
        words.append(f"HAP leaves devices out in {len(fewer)} of {len(there)} cases{told}.")
    if before:
        words.append(
            f"{', '.join(before).capitalize()}: raced before one device alone and DDP on the fast hosts took part, "
            "before HAP could leave out devices that were measured, and with DDP's default buckets."
        )
    return [" ".join(words)] if words else []


def _over_all(case: Mapping[str, Any]) -> float:
    """How many times as fast as the best baseline on all devices, on an unequal cluster."""
    medians = {who: statistics.median(entry["steps_s"]) for who, entry in case["entries"].items()}
    others = ("DDP", "DDP, by speed", "ZeRO-1", "FSDP2")
    return min(medians[who] for who in others if who in medians) / medians["HAP"]


def _commits(body: Body) -> list[str]:
    """Where the cases are of several commits: which cluster's of which."""
    pairs = [(str(case["commit"]), case["cluster"]) for case in body.get("cases") or ()]
    return _of_several(pairs, "The cases are", "python benchmarks/race.py --clusters ...")


def _of_several(pairs: Sequence[tuple[str, str]], words: str, command: str) -> list[str]:
    """What is of which commit, (commit, name), if there are several."""
    of: dict[str, dict[str, None]] = {}
    for commit, name in pairs:
        of.setdefault(commit, {})[name] = None
    if len(of) < 2:
        return []
    told = "; ".join(f"{', '.join(names)} at {commit}" for commit, names in of.items())
    return [f"{words} of several runs, each by `{command}`: {told}."]


def accumulate(body: Body) -> str:
    """Steps of several batches: how many times as fast, by whom they are run."""
    f = body["figures"]

    def span(name: str) -> str:
        return f"{f[f'worst_over_{name}']:.2f} to {f[f'best_over_{name}']:.2f} times"

    words = (
        f"Four batches a step, in {f['cases']:.0f} cases: {span('ddp_no_sync')} as fast as DDP with batches by speed "
        f"under its own `no_sync()`, {span('planned_for_one')} as HAP's plan for one batch a step, and "
        f"{span('summed_each_time')} as with gradients exchanged for every batch."
    )
    return f"{words}\n\n{_source('accumulate', body)}"


def diagnose(body: Body) -> str:
    """How much of what went wrong was found, and what was found where nothing did."""
    f, absent = body["figures"], [case for case, why in body["absent"].items() if why == "this job was not run"]
    jobs = "Jobs of four emulated unequal ranks"
    if absent:
        jobs = f"A job of four emulated unequal ranks (one of {1 + len(absent)}: {', '.join(absent)} were not run)"
    words = (
        f"{jobs}, in which a device became slow or was so from the start, data came late, a link became slower one way "
        f"or was cut, a rank never came, was stopped, killed, or raised: of {f['faults']:.0f} faults "
        f"{f['faults_found']:.0f} were found, {f['faults_found_with_the_rank']:.0f} with the one rank, "
        f"{f['faults_found_with_a_link']:.0f} as a link of two ranks, and {f['faults_found_with_several_ranks']:.0f}, "
        "a link that was cut, only as a hang of all that communicate; of "
        f"{f['healthy_jobs']:.0f} runs with nothing wrong {f['healthy_jobs_with_findings']:.0f} had "
        f"a finding. How many times "
        f"as slow a device had become was told within {f['worst_error_of_factor']:.1%}, a hang within "
        f"{f['seconds_to_tell_a_hang']:.0f} s. Recording took "
        f"{f['recording_us_of_a_collective']:.0f} us of CPU for each collective."
    )
    return f"{words}\n\n{_source('diagnose', body)}"


def zoo(body: Body) -> str:
    """Captured, planned and equal to one device, of how many."""
    f = body["figures"]
    words = (
        f"Of {f['models_total']:.0f} models {f['models_planned']:.0f} are planned at their published size and "
        f"{f['models_equal']:.0f} are equal to one device on unequal ranks in float64"
    )
    if "worst_relative_error" in f:
        words += f" (largest relative difference {f['worst_relative_error']:.1e})"
    words += f"; {f['models_wrong']:.0f} wrong, {f['rules_missing']:.0f} operators without a rule."
    return f"{words}\n\n{_source('zoo', body)}"


def families(body: Body) -> str:
    """Equal to one device, of how many that could be built small; which are refused."""
    return _families(body, "families", "model families of Hugging Face transformers", "at small sizes")


def families_timm(body: Body) -> str:
    """The same of timm's."""
    return _families(body, "families_timm", "kinds of timm's vision models", "on small images")


def _families(body: Body, name: str, many: str, small: str) -> str:
    f = body["figures"]
    words = (
        f"Of {f['families']:.0f} {many} {f['families_built']:.0f} could be built and run {small} (the table says what "
        f"kept the others from it); {f['families_equal']:.0f} of these are equal to one device under uneven "
        f"data-parallel and random plans in float64 (largest relative difference {f['worst_error']:.1e}), "
        f"{f['families_not_equal']:.0f} are not."
    )
    if refused := [case["name"] for case in body["cases"] if case["refused"]]:
        words += f" Refused, each in a line: {', '.join(refused)}."
    failed: dict[str, list[str]] = {}
    for case in body["cases"]:
        if case["failed"]:
            failed.setdefault(case["failed"], []).append(case["name"])
    words += "".join(f" Not compared, as {why}: {', '.join(names)}." for why, names in failed.items())
    of = Counter(str(case["commit"]) for case in body["cases"]).most_common()
    if len(of) < 2:
        return f"{words}\n\n{_source(name, body)}"
    told = "rows: " + ", ".join(f"{count} at {commit}" for commit, count in of)
    command, about = body["command"].partition(" --only")[0], body["machine"]
    where = f"the last run on {about['cores']} cores of {about['cpu']}"
    return f"{words}\n\n([all figures](benchmarks/results/{name}.md); `{command}`, {told}; {where})"


def planning(body: Body) -> str:
    """Seconds and gap of every case that was planned; which were not, and why."""
    found = {name: case for name, case in body["cases"].items() if not case["failure"]}
    rows = [
        [
            name,
            f"{c['wall_s']:.1f}",
            *("" if c[k] is None else f"{c[k] * 1e3:.0f} ms" for k in ("overlapped_s", "overlapped_bound_s")),
            _percent(c["gap_as_run"]),
            *("" if c[k] is None else f"{c[k] * 1e3:.0f} ms" for k in ("step_s", "bound_s")),
            _percent(c["gap"]),
        ]
        for name, c in found.items()
    ]
    columns = ["case", "seconds", "as run", "bound", "gap", "nothing overlapped", "bound", "gap"]
    figures, told = body["figures"], ""
    if (given_up := figures.get("worst_gap_to_128_that_no_bound_can_close")) is not None:
        told = (
            "Plans are chosen by their step as run. With nothing overlapped other plans are shorter, by up to "
            f"{given_up:.1%}, which no bound can close; the bounds to 128 devices are at most "
            f"{figures['worst_gap_to_128_of_the_shortest_found']:.1%} below the shortest steps found.\n\n"
        )
    if failed := [
        f"{name} ({case['failure'].splitlines()[0]})" for name, case in body["cases"].items() if case["failure"]
    ]:
        told += f"Not planned: {'; '.join(failed)}.\n\n"
    return "\n\n".join([markdown_table(columns, rows), told + _source("planning", body), *_runs("planning", body)])


def _runs(name: str, body: Body) -> list[str]:
    """Where the rows are of several commits or CPUs: which. Older rows do not tell, and are then of the same run."""
    pairs = [(f"{case['commit']} on {case['cpu']}", row) for row, case in body["cases"].items() if case.get("commit")]
    return _of_several(pairs, "The rows are", f"python benchmarks/{name}.py --only ...")


def planning_quick(body: Body) -> str:
    """Of every case the seconds of a quick search, and how much longer its plan's step is."""
    rows = [
        [name, f"{c['wall_s']:.1f}", f"{c['normal_wall_s']:.1f}", f"{c['longer']:+.1%}", _percent(c["gap"])]
        for name, c in body["cases"].items()
    ]
    figures, told = body["figures"], ""
    if (cases := figures.get("cases_to_128")) is not None:
        told = (
            f"At most {figures['worst_seconds_to_16']:.1f} s to 16 devices and {figures['worst_seconds_to_128']:.1f} s "
            f"to 128. Of {cases:.0f} steps as run {figures['cases_to_128_within_1_percent']:.0f} are within 1% of the "
            f"default's, the worst is {figures['worst_longer_to_128']:.0%} longer.\n\n"
        )
    columns = ["case", "seconds", "by default", "step longer by", "gap"]
    return f"{markdown_table(columns, rows)}\n\n{told}{_source('planning_quick', body)}"


def planning_proofs(body: Body) -> str:
    """Seconds and gap of every case that more was proved of."""
    rows = [
        [name, f"{c['wall_s']:.0f}", c["cpu"], _percent(c["normal_gap"]), _percent(1.0 - c["bound_s"] / c["step_s"])]
        for name, c in body["cases"].items()
    ]
    figures = body["figures"]
    told = ""
    if (cases := figures.get("cases_to_128")) is not None:
        near, before = figures["cases_to_128_within_3_percent"], figures["the_same_by_planning_alone"]
        told = f"Of {cases:.0f} cases to 128 devices {near:.0f} are proved to be within 3%, {before:.0f} without.\n\n"
    columns = ["case", "seconds", "on", "gap", "thorough"]
    source = told + _source("planning_proofs", body)
    return "\n\n".join([markdown_table(columns, rows), source, *_runs("planning_proofs", body)])


def planning_pins_large(body: Body) -> str:
    """Whether a pin that a user might try is worth something."""
    f = body["figures"]
    words = (
        f"What a bound leaves open, pins may show: {f['plans with a pin']:.0f} plans of {f['cases']:.0f} cases to 128 "
        "devices, of which none is left out, are made with one more decision taken beforehand: data parallel, all in "
        "shards, or one kind of weight whole or in shards. As run "
        f"{f['a pin is shorter by over 1 %']:.0f} of them are shorter than the search's own by over 1%, by at most "
        f"{f['worst']:.1%}."
    )
    return f"{words}\n\n{_source('planning_pins_large', body)}"


def _percent(gap: float | None) -> str:
    return "" if gap is None else f"{gap:.1%}"


def accuracy(body: Body) -> str:
    """Predicted against measured: the errors. Steps as they are run are the race's."""
    figures = body["figures"]
    names = {
        "step_time_median_error": "step time with all passes off, median error",
        "step_time_worst_error": "step time with all passes off, worst error",
        "memory_worst_error": "peak memory, worst error",
        "public_data_median_error": f"public GPU measurements ({FITTED}), median error",
        "public_data_90_percent_below": "the same, 90 % are below",
    }
    rows = [[words, f"{figures[name]:.1%}"] for name, words in names.items() if name in figures]
    raced = [
        abs(case["overlapped_s"] / statistics.median(case["entries"]["HAP"]["steps_s"]) - 1) for case in body["race"]
    ]
    if raced:
        as_run = f"step time as run, passes on (the {len(raced)} cases of `benchmarks/race.py`)"
        at = sum(name in figures for name in ("step_time_median_error", "step_time_worst_error"))
        rows[at:at] = [
            [f"{as_run}, median error", f"{statistics.median(raced):.1%}"],
            [f"{as_run}, worst error", f"{max(raced):.1%}"],
        ]
    if (tau := figures.get("kendall_tau_worst_cluster")) is not None:
        rows.append(["ranking of plans, Kendall's tau of the worst cluster", f"{tau:.2f}"])
    if (tau := figures.get("kendall_tau_worst_cluster_pairs_apart")) is not None:
        rows.append(["the same over the plans that differ by more than steps of one plan do", f"{tau:.2f}"])
    table = markdown_table(["predicted against measured", ""], rows)
    runs = _of_several(body["slices"], "The figures are", "python benchmarks/accuracy.py --only ... --cluster ...")
    return "\n\n".join([table, *runs, _source("accuracy", body)])


def collectives(body: Body) -> str:
    """Uneven collectives against the bound that no schedule can beat."""
    f = body["figures"]
    words = f"The chosen ways take at most {f['worst_chosen_over_bound']:.2f} times the lower bound of their links."
    if "all_reduce_over_gloo" in f:
        words += f" All-reduce is {f['all_reduce_over_gloo']:.2f} times as fast as Gloo's own."
    return f"{words}\n\n{_source('collectives', body)}"


SECTIONS: Mapping[str, Callable[[Body], str]] = {
    "race": race,
    "accumulate": accumulate,
    "diagnose": diagnose,
    "zoo": zoo,
    "families": families,
    "families_timm": families_timm,
    "planning": planning,
    "planning_quick": planning_quick,
    "planning_proofs": planning_proofs,
    "planning_pins_large": planning_pins_large,
    "accuracy": accuracy,
    "collectives": collectives,
}


def _source(name: str, body: Body) -> str:
    about = body["machine"]
    where = f"{about['cores']} cores of {about['cpu']}"
    return f"([all figures](benchmarks/results/{name}.md); `{body['command']}` at {body['commit']}, {where})"


def filled(text: str, results: Path = RESULTS) -> str:
    """``text`` with what stands between the marks replaced. ValueError for a mark that is not closed or not known."""
    opened = re.findall(r"<!-- (\w+) -->", text)
    for name in opened:
        if name not in SECTIONS or f"<!-- /{name} -->" not in text:
            raise ValueError(f"<!-- {name} -->: {'not closed' if name in SECTIONS else 'no such section'}")
        path = results / f"{name}.json"
        inside = SECTIONS[name](_read(path)) if path.exists() else f"Not measured yet: `python benchmarks/{name}.py`."
        pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.S)
        text = pattern.sub(lambda match, inside=inside: f"{match[1]}{inside}\n{match[2]}", text)  # type: ignore[misc]
    return text


def _read(path: Path) -> Body:
    """A report; (commit, name) of each of its slices, where it is made of some (``accuracy``), the commit with the CPU
    where it is told; the cases of the race."""
    parts = {
        one.stem: json.loads(one.read_text(encoding="utf-8")) for one in sorted(path.with_suffix("").glob("*.json"))
    }
    slices = [(" on ".join(part[k] for k in ("commit", "cpu") if k in part), name) for name, part in parts.items()]
    raced = path.with_name("race.json")
    race = json.loads(raced.read_text(encoding="utf-8")).get("cases") or [] if raced.is_file() else []
    return {**json.loads(path.read_text(encoding="utf-8")), "slices": slices, "race": race}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Put the results of the benchmarks into README.md.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if README is out of step")
    given = parser.parse_args(argv)
    before = README.read_text(encoding="utf-8")
    after = filled(before)
    if given.check:
        print("README.md is in step" if before == after else "README.md is out of step: make readme")
        return int(before != after)
    README.write_text(after, encoding="utf-8")
    print("README.md: " + ("as it was" if before == after else "written"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
