"""Does the same plan win under real contention? Each case's plans take turns twice on beds of the same shape: with
compute held by deadline, as in all other benchmarks, and by CFS quotas, under which ranks really share cores.

    python benchmarks/testbed_quota.py [--quick] [--models GPT-2,VGG] [--clusters compute,both] [--rounds 6]

The plans: data parallel with equal shares, data parallel with shares by speed, and the planner's own choice, all run
by HAP with its passes. A step is the slowest rank's. Two plans *tie* where their medians are no further apart than the
greater of their spreads, the spread of a plan being the middle half of its steps (third less first quartile). A case's
verdict is *same* or *different* where each mode has one winner, and *tie* where a mode has several. Kendall's tau is
taken over all pairs of plans, and over those that tie in neither mode.

The rows of a case are of one run. A run of some cases replaces these in ``testbed_quota.json`` and leaves the others.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.accuracy_cases import keep_to_batch
from benchmarks.common import Options, Report, parse
from benchmarks.race import CLUSTERS, chosen, cluster
from benchmarks.race_models import MODELS, build
from benchmarks.testbed import Testbed, cgroup, network, played
from benchmarks.testbed.layout import Mode
from benchmarks.testbed_quota_rank import Turns, exchange_s, take_turns
from hap.capture import capture
from hap.cluster import ClusterSpec, Link
from hap.plan import Plan
from hap.rules.choices import choices
from hap.runtime.emulate import HostRate, measure_host
from hap.search.pins import Pins
from hap.search.planner import plan_graph

NAME = "testbed_quota"
OURS, BY_SPEED, EQUAL = "HAP", "by speed", "equal shares"
ROUNDS = 6
SAME_LOSS = 1e-3  # relative: float32, summed in another order

Verdict = Literal["same", "different", "tie"]


@dataclass(frozen=True)
class Played:
    """One mode's run of a case. ``steps_s``: by plan, the slowest rank's, in the order in which they were run.
    ``late``: deadline mode, of the worst rank and plan, the share of sections that did not fit; ``held``: quota mode,
    by rank, the seconds for which the kernel held it over those that the run took."""

    steps_s: Mapping[str, tuple[float, ...]]
    late: float | None
    held: tuple[float, ...] | None
    drops: int
    steal: float

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Played:
        steps = {plan: tuple(seconds) for plan, seconds in body["steps_s"].items()}
        return cls(**{**body, "steps_s": steps, "held": body["held"] and tuple(body["held"])})

    def median(self, plan: str) -> float:
        return statistics.median(self.steps_s[plan])

    def spread_s(self, plan: str) -> float:
        return middle_half(self.steps_s[plan])

    def apart(self, a: str, b: str) -> bool:
        """Whether two plans' medians differ by more than their spread."""
        return abs(self.median(a) - self.median(b)) > max(self.spread_s(a), self.spread_s(b))

    @property
    def ranking(self) -> tuple[str, ...]:
        return tuple(sorted(self.steps_s, key=lambda plan: (self.median(plan), plan)))

    @property
    def winners(self) -> tuple[str, ...]:
        """The fastest plan, and those that tie with it."""
        first = self.ranking[0]
        return tuple(plan for plan in self.ranking if plan == first or not self.apart(first, plan))

    @property
    def said(self) -> str:
        """The ranking in words: ``=`` between neighbours that tie."""
        words = [self.ranking[0]]
        for before, plan in zip(self.ranking, self.ranking[1:], strict=False):
            words += ["<" if self.apart(before, plan) else "=", plan]
        return " ".join(words)


@dataclass(frozen=True)
class Case:
    """One model on one cluster. ``predicted_s`` by plan, with overlap; ``quota`` is None where no cgroup can be made.
    ``shares``: of a core, by rank."""

    model: str
    cluster: str
    commit: str | None
    predicted_s: Mapping[str, float]
    shares: tuple[float, ...]
    deadline: Played
    quota: Played | None

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Case:
        modes = {mode: body[mode] and Played.read(body[mode]) for mode in ("deadline", "quota")}
        return cls(**{**body, **modes, "shares": tuple(body["shares"])})

    @property
    def name(self) -> str:
        return f"{self.model}, {self.cluster}"


def middle_half(samples: Sequence[float]) -> float:
    """Third less first quartile."""
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return third - first


def verdict(a: Played, b: Played) -> Verdict:
    """See the module docstring."""
    if len(a.winners) > 1 or len(b.winners) > 1:
        return "tie"
    return "same" if a.winners == b.winners else "different"


def tau(a: Played, b: Played, *, clear: bool) -> tuple[float, int] | None:
    """(Kendall's tau, pairs) of the plans' medians in two modes; ``clear``: only of pairs that tie in neither. None
    without a pair."""
    signs = []
    for x, y in combinations(a.steps_s, 2):
        if not clear or (a.apart(x, y) and b.apart(x, y)):
            signs.append(1 if (a.median(x) < a.median(y)) == (b.median(x) < b.median(y)) else -1)
    return (sum(signs) / len(signs), len(signs)) if signs else None


