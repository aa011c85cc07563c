"""``Program`` -> one Python file that every rank can run: the FX modules' instructions, for a person to read.

The file holds the group sizes as tuples (``BATCH = (5, 2, 1)``), tables of parameters, buffers and inputs with their
global shapes and layouts, ``forward(p, x, comm)`` and ``backward(saved, tangent, comm)`` grouped by the user's modules
with local shapes at line ends (``10*BATCH`` is ten times this rank's entry of ``BATCH``), and a ``main`` that runs one
step on random numbers under ``torchrun``; but for the program of one host of a mesh of two axes, which cannot run
alone. The text is deterministic and left alone by black and ruff.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from types import FunctionType
from typing import Any

from hap.codegen.call import bundle_arguments, collective_arguments, map_leaves, returns_many
from hap.codegen.layout import Layout
from hap.codegen.program import (
    Call,
    Convert,
    Held,
    Instruction,
    Program,
    RankDevice,
    Source,
    Start,
    Together,
    Wait,
    group_labels,
    last_uses,
)
from hap.codegen.text import INDENT, WIDTH, Bracket, Text, call, entry, escaped, literal, quoted, statement, subscript
from hap.graph import Value
from hap.hosts_sum import HOSTS_SUM, SITE
from hap.ops import resolve
from hap.placement import LocalSize, LocalStart, Partial, Shard
from hap.plan import Plan

_MAIN = (
    "",
    "",
    'if __name__ == "__main__":',
    f"{INDENT}from hap.runtime.standalone import main",
    "",
    f"{INDENT}main(globals())",
)
_LOCAL = {"parameter": "p", "buffer": "p", "constant": "p", "input": "x"}


def to_python(program: Program, plan: Plan) -> str:
    """The file's text. ``plan`` must be the one ``program`` was lowered from: the header quotes it."""
    assert plan.provenance.model_fingerprint == program.graph_fingerprint, "program and plan do not belong together"
    return _File(program, plan).text()


