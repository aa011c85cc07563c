"""Packing and joining take the calls that the search counts (``search/score.py``), however many ranks there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hap.codegen.layout import Layout
from hap.plan import Collective
from hap.runtime.dealing import FEW
from hap.runtime.transfer import Scatter, Swap, transfer
from hap.search.score import PIECE_VIEWS, VALUE_CALLS, packing_calls

COPIES = ("cat", "clone", "copy_", "index_copy_", "index_select")
KINDS = {"all_gather": "all_to_all", "reduce_scatter": "all_to_all_sum", "all_reduce": "ring", "all_to_all": "direct"}


class Calls(TorchDispatchMode):
    """``copies`` made; ``views`` of pieces, which come by ``split``."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in COPIES:
            self.seen["copies"] += 1
        if name.startswith("split"):
            self.seen["views"] += len(result)
        return result


def calls(kind: str, dim: int, ranks: int, values: int) -> Counter[str]:
    """On rank 1, of values of which every rank has one place of the dim."""
    whole = (2 * ranks, 2 * ranks, 2 * ranks)
    layout, other = (Layout(d, 1, 2, (1,) * ranks) for d in (dim, dim + 1))
    given = whole if kind in ("all_reduce", "reduce_scatter") else layout.local_shape(whole, 1)
    of = {"all_reduce": (), "all_to_all": (layout, other)}.get(kind, (layout,))
    tensors = [torch.ones(given) for _ in range(values)]
    made = transfer(kind, 1, ranks, tensors, [of] * values, KINDS[kind], {})
    with Calls() as mode:
        came = made.pack(tensors)  # nothing is moved
        if isinstance(made, Scatter):
            came = torch.empty(8 * ranks**2 * values)
        if isinstance(made, Swap):
            came = torch.empty(sum(made.incoming), dtype=torch.uint8)
        made.unpack(came)
    return mode.seen


@pytest.mark.parametrize("kind", KINDS)
def test_of_each_value_a_few(kind: Collective) -> None:
    for ranks in (3, 50):
        three, four = (calls(kind, 1, ranks, values)["copies"] for values in (3, 4))
        saved = kind == "all_gather" and ranks <= FEW  # its pieces become the whole by one call
        assert four - three == VALUE_CALLS[kind] - 1 - saved  # for its views
        three, four = (calls(kind, 0, ranks, values)["copies"] for values in (3, 4))
        assert four - three <= VALUE_CALLS[kind] - 1


@pytest.mark.parametrize("kind", KINDS)
def test_of_each_piece_a_view_or_two(kind: Collective) -> None:
    three, more = (calls(kind, 1, ranks, 3) for ranks in (10, 30))
    assert more["copies"] == three["copies"]
    assert more["views"] - three["views"] == pytest.approx(20 * 3 * PIECE_VIEWS[kind], abs=3 * 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_alone_is_not_taken_apart(kind: Collective) -> None:
    few, many = calls(kind, 1, 3, 1), calls(kind, 1, 40, 1)
    assert few["copies"] == many["copies"] and many["views"] <= 1
    assert packing_calls(kind, 1, 3) == packing_calls(kind, 1, 40) > few["copies"]
