"""Does HAP do on GPUs what it does on CPUs? Run it on a machine with one GPU, or with more:

    python benchmarks/gpu_check.py            # a verdict per item, and gpu_check.json in benchmarks/results
    python benchmarks/gpu_check.py --cpu      # rehearsal: the same code on Gloo and tiny sizes, no limits on timings

    one-rank       training on a one-rank NCCL group, stopped and gone on with, equals plain PyTorch, float64, 1e-10
    collectives    every collective in every decomposition, unequal and zero shares, equals the plain result exactly;
                   on every GPU a rank, on a single GPU three that share it, through NCCL's sockets
    ranks          data parallel, ZeRO and tensor parallel with unequal shares equal one device, with one batch a step
                   and with three, whose gradients are exchanged once (ranks as above)
    acco           ACCO's updates are those of the paper's equations on one device
    hosts          a plan of two axes, the ranks being two hosts, equals one device
    fork           hap.compile plans beside a forked process, with CUDA and NCCL at work in the one that forks it: it
                   comes back in time, with the plan that it makes alone, and training equals one device; no process
                   is left. One rank, and ranks as above
    recorded       three recorded ranks: one becomes slow in its stream, one between steps, one stands still, and the
                   diagnosis names it; losses and parameters are those of one device
    mesh-record    the same of a rank that becomes late in a plan of two axes (where ranks share a GPU, four of them)
    mesh-acco      ACCO on two axes, recorded
    reduce-dtype   gradients exchanged in 16 bits, on one axis and two: whole numbers exactly, others as near as
                   rounding allows, under ACCO, too
    attention      forward and backward of attention by every kernel, beside the formulas in float64
    random         random numbers and dropout's masks on the GPU are those on the CPU
    overhead       forward and backward of the emitted program beside eager's, GPT-2 medium, bfloat16: at most 2% more
    compiled       the same beside torch.compile (no limit: the figure is printed)
    both           the same with both compiled (program.compile())
    no-sync        no operation of a step makes the host wait for the GPU (torch.cuda.set_sync_debug_mode)
    memory         peak bytes of a step of that model with AdamW, predicted within 10% of what the allocator saw
    curves         seconds of every op class of that model, measured, beside what the catalogue of GPUs predicts
    step           seconds of a step of that model, predicted from a profile made here, within 10%; and by the catalogue

Items that are not checked stay as they were in the last result of the same GPUs, each with its commit and command.

Exit code: 0 every item passed or had to be left out, 1 an item failed, 2 bad arguments, 3 there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks import gpu_check_cost as cost
from benchmarks import gpu_check_fork as fork
from benchmarks import gpu_check_mesh as mesh
from benchmarks import gpu_check_ranks as ranks
from benchmarks import gpu_check_record as record
from benchmarks import gpu_check_train as train
from benchmarks.common import RESULTS, commit, machine, without_folders
from benchmarks.gpu_check_cost import Item, Setting, Verdict, alone

NO_GPU = 3
SHARING = 3  # ranks on the only GPU of a machine
PLANS: dict[str, dict[str, str]] = {
    "data parallel": {"*": "R", "args.0": "S(0)"},
    "zero": {"*": "S(0)", "args.0": "S(0)"},
    "tensor parallel": {"*": "R", "wide.*.weight": "S(0)", "narrow.*.weight": "S(1)", "args.0": "R"},
}

ATTENTION = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def check_one_rank(setting: Setting) -> Item:
    with alone(setting):
        worst = ranks.train_like_one_device(setting.device, {"one rank": {}})["one rank"]
    verdict: Verdict = "pass" if worst <= ranks.EXACT else "FAIL"
    return Item("one-rank", verdict, f"largest relative difference {worst:.1e}", {"relative_difference": worst})


def check_collectives(setting: Setting) -> Item:
    found = ranks.start_ranks(setting.ranks, bool(setting.gpus), ranks.compare_collectives, 5)
    wrong = sorted({kind for rank in found for kind in rank} - {"compared"})
    compared = sum(rank["compared"] for rank in found)
    words = f"{compared} results on {setting.on}" + (f"; wrong: {', '.join(wrong)}" if wrong else ", all exact")
    return Item("collectives", "FAIL" if wrong else "pass", words, {"compared": compared, "wrong": len(wrong)})


def check_ranks(setting: Setting) -> Item:
    found = ranks.start_ranks(setting.ranks, bool(setting.gpus), ranks.train_like_one_device, PLANS)
    worst = {name: max(rank[name] for rank in found) for name in PLANS}
    words = ", ".join(f"{name} {difference:.1e}" for name, difference in worst.items())
    good = all(difference <= ranks.EXACT for difference in worst.values())
    return Item("ranks", "pass" if good else "FAIL", f"{setting.on}: {words}", worst)


def check_acco(setting: Setting) -> Item:
    found = ranks.start_ranks(setting.ranks, bool(setting.gpus), train.train_by_acco, PLANS["zero"])
    return _exact("acco", setting, max(found))


def check_hosts(setting: Setting) -> Item:
    found = ranks.start_ranks(setting.ranks, bool(setting.gpus), train.train_over_hosts)
    return _exact("hosts", setting, max(found))


def _exact(name: str, setting: Setting, worst: float) -> Item:
    verdict: Verdict = "pass" if worst <= ranks.EXACT else "FAIL"
    words = f"{setting.on}: largest relative difference {worst:.1e}"
    return Item(name, verdict, words, {"relative_difference": worst})


def check_attention(setting: Setting) -> Item:
    found = {dtype: ranks.attention_error(setting.device, dtype) for dtype in ATTENTION}
    words = ", ".join(f"{str(dtype).removeprefix('torch.')} {worst:.1e}" for dtype, worst in found.items())
    good = all(worst <= ATTENTION[dtype] for dtype, worst in found.items())
    figures = {str(dtype).removeprefix("torch."): worst for dtype, worst in found.items()}
    return Item("attention", "pass" if good else "FAIL", f"largest relative difference: {words}", figures)


def check_random(setting: Setting) -> Item:
    found = ranks.random_numbers(setting.device)
    good = all(difference <= (1e-12 if name == "randn" else 0.0) for name, difference in found.items())
    words = ", ".join(f"{name} {difference:.1e}" for name, difference in found.items())
    return Item("random", "pass" if good else "FAIL", f"largest difference from the CPU's: {words}", found)


# ------------------------------------------------------------------------------------------------------------ the frame

CHECKS: dict[str, Callable[[Setting], Item | list[Item]]] = {
    "one-rank": check_one_rank,
    "collectives": check_collectives,
    "ranks": check_ranks,
    "acco": check_acco,
    "hosts": check_hosts,
    "fork": fork.check_fork,
    "recorded": record.check_recorded,
    "mesh-record": mesh.check_record,
    "mesh-acco": mesh.check_acco,
    "reduce-dtype": mesh.check_reduce_dtype,
    "attention": check_attention,
    "random": check_random,
    "overhead": cost.check_overhead,
    "no-sync": cost.check_no_sync,
    "memory": cost.check_memory,
    "curves": cost.check_curves,
    "step": cost.check_step,
}
BESIDE = {"compiled": "overhead", "both": "overhead"}  # items that another's check makes, too
ORDER = [item for name in CHECKS for item in (name, *(beside for beside, of in BESIDE.items() if of == name))]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="rehearse on the CPU: Gloo, tiny sizes, timings not judged")
    parser.add_argument("--only", action="append", choices=ORDER, help="this item (again for more)")
    parser.add_argument("--batch", type=int, default=32, help="timed: so many sequences of 512 tokens (32: 35 GB)")
    parser.add_argument("--rounds", type=int, default=30, help="repetitions of what is timed")
    parser.add_argument("--ranks", type=int, help="default: one for every GPU; three that share the only one")
    parser.add_argument("--commit", help="of a copy that has no history: what it is a copy of")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="default: benchmarks/results")
    given = parser.parse_args(argv)
    of = given.commit or commit()  # of what was loaded
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus and not given.cpu:
        print("no GPU here: nothing was checked (--cpu rehearses the same code on this machine's CPU)", file=sys.stderr)
        return NO_GPU
    if given.cpu:
        setting = Setting(0, given.ranks or 2, 4, 16, 3)
    else:
        setting = Setting(gpus, given.ranks or (gpus if gpus > 1 else SHARING), given.batch, 512, given.rounds)
    where = "rehearsal on the CPU" if given.cpu else f"{gpus} x {torch.cuda.get_device_name(0)}"
    print(f"{where}, torch {torch.__version__}")
    given.out.mkdir(parents=True, exist_ok=True)
    written = given.out / ("gpu_check_rehearsal.json" if given.cpu else "gpu_check.json")
    command = shlex.join(
        ["python", "benchmarks/gpu_check.py", *without_folders(sys.argv[1:] if argv is None else argv)]
    )
    about = {"command": command, "commit": of}
    items = _known(written, bool(given.only))
    failed = False
    wanted = {BESIDE.get(name, name) for name in given.only or CHECKS}
    for name in CHECKS:
        if name not in wanted:
            continue
        for item in _guarded(name, CHECKS[name], setting):
            print(f"{item.verdict:>8}  {item.name:<12} {item.words}", flush=True)
            items[item.name] = asdict(item) | about
            failed |= item.verdict == "FAIL"
        body = about | _record([items[name] for name in ORDER if name in items], setting)
        written.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")  # before the next
    print(f"wrote {written.name}")
    return int(failed)


def _known(path: Path, only: bool) -> dict[str, dict[str, Any]]:
    """The items of the last result, by name; none of one that is of other GPUs. SystemExit where ``only`` some would
    take the place of all those."""
    if not path.is_file():
        return {}
    body = json.loads(path.read_text(encoding="utf-8"))
    then, now = ([gpu.partition(",")[0] for gpu in m.get("gpus", ())] for m in (body["machine"], machine()))
    if then != now:
        if only:
            raise SystemExit(f"error: {path.name} is of {then}, here are {now}: --out another folder")
        return {}
    about = {"command": body["command"], "commit": body["commit"]}
    return {item["name"]: about | item for item in body["items"]}


def _record(items: Sequence[Mapping[str, Any]], setting: Setting) -> dict[str, object]:
    return {
        "machine": machine(),
        "batch": setting.batch,
        "ranks": setting.ranks,
        "nccl": list(torch.cuda.nccl.version()) if setting.gpus else None,
        "items": items,
    }


def _guarded(name: str, check: Callable[[Setting], Item | list[Item]], setting: Setting) -> list[Item]:
    """What the check found. One that breaks has failed, its traceback on stderr, and the others are still run."""
    started = time.monotonic()
    try:
        found = check(setting)
    except Exception as e:
        traceback.print_exc()
        words = f"broke after {time.monotonic() - started:.0f} s: {type(e).__name__}: {' '.join(str(e).split())[:300]}"
        return [Item(name, "FAIL", words)]
    finally:
        print(f"({name}: {time.monotonic() - started:.0f} s)", file=sys.stderr)
        if setting.gpus:
            torch.cuda.empty_cache()
    return found if isinstance(found, list) else [found]


if __name__ == "__main__":
    raise SystemExit(main())
