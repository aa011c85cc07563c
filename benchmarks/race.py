"""HAP against what people use, on unequal clusters played by the testbed, all contestants interleaved in one run.

    python benchmarks/race.py [--quick] [--models GPT-2,VGG] [--clusters both] [--rounds 4] [--bare]

Every cluster is first measured as a user would (``hap profile``), with the models that are raced; HAP plans from that.
Contestants: HAP (its planner's own choice for the cluster, ``--leave-out`` if that is fewer devices), with ``--bare``
the same plan without its passes, DDP with equal batches, and with batches in proportion to the devices' speeds
(weighted so that the gradient is the global batch's): DDP, ZeRO-1 (``ZeroRedundancyOptimizer``), FSDP2
(``fully_shard``); and what people do who throw devices out: DDP on the fastest devices behind the fastest networks, and
one of these alone. Where all devices are equally fast the DDPs with all are one. All train the same: the losses of the
first three steps are compared.
Every case is raced in several sessions of fresh processes. Steps per second are those of the slowest rank. *Exposed* is
a step's time beyond the busiest rank's compute. The *limit* of a case is the step that deals the least compute seen
perfectly to all devices and communicates for free; one device that takes all computes least, if it is raced.

The rows of a case are always of one run, in which its contestants took turns. A run of some cases replaces these in
``race.json`` and leaves the others, each with its commit.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import COLOURS, Options, Report, Spread, drawing, parse
from benchmarks.race_models import MODELS, build
from benchmarks.race_rank import calibrate, fast_hosts, race
from benchmarks.testbed import RankError, Testbed
from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.cost_models.profile import CalibratedCluster, Profile
from hap.placement import Shard
from hap.rules.choices import choices
from hap.runtime.emulate import measure_host
from hap.search.planner import plan_graph
from hap.starting import in_words, left_out

NAME = "race"
CLUSTERS: Mapping[str, tuple[tuple[float, ...], tuple[int, ...]]] = {  # TFLOP/s and network Mbit/s, by rank
    "compute": ((3, 3, 1, 1), (1000, 1000, 1000, 1000)),
    "links": ((1, 1, 1, 1), (1000, 1000, 200, 200)),
    "both": ((3, 3, 1, 1), (1000, 1000, 200, 200)),
    "weak host": ((3, 3, 3, 1), (1000, 1000, 1000, 100)),
    "equal": ((1, 1, 1, 1), (1000, 1000, 1000, 1000)),
}
OURS = "HAP"
BARE = "HAP, no passes"
FAST, ALONE = "DDP, fast hosts", "one device"
BASELINES = ("DDP", "DDP, by speed", FAST, ALONE, "ZeRO-1", "FSDP2")
PITCH = 0.9 / (1 + len(BASELINES))  # of a bar in the picture
ROUNDS = 2  # of a session
SESSIONS = 2  # of fresh processes: what memory a process happens to get makes its steps differ by a few percent


def cluster(name: str) -> ClusterSpec:
    """Four hosts with a device each."""
    speeds, rates = CLUSTERS[name]
    hosts = [
        {
            "name": f"h{r}",
            "devices": [
                {
                    "name": f"c{speed:g}",
                    "tflops": {"float32": speed},
                    "memory": "4GB",
                    "memory_bandwidth": f"{10 * speed:g}GB/s",
                }
            ],
            "network": {"bandwidth": f"{rate}Mbit/s", "latency": "250us"},
        }
        for r, (speed, rate) in enumerate(zip(speeds, rates, strict=True))
    ]
    return ClusterSpec.model_validate({"name": name, "backend": "gloo", "hosts": hosts})


def dealt(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers that sum to ``total``, nearest to the weights (largest remainders)."""
    exact = [total * w / sum(weights) for w in weights]
    found = [math.floor(e) for e in exact]
    for r in sorted(range(len(weights)), key=lambda r: (found[r] - exact[r], r))[: total - sum(found)]:
        found[r] += 1
    return tuple(found)


@dataclass(frozen=True)
class Entry:
    """One contestant. ``steps_s``: each the slowest rank's; ``compute_s`` by rank; bytes of the fullest rank;
    ``missed``, of the sections of the rank that missed most; ``losses`` of the whole batch."""

    steps_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    missed: float
    held_bytes: int
    peak_bytes: int
    losses: tuple[float, ...]

    @property
    def steps(self) -> Spread:
        return Spread.of(self.steps_s)

    @property
    def exposed_s(self) -> float:
        return self.steps.median - max(self.compute_s)


