"""What was discovered, kept on disk: one JSON file per kind of call, written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.resources
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from hap.ops import resolve
from hap.rules.notation import Call, Dim, Row, Slot, call_key
from hap.rules.propose import Proposal

_TEXTS = ("propose.py", "shrink.py", "prove.py", "samples.py", "notation.py")  # what a discovery depends on


@dataclass(frozen=True)
class Memory:
    """A folder of discoveries. A file that cannot be read, or is not one of ours, is as good as none."""

    folder: Path

    @classmethod
    def on_disk(cls) -> Memory:
        """The user's: ``$XDG_CACHE_HOME/hap/rules``, else ``~/.cache/hap/rules``."""
        home = os.environ.get("XDG_CACHE_HOME")
        return cls((Path(home) if home else Path.home() / ".cache") / "hap" / "rules")

    def file(self, call: Call) -> Path:
        return self.folder / f"{call.node.op}-{hashlib.sha256(_key(call).encode()).hexdigest()[:24]}.json"

    def recall(self, call: Call) -> Proposal | None:
        """What was kept for calls of this kind, None if nothing readable was."""
        try:
            entry = json.loads(self.file(call).read_text(encoding="utf-8"))
            if entry["key"] != _key(call):
                return None
            rows = tuple(_row(row) for row in entry["rows"])
            detail = entry["detail"]
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return None
        fitting = all(len(r.inputs) == len(call.inputs) and len(r.outputs) == len(call.outputs) for r in rows)
        return Proposal(rows, detail) if fitting and isinstance(detail, str) else None

    def keep(self, call: Call, found: Proposal) -> None:
        """Write it. Where the folder cannot be written, nothing is kept, and it will be discovered again."""
        entry = {"key": _key(call), "detail": found.detail, "rows": [_row_entry(row) for row in found.rows]}
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".part")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(entry, file)
            os.replace(name, self.file(call))


def _key(call: Call) -> str:
    """All that a discovery depends on. Rows do not depend on which tensors a call reads, nor on where it stands."""
    schema = str(getattr(resolve(call.node.op), "_schema", ""))
    texts = hashlib.sha256()
    for name in _TEXTS:
        texts.update(importlib.resources.files("hap.rules").joinpath(name).read_bytes())
    return repr((schema, call_key(call), torch.__version__, texts.hexdigest()))


def _row_entry(row: Row) -> list[list[Any]]:
    return [[_slot_entry(s) for s in row.inputs], [None if s is None else _slot_entry(s) for s in row.outputs]]


def _slot_entry(slot: Slot) -> Any:
    return [slot.dim, str(slot.outer), str(slot.unit)] if isinstance(slot, Dim) else slot


def _row(entry: Sequence[Sequence[Any]]) -> Row:
    inputs, outputs = entry
    return Row(tuple(_slot(s) for s in inputs), tuple(None if s is None else _slot(s) for s in outputs))


def _slot(entry: Any) -> Slot:
    if entry in ("R", "P"):
        return "R" if entry == "R" else "P"
    dim, outer, unit = entry
    if type(dim) is not int:
        raise TypeError(f"{dim!r} is no dim")
    return Dim(dim, Fraction(outer), Fraction(unit))