def merged(known: Sequence[Case], new: Sequence[Case]) -> list[Case]:
    """All cases in the order of ``MODELS`` and ``CLUSTERS``, the new ones in place of old ones of their name."""
    by_name = {case.name: case for case in (*known, *new)}
    names = [f"{model}, {name}" for name in CLUSTERS for model in MODELS]
    return [by_name[name] for name in names if name in by_name]


def known_cases(options: Options) -> list[Case]:
    path = options.out / f"{NAME}.json"
    return [Case.read(c) for c in json.loads(path.read_text(encoding="utf-8"))["cases"]] if path.is_file() else []


def make_plans(model: str, speeds: Sequence[float], told: ClusterSpec) -> dict[str, Plan]:
    """By name. All for the same cluster, ``told``."""
    built = build(model)
    graph = capture(
        built.model, built.example_inputs, loss_fn=built.loss_fn, example_targets=built.example_targets, name=model
    )
    found = choices(graph)
    batch = keep_to_batch(found)
    whole = {"*": "R"}
    ratios = {EQUAL: (1.0,) * len(speeds), BY_SPEED: tuple(map(float, speeds))}
    plans = {
        name: plan_graph(batch, told, pins=Pins(placements=whole, ratios=r), effort="quick")
        for name, r in ratios.items()
    }
    return {**plans, OURS: plan_graph(found, told)}


def run_mode(mode: Mode, model: str, name: str, plans: Mapping[str, Plan], told: ClusterSpec, rounds: int) -> Played:
    """All plans interleaved on a bed of this mode; off a bed where the machine cannot make one."""
    texts = [(who, plan.to_json()) for who, plan in plans.items()]
    with Testbed(cluster(name), mode, enforced=network.missing() is None) as bed:
        before = bed.counters()
        quota = (bed.controller, bed.layout.bed_id) if mode == "quota" else None
        by_rank: list[dict[str, Turns]] = bed.run(
            take_turns, model, texts, told.to_yaml(), rounds, quota, timeout=100.0
        )
        went = bed.counters() - before
    same_losses(model, by_rank)
    steps = {who: tuple(max(s) for s in zip(*(turns[who].steps_s for turns in by_rank), strict=True)) for who in plans}
    late = max(t.late for turns in by_rank for t in turns.values())
    held = tuple(sum(t.held_s for t in turns.values()) / sum(t.ran_s for t in turns.values()) for turns in by_rank)
    return Played(
        steps, None if mode == "quota" else late, held if mode == "quota" else None, went.drops, went.steal_share
    )


def same_losses(model: str, by_rank: Sequence[Mapping[str, Turns]]) -> None:
    """All plans have trained the same."""
    found = {who: by_rank[0][who].losses for who in by_rank[0]}
    for who, losses in found.items():
        for step, (loss, expected) in enumerate(zip(losses, found[EQUAL], strict=True)):
            same = math.isclose(loss, expected, rel_tol=SAME_LOSS)
            assert same, f"{model}: {who} has loss {loss} in step {step}, {EQUAL} {expected}"


def run_case(model: str, name: str, host: HostRate, rounds: int, can_hold: bool, commit: str | None) -> Case:
    """``commit``: of this code."""
    spec = cluster(name)
    with Testbed(spec, enforced=network.missing() is None) as bed:
        latency_s = bed.run(exchange_s)[0]
        slowdowns = [r.slowdown for r in bed.layout.ranks]
    told = played(spec, host, Link(1e9, 1e-4), latency_s)
    plans = make_plans(model, CLUSTERS[name][0], told)
    predicted = {who: plan.predicted.overlapped_s or plan.predicted.step_s for who, plan in plans.items()}
    timed = run_mode("deadline", model, name, plans, told, rounds)
    contended = run_mode("quota", model, name, plans, told, rounds) if can_hold else None
    return Case(model, name, commit, predicted, tuple(1 / s for s in slowdowns), timed, contended)


class CasesReport(Report):
    """A report whose JSON has the cases too, for the next run to take over."""

    cases: Sequence[Case] = ()

    def body(self) -> dict[str, Any]:
        return super().body() | {"cases": [asdict(case) for case in self.cases]}


def line(case: Case) -> str:
    """One case in one line, while it runs."""
    by_quota = "not run" if case.quota is None else f"{case.quota.said}; {verdict(case.deadline, case.quota)}"
    return f"{case.name}: by deadline {case.deadline.said}; by quota {by_quota}"


