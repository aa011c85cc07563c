"""The best shares at fixed strategies: a linear program (GLOP), one share vector per bundle of groups.

Symbols: bundle b (groups that correspond in equal layers), class r of ranks that are alike and have something of the
same bundles now (they get equal shares), |r| its ranks, stage k (what runs between two collectives; the
last one with the optimizer's update), conversion m, node i with group b(i), ``fixed`` and ``slope`` its line on the
device of r (``parts_coefficients``, a tangent of the roofline at the present share).

    share[b,r] >= 0,  sum_r |r| share[b,r] = 1                                                      (_shares)
    stage[k] >= sum_{i in k} fixed[i,r] + slope[i,r] share[b(i),r]          for every r             (_maximum)
    wire[m] >= constant[m,j] + by_source[m,j] share + by_target[m,j] share  for every port j        (_collective)
    held[r,t] affine in share <= capacity[r]                                for every r, moment t   (_memory)
    away[b,r] >= +-(share[b,r] - share at the present sizes)                                        (_stay)

    minimise  sum_k stage[k] + sum_m wire[m] + STAY step sum away

The last term makes groups that hardly matter stay where they are, instead of in some corner of the optimal face.
It mirrors ``hap.cost_models.evaluate`` stage by stage; equal stages, and equal wires, are one variable.
Memory is the estimate of ``hap.search.prices`` shifted by what the ledger says at the present sizes. A rank that is to
be left out has all its shares fixed at zero, and then no launches for what it skips. With several groups, shares of
different groups need not be equal: a rank with a slow link may have little of one and more of another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray
from ortools.math_opt import model_pb2

from hap.conversion import Need
from hap.cost_models.compute import parts_coefficients, parts_seconds
from hap.cost_models.evaluate import ConversionCost, Evaluation
from hap.cost_models.stages import Stages, find_stages
from hap.fabric import Array
from hap.order import repeats
from hap.placement import GroupSizes, Placement, Shard
from hap.plan import Strategy
from hap.search.milp import GB, MS, SMALLEST
from hap.search.prices import MOMENTS, Facts
from hap.search.protos import fill_matrix, solve_once
from hap.search.wires import ClassForms, RankClasses, Rows

Shares = tuple[float, ...]
STAY = 1e-4  # of the step, for a share of one that goes from one rank to another


def best_shares(
    facts: Facts,
    strategies: Mapping[str, Strategy],
    sizes: GroupSizes,
    evaluation: Evaluation,
    *,
    bundles: Sequence[Sequence[str]],
    fixed: Mapping[str, object],
    left_out: Sequence[int] = (),
    regather: bool = False,
    stages: Stages | None = None,
) -> dict[str, Shares] | None:
    """Group -> shares, for every group of ``bundles`` that is used and not ``fixed``. None if no shares fit the memory.

    ``evaluation`` is that of ``strategies`` at ``sizes``; its conversions say which decomposition each collective
    takes. ``stages``: those of the program, if known.
    """
    return _Program(facts, strategies, sizes, evaluation, bundles, fixed, left_out, regather, stages).solve()


@dataclass
class _Program:
    facts: Facts
    strategies: Mapping[str, Strategy]
    sizes: GroupSizes
    evaluation: Evaluation
    bundles: Sequence[Sequence[str]]
    fixed: Mapping[str, object]
    left_out: Sequence[int]
    regather: bool
    known: Stages | None

    def __post_init__(self) -> None:
        used = [np.array(self.sizes[bundle[0]]) > 0 for bundle in self.bundles]
        labels = [(r in self.left_out, *(bool(u[r]) for u in used)) for r in range(self.facts.cluster.world_size)]
        self.wires = self._known_forms(RankClasses.find(self.facts.cluster, labels))
        self.classes = self.wires.classes
        self.counts, self.n = self.classes.counts, len(self.classes.counts)
        self.out = np.array([r in self.left_out for r in self.classes.first])
        self.here = {g: self.classes.mean(np.array(s, dtype=np.float64) / sum(s)) for g, s in self.sizes.items()}
        self.column: dict[str, int] = {}  # group -> where the shares of its bundle begin
        self.names: list[str] = []
        self.upper: list[float] = []
        self.cost: list[float] = []
        self.row_names: list[str] = []
        self.row_bounds: list[tuple[float, float]] = []
        self.entries: list[tuple[int, int, float]] = []
        self.tops: dict[tuple[bytes, ...], int] = {}
        self._wires: dict[object, list[int]] = {}  # conversion -> the variables above its stages
        self._shares()
        self._stages()
        self._memory()

    def _known_forms(self, classes: RankClasses) -> ClassForms:
        """Those of these classes, which programs before this one may have asked for."""
        known = cast(dict[RankClasses, ClassForms], self.facts.here.setdefault("forms", {}))
        return known.setdefault(classes, ClassForms(self.facts.cluster, classes))

    # -- shares ------------------------------------------------------------------------------------------------------

    def _shares(self) -> None:
        for bundle in self.bundles:
            if any(name in self.fixed for name in bundle):
                continue
            first = len(self.names)
            for c in range(self.n):
                self._variable(f"share[{bundle[0]},{c}]", upper=0.0 if self.out[c] else 1.0)
            terms = [(first + c, float(self.counts[c])) for c in range(self.n)]
            self._row(f"whole[{bundle[0]}]", 1.0, 1.0, terms)
            self.column.update(dict.fromkeys(bundle, first))
        self.shared = len(self.names)
        for first, group in {first: group for group, first in reversed(self.column.items())}.items():
            self._stay(group, first)

    def _stay(self, group: str, first: int) -> None:
        for c, here in enumerate(self.here[group].tolist()):
            weight = STAY * self.evaluation.step_s * MS / 2 * float(self.counts[c])
            away = self._variable(f"away[{group},{c}]", cost=weight)
            for sign in (1.0, -1.0):
                name = f"away[{group},{c},{sign:+.0f}]"
                self._row(name, -sign * here, np.inf, [(away, 1.0), (first + c, -sign)])

    # -- time --------------------------------------------------------------------------------------------------------

    def _stages(self) -> None:
        """The program in order, cut where ``evaluate`` cuts it."""
        conversions = self.evaluation.conversions
        stages = self.known or self._find_stages()
        fixed, slopes = self._local(stages)
        own = np.arange(self.n)[:, None] + np.arange(0, self.shared, self.n)  # (C, groups): the columns of each class
        for number, table in enumerate(self._tables(stages, fixed, slopes)):
            if number == len(stages.between):
                table += self._updates()
            self._above("stage", table[-1], own, table[:-1].T)
            if number < len(stages.between):
                self._collective(conversions[stages.between[number]])

    def _find_stages(self) -> Stages:
        facts, needs = self.facts, [c.need for c in self.evaluation.conversions]
        again = repeats(facts.graph, self.strategies, facts.repeated, facts.evaluator.parts)
        measured = facts.compute.is_measured
        return find_stages(facts.graph, self.strategies, needs, facts.calls, again, measured=measured)

    def _local(self, stages: Stages) -> tuple[Array, list[tuple[str | None, Array]]]:
        """Of what surrounds the step, every distinct call and every distinct slice: fixed seconds (W, C), the group
        that it is dealt out by and its seconds per share (C,)."""
        fixed, slopes = [np.zeros(self.n)], list[tuple[str | None, Array]]([(None, np.zeros(self.n))])
        devices = [self.facts.cluster.devices[r] for r in self.classes.first]
        for parts in stages.calls:
            here = np.ones(self.n) if parts.group is None else self.here[parts.group]
            pairs = [
                (parts_seconds(parts, 0.0, device), 0.0)
                if parts.idle_when_empty and out
                else parts_coefficients(parts, device, at_share=share)
                for device, share, out in zip(devices, here.tolist(), self.out.tolist(), strict=True)
            ]
            constant, slope = np.array(pairs).T
            fixed.append(constant + slope if parts.group is None else constant)
            slopes.append((parts.group, slope))
        for number in stages.slices:
            cost = self.evaluation.conversions[number]
            assert isinstance(cost.need.target, Shard)
            constant, slope = self.wires.slices(cost.nbytes, cost.need.source, cost.need.target)
            fixed.append(constant)
            slopes.append((cost.need.target.group, slope))
        return np.array(fixed), slopes

    def _tables(self, stages: Stages, fixed: Array, slopes: Sequence[tuple[str | None, Array]]) -> Iterator[Array]:
        """Of every stage (groups + 1, C): what each class has of its own share of each group in ms, its constant last.
        It has nothing of other classes' shares: a table with those, too, takes gigabytes where classes are many."""
        slots, by, last = np.empty(len(fixed), dtype=np.intp), np.zeros(fixed.shape), self.shared // self.n
        for row, (group, slope) in enumerate(slopes):
            slots[row] = self._slot(group)
            if slots[row] < last:
                by[row] = slope
            elif group is not None:
                fixed[row] += slope * self.here[group]
        ends = np.searchsorted(stages.stage, np.arange(stages.count + 1)).tolist()
        for a, b in itertools.pairwise(ends):
            work = stages.work[a:b]
            places = np.concatenate([slots[work], np.full(b - a, last)])[:, None] * self.n + np.arange(self.n)
            values = np.concatenate([by[work], fixed[work]])
            table = np.bincount(places.ravel(), values.ravel(), (last + 1) * self.n).astype(np.float64, copy=False)
            yield table.reshape(last + 1, self.n) * MS

    def _slot(self, group: str | None) -> int:
        """Which of the vectors of shares a group has; where it has none, or there is no group, the place of constants,
        which is after them."""
        return self.column.get(group or "", self.shared) // self.n

    def _updates(self) -> Array:
        """(groups + 1, C): the optimizer's rows in ms."""
        total, first = np.zeros((self.shared // self.n + 1, self.n)), list(self.classes.first)
        known: dict[object, tuple[str | None, Array]] = {}
        for node in self.facts.graph.sources("parameter"):
            placement = self.strategies[node.name].outputs[0]
            trained = node.target in self.facts.graph.gradients
            if (key := (node.meta.nbytes, placement, trained)) not in known:
                known[key] = self._update(node.name, placement, first)
            group, seconds = known[key]
            if group is None or group in self.column:
                total[self._slot(group)] += seconds
            else:
                total[-1] += seconds * self.here[group]
        return total * MS

    def _update(self, name: str, placement: Placement | None, first: Sequence[int]) -> tuple[str | None, Array]:
        """(group that it is dealt out by, seconds or those per share (C,))."""
        if not isinstance(placement, Shard):
            return None, self.facts.update_s(name, self.strategies[name], self.sizes)[list(first)]
        everything = {placement.group: (placement.n,) * self.facts.cluster.world_size}
        return placement.group, self.facts.update_s(name, self.strategies[name], everything)[list(first)]

    def _collective(self, cost: ConversionCost) -> None:
        """One variable per stage of the collective, above each of its rows. Its constant does not matter."""
        need = cost.need
        key = (need.collective, cost.decomposition, cost.nbytes, need.source, need.target)
        weight = self.facts.batches.part(need.value)
        if key in self._wires:
            for top in self._wires[key]:
                self.cost[top] += weight
        else:
            form = self.wires.form(*key, self.sizes)
            tops = [self._wire(rows, need, weight) for rows in form.stages]
            self._wires[key] = [top for top in tops if top is not None]

    def _wire(self, rows: Rows, need: Need, weight: float) -> int | None:
        """The variable above these; None where nothing is shared."""
        ends = [
            (p.group, by) for p, by in ((need.source, rows.source), (need.target, rows.target)) if isinstance(p, Shard)
        ]
        if not ends:
            return None
        constant, by_column = rows.constant, dict[int, Array]()
        for group, by in ends:
            if group in self.column:
                first = self.column[group]
                by_column[first] = by_column[first] + by if first in by_column else by
            else:
                constant = constant + by @ self.here[group]
        firsts = sorted(by_column)
        columns = np.array([first + c for first in firsts for c in range(self.n)], dtype=np.intp)
        table = np.concatenate([np.zeros((len(constant), 0)), *(by_column[first] for first in firsts)], axis=1)
        return self._above("wire", constant * MS, np.broadcast_to(columns, table.shape), table * MS, weight)

    def _above(self, label: str, constant: Array, columns: NDArray[np.intp], by: Array, weight: float = 1.0) -> int:
        """A minimised variable above every row, ``constant`` (K,) and ``by`` (K, J) times the shares of ``columns``
        (K, J), which ascend. Equal ones are one variable that counts more."""
        rounded = np.round(by, 9)
        rows, places = np.nonzero(rounded)
        key = (*(a.tobytes() for a in (np.round(constant, 9), rows, columns[rows, places], rounded[rows, places])),)
        if key in self.tops:
            self.cost[self.tops[key]] += weight
            return self.tops[key]
        top = self.tops[key] = self._variable(f"{label}[{len(self.tops)}]", cost=weight)
        first = len(self.row_names)
        for j, least in enumerate(constant.tolist()):
            self._row(f"{label}[{len(self.tops) - 1},{j}]", least, np.inf, [(top, 1.0)])
        rows, places = np.nonzero(np.abs(by) >= SMALLEST)
        terms = (first + rows).tolist(), columns[rows, places].tolist(), (-by[rows, places]).tolist()
        self.entries += zip(*terms, strict=True)
        return top

    # -- memory ------------------------------------------------------------------------------------------------------

    def _memory(self) -> None:
        """Rows of what is held, moved up or down so that they agree with the ledger's peak at the present sizes."""
        everywhere, dealt = list[tuple[int, Array]](), dict[str, list[tuple[int, Array]]]()

        def hold(placement: Placement | None, nbytes: int, moments: Array) -> None:
            if isinstance(placement, Shard):
                dealt.setdefault(placement.group, []).append((nbytes, moments))
            elif placement is not None:
                everywhere.append((nbytes, moments))

        for name, output, nbytes, moments in self.facts.allocated:
            hold(self.strategies[name].outputs[output], nbytes, moments)
        for cost in self.evaluation.conversions:
            if cost.need.value not in self.facts.homes:
                again = self.regather and self.facts.graph.by_name[cost.need.value.node].op == "parameter"
                alive = self.facts.copy_alive(cost.need.value, cost.need.phase if again else "")
                hold(cost.need.target, cost.nbytes, alive)
            if (need := cost.need).value in self.facts.batches.once:
                nbytes = self.facts.batches.left_bytes(need.value, self.facts.graph.meta(need.value))
                hold(need.source, nbytes, self.facts.left(need.value, need.source, need.target))
        whole = _at_moments(everywhere)  # bytes of everybody, and per share of a group
        pieces = {group: _at_moments(held) for group, held in dealt.items()}
        now = whole + sum(by * self.here[group] for group, by in pieces.items())
        spare = np.array(self.evaluation.usable_bytes) - np.array(self.evaluation.memory_bytes, dtype=np.float64)
        room = now.max(axis=0) + [spare[np.array(self.classes.of) == c].min() for c in range(self.n)]
        for t, c in itertools.product(range(MOMENTS), range(self.n)):
            left, terms = float(room[c] - whole[t, 0]), dict[int, float]()
            for group, by in pieces.items():
                if group in self.column:
                    column = self.column[group] + c
                    terms[column] = terms.get(column, 0.0) + float(by[t, 0]) * GB
                else:
                    left -= float(by[t, 0] * self.here[group][c])
            self._row(f"memory[{c},{t}]", -np.inf, left * GB, [(v, k) for v, k in terms.items() if k >= SMALLEST])

    # -- the program -------------------------------------------------------------------------------------------------

    def _variable(self, name: str, *, cost: float = 0.0, upper: float = np.inf) -> int:
        self.names.append(name)
        self.cost.append(cost)
        self.upper.append(upper)
        return len(self.names) - 1

    def _row(self, name: str, lower: float, upper: float, terms: Sequence[tuple[int, float]]) -> None:
        self.entries += [(len(self.row_names), v, k) for v, k in terms]
        self.row_names.append(name)
        self.row_bounds.append((lower, upper))

    def solve(self) -> dict[str, Shares] | None:
        if not self.column:
            return {}
        proto = model_pb2.ModelProto(name="shares")
        proto.variables.ids.extend(range(len(self.names)))
        proto.variables.lower_bounds.extend([0.0] * len(self.names))
        proto.variables.upper_bounds.extend(self.upper)
        proto.variables.integers.extend([False] * len(self.names))
        proto.objective.linear_coefficients.ids.extend(range(len(self.names)))
        proto.objective.linear_coefficients.values.extend(self.cost)
        proto.linear_constraints.ids.extend(range(len(self.row_names)))
        proto.linear_constraints.lower_bounds.extend([lower for lower, _ in self.row_bounds])
        proto.linear_constraints.upper_bounds.extend([upper for _, upper in self.row_bounds])
        fill_matrix(proto, self.entries, np.zeros((0, len(self.names))), len(self.row_names))
        solved = solve_once(proto)
        if solved is None:
            return None
        found = solved.values.tolist()
        by_column = {
            first: self.classes.spread(np.array([max(0.0, found[first + c]) for c in range(self.n)]))
            for first in dict.fromkeys(self.column.values())
        }
        return {name: tuple(by_column[first].tolist()) for name, first in self.column.items()}


def _at_moments(held: Sequence[tuple[int, Array]]) -> Array:
    """(MOMENTS, 1) bytes of all of these together."""
    if not held:
        return np.zeros((MOMENTS, 1))
    found: Array = np.concatenate([moments for _, moments in held], axis=1) @ np.array([[float(n)] for n, _ in held])
    return found
