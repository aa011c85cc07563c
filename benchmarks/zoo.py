"""Which models HAP captures, plans and trains as one device does: the zoo, one row a model.

At its published size, on ``meta``: captured (seconds, memory), its operators, how many of those have no rule, and its
plan for three generations of GPUs (``examples/a100-v100-t4.yaml``). At a small size, in float64: one step on three real
Gloo ranks, under a data parallel, a sharded and a random plan with uneven shares, against PyTorch in one process; and
every strategy of every operator run on uneven pieces and compared with the whole.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import pickle
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.common import COLOURS, ROOT, Report, drawing, parse
from benchmarks.zoo_models import ZOO, find
from benchmarks.zoo_models.equality import TOLERANCE, Equality, check
from benchmarks.zoo_models.reference import ZERO
from hap.capture import capture
from hap.cluster import ClusterSpec
from hap.errors import HapError
from hap.graph import Graph
from hap.rules.check import missing
from hap.rules.choices import choices
from hap.rules.prove import prove_graph
from hap.search.planner import plan_graph

NAME = "zoo"
CLUSTER = ROOT / "examples" / "a100-v100-t4.yaml"
QUICK = ("gpt2", "llama", "resnet50", "dlrm", "hap_bert_moe")
PLAN_DEADLINE_S = 600.0


@dataclass(frozen=True)
class Planned:
    """A model at its published size. ``failure``: why it was not captured or planned, or ""."""

    parameters: int = 0
    nodes: int = 0
    ops: int = 0
    capture_s: float = 0.0
    peak_bytes: int = 0
    missing: tuple[str, ...] = ()
    plan_s: float = 0.0
    step_s: float = 0.0
    failure: str = ""

    @property
    def captured(self) -> bool:
        return self.nodes > 0

    @property
    def planned(self) -> bool:
        return self.step_s > 0


@dataclass(frozen=True)
class Proved:
    """The strategies of a small model's distinct calls, run on uneven pieces."""

    proved: int
    wrong: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", metavar="NAMES", help="models, separated by commas")
    parser.add_argument(
        "--rows", type=Path, metavar="DIR", help="keep each row here, and take what is here of this commit as found"
    )
    options = parse(NAME, "Which models HAP captures, plans and trains as one device does.", argv, parser, ("--only",))
    wanted = options.extra.only.split(",") if options.extra.only else QUICK if options.quick else [m.name for m in ZOO]
    if unknown := set(wanted) - {m.name for m in ZOO}:
        parser.error(f"--only: no such model: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    report = Report(NAME, "The zoo: captured, planned, equal to one device", options)
    rows = []
    for number, name in enumerate(wanted, 1):
        began = time.monotonic()
        rows.append(_kept(options.extra.rows, name, report.commit))
        took = f"{time.monotonic() - began:.0f} s"
        print(f"{number}/{len(wanted)} {name}: {_verdict(*rows[-1][1:])}; {took}", file=sys.stderr, flush=True)
    _figures(report, rows)
    report.table("Models", COLUMNS, [_row(*row) for row in rows])
    with drawing(1, 2, width=6.0, height=0.5 + 0.28 * len(rows)) as (figure, axes):
        _draw(axes, rows)
        report.write(figure)
    return 0


# ---- one model ----


def _kept(folder: Path | None, name: str, commit: str | None) -> tuple[str, Planned, Proved, Equality]:
    """The model's row; with a folder, the one that is kept there, so that a run that was stopped goes on. SystemExit
    for a row of another commit than this code's."""
    path = None if folder is None else folder / f"{name}.pickle"
    if path is not None and path.is_file():
        kept = pickle.loads(path.read_bytes())
        if not isinstance(kept, dict) or kept["commit"] != commit:
            of = kept["commit"] if isinstance(kept, dict) else "a commit that it does not tell"
            raise SystemExit(f"error: {path.name} in --rows is of {of}, this code is of {commit}: remove it")
        found: tuple[str, Planned, Proved, Equality] = kept["row"]
        return found
    row = name, planned(name), proved(name), check(name)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps({"commit": commit, "row": row}))
    return row


