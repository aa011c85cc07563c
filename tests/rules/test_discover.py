"""Discovery: rows of an operator that the table lacks, found by running it and kept only where they are proved."""

import json
import os
import signal
import time

import pytest
import torch

from hap.errors import MissingRuleError, RuleError
from hap.rules.discover import DiscoveredRule, discover, discover_rule
from hap.rules.notation import Dim, Row, partial_rows
from hap.rules.propose import propose
from hap.rules.remember import Memory
from hap.rules.table import RuleTable, call_rows
from tests.rules.graphs import call, integers, meta

SCALE_ROWS = "hap_test_discover.scale_rows.default"


@pytest.fixture(scope="module", autouse=True)
def own_operators():
    library = torch.library.Library("hap_test_discover", "DEF")

    def define(schema, function, **options):
        library.define(schema, **options)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")

    define("scale_rows(Tensor x, Tensor w) -> Tensor", lambda x, w: x * w[:, None])
    define("centre(Tensor x) -> Tensor", lambda x: x - x.mean())
    define("clip(Tensor x) -> Tensor", lambda x: x.clamp(-100.0, 100.0))
    define("clip_norm(Tensor x) -> Tensor", lambda x: x * (100.0 / x.norm().clamp(min=100.0)))
    define("log_rows(Tensor x) -> Tensor", lambda x: x.log().sum(1))
    define("look_up(Tensor table, Tensor index) -> Tensor", lambda table, index: table[index])
    define("one_hot(Tensor index, int classes) -> Tensor", lambda i, n: torch.nn.functional.one_hot(i, n).double())
    define("noisy(Tensor x) -> Tensor", lambda x: x + torch.rand(()))
    define("deadly(Tensor x) -> Tensor", lambda x: os.kill(os.getpid(), signal.SIGSEGV) if x.numel() == 0 else x * 2)
    define("slow(Tensor x) -> Tensor", lambda x: time.sleep(30) or x * 2)
    define("fussy(Tensor x) -> Tensor", lambda x: x * 2 if x.shape[0] == 1024 else 1 / 0)
    define("write(Tensor(a!) x) -> ()", lambda x: None)
    define("part(Tensor(a) x) -> Tensor(a)", lambda x: x)
    define("drawn(Tensor x) -> Tensor", torch.rand_like, tags=torch.Tag.nondeterministic_seeded)
    define("some(Tensor x) -> Tensor", lambda x: x[x > 0], tags=torch.Tag.dynamic_output_shape)
    yield
    library._destroy()


@pytest.fixture
def memory(tmp_path):
    return Memory(tmp_path / "cache")


def named(name, *args, out):
    return call(f"hap_test_discover.{name}.default", *args, out=out)


def rows_of(name, *args, out):
    return {(row.inputs, row.outputs) for row in propose(named(name, *args, out=out)).rows}


def test_rows_and_linear_arguments_of_a_product():
    """x (b, d) * w (b): b cuts both, d only x; linear in either while the other is whole."""
    assert rows_of("scale_rows", meta(64, 300), meta(64), out=meta(64, 300)) == {
        ((Dim(0), Dim(0)), (Dim(0),)),
        ((Dim(1), "R"), (Dim(1),)),
        (("P", "R"), ("P",)),
        (("R", "P"), ("P",)),
    }


def test_dims_of_one_size_are_told_apart_by_what_they_do():
    """A square x: its rows go with w, its columns do not, although all three dims are 64."""
    found = rows_of("scale_rows", meta(64, 64), meta(64), out=meta(64, 64))
    assert ((Dim(0), Dim(0)), (Dim(0),)) in found and ((Dim(1), Dim(0)), (Dim(1),)) not in found


def test_what_is_added_up_is_a_partial_sum_and_operators_real_on_positive_numbers_are_tried_there():
    """sum(log x, 1) of x (b, d): cut along b it is cut, along d it is a partial sum; not linear."""
    assert rows_of("log_rows", meta(64, 300), out=meta(64)) == {((Dim(0),), (Dim(0),)), ((Dim(1),), ("P",))}


def test_a_table_is_looked_up_by_columns_and_by_queries():
    found = rows_of("look_up", meta(1000, 32), integers(64), out=meta(64, 32))
    assert found == {((Dim(1), "R"), (Dim(1),)), (("R", Dim(0)), (Dim(0),)), (("P", "R"), ("P",))}


def test_a_literal_that_is_a_size_may_be_no_size():
    assert rows_of("one_hot", integers(64), 64, out=meta(64, 64)) == {((Dim(0),), (Dim(0),))}


def test_what_depends_on_all_of_x_cannot_be_cut_and_is_linear_all_the_same():
    """x - mean(x): of a sum it is the sum."""
    assert rows_of("centre", meta(64, 300), out=meta(64, 300)) == {(("P",), ("P",))}


def test_an_operator_that_draws_without_saying_so_stays_whole():
    found = propose(named("noisy", meta(64, 300), out=meta(64, 300)))
    assert found.rows == () and found.detail.startswith("it gives other results when it is called again")


