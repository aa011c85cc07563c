"""The cheapest distributed program at fixed shard sizes, synthesised triple by triple: A* over the background theory.

After HAP (arXiv 2401.05965, and its artifact, where the heuristic is 0, every property is a separate key and there is
no memory). A state has decided the first ``depth`` nodes of the graph. It consists of

    open      the tensors that some later node reads: where each was made, and which copies exist or, if it is not made
              yet, are asked for. Everything else is irrelevant for what follows and forgotten.
    ready     T_r, when each kind of rank is ready (R,), by the clock of ``hap.search.theory``
    held      bytes, moment by moment and kind by kind (M * R,)

and a step decides one more node: its inputs are converted, it is computed, and results are brought home (``_expand``).

    f = max( max_r T_r,  sum_r w_r T_r + full . (held - capacity) + left )                          (``_estimate``)

with the potentials of ``hap.search.potentials`` for ``left``: never more than the best completion costs, and at the
start the bound of the MILP's LP relaxation. Two states of equal depth and equal ``open`` have the same completions, and
each completion adds non-negative amounts to ``ready`` and ``held`` and takes maxima over ranks: a state whose vectors
are nowhere smaller than another's is dominated and dropped (``_Frontier``). A state that can no longer fit (held plus
the least that the other nodes hold) is dropped too. So the first finished state that comes out of the queue is optimal.

Ties go to the deeper state, then to the one found first; nothing else decides, so a result is the same every time. A
first dive, along the options that the relaxation takes, gives the upper bound that later states must beat, and what is
found where there are too many of them. Where memory binds, a beam does, if the dive ends before the end; and where
there are too many states it may find something better.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import NamedTuple

from hap.search.milp import Choice
from hap.search.potentials import NOTHING, Copies, Potentials, best_potentials, dot
from hap.search.tables import Prices
from hap.search.theory import Clock, Cost, Theory, Vector, background_theory, bill_prices

STATES = 1_000_000  # expanded at most
BEAM = 64  # states
LOOK = 200  # states expanded between two looks at whether the search is to end
Open = dict[int, tuple[int, Copies]]  # tensor -> (place, or -1 while it is not made; copies)
UNMADE = -1


class Picks(NamedTuple):
    """Options so far: the last one, and those before it."""

    last: int
    before: Picks | None


class State(NamedTuple):
    """See the module's docstring. ``waits[v]``: what tensor v contributes to ``left``."""

    depth: int
    open: Open
    ready: Vector
    held: Vector
    waits: dict[int, float]
    picks: Picks | None


@dataclass(frozen=True)
class Synthesis:
    """What the search found. ``picks`` is empty if nothing fits. ``bound_s``: no program takes less."""

    picks: tuple[int, ...]
    seconds: float
    bound_s: float
    start_bound_s: float
    expanded: int
    generated: int
    fullness: float  # the part of the memory that it takes, where it takes most; 1 where all of them fit

    @property
    def proved(self) -> bool:
        return self.bound_s >= self.seconds


@dataclass
class _Frontier:
    """For every key the vectors that no other one beats."""

    kept: dict[object, list[Vector]] = field(default_factory=dict)

    def admits(self, key: object, vector: Vector) -> bool:
        """Whether nothing kept is as good; then it is kept, instead of all that it beats."""
        known = self.kept.setdefault(key, [])
        if any(all(a <= b for a, b in zip(one, vector, strict=True)) for one in known):
            return False
        known[:] = [one for one in known if not all(a <= b for a, b in zip(vector, one, strict=True))]
        known.append(vector)
        return True

    def has(self, key: object, vector: Vector) -> bool:
        return any(one is vector for one in self.kept[key])