class _File:
    def __init__(self, program: Program, plan: Plan) -> None:
        self.program, self.plan = program, plan
        self.constant = dict(group_labels(program.labels))  # group -> its name in the file
        self.by_name = {s.name: s for s in program.sources}

    def text(self) -> str:
        lines = [
            *self.header(),
            "",
            *self.imports(),
            "",
            "aten = torch.ops.aten",
            "",
            *self.sizes(),
            *self.tables(),
            *self.forward(),
            *self.backward(),
            *([] if self.is_of_a_host else _MAIN),
        ]
        return "\n".join(lines) + "\n"

    @cached_property
    def is_of_a_host(self) -> bool:
        """Whether this is the program of one host among others: alone it cannot run."""
        calls = (*self.program.forward, *self.program.backward)
        return any(isinstance(i, Call) and i.op == HOSTS_SUM for i in calls)

    def header(self) -> list[str]:
        made_for, predicted = self.plan.provenance, self.plan.predicted
        facts = [
            f"plan         {self.plan.checksum}",
            f"model        {made_for.model_fingerprint}",
            f"predicted    {predicted.step_s * 1e3:.4g} ms a step, of it {predicted.communication_s * 1e3:.4g} ms "
            "communication",
            "run          by hap.compile: over_hosts sums what this host and the others have"
            if self.is_of_a_host
            else f"run          torchrun --nproc-per-node {self.program.world_size} THIS_FILE",
        ]
        first = f"{self.program.name} on {made_for.cluster}: the training step, written by HAP {made_for.hap_version}."
        wrapped = [escaped(line) for line in textwrap.wrap(first, WIDTH - 4)] or [""]
        return [f'"""{wrapped[0]}', *wrapped[1:], "", *facts, "", *self.shares(), '"""']

    def shares(self) -> list[str]:
        """The table of ranks: device, then what the rank holds of each group, as many as the width allows."""
        columns = [self.constant[g] for g in self.program.sizes]
        rows = [
            [str(rank), escaped(device), *(f"{s[rank]}/{sum(s)}" for s in self.program.sizes.values())]
            for rank, device in enumerate(self.plan.devices)
        ]
        table = [["rank", "device", *columns], *rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        while sum(widths) + 2 * len(widths) > WIDTH and len(widths) > 2:
            widths.pop()
        return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=False)).rstrip() for row in table]

    def imports(self) -> list[str]:
        own: dict[str, dict[str, None]] = {}
        for instruction in (*self.program.forward, *self.program.backward):
            if isinstance(instruction, Call) and instruction.op != HOSTS_SUM:
                function = resolve(instruction.op)
                if isinstance(function, FunctionType):
                    own.setdefault(function.__module__, {})[function.__name__] = None
        if self._uses_layout():
            own.setdefault("hap.codegen.layout", {})["Layout"] = None
        lines = [f"from {module} import {', '.join(sorted(own[module]))}" for module in sorted(own)]
        return ["import torch", *([""] if lines else []), *lines]

    def _uses_layout(self) -> bool:
        sources = [self.program.held[s.name].placement for s in self.program.sources]
        return any(isinstance(p, Shard) for p in sources) or any(
            isinstance(i, (Together, Start)) or (isinstance(i, Convert) and i.kind == "all_to_all")
            for i in (*self.program.forward, *self.program.backward)
        )

    def sizes(self) -> list[str]:
        if not self.program.sizes:
            return []
        lines = ["# Atoms of each group of dims, rank by rank."]
        for group, sizes in self.program.sizes.items():
            value = Bracket("(", tuple(map(str, sizes)), ")")
            told = f"{escaped(self.program.labels[group])}: {sum(sizes)}"
            lines += statement("", f"{self.constant[group]} = ", value, told)
        return [*lines, ""]

    def tables(self) -> list[str]:
        lines = ["# Global shape, dtype, and layout over the ranks (None: every rank holds the whole)."]
        for name, kind in (("PARAMETERS", "parameter"), ("BUFFERS", "buffer"), ("INPUTS", "input")):
            lines += self._table(name, self.program.sources_of(kind))  # type: ignore[arg-type]
        constants = self.program.sources_of("constant")
        if constants:
            items = tuple(entry(quoted(s.target), self._constant(s)) for s in constants)
            lines += ["", *statement("", "CONSTANTS = ", Bracket("{", items, "}"), exploded=True)]
        return lines

    def _table(self, name: str, sources: Sequence[Source]) -> list[str]:
        items = tuple(entry(quoted(s.target), self._described(self.program.held[s.name])) for s in sources)
        return statement("", f"{name} = ", Bracket("{", items, "}"), exploded=True)

    def _described(self, held: Held) -> Text:
        shape = Bracket("(", tuple(map(str, held.meta.shape)), ")")
        shard = held.placement
        layout = self._layout(Layout.of(shard, self.program.sizes), shard) if isinstance(shard, Shard) else "None"
        return Bracket("(", (shape, str(held.meta.dtype), layout), ")")

    def _constant(self, source: Source) -> Text:
        values = self.program.constants[source.target]
        tensor = call("torch.tensor", [literal(values.tolist())], [("dtype", str(values.dtype))])
        shard = self.program.held[source.name].placement
        layout = self._layout(Layout.of(shard, self.program.sizes), shard) if isinstance(shard, Shard) else "None"
        return Bracket("(", (tensor, layout), ")")

    def _layout(self, layout: Layout, shard: Shard) -> Bracket:
        numbers = [(key, str(value)) for key, value in layout._asdict().items() if key != "sizes"]
        return call("Layout", [], [*numbers, ("sizes", self.constant[shard.group])])

    def forward(self) -> list[str]:
        program = self.program
        body = _Body(self, kept=(program.loss, *program.updates.values(), *program.saved), load=self._load_source)
        body.run(program.forward, "forward")
        for name in (program.loss, *program.updates.values(), *program.saved):
            body.load(name)
        return [
            "",
            "",
            "def forward(p, x, comm):",
            f'{INDENT}"""(loss, buffer updates, values saved for ``backward``) from this rank\'s ``p`` and ``x``."""',
            *body.lines,
            "",
            *statement(INDENT, "updates = ", _dict(program.updates.items()), exploded=True),
            *statement(INDENT, "saved = ", _dict((name, name) for name in program.saved), exploded=True),
            f"{INDENT}return {program.loss}, updates, saved",
        ]

    def backward(self) -> list[str]:
        program = self.program
        body = _Body(self, kept=tuple(program.gradients.values()), load=self._load_saved)
        body.run(program.backward, "backward")
        for name in program.gradients.values():
            body.load(name)
        return [
            "",
            "",
            "def backward(saved, tangent, comm):",
            f'{INDENT}"""Gradients of this rank\'s shares of the parameters; empties ``saved`` on the way."""',
            *body.lines,
            "",
            *statement(INDENT, "return ", _dict(program.gradients.items()), exploded=True),
        ]

    def _load_source(self, name: str) -> Text | None:
        source = self.by_name.get(name)
        return None if source is None else subscript(_LOCAL[source.kind], source.target)

    def _load_saved(self, name: str) -> Text | None:
        if name == self.program.tangent:
            return None if name == "tangent" else "tangent"
        return call("saved.pop", [quoted(name)])

    def shape_comment(self, name: str) -> str:
        """``(10*BATCH, 48)``; a value whose sum over ranks is meant says ``partial``. Nothing for what is no value."""
        if name not in self.program.held:
            return ""
        held = self.program.held[name]
        extents = [str(size) for size in held.meta.shape]
        match held.placement:
            case Shard(dim=dim, outer=outer, unit=unit, group=group):
                extents[dim] = f"{outer * unit}*{self.constant[group]}" if outer * unit > 1 else self.constant[group]
        comma = "," if len(extents) == 1 else ""
        partial = " partial" if isinstance(held.placement, Partial) else ""
        return f"({', '.join(extents)}{comma}){partial}"