def test_what_looks_linear_or_local_near_zero_is_tried_far_from_it():
    """|x| < 100 passes through ``clip``, and a norm under 100 through ``clip_norm``; larger ones do not."""
    assert rows_of("clip", meta(64, 300), out=meta(64, 300)) == {((Dim(d),), (Dim(d),)) for d in (0, 1)}
    assert rows_of("clip_norm", meta(64, 300), out=meta(64, 300)) == set()


def test_an_operator_that_runs_at_no_small_size_stays_whole(memory):
    found = discover(named("fussy", meta(1024, 8), out=meta(1024, 8)), memory=memory)
    assert (found.outcome, found.rows) == ("whole", ())
    assert found.detail.startswith("it does not run on small float64 tensors")


def test_a_kernel_that_dies_of_an_empty_piece_is_survived(memory):
    found = discover(named("deadly", meta(64, 300), out=meta(64, 300)), memory=memory)
    assert (found.outcome, found.rows, found.detail) == ("crashed", (), "trying it ended the process (SIGSEGV)")


def test_a_kernel_of_torch_that_dies_is_survived(memory):
    """Backward of adaptive pooling, of a gradient without channels or pixels."""
    pool = call("aten._adaptive_avg_pool2d_backward.default", meta(2, 3, 1, 1), meta(2, 3, 4, 4), out=meta(2, 3, 4, 4))
    assert discover(pool, memory=memory).outcome in ("crashed", "found")


def test_an_operator_that_takes_too_long_is_stopped(memory):
    found = discover(named("slow", meta(64, 300), out=meta(64, 300)), limit_s=0.5, memory=memory)
    assert (found.outcome, found.rows, found.detail) == ("too slow", (), "trying it took more than 0.5 seconds")
    assert not list(memory.folder.glob("*")), "a slow machine is no property of the operator"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("write", "changes its arguments"),
        ("part", "returns a view of its arguments"),
        ("drawn", "draws random numbers"),
        ("some", "depend on values"),
    ],
)
def test_what_is_no_function_of_shapes_is_refused_in_words(name, why, memory):
    op = f"hap_test_discover.{name}.default"
    with pytest.raises(RuleError, match=f"no rule of {op} can be discovered: .*{why}"):
        discover_rule(op, table=RuleTable())
    with pytest.raises(MissingRuleError, match=why):
        discover(call(op, meta(6), out=meta(6)), memory=memory)


def test_an_operator_with_a_rule_is_not_discovered():
    with pytest.raises(RuleError, match=r"aten\.mm\.default has a builtin rule"):
        discover_rule("aten.mm.default", table=RuleTable())


SCALED = (SCALE_ROWS, meta(64, 300), meta(64))


def test_what_was_found_is_remembered_and_what_is_not_aten_is_proved_again(memory, monkeypatch):
    scaled = call(*SCALED, out=meta(64, 300))
    first = discover(scaled, memory=memory)
    assert first.outcome == "found" and len(first.rows) == 4
    monkeypatch.setattr("hap.rules.discover.propose", lambda call: pytest.fail("not asked again"))
    assert discover(scaled, memory=memory) == first
    (file,) = memory.folder.glob("*")
    entry = json.loads(file.read_text())
    entry["rows"].append([[[1, "1", "1"], [0, "1", "1"]], [[1, "1", "1"]]])  # as an older version of the operator had
    file.write_text(json.dumps(entry))
    monkeypatch.undo()
    assert discover(scaled, memory=memory) == first, "a remembered row that no longer holds is not believed"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": 1, "rows": [], "detail": ""}'])
def test_a_damaged_file_is_as_good_as_none(damage, memory):
    scaled = call(*SCALED, out=meta(64, 300))
    found = propose(scaled)
    memory.keep(scaled, found)
    assert memory.recall(scaled) == found
    (file,) = memory.folder.glob("*")
    file.write_text(damage)
    assert memory.recall(scaled) is None


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    memory = Memory(tmp_path / "file")
    memory.keep(call(*SCALED, out=meta(64, 300)), propose(call(*SCALED, out=meta(64, 300))))
    assert memory.recall(call(*SCALED, out=meta(64, 300))) is None


def test_the_memory_knows_shapes_literals_and_the_place_that_the_environment_names(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    memory = Memory.on_disk()
    assert memory.folder == tmp_path / "hap" / "rules"
    files = {memory.file(named("one_hot", integers(n), c, out=meta(n, c))) for n, c in ((4, 5), (4, 6), (5, 5))}
    assert len(files) == 3


def test_a_table_asks_once_for_each_kind_of_call(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    table = RuleTable()
    before = table.fingerprint
    discover_rule(SCALE_ROWS, table=table)
    assert table.fingerprint != before
    scaled = call(*SCALED, out=meta(64, 300))
    rows = call_rows(scaled, table)
    assert Row((Dim(0), Dim(0)), (Dim(0),)) in rows and set(partial_rows(scaled, ("PR", "RP"))) < set(rows)
    monkeypatch.setattr("hap.rules.discover.discover", lambda call: pytest.fail("asked again"))
    assert call_rows(scaled, table) == rows
    rule = table.user[SCALE_ROWS]
    assert isinstance(rule, DiscoveredRule) and repr(rule) == f"DiscoveredRule(op='{SCALE_ROWS}')"
