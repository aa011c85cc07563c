"""The prover finds wrong rules, and only those; the user's rules go through it."""

import os

import pytest
import torch

from hap.errors import MissingRuleError, RuleError
from hap.plan import Strategy
from hap.rules.choices import choices
from hap.rules.notation import Row, call_key, literal_key, parse_einsum
from hap.rules.prove import LARGEST, Proof, _prove_in_child, prove_call, prove_graph
from hap.rules.register import register_rule
from hap.rules.samples import size_vectors, split_sum
from hap.rules.table import BUILTIN, RuleTable, UserRule, call_rows
from tests.rules.graphs import call, fused_projection, linear, meta

ROWS = "S(0:1x7x1@g)"


def verdict(a_call, strategy, notation):
    """What proof says of a rule that claims ``notation``, whether or not the real table does."""
    claim = UserRule(notation, parse_einsum(notation), ("P" * len(a_call.inputs),), literal_key(a_call.node.args))
    (found,) = prove_call(a_call, [Strategy.parse(strategy)], Proof(table=RuleTable({a_call.node.op: claim})))
    return found


def test_sizes_are_uneven_and_leave_a_rank_with_nothing_and_one_with_everything():
    assert size_vectors(8, 3) == ((4, 3, 1), (0, 8, 0), (2, 0, 6))
    assert size_vectors(1, 3) == ((1, 0, 0), (0, 1, 0), (0, 0, 1))
    for n in range(1, 40):
        for world_size in range(2, 6):
            vectors = size_vectors(n, world_size)
            assert all(sum(v) == n and min(v) >= 0 for v in vectors)


def test_partial_pieces_sum_to_the_whole():
    whole = torch.randn(3, 4, dtype=torch.float64)
    parts = split_sum(whole, 3, torch.Generator().manual_seed(0))
    assert torch.allclose(sum(parts), whole, atol=1e-14)
    assert not any(torch.allclose(p, whole / 3) for p in parts)


@pytest.mark.parametrize(
    ("op", "args", "out", "strategy", "notation"),
    [
        ("aten.cumsum.default", (meta(7, 3), 0), meta(7, 3), f"{ROWS} -> {ROWS}", "n d -> n d"),
        ("aten.mean.dim", (meta(7, 3), (0,)), meta(3), f"{ROWS} -> P", "n d -> d"),
        ("aten.amax.default", (meta(7, 3), (0,)), meta(3), f"{ROWS} -> P", "n d -> d"),
        ("aten._softmax.default", (meta(7, 3), 0, False), meta(7, 3), f"{ROWS} -> {ROWS}", "n d -> n d"),
        ("aten.relu.default", (meta(7, 3),), meta(7, 3), "P -> P", "n d -> n d"),
        ("aten.add.Tensor", (meta(7, 3), 1.0), meta(7, 3), "P -> P", "n d -> n d"),
        ("aten.mul.Tensor", (meta(7, 3), meta(7, 3)), meta(7, 3), "P, P -> P", "n d, n d -> n d"),
        ("aten.flip.default", (meta(7, 3), (0,)), meta(7, 3), f"{ROWS} -> {ROWS}", "n d -> n d"),
    ],
)
def test_a_wrong_rule_is_refuted(op, args, out, strategy, notation):
    found = verdict(call(op, *args, out=out), strategy, notation)
    assert not found.ok
    assert found.worst_error > 1e-3
    assert found.detail.startswith("output 0 at sizes"), "it ran, and gave something else"


def test_a_right_rule_is_believed():
    found = verdict(call("aten.cumsum.default", meta(7, 3), 1, out=meta(7, 3)), f"{ROWS} -> {ROWS}", "n d -> n d")
    assert found.ok
    assert found.worst_error == 0.0


def test_all_of_a_hand_built_graph_is_proved():
    for graph in (linear(), fused_projection()):
        verdicts = prove_graph(choices(graph))
        assert [v for v in verdicts if not v.ok] == []
        assert max(v.worst_error for v in verdicts) < 1e-12


def test_a_call_that_is_too_large_is_said_to_be_unproved():
    huge = call("aten.relu.default", meta(LARGEST), out=meta(LARGEST))
    (found,) = prove_call(huge, [Strategy.parse("R -> R")])
    assert not found.ok
    assert "not run" in found.detail


def test_a_strategy_that_is_no_row_is_not_proved():
    (found,) = prove_call(call("aten.relu.default", meta(7), out=meta(7)), [Strategy.parse("P -> P")])
    assert not found.ok
    assert "no sharding rule allows P -> P" in found.detail


def test_an_isolated_proof_says_the_same_and_survives_a_kernel_that_does_not(monkeypatch):
    relu = call("aten.relu.default", meta(7), out=meta(7))
    strategy = Strategy.parse(f"{ROWS} -> {ROWS}")
    assert prove_call(relu, [strategy], Proof(isolated=True)) == prove_call(relu, [strategy])
    monkeypatch.setattr("hap.rules.prove.resolve", lambda op: lambda *args: os._exit(7))
    found = _prove_in_child(relu, strategy, Proof())
    assert not found.ok
    assert "exit code 7" in found.detail


def permuted(x, order):
    if not order.sort().values.equal(torch.arange(x.shape[1])):
        raise ValueError(f"{order} is no permutation")
    return x[:, order]


