"""Mutations of plan files: a good file in, a file that is a little wrong out, often with a fresh checksum.

``mutate(text, source)`` draws one of: damage to the text; one leaf, key or list of the tree replaced, dropped, repeated
or swapped; one decision exchanged for another that is written correctly (a strategy of another node, other sizes, a
conversion less, another decomposition), which only knowledge of the graph can refuse.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from hap.plan_file import checksum

Body = dict[str, Any]
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 3.5, 1e308, -1e-9, 10**30, "", "R", "P", " -> ", "S(0:1x8x1@g0)", "S(9:1x1x1@g0)",
    "S(0:0x8x0@g0)", "\u0663", "\ud800", "x:y", [], {}, [[]], {"a": {"b": {"c": {"d": [[[[[[[[1]]]]]]]]}}}}, "a" * 3000,
)  # fmt: skip


def mutate(text: str, source: random.Random) -> str:
    kind = source.random()
    if kind < 0.15:
        return _damaged(text, source)
    body = json.loads(text)
    body.pop("checksum")
    change: Callable[[Body, random.Random], None] = _tree if kind < 0.5 else source.choice(DECISIONS)
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        change(body, source)
    if source.random() < 0.05:
        return json.dumps(body)
    return json.dumps({**body, "checksum": checksum(body)})


def _damaged(text: str, source: random.Random) -> str:
    at, kind = source.randrange(len(text)), source.randrange(6)
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + chr(source.choice((0, 34, 44, 91, 123, 0x1F600, 0xD800))) + text[at:]
    if kind == 2:
        return text[:at] + text[at + source.randint(1, 40) :]
    if kind == 3:
        return text[:at] + "[" * source.choice((10, 100_000)) + text[at:]
    if kind == 4:
        return text[:at] + source.choice(("NaN", "-Infinity", "1e999", "9" * 5000, "{}", "null")) + text[at:]
    return text.replace(source.choice("{}[]:,"), source.choice("{}[]:,"), source.choice((1, -1)))


def _tree(body: Body, source: random.Random) -> None:
    """One place of the tree, drawn by walking down from the root."""
    holder: Any = body
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return
        key = source.choice(keys)
        inner = holder[key]
        if isinstance(inner, (dict, list)) and inner and source.random() < 0.8:
            holder = inner
            continue
        break
    action = source.randrange(4)
    if action == 0:
        del holder[key]
    elif action == 1:
        holder[key] = source.choice(ODD)
    elif action == 2 and isinstance(holder, list):
        holder.append(holder[key])
    elif action == 2:
        holder[f"{key}x"] = holder[key]
    else:
        other = source.choice(keys)
        holder[key], holder[other] = holder[other], holder[key]


def _strategy(body: Body, source: random.Random) -> None:
    names = list(body["strategies"])
    body["strategies"][source.choice(names)] = body["strategies"][source.choice(names)]


def _placement(body: Body, source: random.Random) -> None:
    """One placement inside a strategy exchanged for another of the plan's, or its numbers changed."""
    name = source.choice(list(body["strategies"]))
    words = body["strategies"][name].replace(",", " , ").split(" ")
    places = [i for i, w in enumerate(words) if w[:1] in ("R", "P", "S")]
    others = [w for s in body["strategies"].values() for w in s.replace(",", " ").split() if w[:1] in ("R", "P", "S")]
    if places:
        words[source.choice(places)] = source.choice([*others, "R", "P"])
    body["strategies"][name] = " ".join(words).replace(" , ", ", ").replace(" ,", ",")


def _sizes(body: Body, source: random.Random) -> None:
    group = source.choice(list(body["groups"].values()))
    cuts = sorted(source.randint(0, group["n"]) for _ in group["sizes"][1:])
    group["sizes"] = [b - a for a, b in zip([0, *cuts], [*cuts, group["n"]], strict=True)]


def _length(body: Body, source: random.Random) -> None:
    """Another number of atoms for a group, everywhere."""
    name = source.choice(list(body["groups"]))
    group = body["groups"][name]
    old, new = group["n"], source.choice((1, 2, group["n"] * 2, max(1, group["n"] // 2)))
    group["n"], group["sizes"] = new, [new] + [0] * (len(group["sizes"]) - 1)
    for node, text in body["strategies"].items():
        body["strategies"][node] = text.replace(f"x{old}x", f"x{new}x")


def _conversions(body: Body, source: random.Random) -> None:
    found = body["conversions"]
    if not found:
        return
    one, other = source.randrange(len(found)), source.randrange(len(found))
    kind = source.randrange(5)
    if kind == 0:
        del found[one]
    elif kind == 1:
        found.insert(other, dict(found[one]))
    elif kind == 2:
        key = source.choice(list(found[one]))
        found[one] = {**found[one], key: found[other][key]}
    elif kind == 3:
        found[one] = {**found[one], "phase": source.choice(("forward", "backward"))}
    else:
        found[one], found[other] = found[other], found[one]


def _world(body: Body, source: random.Random) -> None:
    """One rank more or less, wherever ranks are counted."""
    less = source.random() < 0.5
    for holder, key in (
        *((g, "sizes") for g in body["groups"].values()),
        *((body["predicted"], k) for k in ("compute_s", "memory_bytes", "memory_by_kind")),
        (body, "devices"),
    ):
        holder[key] = holder[key][:-1] if less else [*holder[key], 0 if key == "sizes" else holder[key][-1]]
    body["provenance"]["world_size"] += -1 if less else 1
    body["explanation"] = None


DECISIONS = (_strategy, _placement, _placement, _sizes, _length, _conversions, _conversions, _world)
