"""Python text in the layout that black and ``ruff format`` leave alone, at 120 columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

WIDTH = 120
INDENT = "    "


@dataclass(frozen=True)
class Bracket:
    """``open item, item close``; an item is text or another bracket."""

    open: str
    items: tuple[Text, ...]
    close: str

    @property
    def flat(self) -> str:
        inside = ", ".join(flat(item) for item in self.items)
        comma = "," if self.open == "(" and len(self.items) == 1 else ""
        return f"{self.open}{inside}{comma}{self.close}"


Text = str | Bracket


def flat(text: Text) -> str:
    return text if isinstance(text, str) else text.flat


def call(function: str, args: Sequence[Text], keywords: Sequence[tuple[str, Text]] = ()) -> Bracket:
    """``function(arg, key=arg)``."""
    named = [
        Bracket(f"{key}={value.open}", value.items, value.close) if isinstance(value, Bracket) else f"{key}={value}"
        for key, value in keywords
    ]
    return Bracket(f"{function}(", (*args, *named), ")")


def subscript(table: str, key: str) -> Bracket:
    """``table["key"]``."""
    return Bracket(f"{table}[", (quoted(key),), "]")


def escaped(text: str, mark: str = '"') -> str:
    """``text`` as it may be within ``mark`` or in a comment, whoever named what it tells of: it stays one line of one
    string."""
    keeps = (c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode() for c in text)
    return "".join(f"\\{c}" if c == mark else c for c in keeps)


def quoted(text: str) -> str:
    """A string literal, in the quotes of which it has fewer."""
    mark = "'" if text.count('"') > text.count("'") else '"'
    return f"{mark}{escaped(text, mark)}{mark}"


def entry(key: str, value: Text) -> Text:
    """``key: value`` of a dict."""
    return (
        Bracket(f"{key}: {value.open}", value.items, value.close) if isinstance(value, Bracket) else f"{key}: {value}"
    )


def statement(indent: str, prefix: str, text: Text, comment: str = "", *, exploded: bool = False) -> list[str]:
    """The lines of ``prefix text  # comment``; ``exploded`` puts every item on a line of its own whatever the width."""
    tail = f"  # {comment}" if comment else ""
    if isinstance(text, Bracket) and len(indent + prefix + text.open) > WIDTH:
        return [f"{indent}{prefix}(", *_lines(indent + INDENT, "", text, "", exploded), f"{indent}){tail}"]
    return _lines(indent, prefix, text, tail, exploded)


def _lines(indent: str, prefix: str, text: Text, tail: str, exploded: bool) -> list[str]:
    one = f"{indent}{prefix}{flat(text)}{tail}"
    if isinstance(text, str) or not text.items or (len(one) <= WIDTH and not exploded):
        return [one]
    inner = indent + INDENT
    body = f"{inner}{', '.join(flat(item) for item in text.items)}"
    if len(body) <= WIDTH and not exploded and not _keeps_comma(text):
        return [f"{indent}{prefix}{text.open}", body, f"{indent}{text.close}{tail}"]
    comma = "" if len(text.items) == 1 and not _keeps_comma(text) else ","
    lines = [line for item in text.items for line in _lines(inner, "", item, comma, False)]
    return [f"{indent}{prefix}{text.open}", *lines, f"{indent}{text.close}{tail}"]


def _keeps_comma(text: Bracket) -> bool:
    """Whether items go on lines of their own at once (lists, dicts, tuples), not first all on one (calls)."""
    return not (text.open[-2:-1].isalnum() or text.open[-2:-1] == "_")


def literal(value: Any) -> Text:
    """A plain constant as Python text: numbers, strings, dtypes, layouts, memory formats, nested lists."""
    if isinstance(value, (list, tuple)):
        return Bracket("[", tuple(literal(item) for item in value), "]")
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, complex):  # as it is, nan and the sign of a zero too
        return call("complex", [literal(value.real), literal(value.imag)])
    if isinstance(value, str):
        return quoted(value)
    known = (bool, int, float, type(None), torch.dtype, torch.layout, torch.memory_format)
    assert isinstance(value, known), f"{value!r} cannot be written as Python"
    return str(value)