@pytest.fixture(scope="module")
def own_operators():
    library = torch.library.Library("hap_test_rules", "DEF")
    library.define("scale_rows(Tensor x, Tensor w) -> Tensor")
    library.impl("scale_rows", lambda x, w: x * w[:, None], "CompositeExplicitAutograd")
    library.define("power_mean(Tensor x, float p) -> Tensor")
    library.impl("power_mean", lambda x, p: x.abs().pow(p).mean(1), "CompositeExplicitAutograd")
    for schema, function in (
        ("look_up(Tensor table, Tensor index) -> Tensor", lambda table, index: table[index]),
        ("permuted(Tensor x, Tensor order) -> Tensor", permuted),
        ("clip(Tensor x) -> Tensor", lambda x: x.clamp(-100.0, 100.0)),
        ("top(Tensor x, int k) -> Tensor", lambda x, k: x.topk(k, dim=1).values),
    ):
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    yield
    library._destroy()


def test_the_users_rule_is_proved_and_found_linear_where_it_is(own_operators):
    table = RuleTable()
    before = table.fingerprint
    register_rule("hap_test_rules.scale_rows.default", "b d, b -> b d", table=table)
    scaled = call("hap_test_rules.scale_rows.default", meta(8, 4), meta(8), out=meta(8, 4))
    rows = call_rows(scaled, table)
    assert rows[:2] == parse_einsum("b d, b -> b d").rows()
    assert rows[2:] == (Row(("P", "R"), ("P",)), Row(("R", "P"), ("P",)))
    assert table.fingerprint != before
    assert "hap_test_rules.scale_rows.default" not in RuleTable().user


def test_the_users_wrong_rule_is_refused_and_not_kept(own_operators):
    table = RuleTable()
    with pytest.raises(RuleError, match="wrong for 'd'"):
        register_rule("hap_test_rules.power_mean.default", "b d -> b", literals=(3.0,), table=table)
    assert table.user == {}
    register_rule("hap_test_rules.power_mean.default", "b . -> b", literals=(3.0,), table=table)
    assert table.user["hap_test_rules.power_mean.default"].partials == ()


def test_the_users_rule_holds_only_for_the_literals_that_it_was_proved_with(own_operators):
    table = RuleTable()
    register_rule("hap_test_rules.power_mean.default", "b . -> b", literals=(3.0,), table=table)
    assert call_rows(call("hap_test_rules.power_mean.default", meta(8, 4), 3.0, out=meta(8)), table)
    with pytest.raises(MissingRuleError, match="literals"):
        call_rows(call("hap_test_rules.power_mean.default", meta(8, 4), 2.0, out=meta(8)), table)


@pytest.mark.parametrize(
    ("op", "notation", "complaint"),
    [
        ("aten.mm.default", "m k, k n -> m n", "has a builtin rule"),
        ("hap_test_rules.scale_rows.default", "b d -> b d", "does not run on"),
        ("hap_test_rules.scale_rows.default", "b d, b -> d b", "gives \\(4, 5\\) where its rule says \\(5, 4\\)"),
    ],
)
def test_rules_that_cannot_be_registered(own_operators, op, notation, complaint):
    with pytest.raises(RuleError, match=complaint):
        register_rule(op, notation, table=RuleTable())


def registered(name, notation, **options):
    table = RuleTable()
    verdicts = register_rule(f"hap_test_rules.{name}.default", notation, table=table, **options)
    assert verdicts and all(v.ok for v in verdicts)
    return table.user[f"hap_test_rules.{name}.default"]


def test_a_rule_is_proved_for_every_kind_of_number_that_the_operator_takes(own_operators):
    """look_up(table, index): indices are whole numbers, what is looked up may be any."""
    rule = registered("look_up", ". d, b -> b d")
    assert rule.kinds == (("floating", "whole"), ("whole", "whole"), ("boolean", "whole"))
    assert rule.partials == ("PR",)
    assert registered("scale_rows", "b d, b -> b d").partials == ("PR", "RP")
    floats = call("hap_test_rules.look_up.default", meta(9, 4), meta(7), out=meta(7, 4))
    with pytest.raises(MissingRuleError, match="kinds of numbers"):
        rule(floats)


def test_a_wrong_rule_is_refused_in_one_line_with_the_counterexample(own_operators):
    with pytest.raises(RuleError) as refusal:
        registered("look_up", "v d, b -> b d")
    line = str(refusal.value)
    assert line.startswith(
        "rule 'v d, b -> b d' of hap_test_rules.look_up.default is wrong for 'v': S(0:1x2x2@g), R -> P"
    )
    assert "on float64 (4, 5), int64 (6,): error inf" in line and "\n" not in line


def test_an_operator_that_takes_but_one_kind_of_arguments_is_proved_on_samples(own_operators):
    """permuted(x, order): any whole numbers below 3 would not do."""
    with pytest.raises(RuleError, match="does not run on"):
        registered("permuted", "b d, d -> b d")
    samples = (torch.randn(5, 7), torch.randperm(7))
    assert registered("permuted", "b ., . -> b .", samples=samples).kinds == (("floating", "whole"),)
    with pytest.raises(RuleError, match="wrong for 'd'"):
        registered("permuted", ". d, d -> . d", samples=samples)
    with pytest.raises(RuleError, match="'d' has two sizes"):
        registered("permuted", ". d, d -> . d", samples=(torch.randn(5, 7), torch.randperm(6)))


def test_what_looks_linear_near_zero_is_not_taken_to_be(own_operators):
    assert registered("clip", "b d -> b d").partials == ()


def test_a_dim_that_the_operator_makes_may_be_whole(own_operators):
    assert registered("top", "b . -> b .", literals=(2,)).partials == ()


def test_calls_that_differ_in_tensors_only_are_one_kind():
    a, b = (call("aten.relu.default", meta(7), out=meta(7)) for _ in range(2))
    assert call_key(a) == call_key(b)
    assert call_key(a) != call_key(call("aten.relu.default", meta(8), out=meta(8)))
    assert literal_key((1,)) != literal_key((1.0,)) != literal_key((True,))
    assert "aten.relu.default" in BUILTIN
