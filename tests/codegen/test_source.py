"""The emitted Python file: readable, left alone by formatters, deterministic, and the FX program's very numbers."""

from __future__ import annotations

import ast
import math
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hap.capture import capture, source_values
from hap.codegen.fx import to_graph_modules
from hap.codegen.lowering import lower
from hap.codegen.program import Program
from hap.codegen.source import to_python
from hap.codegen.text import Bracket, call, literal, statement
from hap.graph import Graph
from hap.mesh import graph_of
from hap.placement import Shard, take_shard
from hap.plan import Plan
from hap.rules.host_graph import summed
from hap.runtime import standalone
from hap.runtime.collectives import Communicator
from tests._support import cases, gpt2
from tests._support.mesh import make_mesh
from tests._support.plans import replicated_plan
from tests._support.ranks import run_ranks

PLANS = {
    "data parallel": partial(cases.data_parallel, (5, 2, 1)),
    "tensor parallel": partial(cases.tensor_parallel, (3, 2, 1)),
    "zero": partial(cases.zero, (5, 0, 3), regather=True),
    "senseless": partial(cases.anything, 3),
}


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return {name: emitted(make()) for name, make in PLANS.items()}


def emitted(plan: Plan) -> str:
    return to_python(lower(gpt2.graph(), plan), plan)


@pytest.mark.parametrize("name", PLANS)
def test_formatter_and_linter_leave_it_alone(name: str, sources: dict[str, str], tmp_path: Path) -> None:
    check_layout(sources[name], tmp_path)


def check_layout(text: str, tmp_path: Path) -> None:
    (tmp_path / "emitted.py").write_text(text, encoding="utf-8")
    for arguments in (
        ["format", "--isolated", "--line-length", "120", "--check"],
        ["check", "--isolated", "--line-length", "120", "--select", "E,F,W,UP,B,SIM,RUF,C4"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, "emitted.py"], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-2000:]


def test_it_says_what_it_is_for_and_who_holds_what(sources: dict[str, str]) -> None:
    text, plan = sources["tensor parallel"], PLANS["tensor parallel"]()
    header = text.split('"""')[1]
    assert "gpt2 on test: the training step" in header and plan.checksum in header
    table = [line.split() for line in header.splitlines()[-4:-1]] + [header.splitlines()[-1].split()]
    rank = next(row for row in table if row[:2] == ["2", "cpu2"])
    assert "1/6" in rank and "32/192" in rank
    assert "HEADS_OF_H_0_ATTN = (3, 2, 1)  # heads of gpt2.transformer.h.0.attn: 6" in text
    assert "    # gpt2.transformer.h.1.attn\n" in text and "    # gpt2.transformer.h.1.attn, backward\n" in text
    assert "sizes=HEADS_OF_H_0_ATTN" in text and "LocalSize" not in text


def test_a_line_of_it(sources: dict[str, str]) -> None:
    lines = [line.strip() for line in sources["data parallel"].splitlines()]
    assert "view_1 = aten.reshape.default(native_layer_norm_1_0, [10 * BATCH[rank], 48])  # (10*BATCH, 48)" in lines
    assert any(line.endswith("# (48, 144) partial") for line in lines)
    assert any(line.startswith("del ") for line in lines)


def test_it_is_deterministic(sources: dict[str, str]) -> None:
    for name, make in PLANS.items():
        assert emitted(make()) == sources[name]


def compare_with_fx(rank: int, graph: Graph, programs: Mapping[str, tuple[Program, str]]) -> list[str]:
    """Every plan by the FX modules and by the file's functions: bit for bit the same. Returns the names compared."""
    comm = Communicator(dist.group.WORLD)
    values = source_values(graph, gpt2.build(), (gpt2.batch(),), gpt2.batch())
    for program, text in programs.values():
        file: dict[str, object] = {"__name__": "emitted"}
        exec(compile(text, "emitted.py", "exec"), file)
        local = {}
        for source in program.forward_sources:
            held = program.held[source.name]
            whole = program.constants[source.target] if source.kind == "constant" else values[held.value]
            shard = held.placement
            local[source] = (
                take_shard(whole, shard, program.sizes[shard.group], rank) if isinstance(shard, Shard) else whole
            )
        forward, backward = to_graph_modules(program, rank)
        tangent = torch.tensor(0.3, dtype=torch.float64)
        with torch.no_grad():
            loss, _, saved = forward(comm, *local.values())
            gradients = backward(comm, saved, tangent)
            p = {s.target: t for s, t in local.items() if s.kind != "input"}
            x = {s.target: t for s, t in local.items() if s.kind == "input"}
            file_loss, _, file_saved = file["forward"](p, x, comm)  # type: ignore[operator]
            file_gradients = file["backward"](file_saved, tangent, comm)  # type: ignore[operator]
        assert torch.equal(loss, file_loss) and not saved and not file_saved, "the backward empties what was saved"
        assert gradients.keys() == file_gradients.keys() == graph.gradients.keys()
        assert all(torch.equal(gradients[name], file_gradients[name]) for name in gradients)
    return list(programs)


def test_it_computes_bit_for_bit_what_the_fx_program_computes(sources: dict[str, str]) -> None:
    programs = {name: (lower(gpt2.graph(), make()), sources[name]) for name, make in PLANS.items()}
    assert run_ranks(3, compare_with_fx, gpt2.graph(), programs) == [list(PLANS)] * 3