class _Body:
    """The lines of one function in the making. ``load`` gives the text that fetches a name from outside."""

    def __init__(self, file: _File, kept: Sequence[str], load: Callable[[str], Text | None]) -> None:
        self.file, self.kept, self.outside = file, kept, load
        self.lines: list[str] = []
        self.defined: set[str] = set()
        self.module: str | None = None

    def run(self, part: Sequence[Instruction], phase: str) -> None:
        if any(_uses_rank(instruction) for instruction in part):
            self.lines.append(f"{INDENT}rank = comm.rank")
        for instruction, dead in zip(part, last_uses(part, self.kept), strict=True):
            if instruction.module != self.module:
                self.module = instruction.module
                name = escaped(self.module or self.file.program.name)
                title = f"{INDENT}# {name}{', backward' if phase == 'backward' else ''}"
                self.lines += ["", title[:WIDTH].rstrip()]
            for name in instruction.inputs:
                self.load(name)
            self.emit(instruction)
            if unread := [n for n in dead if n in self.defined]:
                self.lines += _delete(unread)

    def load(self, name: str) -> None:
        if name in self.defined:
            return
        self.defined.add(name)
        if (text := self.outside(name)) is not None:
            self.lines += statement(INDENT, f"{name} = ", text, self.file.shape_comment(name))

    def emit(self, instruction: Instruction) -> None:
        comments = [self.file.shape_comment(n) for n in instruction.outputs if n is not None]
        match instruction:
            case Convert():
                prefix, text = f"{instruction.output} = ", self._collective(instruction)
            case Together():
                prefix, text = _unpacked(instruction.outputs), self._bundle("together", instruction)
            case Start():
                prefix, text = f"{instruction.handle} = ", self._bundle("start", instruction.work)
            case Wait():
                prefix, text = _unpacked(instruction.outputs), call("comm.wait", [instruction.handle])
            case Call():
                names = [n or "_" for n in instruction.outputs]
                prefix = _unpacked(names) if returns_many(instruction) else f"{', '.join(names)} = "
                text = self._call(instruction)
        self.defined.update(n for n in instruction.outputs if n is not None)
        comment = comments[0] if len(comments) == 1 else ""
        if len(INDENT + prefix + text.open) > WIDTH and len(instruction.outputs) > 1:
            self.lines += [f"{INDENT}(", *(f"{INDENT}{INDENT}{n or '_'}," for n in instruction.outputs)]
            prefix = ") = "
        self.lines += statement(INDENT, prefix, text, comment)

    def _collective(self, convert: Convert) -> Bracket:
        placements = {"source": convert.source, "target": convert.target}
        shard = next((p for p in placements.values() if isinstance(p, Shard)), None)
        keywords: list[tuple[str, Text]] = []
        for key, value in collective_arguments(convert, self.file.program.sizes).items():
            if isinstance(value, Layout):
                side = placements[key]
                assert isinstance(side, Shard)
                keywords.append((key, self.file._layout(value, side)))
            elif key == "sizes":
                assert shard is not None
                keywords.append((key, self.file.constant[shard.group]))
            else:
                keywords.append((key, literal(value)))
        return call(f"comm.{convert.kind}", [convert.input], keywords)

    def _bundle(self, method: str, work: Together) -> Bracket:
        layouts, decomposition = bundle_arguments(work, self.file.program.sizes)
        rows: list[Text] = []
        for member, found in zip(work.members, layouts, strict=True):
            shards = [p for p in (member.source, member.target) if isinstance(p, Shard)]
            items = [self.file._layout(layout, shard) for layout, shard in zip(found, shards, strict=True)]
            rows.append(Bracket("(", tuple(items), ")"))
        values = Bracket("[", tuple(work.inputs), "]")
        return call(
            f"comm.{method}", [quoted(work.kind), values, Bracket("[", tuple(rows), "]"), quoted(decomposition)]
        )

    def _call(self, instruction: Call) -> Bracket:
        function = resolve(instruction.op)
        if instruction.op == HOSTS_SUM:
            given = [self._argument(arg) for arg in instruction.args[: SITE + 1]]
            return call("comm.over_hosts", given, [(key, self._argument(arg)) for key, arg in instruction.kwargs])
        if isinstance(function, FunctionType):
            name = function.__name__
        else:
            name = str(function) if str(function).startswith("aten.") else f"torch.ops.{function}"
        args = [self._argument(arg) for arg in instruction.args]
        return call(name, args, [(key, self._argument(arg)) for key, arg in instruction.kwargs])

    def _argument(self, tree: Any) -> Text:
        mapped = map_leaves(tree, lambda leaf: _Leaf(self._leaf(leaf)))
        return _text(mapped)

    def _leaf(self, leaf: Value | LocalSize | RankDevice) -> str:
        if isinstance(leaf, Value):
            return leaf.node
        if isinstance(leaf, RankDevice):
            return "comm.device"
        constant = self.file.constant[leaf.group]
        mine = f"sum({constant}[:rank])" if isinstance(leaf, LocalStart) else f"{constant}[rank]"
        return mine if leaf.scale == 1 else f"{leaf.scale} * {mine}"


