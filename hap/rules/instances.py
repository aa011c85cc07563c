"""Operator calls of models that people train, small, as data: what ``hap rules check`` runs when no model is given.

``instances.json`` holds one call of each form that the zoo's small models make (``benchmarks/zoo_models/instances.py``
writes it): the operator, the metas of its tensors and its literals. A tensor argument is ``{"tensor": i}``, a dtype
``{"dtype": "float64"}``; lists are tuples.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterable
from typing import Any

import torch

from hap.graph import Node, TensorMeta, Value, map_values
from hap.rules.notation import Call

FILE = "instances.json"


def load_calls() -> tuple[Call, ...]:
    """Every call of the file."""
    text = importlib.resources.files("hap.rules").joinpath(FILE).read_text(encoding="utf-8")
    return parse_calls(text)


def parse_calls(text: str) -> tuple[Call, ...]:
    """Inverse of ``dump_calls``."""
    return tuple(_call(entry) for entry in json.loads(text))


def dump_calls(calls: Iterable[Call]) -> str:
    """One line a call."""
    lines = ",\n".join(json.dumps(_entry(call)) for call in calls)
    return f"[\n{lines}\n]\n"


def _entry(call: Call) -> list[Any]:
    position = iter(range(len(call.inputs)))
    args = map_values(call.node.args, lambda _: {"tensor": next(position)})
    kwargs = {k: map_values(v, lambda _: {"tensor": next(position)}) for k, v in call.node.kwargs}
    return [
        call.node.op,
        [_meta_entry(m) for m in call.inputs],
        [_meta_entry(m) for m in call.outputs],
        _literal_entry(args),
        {k: _literal_entry(v) for k, v in kwargs.items()},
    ]


def _meta_entry(meta: TensorMeta | None) -> Any:
    return None if meta is None else [_dtype_name(meta.dtype), *meta.shape]


def _literal_entry(tree: Any) -> Any:
    if isinstance(tree, (tuple, list)):
        return [_literal_entry(item) for item in tree]
    if isinstance(tree, torch.dtype):
        return {"dtype": _dtype_name(tree)}
    assert isinstance(tree, (bool, int, float, str, dict, type(None))), f"{tree!r} cannot be written"
    return tree


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _call(entry: list[Any]) -> Call:
    op, inputs, outputs, args, kwargs = entry
    metas = tuple(_meta(m) for m in inputs)
    node_kwargs = tuple((k, _literal(v)) for k, v in kwargs.items())
    node = Node("call", op, _literal(args), node_kwargs, tuple(None if m is None else _meta(m) for m in outputs))
    return Call(node, metas)


def _meta(entry: list[Any]) -> TensorMeta:
    name, *shape = entry
    return TensorMeta(tuple(shape), getattr(torch, name))


def _literal(entry: Any) -> Any:
    if isinstance(entry, list):
        return tuple(_literal(item) for item in entry)
    if isinstance(entry, dict):
        return Value(f"x{entry['tensor']}") if "tensor" in entry else getattr(torch, entry["dtype"])
    return entry