@dataclass(frozen=True)
class Case:
    """One model on one cluster in one run. ``absent`` has the reasons of those who could not; ``shape`` says what HAP's
    plan is; seconds without and with overlap are its predictions."""

    model: str
    cluster: str
    commit: str | None
    shape: str
    step_s: float
    overlapped_s: float
    slowdowns: tuple[float, ...]
    entries: Mapping[str, Entry]
    absent: Mapping[str, str]

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Case:
        return cls(**{**body, "entries": {who: Entry(**e) for who, e in body["entries"].items()}})

    @property
    def name(self) -> str:
        return f"{self.model}, {self.cluster}"

    @property
    def best(self) -> str:
        return min((who for who in BASELINES if who in self.entries), key=lambda who: self.entries[who].steps.median)

    def speedup(self, over: str) -> float:
        return self.entries[over].steps.median / self.entries[OURS].steps.median

    @property
    def limit_s(self) -> float:
        work = min(sum(c / s for c, s in zip(e.compute_s, self.slowdowns, strict=True)) for e in self.entries.values())
        return work / sum(1 / s for s in self.slowdowns)

    @property
    def of_limit(self) -> float:
        return self.limit_s / self.entries[OURS].steps.median

    def verify(self) -> None:
        """All have trained the same: the losses of the first steps, after each one's updates."""
        for who, entry in self.entries.items():
            for step, (found, expected) in enumerate(zip(entry.losses, self.entries["DDP"].losses, strict=True)):
                same = math.isclose(found, expected, rel_tol=1e-3)
                assert same, f"{self.name}: {who} has loss {found} in step {step}, DDP {expected}"


def entry_of(sessions: Sequence[Sequence[Any]]) -> Entry:
    """What the ranks found of one contestant, session by session: compute is the median of the sessions'."""
    ranks = [r for session in sessions for r in session]
    return Entry(
        tuple(max(s) for session in sessions for s in zip(*(r.steps_s for r in session), strict=True)),
        tuple(statistics.median(r.compute_s for r in same) for same in zip(*sessions, strict=True)),
        statistics.median(max(r.missed for r in session) for session in sessions),
        max(r.held_bytes for r in ranks),
        max(r.peak_bytes for r in ranks),
        tuple(sum(losses) for losses in zip(*(r.losses for r in sessions[0]), strict=True)),
    )


def shape_of(plan: Any, graph: Any) -> str:
    """How the batch is dealt, and how much of the parameters every rank holds whole."""
    whole = total = 0
    for node in graph.sources("parameter"):
        total += node.meta.nbytes
        whole += node.meta.nbytes if str(plan.strategy(node.name).outputs[0]) == "R" else 0
    inputs = [plan.strategy(node.name).outputs[0] for node in graph.sources("input")]
    groups = [placement.group for placement in inputs if isinstance(placement, Shard)]
    everywhere = "on every rank" if plan.world_size > 1 else "on one"
    sizes = ":".join(map(str, plan.groups[groups[0]].sizes)) if groups else everywhere
    gone = f", without {in_words(plan)}" if left_out(plan) else ""
    return f"batch {sizes}, {whole / total:.0%} of the parameters whole{gone}"


def cannot_run(model: str) -> str | None:
    """Why FSDP2 does not run this model on CPUs here, on a bed of its own; None if it does."""
    built = build(model)
    equal = dealt(len(built.example_inputs), (1,) * 4)
    with Testbed(cluster("equal")) as bed:
        try:
            bed.run(race, ["FSDP2"], model, equal, equal, "", "", "", 1, timeout=120.0)
        except RankError as error:
            return str(error).strip().splitlines()[-1]
    return None


def described(name: str, call_s: float, slowdowns: Sequence[float]) -> ClusterSpec:
    """The cluster with what a call takes on its devices, ``call_s`` of this machine's seconds: the cluster file's
    ``launch``, by which packing many values for one collective is priced."""
    spec = cluster(name)
    hosts = tuple(
        host.model_copy(update={"devices": tuple(d.model_copy(update={"launch": call_s * s}) for d in host.devices)})
        for host, s in zip(spec.hosts, slowdowns, strict=True)
    )
    return ClusterSpec.model_validate(spec.model_copy(update={"hosts": hosts}).model_dump(exclude_none=True))


def profiled(
    name: str, call_s: float, models: Sequence[str], optimizer: str = "adamw", reduce_dtype: str | None = None
) -> CalibratedCluster:
    """What a user would do first: measure the cluster, with the calls of what is to be trained."""
    with Testbed(cluster(name)) as bed:
        spec = described(name, call_s, [r.slowdown for r in bed.layout.ranks])
        text = bed.run(calibrate, spec.to_yaml(), models, optimizer, reduce_dtype, timeout=300.0)[0]
    return Profile.model_validate_json(text).calibrate(spec)


