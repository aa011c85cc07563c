"""What a diagnosis consists of."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Syndrome = Literal[
    "raised",  # a rank's program ended by an exception
    "lost",  # a rank's process gives no sign of life
    "ended early",  # a rank came to its end, and others wait in what it never came to
    "non-communication hang",  # a rank never comes to the collective in which others wait
    "communication hang",  # all have come to it, and it does not end
    "desync",  # ranks wait in different collectives
    "compute straggler",  # a rank computes more slowly than its plan says, or than it did
    "misjudged devices",  # all of one kind compute more slowly than a plan says that nothing was measured for
    "late between steps",  # a rank's data, optimizer or whatever it does beside the program takes long
    "slow sender",
    "slow receiver",
    "slow link",
    "slow communication",  # collectives take longer than they did, or than the plan says
    "slower than planned",  # alike everywhere
]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. ``ranks`` are those to look at; ``factor``: how many times as long something takes;
    ``lost_s``: what it costs of each step, as far as that is known; ``since_step``: from where on, None: all along."""

    syndrome: Syndrome
    ranks: tuple[int, ...]
    summary: str
    evidence: tuple[str, ...] = ()
    next_step: str = ""
    factor: float | None = None
    lost_s: float | None = None
    since_step: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
