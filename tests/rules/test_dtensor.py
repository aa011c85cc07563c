"""DTensor's tables as a second opinion: what it has beyond ours is on a short list, ours beyond it is proved."""

import pytest

from hap.rules.instances import load_calls
from hap.rules.prove import prove_call, row_strategies
from hap.rules.table import call_rows
from tests._support.dtensor import Compared, compare, fake_mesh, form_of
from tests._support.torch_release import TORCH

pytestmark = pytest.mark.skipif(TORCH < (2, 13), reason="DTensor's tables were others")
MOST = 4  # ways to cut one row's dim
CONSTANT = (
    "what is filled with a constant reads no value of its argument: ours is made where it is needed, sharded or not"
)
POOL = "by channels: the kernel of the backward dies of a piece without channels, and pooling alone would be no use"
EXPLAINED = {
    "aten._adaptive_avg_pool2d.default": POOL,
    "aten.full_like.default": CONSTANT,
    "aten.ones_like.default": CONSTANT,
    "aten.zeros_like.default": CONSTANT,
}
REFUTED = {
    "aten._adaptive_avg_pool2d_backward.default": "a piece without channels kills the kernel",
    "aten.cumsum.default": "DTensor takes dim -1 for none of the dims, and would cut the one that is summed along",
    "aten.max_pool2d_with_indices.default": "a piece without channels is refused by the kernel",
    "aten.max_pool2d_with_indices_backward.default": "a piece without channels kills the kernel",
}


@pytest.fixture(scope="module")
def compared() -> tuple[Compared, ...]:
    with fake_mesh() as mesh:
        return compare(load_calls(), mesh)


def test_most_operators_are_in_both_tables(compared):
    assert len(compared) >= 80
    assert sum(len(c.both) for c in compared) >= 200


def test_what_dtensor_has_and_we_lack_is_explained(compared):
    assert {c.op for c in compared if c.theirs} == set(EXPLAINED)


def test_what_dtensor_has_and_running_it_refutes_is_known(compared):
    assert {c.op for c in compared if c.refuted} == set(REFUTED)


def test_what_we_have_beyond_dtensor_is_proved(compared):
    beyond = {c.op: c.ours for c in compared if c.ours}
    proved = 0
    for call in load_calls():
        rows = [row for row in call_rows(call) if form_of(row) in beyond.get(call.node.op, ())]
        for row in rows:
            verdicts = prove_call(call, tuple(row_strategies(row, call))[:MOST])
            assert [v for v in verdicts if not v.ok] == []
            proved += len(verdicts)
    assert proved >= 70