def run_as_torchrun_would(rank: int, path: str) -> tuple[str, int]:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        file = runpy.run_path(path, run_name="__main__")
    _, gradients = standalone.run_step(file, standalone.connect())
    return printed.getvalue(), sum(g.numel() for g in gradients.values())


def test_it_runs_by_itself(sources: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "emitted.py"
    path.write_text(sources["zero"])
    ranks = run_ranks(3, run_as_torchrun_would, str(path))
    assert ranks[0][0].startswith("loss ") and "28 gradients, 3 ranks" in ranks[0][0]
    assert ranks[1] == ("", 0), "rank 1 holds nothing and prints nothing"


def test_one_device_needs_no_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "emitted.py"
    path.write_text(emitted(replicated_plan(gpt2.graph())))
    runpy.run_path(str(path), run_name="__main__")
    assert "28 gradients, 1 ranks" in capsys.readouterr().out


class Odd(torch.nn.Module):
    """Names that would end a string or a line, a table of one row, numbers that are none, one part of one."""

    def __init__(self) -> None:
        super().__init__()
        names = ("a b", 'q"x', "it's \"", "new\nline", "back\\xslash", 'ü"""', "\u2028")
        self.steps = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in names})
        self.rows = torch.nn.Embedding(1, 4)
        self.register_buffer("ids", torch.zeros(4, dtype=torch.int64))
        self.odd = torch.tensor([complex(0, math.inf), complex(math.nan, 1), complex(-0.0, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.rows(self.ids)
        for step in self.steps.values():
            x = step(x).relu()
        (whole,) = x.unsqueeze(0).unbind(0)
        return whole.square().mean() + torch.view_as_real(self.odd).nan_to_num(0, 1, -1).sum()


def test_names_end_no_string_and_no_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of parameters, modules, clusters and devices: a plan may come from others, and its names must run nothing."""
    model = Odd()
    graph = capture(model, torch.zeros(1, 4))
    plan = replicated_plan(graph)
    cluster, device = 'lab\\xeon """', 'x"""\nraise SystemExit("ran")\n"""\\'
    made_for = plan.provenance.model_copy(update={"cluster": cluster})
    plan = plan.model_copy(update={"provenance": made_for, "devices": (device,)})
    program = lower(graph, plan)
    text = to_python(program, plan)
    check_layout(text, tmp_path)
    head = ast.get_docstring(ast.parse(text))
    assert head is not None and cluster in head and device in head
    assert [line for line in text.splitlines() if "new" in line and line.lstrip().startswith("#")], "a title"
    file: dict[str, Any] = {"__name__": "emitted"}
    exec(compile(text, "emitted.py", "exec"), file)
    assert set(file["PARAMETERS"]) == {name for name, _ in model.named_parameters()}
    (found, _), (kept,) = next(iter(file["CONSTANTS"].values())), program.constants.values()
    assert torch.view_as_real(found).numpy().tobytes() == torch.view_as_real(kept).numpy().tobytes()
    (tmp_path / "emitted.py").write_text(text, encoding="utf-8")
    runpy.run_path(str(tmp_path / "emitted.py"), run_name="__main__")
    assert "15 gradients, 1 ranks" in capsys.readouterr().out


def test_sums_over_hosts_are_asked_of_the_communicator_by_their_numbers() -> None:
    """In the file and in the module, in program order; no import of the operator, which a file does not call."""
    plan = make_mesh(gpt2.graph(), (2, 1), (5, 3))
    for host, ranks in enumerate((2, 1)):
        graph, inside = graph_of(gpt2.graph(), plan, host), plan.inside_of(host)
        program, sums = lower(graph, inside), summed(graph)
        text = to_python(program, inside)
        lines = [ast.unparse(n) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Assign)]
        found = [m for line in lines if (m := re.fullmatch(r"\w+ = comm\.over_hosts\(\w+, (\d+)\)", line))]
        assert sorted(int(m[1]) for m in found) == list(range(len(sums))) and len(sums) > 28
        order = [int(site) for site in re.findall(r"comm\.over_hosts\(\s*\w+, (\d+)", text)]
        assert order == list(range(len(sums))) and "hosts_sum" not in text
        for rank in range(ranks):
            nodes = [n for m in to_graph_modules(program, rank) for n in m.graph.nodes if n.target == "over_hosts"]
            assert [(n.op, n.args[2]) for n in nodes] == [("call_method", site) for site in range(len(sums))]
            assert all(str(n.args[0]) == "comm" and len(n.args) == 3 and not n.kwargs for n in nodes)


def test_brackets_break_as_black_breaks_them() -> None:
    long = "a" * 60
    assert statement("    ", "x = ", call("f", ["a", literal([1, 2])]), "note") == ["    x = f(a, [1, 2])  # note"]
    assert statement("", "x = ", call("f", [long, "b" * 54])) == ["x = f(", f"    {long}, {'b' * 54}", ")"]
    assert statement("", "x = ", Bracket("[", (long, long), "]")) == ["x = [", f"    {long},", f"    {long},", "]"]
    assert statement("", f"{long}, {long} = ", call("f", ["a"])) == [f"{long}, {long} = (", "    f(a)", ")"]


def test_literals() -> None:
    assert literal(float("-inf")) == 'float("-inf")'
    assert literal("it's") == '"it\'s"' and literal('6" x\n') == "'6\" x\\n'"
    assert literal(torch.bfloat16) == "torch.bfloat16"
