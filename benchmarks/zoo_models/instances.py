"""Writes ``hap/rules/instances.json``: one call of each form that the small models make.

    python -m benchmarks.zoo_models.instances

Two calls have one form if operator, numbers of dims, dtypes and the kinds of their literals agree; of each form the
``PER_FORM`` smallest are kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hap.rules
from benchmarks.zoo_models import ZOO
from hap.capture import capture
from hap.graph import Graph
from hap.rules.check import graph_calls
from hap.rules.instances import FILE, dump_calls
from hap.rules.notation import Call

PER_FORM = 2


def small_graphs() -> list[Graph]:
    graphs = []
    for model in ZOO:
        case = model.build("small")
        graphs.append(
            capture(case.model, case.inputs, loss_fn=case.loss_fn, example_targets=case.targets, name=model.name)
        )
    return graphs


def chosen(calls: tuple[Call, ...]) -> list[Call]:
    """The smallest calls of each form, by operator."""
    forms: dict[Any, list[Call]] = {}
    for call in calls:
        forms.setdefault(_form(call), []).append(call)
    kept = [call for alike in forms.values() for call in sorted(alike, key=_elements)[:PER_FORM]]
    return sorted(kept, key=lambda call: call.node.op)


def _form(call: Call) -> Any:
    metas = (*call.inputs, *call.outputs)
    return call.node.op, tuple(m and (len(m.shape), m.dtype) for m in metas), _kinds((call.node.args, call.node.kwargs))


def _kinds(tree: Any) -> Any:
    return tuple(map(_kinds, tree)) if isinstance(tree, (tuple, list)) else type(tree).__name__


def _elements(call: Call) -> int:
    return sum(m.numel for m in call.inputs)


if __name__ == "__main__":
    path = Path(hap.rules.__path__[0]) / FILE
    path.write_text(dump_calls(chosen(graph_calls(small_graphs()))), encoding="utf-8")
    print(f"wrote {path.name}: {path.stat().st_size} bytes")
