"""The plan's file format: its canonical text, what is refused before any field is looked at, and older versions.

A plan file is JSON of schema version 3 (``hap/plan.schema.json``; ``python -m hap.plan_file`` prints it anew). The
canonical text has one key a line in the plan's own order, one line for each list of numbers and one for each
conversion, so that a change of one decision is a change of one line. Loading parses text and nothing else: no code, no
reference to another file, no number that is not finite, bounded size and depth.

The checksum is the SHA-256 of the compact JSON with sorted keys, without the checksum itself. A file of an older
version carries the checksum of what it held, and is read as a plan that lacks what came later: the explanation
(version 2), the step as it is run (version 3). So a new field is a new version: files that lack it would seem edited;
but for one that is left out where it says nothing, such as the recomputed calls.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hap.errors import PlanError

SCHEMA_VERSION = 3
MAX_CHARACTERS = 512 * 2**20
MAX_DEPTH = 12
LINE = 240  # a list or an object of scalars that fits stands on one line

Body = dict[str, Any]


def _from_version_1(body: Body) -> Body:
    """Version 1 had no explanation, and no fingerprint of a profile."""
    return {**body, "schema_version": 2}


def _from_version_2(body: Body) -> Body:
    """Version 2 had no step as it is run."""
    return {**body, "schema_version": 3}


UPGRADES: Mapping[int, Callable[[Body], Body]] = {1: _from_version_1, 2: _from_version_2}


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a plan file. PlanError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise PlanError(f"{path}: cannot read plan ({e})") from None


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """PlanError if it cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as e:
        raise PlanError(f"{path}: cannot write ({e.strerror})") from None


def parse(text: str, origin: str) -> tuple[Body, str | None]:
    """The body of a plan file at today's version, and the checksum that it must have (None: checked here, as it was of
    an older version). PlanError, one line, for anything that is not a plan file."""
    body = _read(text, origin)
    version = body.get("schema_version")
    if version is None:
        raise PlanError(f"{origin}: not a plan file (no schema_version)")
    claimed = body.pop("checksum", None)
    if version == SCHEMA_VERSION and isinstance(version, int):
        return body, str(claimed)
    if isinstance(version, bool) or not isinstance(version, int) or version not in UPGRADES:
        raise PlanError(_unknown_version(version, origin))
    if claimed != checksum(body):
        raise PlanError(edited(origin))
    while body["schema_version"] != SCHEMA_VERSION:
        body = UPGRADES[body["schema_version"]](body)
    return body, None


def edited(origin: str) -> str:
    return f"{origin}: content does not match its checksum (edited by hand or damaged); plan again"


def _unknown_version(version: Any, origin: str) -> str:
    shown = repr(version)[:20]
    readable = f"{min(UPGRADES)} to {SCHEMA_VERSION}"
    newer = isinstance(version, int) and version > SCHEMA_VERSION
    remedy = "pip install --upgrade hap" if newer else f"hap plan MODEL --cluster CLUSTER.yaml -o {origin}"
    return f"{origin}: schema version {shown}, this HAP reads {readable}; run: {remedy}"


def _read(text: str, origin: str) -> Body:
    if len(text) > MAX_CHARACTERS:
        raise PlanError(f"{origin}: {len(text)} characters, more than any plan has ({MAX_CHARACTERS})")
    try:
        body = json.loads(text, object_pairs_hook=_no_key_twice, parse_constant=_no_constant)
        json.dumps(body, ensure_ascii=False).encode()  # lone surrogates are no text
    except (ValueError, RecursionError) as e:
        raise PlanError(f"{origin}: not a complete plan file ({' '.join(str(e).split())[:120]})") from None
    if not isinstance(body, dict):
        raise PlanError(f"{origin}: not a plan file (no schema_version)")
    _verify_nesting(body, origin)
    return body


def _no_key_twice(pairs: list[tuple[str, Any]]) -> Body:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise ValueError("a key is given twice")
    return body


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _verify_nesting(body: Body, origin: str) -> None:
    """PlanError for nesting deeper than a plan's, and for a number too large for a float (1e999)."""
    waiting: list[tuple[Any, int]] = [(body, 1)]
    while waiting:
        item, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise PlanError(f"{origin}: nested deeper than {MAX_DEPTH} levels, so not a plan")
        for inner in item.values() if isinstance(item, dict) else item:
            if isinstance(inner, (dict, list)):
                waiting.append((inner, depth + 1))
            elif isinstance(inner, float) and not math.isfinite(inner):
                raise PlanError(f"{origin}: not a complete plan file (a number is not finite)")


def checksum(body: Mapping[str, Any]) -> str:
    """SHA-256 of the compact JSON with sorted keys."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def render(body: Mapping[str, Any]) -> str:
    """The canonical text of a body, with its checksum last."""
    return "".join(_lines({**body, "checksum": checksum(body)}, "")) + "\n"


def _lines(value: Any, indent: str) -> Iterator[str]:
    """Pieces of JSON text: short leaves on one line, everything else one entry a line."""
    if not isinstance(value, (dict, list)) or not value or _is_flat(value):
        yield json.dumps(value)
        return
    inner = indent + " "
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    entries = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    yield opening
    for i, (key, item) in enumerate(entries):
        yield f"{',' if i else ''}\n{inner}" + (f"{json.dumps(key)}: " if key is not None else "")
        yield from _lines(item, inner)
    yield f"\n{indent}{closing}"


def _is_flat(value: Any) -> bool:
    """A list of numbers always stands on one line; scalars, and such lists in an object, where they fit."""
    if _is_numbers(value):
        return True
    items = value.values() if isinstance(value, dict) else value
    if any(isinstance(item, dict) or (isinstance(item, list) and not _is_numbers(item)) for item in items):
        return False
    return len(value) < LINE and len(json.dumps(value)) <= LINE


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and not any(isinstance(item, (dict, list, str)) for item in value)


def schema() -> dict[str, Any]:
    """The JSON Schema of the file, made from ``hap.plan.Plan``."""
    from hap.plan import Plan

    made = Plan.model_json_schema(mode="validation")
    made["properties"]["checksum"] = {"type": "string", "pattern": "^[0-9a-f]{64}$", "title": "Checksum"}
    made["properties"]["schema_version"] = {"const": SCHEMA_VERSION, "title": "Schema Version"}
    made["required"] = sorted([*made["required"], "checksum", "schema_version"])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "HAP plan", **made}


if __name__ == "__main__":
    print(json.dumps(schema(), indent=1, sort_keys=True))