class Astar:
    """One search. ``check``: called every ``LOOK`` states; may end it by an exception."""

    def __init__(self, theory: Theory, potentials: Potentials, check: Callable[[], None] = lambda: None) -> None:
        self.theory, self.potentials, self.check = theory, potentials, check
        self.size = len(theory.costs)
        self.levels = [*accumulate(reversed(potentials.level), initial=0.0)][::-1]  # of the nodes from here on
        self.least_held = self._least_held()
        self.binding = bool(theory.capacity_bytes)
        self.expanded = self.generated = 0
        self.asking: dict[int, list[int]] = {}  # tensor -> uses by the class that makes it
        for v, tensor in enumerate(theory.tensors):
            self.asking[v] = [k for k, use in enumerate(tensor.uses) if use.reader == tensor.producer]
        self.last_use = [max((u.reader for u in t.uses if u.reader is not None), default=-1) for t in theory.tensors]
        self._wanted: dict[tuple[int, int], Copies] = {}
        self._groups()

    # -- what is fixed -------------------------------------------------------------------------------------------------

    def _least_held(self) -> list[Vector]:
        """Depth -> bytes that the nodes from there on hold at least."""
        least = [
            tuple(map(min, zip(*(self.theory.costs[a][i].held_bytes for i in options), strict=True)))
            for a, options in enumerate(self.theory.options)
        ]
        start = tuple(0.0 for _ in self.theory.capacity_bytes)
        return [*accumulate(reversed(least), _add, initial=start)][::-1]

    def _groups(self) -> None:
        """Inputs that are sharded in one group, all or none of them."""
        self.follows: dict[int, list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {}  # -> first, its options, own
        self.leads: dict[int, int] = {}  # first class of a group -> the last
        for (first, options), *rest in self.theory.classes.together:
            self.leads[first] = max(self.leads.get(first, first), *(other for other, _ in rest))
            for other, own in rest:
                self.follows.setdefault(other, []).append((first, options, own))

    def _later(self, v: int, depth: int) -> Copies:
        """The (place, copy) that readers of tensor v from ``depth`` on may want."""
        if (v, depth) not in self._wanted:
            uses = (u for u in self.theory.tensors[v].uses if u.reader is not None and u.reader >= depth)
            self._wanted[v, depth] = frozenset((q, u.copy) for u in uses for q in u.wants)
        return self._wanted[v, depth]

    # -- states --------------------------------------------------------------------------------------------------------

    def start(self) -> State:
        opened: Open = {}
        waits: dict[int, float] = {}
        for v, tensor in enumerate(self.theory.tensors):
            asked = [(u.wants[0], u.copy) for u in tensor.uses if u.reader is None]
            if asked:
                opened[v], waits[v] = (UNMADE, frozenset(asked)), self.potentials.asked(v)
        zero = (0.0,) * self.theory.ranks
        return State(0, opened, zero, tuple(0.0 for _ in self.theory.capacity_bytes), waits, None)

    def expand(self, state: State) -> Iterator[State]:
        self.expanded += 1
        if self.expanded % LOOK == 0:
            self.check()
        for option in self.theory.options[state.depth]:
            if self._agrees(state, option):
                child = self._expand(state, option)
                if child is not None:
                    self.generated += 1
                    yield child

    def _agrees(self, state: State, option: int) -> bool:
        """Whether the inputs of a group that are decided are sharded if this one is."""
        follows = self.follows.get(state.depth, ())
        return all((_picked(state, first) in options) == (option in own) for first, options, own in follows)

    def _expand(self, state: State, option: int) -> State | None:
        """The state after deciding one more node; None if a conversion is impossible or memory is exceeded."""
        a, opened, waits = state.depth, dict(state.open), dict(state.waits)
        before = self._read(a, option, opened, waits)
        after = None if before is None else self._make(a, option, opened)
        if before is None or after is None:
            return None
        pays, held = [*before, self.theory.costs[a][option], *after], state.held
        for cost in pays:
            held = _add(held, cost.held_bytes)
        if self.binding and not self._fits(held, a + 1):
            return None
        for v in dict.fromkeys([*(v for v, _ in self.theory.read[a]), *self.theory.made[a]]):
            self._settle(v, a, opened, waits)
        return State(a + 1, opened, self._ready(state.ready, pays), held, waits, Picks(option, state.picks))

    def _read(self, a: int, option: int, opened: Open, waits: dict[int, float]) -> list[Cost] | None:
        """What bringing the inputs of class a into place costs; what is not made yet is asked for."""
        pays = []
        for v, k in self.theory.read[a]:
            tensor = self.theory.tensors[v]
            place, copies = opened.get(v, (UNMADE, NOTHING))
            wanted = tensor.uses[k].wants[option], tensor.uses[k].copy
            if place == UNMADE:
                waits[v] = waits.get(v, 0.0) + self.potentials.need[v][k][wanted[0]]
            elif wanted[0] != place and wanted not in copies:
                if (place, *wanted) not in tensor.conversions:
                    return None
                pays.append(tensor.conversions[place, *wanted])
            opened[v] = place, copies | {wanted}
        return pays

    def _make(self, a: int, option: int, opened: Open) -> list[Cost] | None:
        """What bringing the outputs of class a where they are asked for already costs."""
        pays = []
        for v in self.theory.made[a]:
            tensor, place = self.theory.tensors[v], self.theory.tensors[v].gives[option]
            copies = opened.get(v, (UNMADE, NOTHING))[1]
            copies |= {(tensor.uses[k].wants[option], tensor.uses[k].copy) for k in self.asking.get(v, ())}
            for q, copy in sorted(copies):
                if q != place:
                    if (place, q, copy) not in tensor.conversions:
                        return None
                    pays.append(tensor.conversions[place, q, copy])
            opened[v] = place, copies
        return pays

    def _settle(self, v: int, decided: int, opened: Open, waits: dict[int, float]) -> None:
        """Forget what no later reader wants; renew what the tensor contributes to ``left``."""
        place, copies = opened[v]
        if place == UNMADE:
            return
        if self.last_use[v] <= decided:
            del opened[v]
            waits.pop(v, None)
            return
        copies = copies & self._later(v, decided + 1) - {(place, use.copy) for use in self.theory.tensors[v].uses}
        opened[v] = place, copies
        waits[v] = self.potentials.waiting(v, place, copies, decided)

    def _ready(self, ready: Vector, pays: Sequence[Cost]) -> Vector:
        for cost in pays:
            if self.theory.waits and cost.together_s > 0:
                together = max(ready) + cost.together_s
                ready = tuple(together + s for s in cost.alone_s)
            else:
                ready = tuple(t + cost.together_s + s for t, s in zip(ready, cost.alone_s, strict=True))
        return ready

    def _fits(self, held: Vector, depth: int) -> bool:
        pairs = zip(held, self.least_held[depth], self.theory.capacity_bytes, strict=True)
        return all(h + least <= c * (1 + 1e-12) for h, least, c in pairs)

    def estimate(self, state: State) -> float:
        """f: no completion takes less."""
        slowest = max(state.ready)
        if state.depth == self.size:
            return slowest
        p = self.potentials
        left = self.levels[state.depth] + sum(state.waits.values())
        spare = dot(p.full, state.held) - dot(p.full, self.theory.capacity_bytes)
        return max(slowest, dot(p.weights, state.ready) + spare + left)

    def key(self, state: State) -> object:
        """What the completions of a state depend on, beside ``ready`` and ``held``."""
        groups = [_picked(state, first) for first, last in self.leads.items() if first < state.depth <= last]
        return state.depth, tuple(state.open.items()), tuple(groups)

    # -- the search ----------------------------------------------------------------------------------------------------

    def run(self, states: int = STATES, gap: float = 0.0, below_s: float = inf) -> Synthesis:
        """The cheapest program of those that take less than ``below_s``; ends early after so many states, or when the
        best is proved within ``gap``."""
        begin = self.start()
        bound = first = self.estimate(begin)
        best, seconds = self._dive(begin)
        if best is None:
            best, seconds = self._beam(begin)
        if seconds >= below_s:
            best, seconds = None, below_s
        last = self.expanded + states
        queue: list[tuple[float, int, int, State, Vector]] = [(first, 0, 0, begin, ())]
        frontier, count = _Frontier(), 0
        while queue:
            f, _, _, state, vector = heapq.heappop(queue)
            bound = min(f, seconds)
            if f >= seconds * (1 - gap):
                break
            if self.expanded >= last:
                best, seconds = min(((best, seconds), self._beam(begin)), key=lambda found: found[1])
                break
            if state.depth and not frontier.has(self.key(state), vector):
                continue
            if state.depth == self.size:
                best, seconds = state, f
                break
            for child in self.expand(state):
                estimate = self.estimate(child)
                if estimate >= seconds:
                    continue
                vector = child.ready + child.held if self.binding else child.ready
                if frontier.admits(self.key(child), vector):
                    count += 1
                    heapq.heappush(queue, (estimate, -child.depth, count, child, vector))
        else:
            bound = seconds
        fullness = 1.0 if best is None else self._fullness(best)
        return Synthesis(_chain(best), seconds, bound, first, self.expanded, self.generated, fullness)

    def _beam(self, state: State) -> tuple[State | None, float]:
        """The best of those that are left where of every depth the ``BEAM`` states with the least estimates go on;
        where memory binds, as it is there that a dive ends before the end, or far from the best."""
        states = [state] if self.binding else []
        for _ in range(self.size):
            frontier, children = _Frontier(), list[tuple[float, int, State]]()
            for child in (child for one in states for child in self.expand(one)):
                if frontier.admits(self.key(child), child.ready + child.held):
                    children.append((self.estimate(child), len(children), child))
            states = [child for _, _, child in heapq.nsmallest(BEAM, children)]
        best = min(states, key=lambda one: max(one.ready), default=None)
        return best, inf if best is None else max(best.ready)

    def _fullness(self, state: State) -> float:
        parts = (held / most for held, most in zip(state.held, self.theory.capacity_bytes, strict=True) if most > 0.0)
        return max(parts, default=1.0)

    def _dive(self, state: State) -> tuple[State | None, float]:
        """Always to the child that the relaxation takes most of, of equals the one with the least estimate; where there
        is none, nothing is found."""
        while state.depth < self.size:
            taken, children = self.potentials.taken[state.depth], list(self.expand(state))
            if not children:
                return None, inf
            state = min(
                children, key=lambda child: (-round(taken[_picked(child, state.depth)], 6), self.estimate(child))
            )
        return state, max(state.ready)


def _add(a: Vector, b: Vector) -> Vector:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _picked(state: State, a: int) -> int:
    """The option of class a, which is decided."""
    picks = state.picks
    for _ in range(state.depth - 1 - a):
        assert picks is not None
        picks = picks.before
    assert picks is not None
    return picks.last


def _chain(state: State | None) -> tuple[int, ...]:
    found: list[int] = []
    picks = None if state is None else state.picks
    while picks is not None:
        found.append(picks.last)
        picks = picks.before
    return tuple(reversed(found))


def synthesise(
    theory: Theory,
    *,
    states: int = STATES,
    gap: float = 0.0,
    below_s: float = inf,
    check: Callable[[], None] = lambda: None,
) -> Synthesis | None:
    """The cheapest program of a theory; None if none fits the memory, or none that does takes less than ``below_s``.
    ``check`` is called during the search, and may end it by an exception."""
    potentials = best_potentials(theory)
    if potentials is None:
        return None
    found = Astar(theory, potentials, check).run(states, gap, below_s)
    return found if found.picks else None


def choose(
    prices: Prices,
    *,
    forced: Mapping[int, Sequence[int]] | None = None,
    barriers: bool = False,
    nodes: int = STATES,
    gap: float = 1e-6,
    below_s: float = inf,
    check: Callable[[], None] = lambda: None,
) -> Choice | None:
    """What ``hap.search.milp.choose`` returns, found by A*: ``variables`` counts the states, ``rows`` the triples."""
    clock: Clock = "node" if barriers else "step"
    allowed = {a: tuple(options) for a, options in (forced or {}).items()}
    bill, priced = bill_prices(prices)
    theory = background_theory(bill, priced.coefficients(), clock, forced=allowed)
    found = synthesise(theory, states=nodes, gap=gap, below_s=below_s, check=check)
    if found is None:
        return None
    status = "optimal" if found.bound_s >= found.seconds * (1 - gap) else "state_limit"
    triples = sum(1 for _ in theory.triples())
    return Choice(found.picks, found.seconds, found.bound_s, found.generated, triples, status, found.fullness)