def _unpacked(names: Sequence[str]) -> str:
    """``a, b = ``, or ``(a,) = `` of one, as an assignment begins that unpacks."""
    return f"({names[0]},) = " if len(names) == 1 else f"{', '.join(names)} = "


class _Leaf(str):
    """Text that is code already, not a string literal."""


def _text(tree: Any) -> Text:
    if isinstance(tree, _Leaf):
        return str(tree)
    if isinstance(tree, list):
        return Bracket("[", tuple(_text(item) for item in tree), "]")
    return literal(tree)


def _uses_rank(instruction: Instruction) -> bool:
    found: list[bool] = []
    if isinstance(instruction, Call):
        map_leaves([*instruction.args, *(a for _, a in instruction.kwargs)], lambda e: found.append(_is_local(e)))
    return any(found)


def _is_local(leaf: Any) -> bool:
    return isinstance(leaf, LocalSize)


def _dict(items: Iterable[tuple[str, str]]) -> Bracket:
    return Bracket("{", tuple(entry(quoted(key), value) for key, value in items), "}")


def _delete(names: Sequence[str]) -> list[str]:
    lines, line = [], f"{INDENT}del {names[0]}"
    for name in names[1:]:
        if len(line) + len(name) + 2 > WIDTH:
            lines.append(line)
            line = f"{INDENT}del {name}"
        else:
            line += f", {name}"
    return [*lines, line]
