"""Recorded runs on GPUs, for ``benchmarks/gpu_check.py``: is what goes wrong found, on the streams' clock?

Three ranks train, recorded, and from the middle on one of them is slow: in its stream, which the host does not notice,
or between steps, or it stands still. The diagnosis is made from the records alone; of the rank that stands, while it
does. All the while the losses and parameters are those of one device.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import hap
from benchmarks import gpu_check_ranks as ranks
from benchmarks.gpu_check_cost import Item, Setting
from hap.diagnosis import hang
from hap.diagnosis.finding import Finding
from hap.diagnosis.run import Run, load_run
from hap.diagnosis.trace import to_trace
from hap.diagnosis.traffic import find_traffic
from hap.diagnosis.verdict import diagnose
from hap.runtime.collectives import Communicator

LEAST = 3  # ranks
STEPS, AT = 24, 12  # and the step before which something goes wrong
STANDS_AT = 4
SLOW_S = 0.15
CYCLES_PER_S = 1.8e9  # of a GPU, about
HANG_S, PATIENCE_S = 3.0, 60.0  # a rank is asked about after so long, and for so long
LIMIT_S = 200.0
ZERO = {"*": "S(0)", "args.0": "S(0)"}


@dataclass(frozen=True)
class Fault:
    """What ``rank`` is made to do, and what the diagnosis should call it; nothing for a job that is well."""

    syndrome: str
    rank: int = 0


FAULTS = {
    "well": Fault(""),
    "slow stream": Fault("compute straggler", 1),
    "late host": Fault("late between steps", 2),
    "stands": Fault("non-communication hang", 1),
}


def check_recorded(setting: Setting) -> Item:
    setting = replace(setting, ranks=max(setting.ranks, LEAST))
    with tempfile.TemporaryDirectory() as folder:
        found = ranks.start_ranks(setting.ranks, bool(setting.gpus), train_with_faults, folder, limit_s=LIMIT_S)
        shared = setting.gpus < setting.ranks
        told = {name: told_of(Path(folder, name), fault, found, shared) for name, fault in FAULTS.items()}
    worst = max(rank["difference"] for rank in found)
    good = worst <= ranks.EXACT and all(right for right, _ in told.values())
    words = "; ".join(f"{name}: {said}" for name, (_, said) in told.items())
    figures = {"relative_difference": worst} | {f"{name} found": float(right) for name, (right, _) in told.items()}
    words = f"{setting.on}: {words}; {worst:.1e} from one device"
    return Item("recorded", "pass" if good else "FAIL", words, figures)


def told_of(folder: Path, fault: Fault, found: list[dict[str, Any]], shared: bool) -> tuple[bool, str]:
    """Whether that is what the records say, and in words what they do. Of a job that goes on only what began in its
    middle counts: the plan's cluster is made up, so ranks take longer than it says from the start. Where ranks share a
    GPU or cores their slices of time make one slow now and then, so what is told of a job that is well is not judged
    there."""
    if fault.syndrome.endswith("hang"):
        said = found[fault.rank]["standing"]
        return said == f"{fault.syndrome} of {fault.rank}", said or "nothing told"
    run = load_run(folder)
    named = [f for f in diagnose(run).findings if f.ranks and f.since_step is not None]
    words = ", ".join(map(in_words, named)) or "no rank has become slow"
    words += f" ({1e3 * float(run.seconds[: AT // 2].mean()):.0f} ms a step before)"
    if (turned := out_of_order(run)) or not find_traffic(run).rows or '"forward"' not in to_trace(run):
        return False, f"{words}, {turned} calls that end before they begin"
    if not fault.syndrome:
        return shared or not named, words
    return bool(named) and (named[0].syndrome, named[0].ranks) == (fault.syndrome, (fault.rank,)), words


def out_of_order(run: Run) -> int:
    """Calls whose times are not in the order in which they were taken: of the program's stream, and of a lane's."""
    calls = [call[2:] for row in run.steps for line in row for call in line.calls or ()]
    return sum(list(c[:4]) != sorted(c[:4]) or list(c[4:]) != sorted(c[4:]) for c in calls)


def in_words(finding: Finding) -> str:
    ranks_ = ", ".join(map(str, finding.ranks))
    factor = "" if finding.factor is None else f", {finding.factor:.1f} times as long"
    since = "" if finding.since_step is None else f" since step {finding.since_step}"
    return f"{finding.syndrome} of {ranks_}{factor}{since}"


def train_with_faults(device: torch.device, folder: str) -> dict[str, Any]:
    """Every fault's job, one after another. The largest relative difference from one device, and what the rank that
    stands still was told meanwhile."""
    worst, standing = 0.0, ""
    for name, fault in FAULTS.items():
        program, trouble = ranks.tiny_program(device, ZERO), Trouble(fault, device, Path(folder, name))
        program.set_pace(trouble)
        with program.record(trouble.folder):
            worst = max(worst, train(program, STEPS, trouble.before))
        Communicator(dist.group.WORLD, device).gather_objects(None)  # until all have written
        standing = standing or trouble.told
    return {"difference": worst, "standing": standing}


class Trouble:
    """What goes wrong on this rank, if it is the fault's. As a pace it keeps the stream busy before the next use of the
    wire, for as long as it was told to."""

    def __init__(self, fault: Fault, device: torch.device, folder: Path) -> None:
        self.fault, self.device, self.folder = fault, device, folder
        self.owed_s, self.told = 0.0, ""

    def before(self, step: int) -> None:
        """The step, counted from 1."""
        if dist.get_rank() != self.fault.rank:
            return
        if self.fault.syndrome == "compute straggler" and step >= AT:
            self.owed_s = SLOW_S
        elif self.fault.syndrome == "late between steps" and step >= AT:
            time.sleep(SLOW_S)
        elif self.fault.syndrome.endswith("hang") and step == STANDS_AT:
            self.told = stand(self.folder)

    def settle(self) -> None:
        owed_s, self.owed_s = self.owed_s, 0.0
        if owed_s and self.device.type == "cuda":
            torch.cuda._sleep(int(owed_s * CYCLES_PER_S))  # in the stream: the host goes on
        elif owed_s:
            time.sleep(owed_s)

    def resume(self) -> None:
        pass


def train(program: hap.HapProgram, steps: int, before: Callable[[int], None]) -> float:
    """The largest relative difference of losses and of the parameters afterwards from one device. The host never waits
    for the GPU, so that it runs ahead as far as it can. ``before`` each step, counted from 1."""
    device, model = program.device, ranks.tiny().to(program.device)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (program, model))
    losses: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(1, steps + 1):
        before(step)
        ids, targets = ranks.tiny_batch(step)
        share, my_targets = program.shard_batch((ids,), targets)
        loss = program(*share, targets=my_targets)
        expected = ranks.token_loss(model(ids.to(device)), targets.to(device))
        for one in (loss, expected):
            one.backward()
        program.clip_grad_norm_(0.5)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append((loss.detach(), expected.detach()))
    state = program.state_dict()
    worst = max(ranks.relative(*pair) for pair in losses)
    return max(worst, *(ranks.relative(state[name], p) for name, p in model.state_dict().items()))


def stand(folder: Path) -> str:
    """Stand still until a hang is found, or for as long as patience lasts; what was found."""
    until = time.monotonic() + PATIENCE_S
    with mock.patch.object(hang, "LEAST_S", HANG_S):
        while time.monotonic() < until:
            time.sleep(0.5)
            found = diagnose(load_run(folder)).findings
            if found and found[0].syndrome.endswith("hang"):
                return in_words(found[0])
    run: Run = load_run(folder)
    states = [record.state for record in run.ranks]
    entered = ", ".join("?" if s is None else f"{s.entered}{' in the wire' * bool(s.in_wire)}" for s in states)
    return f"no hang in {PATIENCE_S:.0f} s; uses of the wire begun: {entered}"
