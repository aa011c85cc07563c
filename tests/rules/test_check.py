"""What ``hap rules check`` says: every operator of the zoo proved, a wrong rule refuted, a missing one named."""

from dataclasses import replace

from hap.rules.check import check_calls, describe, graph_calls, missing
from hap.rules.instances import dump_calls, load_calls, parse_calls
from hap.rules.notation import literal_key, parse_einsum
from hap.rules.prove import LARGEST, Proof
from hap.rules.table import BUILTIN, RuleTable, UserRule
from tests.rules.graphs import GraphBuilder, call, linear, meta

MM = call("aten.mm.default", meta(4, 5), meta(5, 6), out=meta(4, 6))
UNKNOWN = call("mylib.mystery.default", meta(4, 5), out=meta(4, 5))


def scan():
    """A scan along dim 1, with a rule that says that it may be cut there."""
    call_ = call("aten.cummax.default", meta(4, 5), 1, out=(meta(4, 5), meta(4, 5)))
    einsum = parse_einsum("a b -> a b, a b")
    return call_, Proof(table=RuleTable({call_.node.op: UserRule("", einsum, (), literal_key(call_.node.args))}))


def test_an_operator_with_a_rule_that_holds_is_proved():
    (found,) = check_calls([MM])
    assert (found.op, found.verdict, found.calls, found.rows, found.missing) == ("aten.mm.default", "proved", 1, 5, 0)
    assert found.proved >= 5 and not found.wrong


def test_an_operator_without_a_rule_is_missing():
    (found,) = check_calls([UNKNOWN])
    assert (found.verdict, found.missing, found.proved) == ("missing", 1, 0)


def test_a_rule_that_does_not_hold_is_wrong():
    call_, proof = scan()
    (found,) = check_calls([call_], proof=proof)
    assert found.verdict == "wrong"
    assert "S(1:1x5x1@g) -> S(1:1x5x1@g), S(1:1x5x1@g)" in [str(v.strategy) for v in found.wrong]


def test_a_call_too_large_to_run_is_not_called_proved():
    large = call("aten.relu.default", meta(LARGEST, 1), out=meta(LARGEST, 1))
    (found,) = check_calls([large])
    assert (found.verdict, found.proved, len(found.wrong)) == ("not run", 0, 0) and found.skipped > 0


def test_only_the_operator_asked_for():
    assert [c.op for c in check_calls([MM, UNKNOWN], "aten.mm.default")] == ["aten.mm.default"]


def test_all_missing_rules_of_a_graph_at_once():
    b = GraphBuilder()
    x = b.source("input", "x", 4, 5)
    for i in range(2):
        x = b.call(f"first{i}", "mylib.first.default", x, out=meta(4, 5), module=f"layer{i}")
    graph = b.finish(b.call("second", "mylib.second.default", x, out=meta(4, 5)))
    found = missing(graph)
    assert [(m.op, m.calls) for m in found] == [("mylib.first.default", 2), ("mylib.second.default", 1)]
    assert found[0].modules == ("layer0", "layer1") and "register_rule" in found[0].message
    assert missing(linear()) == ()


def test_each_kind_of_call_is_checked_once():
    assert len(graph_calls([linear(), linear()])) == len(graph_calls([linear()])) == 5


def test_the_file_of_calls_is_what_it_was_written_from():
    calls = load_calls()
    assert parse_calls(dump_calls(calls)) == calls
    assert len({c.node.op for c in calls}) >= 100
    assert all(c.node.op in BUILTIN for c in calls)


def test_literals_survive_the_file():
    odd = call("aten.full.default", (4, 5), -float("inf"), out=meta(4, 5), dtype=meta(1).dtype)
    (found,) = parse_calls(dump_calls([odd]))
    assert found == replace(odd, node=replace(odd.node, name="call"))


def test_the_words():
    lines = describe(check_calls([MM, UNKNOWN]))
    assert lines[0].startswith("proved   aten.mm.default ") and lines[1].startswith("missing  mylib.mystery.default ")
    assert lines[-1] == "1 proved, 0 whole, 0 not run, 0 wrong, 1 missing"
    call_, proof = scan()
    wrong = describe(check_calls([call_], proof=proof))
    assert wrong[0].startswith("wrong    aten.cummax.default") and "error" in wrong[1]
