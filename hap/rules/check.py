"""Which operators of graphs have no rule, and whether the rules that they have hold: ``hap rules check``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hap.errors import MissingRuleError
from hap.graph import Graph
from hap.ops import why_untried
from hap.rules.discover import discover
from hap.rules.notation import Call, call_key, make_call
from hap.rules.prove import LARGEST, Proof, Verdict, call_elements, prove_call, row_strategies
from hap.rules.table import DEFAULT_TABLE, RuleTable, call_rows

VERDICTS = ("proved", "whole", "not run", "wrong", "missing")
_SHOWN = 3  # refuted strategies of one operator


@dataclass(frozen=True)
class Missing:
    """An operator without a rule: how often a graph calls it, from which modules, and what the first refusal said."""

    op: str
    calls: int
    modules: tuple[str, ...]
    message: str


@dataclass(frozen=True)
class Checked:
    """One operator over some calls. ``calls`` counts those that differ; ``missing`` those without a rule.

    ``proved`` and ``wrong`` are strategies that were run; ``skipped`` rows of calls that are too large to run.
    """

    op: str
    calls: int = 0
    rows: int = 0
    proved: int = 0
    wrong: tuple[Verdict, ...] = ()
    missing: int = 0
    skipped: int = 0

    @property
    def verdict(self) -> str:
        """``missing``, ``wrong``, ``not run``, ``whole`` (nothing but the all-replicated row) or ``proved``."""
        if self.missing:
            return "missing"
        if self.wrong:
            return "wrong"
        if self.skipped and not self.proved:
            return "not run"
        return "proved" if self.rows else "whole"


@dataclass(frozen=True)
class Discovered:
    """What discovery says of one kind of call; ``forms`` are its rows in words, ``wanted`` if the table lacks it."""

    op: str
    outcome: str
    forms: tuple[str, ...]
    detail: str
    wanted: bool


def discover_calls(
    calls: Iterable[Call], op: str | None = None, table: RuleTable = DEFAULT_TABLE
) -> tuple[Discovered, ...]:
    """Each kind of call of ``op``, or of every operator that has no rule, whatever it may be."""
    found = []
    for call in calls:
        name = call.node.op
        known = table.find(name) is not None
        if known if op is None else name != op:
            continue
        if why := why_untried(name):
            found.append(Discovered(name, "refused", (), why, False))
            continue
        d = discover(call)
        found.append(Discovered(name, d.outcome, tuple(map(str, d.rows)), d.detail, not known))
    return tuple(dict.fromkeys(found))


@dataclass
class _Tally:
    calls: int = 0
    rows: int = 0
    proved: int = 0
    wrong: list[Verdict] = field(default_factory=list)
    missing: int = 0
    skipped: int = 0


def missing(graph: Graph, table: RuleTable = DEFAULT_TABLE) -> tuple[Missing, ...]:
    """Every operator of the graph without a rule, by name: all that ``choices`` would refuse, one after another."""
    found: dict[str, tuple[list[str], str]] = {}
    for node in graph.nodes:
        if node.is_source:
            continue
        try:
            call_rows(make_call(node, graph), table)
        except MissingRuleError as e:
            found.setdefault(node.op, ([], str(e)))[0].append(node.module)
    return tuple(
        Missing(op, len(modules), tuple(dict.fromkeys(modules)), message)
        for op, (modules, message) in sorted(found.items())
    )


def graph_calls(graphs: Iterable[Graph]) -> tuple[Call, ...]:
    """Each kind of call in the graphs once."""
    found: dict[object, Call] = {}
    for graph in graphs:
        for node in graph.nodes:
            if not node.is_source:
                call = make_call(node, graph)
                found.setdefault(call_key(call), call)
    return tuple(found.values())


def check_calls(calls: Iterable[Call], op: str | None = None, proof: Proof | None = None) -> tuple[Checked, ...]:
    """Every row of every call (of ``op``) fitted to every atom that it fits, and run; by operator, in order of name."""
    proof = proof or Proof()
    tallies: dict[str, _Tally] = {}
    for call in calls:
        if op is not None and call.node.op != op:
            continue
        tally = tallies.setdefault(call.node.op, _Tally())
        tally.calls += 1
        try:
            rows = call_rows(call, proof.table)
        except MissingRuleError:
            tally.missing += 1
            continue
        tally.rows += len(rows)
        if call_elements(call) > LARGEST:
            tally.skipped += len(rows)
            continue
        strategies = tuple(dict.fromkeys(s for row in rows for s in row_strategies(row, call)))
        for verdict in prove_call(call, strategies, proof):
            if verdict.ok:
                tally.proved += 1
            else:
                tally.wrong.append(verdict)
    return tuple(_checked(name, tallies) for name in sorted(tallies))


def _checked(name: str, tallies: Mapping[str, _Tally]) -> Checked:
    t = tallies[name]
    return Checked(name, t.calls, t.rows, t.proved, tuple(t.wrong), t.missing, t.skipped)


def describe(found: Iterable[Checked]) -> list[str]:
    """One line an operator, up to three refuted strategies under it, and a last line that counts verdicts."""
    lines, counts = [], dict.fromkeys(VERDICTS, 0)
    for c in found:
        counts[c.verdict] += 1
        skipped = f", {c.skipped} rows too large to run" if c.skipped else ""
        lines.append(
            f"{c.verdict:8} {c.op:52} {c.calls} calls, {c.proved} strategies proved, {len(c.wrong)} wrong{skipped}"
        )
        lines += [f"         {v.strategy}: error {v.worst_error:.2g}, {v.detail}" for v in c.wrong[:_SHOWN]]
    return [*lines, ", ".join(f"{n} {verdict}" for verdict, n in counts.items())]
