"""Which of Hugging Face's model families, or of timm's, HAP trains as one device does: all of them, at a small size.

Language models, classifiers of images, classifiers of texts: each family's own configuration with small sizes
(``zoo_models/families``), in float64, one global batch of 4. Captured, then one step on three lockstep ranks under
three plans: the batch dealt 2:1:1, and twice any strategies with any sizes, zeros included. Loss, every gradient and
every buffer are compared with PyTorch's in one process. Where a gradient nearly cancels, PyTorch itself rounds to other
digits of that tensor with the batch in other orders; so much is allowed, if it is little. A family that cannot be
built or run at these sizes, or for want of a library, is not tried, and told of; what HAP refuses is told in its words.
Each runs in a process of its own, limited in seconds and memory; one that fails, or is unequal, fails the run. With
``--only`` the other families stay as they were in the last result. ``--timm``: those of timm instead, which is to be
installed for it (``zoo_models/timm_families``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import ROOT, Report, parse
from benchmarks.families_one import ROUNDINGS, TIMM, allowed
from benchmarks.zoo_models import timm_families
from benchmarks.zoo_models.equality import TOLERANCE
from benchmarks.zoo_models.families import families

QUICK = ("llama", "mamba", "deepseek_v3", "vit", "xlnet", "test_vit", "test_resnet")
DEADLINE_S, MOST_GIB = 240, 10
JOBS = 2
TIMMS_WORDS = "have a model of up to 35 million parameters that could be built and run on small images"
COLUMNS = ("for", "family", "nodes", "of products dealt out", "worst error", "own", "where")


@dataclass(frozen=True)
class Row:
    """Of one family: ``error`` relative to one device, and the tensor that has it, which is furthest from what is
    allowed; or why there is none. ``largest``: of all tensors, where that may be another. ``own``: how far PyTorch is
    from itself in that one, where it was asked."""

    kind: str
    name: str
    nodes: int = 0
    error: float = 0.0
    largest: float = 0.0
    where: str = ""
    own: float = 0.0
    dealt: float = 0.0
    not_built: str = ""
    refused: str = ""
    failed: str = ""
    commit: str | None = None

    @property
    def compared(self) -> bool:
        return not (self.not_built or self.refused or self.failed)

    @property
    def equal(self) -> bool:
        return self.compared and self.error <= allowed(self.own)


@dataclass(frozen=True)
class Library:
    """``families``: (what for, name) of each; ``result``: the name of the files; ``words``: what is said of them."""

    package: str
    result: str
    words: str
    families: tuple[tuple[str, str], ...]


TIMMS = Library(TIMM, "families_timm", TIMMS_WORDS, tuple((TIMM, name) for name in timm_families.MODELS))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", metavar="NAMES", help="families, separated by commas")
    parser.add_argument("--timm", action="store_true", help="those of timm, not of Hugging Face's transformers")
    options = parse("families", "Which of a library's model families HAP trains as one device does.", argv, parser)
    of = (
        TIMMS
        if options.extra.timm
        else Library("transformers", "families", "could be built and run at the small sizes", families())
    )
    quick = [name for name in QUICK if name in {known for _, known in of.families}]
    names = options.extra.only.split(",") if options.extra.only else quick if options.quick else []
    if unknown := set(names) - {name for _, name in of.families}:
        parser.error(f"no such family: {', '.join(sorted(unknown))}")
    wanted = [(kind, name) for kind, name in of.families if not names or name in names]
    report = Report(of.result, f"Model families of {of.package}, equal to one device", options)
    known = _known(options.out / f"{of.result}.json") if options.extra.only else {}
    with ThreadPoolExecutor(JOBS) as pool:
        for number, row in enumerate(pool.map(lambda one: _row(*one), wanted), 1):
            known[row.kind, row.name] = replace(row, commit=report.commit)
            print(f"{number}/{len(wanted)} {row.kind} {row.name}: {_said(row)}", file=sys.stderr, flush=True)
    rows = [known[one] for one in of.families if one in known]
    _write(report, of, rows)
    return 0 if all(row.equal or row.not_built or row.refused for row in rows) else 1


def _known(path: Path) -> dict[tuple[str, str], Row]:
    """The families of the last result."""
    rows = [Row(**case) for case in json.loads(path.read_text())["cases"]] if path.is_file() else []
    return {(row.kind, row.name): row for row in rows}


def _row(kind: str, name: str) -> Row:
    command = [sys.executable, str(ROOT / "benchmarks" / "families_one.py"), kind, name, str(MOST_GIB)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return Row(kind, name, failed=f"took more than {DEADLINE_S} s")
    if done.returncode and "can't allocate memory" in done.stderr:
        return Row(kind, name, failed=f"three ranks in one process need more than {MOST_GIB} GiB")
    if done.returncode:
        return Row(kind, name, failed=next(iter(done.stderr.strip().splitlines()[-1:]), f"exit {done.returncode}"))
    return Row(kind, name, **json.loads(done.stdout.strip().splitlines()[-1]))


def _said(row: Row) -> str:
    if row.compared:
        return f"{'equal' if row.equal else 'NOT EQUAL'}, {row.error:.1e} {row.where}"
    told = {"not built": row.not_built, "refused": row.refused, "failed": row.failed}
    return next(f"{what}: {why}" for what, why in told.items() if why)


def _write(report: Report, of: Library, rows: Sequence[Row]) -> None:
    equal, built = [r for r in rows if r.equal], [r for r in rows if not r.not_built]
    report.figure("families", len(rows))
    report.figure("families_built", len(built))
    report.figure("families_equal", len(equal))
    report.figure(f"families_equal_within_{TOLERANCE:g}", sum(r.error <= TOLERANCE for r in equal))
    report.figure("families_not_equal", sum(r.compared and not r.equal for r in rows))
    report.figure("families_refused", sum(bool(r.refused) for r in rows))
    report.figure("families_failed", sum(bool(r.failed) for r in rows))
    for kind, count in Counter(r.kind for r in equal).items():
        report.figure(f"families_equal, {kind}", count)
    if equal:
        report.figure("worst_error", max(max(r.error, r.largest) for r in equal))
    report.text(
        f"{of.package} {version(of.package)}. Of {len(rows)} families {len(built)} {of.words}, and "
        f"{len(equal)} of these are equal to one device within {TOLERANCE:g} of a tensor's largest element, or "
        f"{ROUNDINGS:g} times what PyTorch differs from itself in that tensor with the batch in other orders (`own`), "
        "under a data-parallel and two random plans."
    )
    commits = Counter(str(r.commit) for r in rows)
    if len(commits) > 1:
        told = ", ".join(f"{count} at {commit}" for commit, count in commits.most_common())
        report.text(f"Rows are of several runs: {told}.")
    unequal = [r for r in built if not r.equal]
    if unequal:
        report.table(
            "Not equal, refused or failed", ("for", "family", "why"), [(r.kind, r.name, _said(r)) for r in unequal]
        )
    cells = [
        (r.kind, r.name, r.nodes, f"{r.dealt:.0%}", f"{r.error:.1e}", f"{r.own:.1e}" if r.own else "", r.where)
        for r in rows
        if r.compared
    ]
    report.table("Compared", COLUMNS, cells)
    left = [(r.kind, r.name, r.not_built) for r in rows if r.not_built]
    if left:
        report.table("Not built at these sizes", ("for", "family", "why"), left)
    path = report.write(None)
    body = json.loads(path.read_text())
    body["cases"] = [asdict(r) for r in rows]
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