def tell(report: CasesReport, cases: Sequence[Case], cannot: str | None) -> None:
    """Figures, tables and files."""
    report.cases = cases
    both = [(case, case.deadline, case.quota) for case in cases if case.quota is not None]
    if both:
        verdicts = [verdict(a, b) for _, a, b in both]
        report.figure("cases", len(both))
        report.figure("same_winner", verdicts.count("same"))
        report.figure("tied_winner", verdicts.count("tie"))
        report.figure("other_winner", verdicts.count("different"))
        report.figure("tau_worst_case", min(found[0] for _, a, b in both if (found := tau(a, b, clear=False))))
        clear = [found for _, a, b in both if (found := tau(a, b, clear=True))]
        report.figure("clear_pairs", sum(pairs for _, pairs in clear))
        report.figure("clear_pairs_alike", sum(round(pairs * (1 + t) / 2) for t, pairs in clear))
        for case, a, b in both:
            found = tau(a, b, clear=True)
            key = case.name.replace(", ", "_").replace(" ", "_")
            if found is None:
                report.missing(f"tau_{key}", "no two plans are apart in both modes")
            else:
                report.figure(f"tau_{key}", found[0])
    for name in ("cases", "same_winner") if cannot else ():
        report.missing(f"{name} (of this run)", cannot or "")
    report.table(
        "Steps, ms of the slowest rank, interleaved (spread: the middle half of the steps / median)",
        ["case: plan", "predicted", "by deadline", "spread", "by quota", "spread", "quota / deadline"],
        [row for case in cases for row in step_rows(case)],
    )
    report.table(
        "The same winner? (< faster, = inside the spread)",
        ["case", "by deadline", "by quota", "winner", "tau, all pairs", "tau, clear pairs", "commit"],
        [case_row(case) for case in cases],
    )
    report.table(
        "The runs",
        ["case", "core share by rank", "sections late", "held by the kernel, by rank", "drops", "steal"],
        [run_row(case) for case in cases],
    )
    report.text(
        "Emulated speeds, real bytes. *By deadline*: the real kernels run, then the rank waits until nominal time x "
        "slow-down. *By quota*: CFS through a cgroup, period 10 ms, on the main thread of each rank (cgroup v1) or on "
        "its process (v2); ranks share cores, two and two, so what a step takes is the kernel's. *Held*: the share of "
        "the measured time for which the quota kept a rank from running; it compiled without one. A quota is coarse: "
        "a section of compute ends up to a period late, and what moves bytes runs in what the quotas leave of a core; "
        "that is why figures elsewhere are by deadline."
    )
    report.write(None)


def step_rows(case: Case) -> list[list[str]]:
    rows = []
    for plan in case.deadline.steps_s:
        cells = [f"{case.name}: {plan}", f"{1e3 * case.predicted_s[plan]:.0f}"]
        for mode in (case.deadline, case.quota):
            if mode is None:
                cells += ["", ""]
            else:
                cells += [f"{1e3 * mode.median(plan):.0f}", f"{mode.spread_s(plan) / mode.median(plan):.1%}"]
        cells.append("" if case.quota is None else f"{case.quota.median(plan) / case.deadline.median(plan):.2f}")
        rows.append(cells)
    return rows


def case_row(case: Case) -> list[str]:
    if case.quota is None:
        return [case.name, case.deadline.said, "not run", "", "", "", str(case.commit)]
    taus = [tau(case.deadline, case.quota, clear=clear) for clear in (False, True)]
    shown = ["" if found is None else f"{found[0]:.2f} of {found[1]}" for found in taus]
    return [
        case.name,
        case.deadline.said,
        case.quota.said,
        verdict(case.deadline, case.quota),
        *shown,
        str(case.commit),
    ]


def run_row(case: Case) -> list[str]:
    modes = [mode for mode in (case.deadline, case.quota) if mode is not None]
    held = "" if case.quota is None or case.quota.held is None else " ".join(f"{h:.0%}" for h in case.quota.held)
    return [
        case.name,
        " ".join(f"{share:.0%}" for share in case.shares),
        f"{case.deadline.late or 0:.0%}",
        held,
        " + ".join(str(mode.drops) for mode in modes),
        " ".join(f"{mode.steal:.1%}" for mode in modes),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="", help=f"some of {', '.join(MODELS)}; default: GPT-2,VGG")
    parser.add_argument("--clusters", default="", help=f"some of {', '.join(CLUSTERS)}; default: compute,both")
    parser.add_argument("--rounds", type=int, default=0, help=f"blocks of two steps each; default {ROUNDS}")
    options = parse(NAME, "Does the same plan win under real contention?", parser=parser)
    models = chosen(options.extra.models, MODELS, ("GPT-2",) if options.quick else ("GPT-2", "VGG"))
    clusters = chosen(options.extra.clusters, CLUSTERS, ("both",) if options.quick else ("compute", "both"))
    rounds = options.extra.rounds or (3 if options.quick else ROUNDS)
    report = CasesReport(NAME, "The same winner under real contention: deadlines against quotas", options)
    cannot = network.missing()
    if cannot is None and cgroup.find() is None:
        cannot = "a quota needs a cpu cgroup (v1 or v2) that this process can write"
    if cannot is not None:
        print(f"by deadline only: {cannot}", file=sys.stderr)
    host = measure_host()
    new = []
    for name in clusters:
        for model in models:
            new.append(run_case(model, name, host, rounds, cannot is None, report.commit))
            print(line(new[-1]), flush=True)
    tell(report, merged(known_cases(options), new), cannot)


if __name__ == "__main__":
    main()
