"""Where the job of a plan that leaves devices out is started: on which devices, with which commands.

Such a plan is for the cluster of the others: its devices, its fingerprint and its ranks are theirs. What it leaves out
stands in its provenance by rank and by name in the whole cluster, so that a job with all devices is told where to start
(``refusal``), and a reader how (``how_to_start``).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from itertools import groupby, takewhile
from typing import NamedTuple

from hap.errors import PlanError
from hap.plan import Plan
from hap.report.words import FEW_RANKS, counted, listed, seconds

FEW = 8  # devices that are named one by one, and hosts that have a line each
SHOWN = "CUDA_VISIBLE_DEVICES"  # where it is set, a host's GPUs are those that it names, in its order
PORT = 29500  # torchrun's own
SCRIPT = "SCRIPT.py --cluster CLUSTER.yaml --plan X.plan.json"  # what hap run hands on to a script, too


class Part(NamedTuple):
    """The devices of one host that take part, numbered as the host numbers them, and how many it has in all."""

    host: str
    numbers: tuple[int, ...]
    of: int


def left_out(plan: Plan) -> dict[int, str]:
    """Rank in the whole cluster -> name of each device that the plan leaves out. PlanError for a plan that tells no
    sense of them."""
    solver = plan.provenance.solver
    ranks, names = solver.get("left_out", []), solver.get("left_out_devices", [])
    everyone = range(plan.world_size + (len(ranks) if isinstance(ranks, list) else 0))
    if (
        not (isinstance(ranks, list) and isinstance(names, list) and len(ranks) == len(names))
        or not all(type(r) is int and r in everyone for r in ranks)
        or not all(isinstance(name, str) for name in names)
        or len(dict.fromkeys(ranks)) < len(ranks)
    ):
        raise PlanError("the plan does not say which devices it leaves out; plan again")
    return dict(zip(ranks, names, strict=True))


def parts(plan: Plan) -> tuple[Part, ...]:
    """The hosts that take part, in the order of their ranks."""
    missing, own = left_out(plan), iter(plan.devices)
    names = [missing[rank] if rank in missing else next(own) for rank in range(plan.world_size + len(missing))]
    found = []
    ranks = enumerate(names)
    for host, members in groupby(ranks, key=lambda item: item[1].partition("/")[0]):
        here = [rank for rank, _ in members]
        numbers = tuple(i for i, rank in enumerate(here) if rank not in missing)
        if numbers:
            found.append(Part(host, numbers, len(here)))
    return tuple(found)


def in_words(plan: Plan) -> str:
    """The devices that are left out: by name, or of many how many of each kind on which host."""
    names = list(left_out(plan).values())
    if len(names) <= FEW:
        return listed(names, FEW)
    kinds = Counter(name.partition("#")[0] for name in names)
    return listed([f"{count} x {kind}" for kind, count in kinds.items()], FEW)


def with_all(plan: Plan) -> str:
    """What a step of all devices would take, as far as it was looked at."""
    solver, them = plan.provenance.solver, "it" if len(left_out(plan)) == 1 else "them"
    glanced = ", at first glance" if solver.get("with_all_glanced") is True else ""
    for name, how in (
        ("with_all_overlapped_s", "{} as it is run"),
        ("with_all_step_s", "{} with nothing overlapped"),
        ("with_all_at_least_s", "at least {} with nothing overlapped"),
    ):
        if isinstance(found := solver.get(name), int | float):
            return f"with {them} the step would take {how.format(seconds(found))}{glanced}"
    raise PlanError("the plan does not say what the devices that it leaves out would cost; plan again")


def refusal(plan: Plan, world_size: int) -> str:
    """Why a job of so many ranks cannot run the plan, and where to start it."""
    hosts = [f"{p.host} ({counted(len(p.numbers), 'rank')}{_of(p)})" for p in parts(plan)]
    where = listed(hosts, FEW_RANKS)
    return (
        f"the plan leaves out {in_words(plan)}, and this job has {world_size} ranks: "
        f"start {plan.world_size}, on {where} only"
    )


def _of(part: Part) -> str:
    """Which of the host's devices, where others are left out."""
    return "" if len(part.numbers) == part.of else f", of its devices {', '.join(map(str, part.numbers))}"


def how_to_start(plan: Plan) -> list[str]:
    """One line for each host that takes part, or of many hosts for each run of those that start alike."""
    hosts, cuda = parts(plan), plan.provenance.backend == "nccl"
    if len(hosts) == 1:
        shown = _visible(hosts[0], cuda, here=True)
        return [f"on {hosts[0].host}: {shown}torchrun --standalone {_ranks(hosts[0])} {SCRIPT}"]
    lines = []
    for first, last in _alike(hosts):
        part = hosts[first]
        one = first == last
        where = part.host if one else f"{part.host} to {hosts[last].host}"
        number = f"{first}" if one else f"N (N from {first} to {last}, in their order)"
        shown = _visible(part, cuda, here=False)
        lines.append(
            f"on {where}: {shown}torchrun --nnodes {len(hosts)} --node-rank {number} {_ranks(part)} "
            f"--master-addr {hosts[0].host} --master-port {PORT} {SCRIPT}"
        )
    return lines


def _alike(hosts: tuple[Part, ...]) -> Iterator[tuple[int, int]]:
    """(first, last) of each run of hosts that start alike; of few hosts each alone."""
    if len(hosts) <= FEW:
        yield from ((i, i) for i in range(len(hosts)))
        return
    for _, run in groupby(range(len(hosts)), key=lambda i: hosts[i][1:]):
        members = list(run)
        yield members[0], members[-1]


def _ranks(part: Part) -> str:
    return f"--nproc-per-node {len(part.numbers)}"


def visible(plan: Plan, host: str | None) -> dict[str, str]:
    """The environment of a host's ranks (None: the only host of the plan, if there is one): which of its GPUs they see,
    where it has others. PlanError if this process sees too few to tell which they are."""
    mine = [part for part in parts(plan) if host in (None, part.host)]
    if len(mine) != 1 or not (found := _environment(mine[0], plan.provenance.backend == "nccl")):
        return {}
    if (shown := os.environ.get(SHOWN)) is None:
        return found
    if (named := _named(mine[0])) is None:
        raise PlanError(
            f"the plan is for {_numbered(mine[0])} of the {mine[0].of} GPUs of {mine[0].host}, and {SHOWN}={shown!r} "
            "shows fewer: name them all, or unset it"
        )
    return {SHOWN: named}


def _visible(part: Part, cuda: bool, here: bool) -> str:
    """``here``: it may be this machine, where some are shown."""
    found = _environment(part, cuda)
    if found and here:
        found = {SHOWN: _named(part) or found[SHOWN]}
    return "".join(f"{name}={value} " for name, value in found.items())


def _environment(part: Part, cuda: bool) -> dict[str, str]:
    return {SHOWN: _numbered(part)} if cuda and len(part.numbers) < part.of else {}


def _numbered(part: Part) -> str:
    return ",".join(map(str, part.numbers))


def _named(part: Part) -> str | None:
    """The host's GPUs that take part among those that this process sees, in their words. None if it sees fewer."""
    shown = list(takewhile(lambda one: one and one[0] != "-", map(str.strip, os.environ.get(SHOWN, "").split(","))))
    return ",".join(shown[number] for number in part.numbers) if len(shown) >= part.of else None