def run_case(
    model: str, name: str, told: CalibratedCluster, rounds: int, absent: Mapping[str, str], bare: bool, code: str | None
) -> Case:
    """Plan, then race all that are not ``absent``. ``code``: the commit that was loaded."""
    spec = cluster(name)
    built = build(model)
    graph = capture(
        built.model, built.example_inputs, loss_fn=built.loss_fn, example_targets=built.example_targets, name=model
    )
    plan = plan_graph(choices(graph), told, leave_out=True)
    batch = len(built.example_inputs)
    sizes, equal = dealt(batch, CLUSTERS[name][0]), dealt(batch, (1,) * 4)
    names = [who for who in (OURS, BARE, *BASELINES) if who not in absent and (bare or who != BARE)]
    if sizes == equal:
        names.remove("DDP, by speed")
    if len(fast_hosts(spec)) in (1, spec.world_size):  # which the others already are
        names.remove(FAST)
    given = (plan.to_json(), told.described.to_yaml(), told.profile.model_dump_json())
    with Testbed(spec) as bed:
        slowdowns = tuple(r.slowdown for r in bed.layout.ranks)
        found = [bed.run(race, names, model, sizes, equal, *given, rounds, timeout=900.0) for _ in range(SESSIONS)]
    predicted = plan.predicted
    case = Case(
        model,
        name,
        code,
        shape_of(plan, graph),
        predicted.step_s,
        predicted.as_run_s,
        slowdowns,
        {who: entry_of([[ranks[who] for ranks in session] for session in found]) for who in names},
        absent,
    )
    case.verify()
    return case


class CasesReport(Report):
    """A report whose JSON has the cases too, for the next run to take over."""

    def __init__(self, name: str, title: str, options: Options) -> None:
        super().__init__(name, title, options)
        self.cases: dict[str, Case] = {}
        path = options.out / f"{name}.json"
        if path.is_file():
            known = json.loads(path.read_text(encoding="utf-8")).get("cases", [])
            self.cases = {case.name: case for case in map(Case.read, known)}

    def body(self) -> dict[str, Any]:
        return super().body() | {"cases": [asdict(case) for case in self.cases.values()]}

    def keep(self) -> None:
        """The cases so far, in the stored report: a run that is cut off loses none."""
        path = self.options.out / f"{self.name}.json"
        stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else self.body()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(stored | {"cases": self.body()["cases"]}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="", help=f"some of {', '.join(MODELS)}; default: all")
    parser.add_argument("--clusters", default="", help=f"some of {', '.join(CLUSTERS)}; default: all")
    parser.add_argument("--rounds", type=int, default=0, help=f"blocks of two steps in a session; default {ROUNDS}")
    parser.add_argument("--bare", action="store_true", help="race HAP without its passes, too")
    options = parse(NAME, "HAP against what people use, on unequal clusters.", parser=parser)
    models = chosen(options.extra.models, MODELS, ("GPT-2", "VGG") if options.quick else tuple(MODELS))
    clusters = chosen(options.extra.clusters, CLUSTERS, ("both", "equal") if options.quick else tuple(CLUSTERS))
    rounds = options.extra.rounds or (1 if options.quick else ROUNDS)
    report = CasesReport(NAME, "The race: HAP against DDP, ZeRO-1, FSDP2 and fewer devices", options)
    call_s = measure_host().launch_s
    reasons = {model: cannot_run(model) for model in models}
    absent = {model: {"FSDP2": why} if why else {} for model, why in reasons.items()}
    for name in clusters:
        told = profiled(name, call_s, models)
        print(f"{name}: profiled in {told.profile.seconds_taken:.0f} s", flush=True)
        for model in models:
            case = run_case(model, name, told, rounds, absent[model], options.extra.bare, report.commit)
            report.cases[case.name] = case
            report.keep()
            print(line(case), flush=True)
    in_order = [f"{model}, {name}" for name in CLUSTERS for model in MODELS]
    for name in in_order:
        if name not in report.cases:
            report.missing(name, "the case was not run")
    write(report, [report.cases[name] for name in in_order if name in report.cases])


def chosen(text: str, known: Mapping[str, Any], default: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",")) if text else default
    for name in names:
        if name not in known:
            raise SystemExit(f"unknown {name!r} (known: {', '.join(known)})")
    return names


def line(case: Case) -> str:
    """One case in one line, while it runs."""
    times = ", ".join(
        f"{who} {e.steps.median * 1e3:.0f} ({max(e.compute_s) * 1e3:.0f})" for who, e in case.entries.items()
    )
    told = f"{case.overlapped_s * 1e3:.0f} told, {case.shape}"
    return f"{case.name}: {times} ms; {case.speedup(case.best):.2f} x {case.best}; {told}"


