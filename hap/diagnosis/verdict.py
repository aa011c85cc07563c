"""The whole of a diagnosis: what stopped the job, else what makes it slow, else that it is well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hap.diagnosis.finding import Finding
from hap.diagnosis.hang import find_hang, is_left_open
from hap.diagnosis.links import find_slow_links
from hap.diagnosis.run import Run
from hap.diagnosis.slow import SLOWER, Slow, find_slow
from hap.report.words import seconds as in_words
from hap.report.words import table

FEW_STEPS = 3


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """``findings``: the worst first; none means that all is well. ``slow``: the medians that they rest on, None where
    too few steps were told of."""

    run: Run
    findings: tuple[Finding, ...]
    slow: Slow | None

    @property
    def verdict(self) -> str:
        """One line."""
        if self.findings:
            first = self.findings[0]
            return f"{first.syndrome}: {first.summary}"
        as_far = "; whether its ranks still run shows only where they do, not in a copy" * is_left_open(self.run)
        if self.slow is None:
            few = f"({len(self.run.steps)} of {FEW_STEPS})"
            return f"too few steps to say more than that nothing hangs {few}{as_far}"
        return f"healthy: {len(self.run.steps)} steps, {in_words(self.slow.step_s)} each{as_far}"

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "findings": [finding.to_json() for finding in self.findings],
            "steps": len(self.run.steps),
            "step_s": None if self.slow is None else self.slow.step_s,
            "predicted_step_s": None if self.run.expected is None else self.run.expected.step_s,
            "ranks": [] if self.slow is None else _rows(self.slow),
        }


def diagnose(run: Run) -> Diagnosis:
    """See the module docstring."""
    hang = find_hang(run)
    slow = Slow.of(run) if len(run.steps) >= FEW_STEPS else None
    found = [*hang]
    if not hang:
        links = find_slow_links(run, None if run.expected is None else run.expected.cluster)
        found += [] if slow is None else _with_causes(find_slow(slow), links)
        found += links
        found += [] if slow is None else _everywhere(slow, found)
    return Diagnosis(run, tuple(found), slow)


def _with_causes(slow: tuple[Finding, ...], links: tuple[Finding, ...]) -> list[Finding]:
    """What is slow for a reason that a probe has found is that reason's doing, and not told twice."""
    return [finding for finding in slow if not (finding.syndrome == "slow communication" and links)]


def _everywhere(slow: Slow, found: list[Finding]) -> list[Finding]:
    """A step that takes longer than planned, where nothing that was found says why."""
    expected = slow.run.expected
    if expected is None or found or slow.step_s < SLOWER * expected.step_s:
        return []
    off = "" if np.isnan(slow.usual) else f"; ranks take {slow.usual:.2f} times what the plan says by themselves"
    return [
        Finding(
            "slower than planned",
            (),
            f"a step takes {in_words(slow.step_s)}, and {in_words(expected.step_s)} were predicted{off}",
            (),
            "measure the cluster again (hap profile), and plan with that"
            if expected.is_measured
            else "the plan rests on the catalogue: hap profile measures this cluster, hap plan --profile plans with it",
            factor=slow.step_s / expected.step_s,
            lost_s=slow.step_s - expected.step_s,
        )
    ]


def _rows(slow: Slow) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            "device": device,
            "compute_s": float(slow.compute_s[rank]),
            "over_predicted": None if np.isnan(slow.ratio[rank]) else float(slow.ratio[rank]),
            "outside_s": float(slow.outside_s[rank]),
            "waited_for_s": None if np.isnan(slow.waited_for_s[rank]) else float(slow.waited_for_s[rank]),
        }
        for rank, device in enumerate(slow.run.devices)
    ]


def told(diagnosis: Diagnosis) -> str:
    """The verdict, then each finding with its evidence and what to do, then a table of the ranks."""
    lines = [diagnosis.verdict]
    for number, finding in enumerate(diagnosis.findings):
        if number:
            lines += ["", f"also, {finding.syndrome}: {finding.summary}"]
        lines += [f"  {line}" for line in finding.evidence]
        lines += [f"  next: {finding.next_step}"] if finding.next_step else []
    if diagnosis.slow is not None:
        lines += ["", *_table(diagnosis.slow)]
    return "\n".join(lines)


def _table(slow: Slow) -> list[str]:
    expected = slow.run.expected
    steps = slow.run.numbers[slow.window]
    predicted = "" if expected is None else f", predicted {in_words(expected.step_s)}"
    wire = f"all wait for the wire {in_words(slow.wire_s)}"
    if np.isnan(slow.wire_s):
        wire = "who is waited for is not known, as none of them was told call by call"
    head = ["device", "computes", "outside", "both x predicted", "waited for"]
    rows = [
        [
            device,
            in_words(float(slow.compute_s[rank])),
            in_words(float(slow.outside_s[rank])),
            "-" if np.isnan(slow.ratio[rank]) else f"{slow.ratio[rank]:.2f}",
            "-" if np.isnan(slow.waited_for_s[rank]) else in_words(float(slow.waited_for_s[rank])),
        ]
        for rank, device in enumerate(slow.run.devices)
    ]
    return [
        f"steps {steps[0]} to {steps[-1]}: {in_words(slow.step_s)} each (median){predicted}; {wire}",
        *table([head, *rows], right=(1, 2, 3, 4)),
    ]