def planned(name: str) -> Planned:
    """Capture and plan in a process of its own, whose memory is then the model's."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "hap.api", "benchmarks.zoo_models"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_plan_in_child, args=(sender, name), daemon=True)
    process.start()
    sender.close()
    found = Planned(failure="nothing captured")
    deadline = time.monotonic() + PLAN_DEADLINE_S
    try:
        while receiver.poll(max(0.0, deadline - time.monotonic())):
            found = receiver.recv()
            if found.planned or found.failure:
                break
        else:
            found = Planned(**{**vars(found), "failure": f"no plan within {PLAN_DEADLINE_S:.0f} s"})
    except EOFError:
        found = Planned(**{**vars(found), "failure": "the process died"})
    process.kill()
    process.join()
    return found


def _plan_in_child(pipe: Connection, name: str) -> None:
    torch.set_num_threads(1)
    facts: dict[str, Any] = {}
    try:
        case = find(name).build("real")
        began = time.process_time()
        graph = capture(case.model, case.inputs, loss_fn=case.loss_fn, example_targets=case.targets, name=name)
        facts = _captured(graph, time.process_time() - began)
        pipe.send(Planned(**facts))
        began = time.process_time()
        plan = plan_graph(choices(graph), ClusterSpec.load(CLUSTER), effort="quick")
        facts |= {"plan_s": time.process_time() - began, "step_s": plan.predicted.step_s}
    except HapError as e:
        facts["failure"] = f"{type(e).__name__}: {e}"
    pipe.send(Planned(**facts))


def _captured(graph: Graph, seconds: float) -> dict[str, Any]:
    calls = [n for n in graph.nodes if not n.is_source]
    return {
        "parameters": sum(n.meta.numel for n in graph.sources("parameter")),
        "nodes": len(graph.nodes),
        "ops": len({n.op for n in calls}),
        "capture_s": seconds,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "missing": tuple(m.op for m in missing(graph)),
    }


def proved(name: str) -> Proved:
    case = find(name).build("small")
    graph = capture(case.model, case.inputs, loss_fn=case.loss_fn, example_targets=case.targets, name=name)
    if missing(graph):
        return Proved(0, ())
    verdicts = prove_graph(choices(graph))
    wrong = tuple(f"{v.op}: {v.strategy}" for v in verdicts if not v.ok)
    return Proved(len(verdicts) - len(wrong), wrong)


# ---- the report ----

COLUMNS = (
    "model", "parameters", "captured (CPU s)", "peak", "nodes", "ops", "rules missing", "strategies proved", "wrong",
    "planned (CPU s)", "step predicted", "dealt", "equal", "worst error", "seconds", "why not",
)  # fmt: skip


def _row(name: str, plan: Planned, proof: Proved, equality: Equality) -> list[str]:
    return [
        find(name).title,
        f"{plan.parameters / 1e6:.1f}M",
        f"{plan.capture_s:.1f}" if plan.captured else "no",
        f"{plan.peak_bytes / 2**20:.0f} MiB",
        str(plan.nodes),
        str(plan.ops),
        str(len(plan.missing)),
        str(proof.proved),
        str(len(proof.wrong)),
        f"{plan.plan_s:.1f}" if plan.planned else "no",
        f"{plan.step_s * 1e3:.0f} ms" if plan.planned else "",
        f"{equality.shared:.0%}",
        "yes" if equality.equal else "NO",
        f"{equality.worst:.1e}",
        f"{equality.seconds:.0f}",
        _why(plan, proof, equality),
    ]


def _why(plan: Planned, proof: Proved, equality: Equality) -> str:
    """What keeps the row from being perfect, in words; "" if nothing does."""
    said = [plan.failure, ", ".join(plan.missing), "; ".join(proof.wrong[:2]), equality.failure]
    if not equality.failure and not equality.equal:
        label, (error, where) = max(equality.errors.items(), key=lambda item: item[1][0])
        said.append(f"{where} under the {label} plan: {error:.1e}, more than {TOLERANCE:.0e}")
    return "; ".join(s for s in said if s).replace("|", "/")


def _verdict(plan: Planned, proof: Proved, equality: Equality) -> str:
    return _why(plan, proof, equality) or f"captured, planned, equal ({equality.worst:.1e})"


def _figures(report: Report, rows: Sequence[tuple[str, Planned, Proved, Equality]]) -> None:
    report.figure("models_total", len(rows))
    report.figure("models_planned", sum(p.planned for _, p, _, _ in rows))
    report.figure("models_equal", sum(e.equal for *_, e in rows))
    report.figure("models_wrong", sum(not e.equal and not e.failure for *_, e in rows))
    report.figure("rules_missing", len({op for _, p, _, _ in rows for op in p.missing}))
    report.figure("rules_wrong", len({w for _, _, p, _ in rows for w in p.wrong}))
    errors = {name: e.worst for name, *_, e in rows if e.errors}
    if endless := [name for name, error in errors.items() if not math.isfinite(error)]:
        report.missing("worst_relative_error", f"{', '.join(endless)}: a tensor is missing, or nowhere near")
    elif errors:
        report.figure("worst_relative_error", max(errors.values()))
    else:
        report.missing("worst_relative_error", "no model ran on ranks")
    report.figure("least_share_dealt", min(e.shared for *_, e in rows))
    report.figure("worst_capture_seconds", max(p.capture_s for _, p, _, _ in rows))
    report.figure("worst_capture_peak_mib", max(p.peak_bytes for _, p, _, _ in rows) / 2**20)
    report.figure("worst_plan_seconds", max(p.plan_s for _, p, _, _ in rows))
    report.text(
        "Captured and planned at the published size, on meta, so that no weight is allocated (seconds of CPU, with the "
        "planner's quick effort; peak memory of the whole process after capture, its imports included). Equal: a small "
        "model in float64, one step on three Gloo ranks under three plans (the batch dealt 4 : 2 : 1; every parameter "
        "dealt too; strategies and sizes at random, zeros included), loss, gradients and buffers within "
        f"{TOLERANCE:.0e} of PyTorch in one process, relative to each tensor's own largest element; only a gradient "
        f"below {ZERO:.0e} of the model's largest, zero in exact arithmetic, must be found below that, too, and has no "
        "error of its own. Dealt: of the matrix products, convolutions and attentions, the share that the first plan "
        "runs on pieces (below 90 % there is no answer). Proved: strategies of its distinct calls, each run on uneven "
        "pieces, an empty one among them."
    )


def _draw(axes: Sequence[Any], rows: Sequence[tuple[str, Planned, Proved, Equality]]) -> None:
    titles = [find(name).title for name, *_ in rows]
    places = range(len(rows))
    left, right = axes
    left.barh(places, [p.capture_s for _, p, _, _ in rows], color=COLOURS[0], label="capture")
    left.barh(
        places,
        [p.plan_s for _, p, _, _ in rows],
        left=[p.capture_s for _, p, _, _ in rows],
        color=COLOURS[3],
        label="plan",
    )
    left.set(title="CPU seconds at the published size", xlabel="s", xscale="symlog", yticks=places, yticklabels=titles)
    left.legend()
    floor = 1e-17
    shown = [max(e.worst, floor) for *_, e in rows]
    colours = [COLOURS[2] if e.equal else COLOURS[1] for *_, e in rows]
    right.scatter(shown, places, c=colours, zorder=3)
    right.axvline(TOLERANCE, color=COLOURS[1], linestyle="--", label="tolerance")
    right.set(title="Worst error against one device", xlabel="relative, float64", xscale="log", yticks=places)
    right.set_yticklabels([])
    right.legend()
    for axis in axes:
        axis.invert_yaxis()


if __name__ == "__main__":
    sys.exit(main())