def write(report: Report, cases: Sequence[Case]) -> None:
    unequal = [c.speedup(c.best) for c in cases if c.cluster != "equal"]
    if unequal:
        report.figure("geomean_over_best_baseline_unequal", statistics.geometric_mean(unequal))
    report.figure("best_over_equal_ddp", max(c.speedup("DDP") for c in cases))
    report.figure("worst_over_best_baseline", min(c.speedup(c.best) for c in cases))
    report.figure("share_of_limit", statistics.geometric_mean([c.of_limit for c in cases]))
    rows = []
    for c in cases:
        key = c.name.replace(", ", "_").replace(" ", "_")
        ours = c.entries[OURS].steps
        report.figure(f"over_best_baseline_{key}", c.speedup(c.best), ours)
        report.figure(f"share_of_limit_{key}", c.of_limit)
        for who, entry in c.entries.items():
            rows.append(
                (
                    f"{c.name}: {who}",
                    f"{1 / entry.steps.median:.2f}",
                    f"{entry.steps.relative:.0%}",
                    f"{entry.steps.median * 1e3:.0f}",
                    f"{max(entry.compute_s) * 1e3:.0f}",
                    f"{entry.exposed_s * 1e3:.0f}",
                    f"{entry.held_bytes / 1e6:.1f}",
                    f"{entry.peak_bytes / 1e6:.1f}",
                    f"{entry.missed:.0%}",
                    f"{entry.steps.median / ours.median:.2f}",
                )
            )
    columns = ["case: contestant", "steps/s", "spread", "ms", "compute ms", "exposed ms", "held MB", "peak MB", "late"]
    report.table("Interleaved, slowest rank", [*columns, "HAP is x faster"], rows)
    summary = [
        (
            c.name,
            c.best,
            f"{c.speedup(c.best):.2f}",
            f"{c.speedup('DDP'):.2f}",
            f"{c.of_limit:.0%}",
            f"{c.overlapped_s / c.entries[OURS].steps.median:.2f}",
            c.shape,
            c.commit,
        )
        for c in cases
    ]
    columns = ["case", "best baseline", "HAP over it", "over DDP", "of the limit", "predicted / measured", "HAP's plan"]
    report.table("Summary", [*columns, "commit"], summary)
    report.text(
        "Emulated speeds, real bytes: compute is this machine's CPU, stretched to a device's speed by deadline; links "
        "are shaped by the kernel. All rows of a case were taken in one run, in turns. ZeRO-1 and FSDP2 have batches "
        "in proportion to speed. *Held*: parameters, gradients and optimizer state of the fullest rank; *peak*: with "
        "activations and copies, but without DDP's buckets. *Late*: sections whose real work did not fit its deadline. "
        "*Limit*: the least compute seen, dealt perfectly, and communication for free. HAP may leave devices out; in "
        "the race the ranks of such a plan are a job inside of the other one. DDP and ZeRO-1 have buckets of 1 MB, as "
        "HAP has: their default of 25 would hold these models' gradients in one or two."
    )
    if before := [c.name for c in cases if ALONE not in c.entries]:
        report.text(
            "Raced before one device alone and DDP on the fast hosts took part, before HAP could leave out devices "
            f"that were measured, and with DDP's default buckets: {'; '.join(before)}."
        )
    for name, reason in {n: r for c in cases for n, r in c.absent.items()}.items():
        report.missing(name, reason)
    with drawing(1, 1, width=max(6.0, 0.8 * len(cases))) as (figure, (axis,)):
        draw(axis, cases)
        report.write(figure)


def draw(axis: Any, cases: Sequence[Case]) -> None:
    """Steps per second over the best baseline's."""
    who = [OURS, *BASELINES]
    for i, name in enumerate(who):
        times = [{"DDP, by speed": c.entries["DDP"], **c.entries} for c in cases]
        heights = [
            c.entries[c.best].steps.median / t[name].steps.median if name in t else 0.0
            for c, t in zip(cases, times, strict=True)
        ]
        x = [k + (i - len(who) / 2 + 0.5) * PITCH for k in range(len(cases))]
        axis.bar(x, heights, 0.9 * PITCH, color=COLOURS[i], label=name)
    axis.axhline(1, color="#999999", linewidth=1)
    axis.set_xticks(range(len(cases)), [c.name.replace(", ", "\n") for c in cases], fontsize=7)
    axis.set(ylabel="speed over the best baseline's", title="Steps per second, interleaved on one testbed")
    axis.legend(fontsize=8, ncols=4)


if __name__ == "__main__":
    main()
