"""What both backends of codegen, FX and Python source, need to know of one instruction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hap.codegen.layout import Layout
from hap.codegen.program import Call, Convert, RankDevice, Together
from hap.graph import Value
from hap.ops import resolve
from hap.placement import LocalSize, Shard, Sizes


def collective_arguments(convert: Convert, sizes: Mapping[str, Sizes]) -> dict[str, Any]:
    """The keyword arguments of the ``Communicator`` method that performs ``convert``."""
    layouts = {
        side: Layout.of(placement, sizes)
        for side, placement in (("source", convert.source), ("target", convert.target))
        if isinstance(placement, Shard)
    }
    if convert.kind == "all_to_all":
        return {**layouts, "decomposition": convert.decomposition}
    single: dict[str, Any] = next(iter(layouts.values()))._asdict() if layouts else {}
    return {**single, "decomposition": convert.decomposition}


def bundle_arguments(work: Together, sizes: Mapping[str, Sizes]) -> tuple[list[tuple[Layout, ...]], str]:
    """(layouts, decomposition) that ``Communicator.together`` and ``start`` take after the kind and the values."""
    layouts = [
        tuple(Layout.of(placement, sizes) for placement in (m.source, m.target) if isinstance(placement, Shard))
        for m in work.members
    ]
    return layouts, work.decomposition


def returns_many(call: Call) -> bool:
    """Whether the operator returns a tuple or list, even one of length one, and not a tensor."""
    schema = getattr(resolve(call.op), "_schema", None)
    if schema is None:
        return len(call.outputs) > 1
    return len(schema.returns) != 1 or str(schema.returns[0].type) != "Tensor"


def map_leaves(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """A nested argument with every ``Value``, ``LocalSize``, ``RankDevice`` replaced by ``leaf`` of it."""
    if isinstance(tree, (Value, LocalSize, RankDevice)):
        return leaf(tree)
    if isinstance(tree, (tuple, list)):
        return [map_leaves(item, leaf) for item in tree]
    return tree
