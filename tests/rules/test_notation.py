"""Atoms in slots, the einsum-like notation, and what the table says of single calls."""

from fractions import Fraction

import pytest

from hap.errors import MissingRuleError, RuleError
from hap.graph import Node
from hap.rules.notation import Atom, Dim, Row, base_atom, parse_einsum, scale_atom
from hap.rules.table import BUILTIN, RuleTable, call_rows, rules_fingerprint
from tests.rules.graphs import booleans, call, integers, meta

THIRD = Fraction(1, 3)


def test_a_slot_scales_the_base_atom_and_must_be_whole_and_fill_the_dim():
    heads = Atom(1, 6, 8)
    assert scale_atom(Dim(1, outer=Fraction(3)), heads, 144) == Atom(3, 6, 8)
    assert scale_atom(Dim(1, outer=Fraction(3)), heads, 145) is None
    assert scale_atom(Dim(1, outer=THIRD), heads, 16) is None
    assert scale_atom(Dim(1, unit=Fraction(1, 8)), heads, 6) == Atom(1, 6, 1)


def test_the_base_atom_is_what_the_slot_scaled():
    assert base_atom(Dim(1, outer=Fraction(3)), Atom(3, 6, 8)) == Atom(1, 6, 8)
    assert base_atom(Dim(1, outer=Fraction(3)), Atom(1, 144, 1)) is None
    assert base_atom(Dim(1, unit=Fraction(16)), Atom(1, 6, 8)) is None


def test_a_letter_shards_where_it_stands_and_is_contracted_where_it_is_missing_on_the_right():
    assert parse_einsum("m k, k n -> m n").rows() == (
        Row((Dim(0), "R"), (Dim(0),)),
        Row((Dim(1), Dim(0)), ("P",)),
        Row(("R", Dim(1)), (Dim(1),)),
    )


def test_each_output_is_partial_in_the_letters_it_lacks_and_a_dot_stays_whole():
    assert parse_einsum("b d ., b -> b d ., d").rows() == (
        Row((Dim(0), Dim(0)), (Dim(0), "P")),
        Row((Dim(1), "R"), (Dim(1), Dim(0))),
    )


def test_a_scalar_is_an_empty_term():
    assert parse_einsum("k, k ->").rows() == (Row((Dim(0), Dim(0)), ("P",)),)


@pytest.mark.parametrize(
    ("notation", "complaint"),
    [
        ("m k, k n", "write inputs -> outputs"),
        ("m -> m -> m", "write inputs -> outputs"),
        ("m m -> m", "'m' stands twice"),
        ("m -> n", "'n' stands on the right only"),
        ("m+ -> m", "'m\\+' is not a name"),
    ],
)
def test_malformed_notation_is_refused(notation, complaint):
    with pytest.raises(RuleError, match=complaint):
        parse_einsum(notation)


def test_a_matrix_product_is_linear_in_one_argument_at_a_time():
    product = call("aten.mm.default", meta(4, 5), meta(5, 6), out=meta(4, 6))
    assert call_rows(product)[3:] == (Row(("P", "R"), ("P",)), Row(("R", "P"), ("P",)))


def partial_patterns(a_call):
    rows = call_rows(a_call)
    return {"".join(row.inputs) for row in rows if not any(isinstance(s, Dim) for s in row.slots)}


@pytest.mark.parametrize(
    ("op", "args", "patterns"),
    [
        ("aten.add.Tensor", (meta(4, 5), meta(5)), {"PP"}),
        ("aten.add.Tensor", (meta(4, 5), 0), {"P"}),
        ("aten.add.Tensor", (meta(4, 5), 1.0), set()),
        ("aten.sub.Tensor", (meta(4, 5), meta(4, 5)), {"PP"}),
        ("aten.mul.Tensor", (meta(4, 5), meta(4, 5)), {"PR", "RP"}),
        ("aten.mul.Tensor", (meta(4, 5), 3.0), {"P"}),
        ("aten.div.Tensor", (meta(4, 5), meta(4, 5)), {"PR"}),
        ("aten.neg.default", (meta(4, 5),), {"P"}),
        ("aten.relu.default", (meta(4, 5),), set()),
        ("aten.pow.Tensor_Scalar", (meta(4, 5), 2), set()),
        ("aten.tanh_backward.default", (meta(4, 5), meta(4, 5)), {"PR"}),
        ("aten.where.self", (booleans(4, 5), meta(4, 5), meta(4, 5)), {"RPP"}),
        ("aten.masked_fill.Scalar", (meta(4, 5), booleans(4, 5), 0), {"PR"}),
        ("aten.masked_fill.Scalar", (meta(4, 5), booleans(4, 5), -1e9), set()),
    ],
)
def test_which_arguments_of_a_pointwise_operator_may_be_partial(op, args, patterns):
    assert partial_patterns(call(op, *args, out=meta(4, 5))) == patterns


def test_a_broadcast_argument_is_whole_along_the_dim_that_it_lacks_or_has_as_one():
    rows = call_rows(call("aten.add.Tensor", meta(4, 1, 6), meta(5, 6), out=meta(4, 5, 6)))
    assert rows[:3] == (
        Row((Dim(0), "R"), (Dim(0),)),
        Row(("R", Dim(0)), (Dim(1),)),
        Row((Dim(2), Dim(1)), (Dim(2),)),
    )


def test_booleans_are_never_partial():
    assert partial_patterns(call("aten.view.default", booleans(4, 5), (20,), out=booleans(20))) == set()
    assert partial_patterns(call("aten._to_copy.default", booleans(4), out=meta(4))) == set()


def test_a_sum_over_a_sharded_dim_is_partial_and_a_maximum_has_no_such_row():
    summed = call("aten.sum.dim_IntList", meta(4, 5), (0,), out=meta(5))
    assert call_rows(summed) == (Row((Dim(0),), ("P",)), Row((Dim(1),), (Dim(0),)), Row(("P",), ("P",)))
    highest = call("aten.amax.default", meta(4, 5), (0,), True, out=meta(1, 5))
    assert call_rows(highest) == (Row((Dim(1),), (Dim(1),)),)


def test_counts_become_floats_before_they_are_summed_and_floats_never_integers():
    assert partial_patterns(call("aten._to_copy.default", integers(4), out=meta(4))) == {"P"}
    assert partial_patterns(call("aten._to_copy.default", meta(4), out=integers(4))) == set()


def test_an_unknown_operator_is_named_with_its_module_and_the_remedy():
    dropout = call("aten.native_dropout.default", meta(4), 0.1, True, out=(meta(4), booleans(4)))
    node = Node("drop", dropout.node.op, dropout.node.args, outputs=dropout.node.outputs, module="h.0.mlp")
    with pytest.raises(MissingRuleError) as refusal:
        call_rows(type(dropout)(node, dropout.inputs))
    for word in ("aten.native_dropout.default", "h.0.mlp", 'hap.register_rule("aten.native_dropout.default"'):
        assert word in str(refusal.value)


def test_the_fingerprint_is_stable():
    assert rules_fingerprint() == rules_fingerprint(RuleTable())
    assert len(rules_fingerprint()) == 64
    assert len(BUILTIN) > 150
