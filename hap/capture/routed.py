"""Experts of a mixture that are called one after another, each with the rows that are sent to it:

    for e, expert in enumerate(experts):
        row, nth = torch.where(ids == e)                        # ids (rows, k): the experts of every row
        y[row] += weight[row, nth, None] * expert(x[row])       # or y.index_add_(0, row, ...)

How many rows go to one expert no graph of static shapes can say; that every place of ``ids`` goes to one can be. So
what is made of the rows of one is written down (``rows``), and where it is added to rows of ``y`` that is remembered.
Once ``y`` is used, or the step ends, what is alike of all experts is computed together (``together``), for every place
with the expert that its id names, and added to ``y``.

Masks may be ``ids == e``, or ``one_hot(ids)[..., e]`` with its dims in any order, and index by themselves or by their
places. Of all places of the ids rows may be set, too. What else is done with what such a mask selects, as with that of
labels, is done as with any mask's (``selected``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

import torch

from hap.capture.places import Place
from hap.capture.routes import Route, Routes
from hap.capture.rows import Rows, indexed, rows_in
from hap.capture.seen import Seen
from hap.capture.selected import Selected, SelectionError
from hap.capture.together import Call, Read, State, Together, Unlike, made_of, reads_in
from hap.capture.torch_private import is_alias

_META = frozenset(
    ["device", "dim", "dtype", "is_cuda", "is_floating_point", "layout", "ndim", "numel", "shape", "size"]
)
_INDEX_AT: Mapping[Any, int] = {
    torch.Tensor.__getitem__: 1,
    torch.Tensor.__setitem__: 1,
    torch.Tensor.index_select: 2,
    torch.index_select: 2,
    torch.Tensor.index_add_: 2,
}
_READING = frozenset({torch.Tensor.__getitem__, torch.Tensor.index_select, torch.index_select})


class _Place(NamedTuple):
    """What an index says: along which dims of the ids; the mask, if it selects the same, whether there is a dim before,
    and the rest of the index."""

    route: Route
    dims: tuple[int, ...]
    more: tuple[torch.Tensor | None, bool, tuple[Any, ...]]


class _Kind(Enum):
    ADDED = "added, cast to the dtype of what they are added to"
    INDEX_ADDED = "added in the same dtype"
    SET = "written, in the place of what was there"


class _Written(NamedTuple):
    """``rows`` are to be written to ``to`` where they were read along these ``dims`` of the ids, in this state."""

    kind: _Kind
    to: Seen
    rows: Rows
    dims: tuple[int, ...]
    state: State


Owed = list[list[_Written]]


class Routed:
    """What one trace does with rows of experts. ``first``: the first tensor that was made of the same."""

    def __init__(self, routes: Routes, first: Callable[[Any], Any]) -> None:
        self._routes, self._first = routes, first
        self._written: Owed = []  # a list for each memory that is written to
        self._settled: dict[tuple[int, int], Seen] = {}  # of that and how often it had been changed: as it was written

    # -- what is read and written ------------------------------------------------------------------------------------

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a function of rows, or of places of ids, returns; NotImplemented if it is none of these."""
        selects = (
            func in (torch.Tensor.index_select, torch.index_select) and not kwargs and args[1] in (0, -args[0].dim())
        )
        if func is torch.Tensor.__getitem__ or selects:
            rows = self._read(args[0], args[2] if selects else args[1])
            if rows is not None:
                return rows
        if func is torch.Tensor.__setitem__:
            return None if self._writes(*args) else NotImplemented
        if func is torch.Tensor.index_add_ and any(isinstance(a, Rows) for a in (*args, *kwargs.values())):
            return self._add(*args, **kwargs)
        if any(True for _ in rows_in((*args, *kwargs.values()))):
            return Rows.__torch_function__(func, (Rows,), args, kwargs)
        return NotImplemented

    def _read(self, x: Any, index: Any) -> Rows | None:
        """``x[index]`` by a mask of ids or by its places; None if it is nothing of that."""
        place = self._place(x, index)
        if place is None:
            return None
        route, dims, (mask, lead, rest) = place
        if len(dims) > x.dim() or any(x.shape[n] != route.ids.tensor.shape[d] for n, d in enumerate(dims)):
            raise SelectionError("rows for an expert of a tensor of another size than the ids of experts")
        is_owed = any(one.kind is not _Kind.SET for one in self._owed_to(x))
        selected = None if mask is None or is_owed else Selected.of(x, self._first(mask))
        term = Read(Seen.now(x), dims, rest, selected, is_owed)
        return Rows(route, term, indexed(tuple(x.shape[len(dims) :]), rest), x.dtype, lead=lead)

    def _place(self, x: Any, index: Any) -> _Place | None:
        given = index if isinstance(index, tuple) else (index,)
        at = [n for n, i in enumerate(given) if isinstance(i, (Place, torch.Tensor))]
        if not at or not isinstance(x, torch.Tensor):
            return None
        found, lead, rest = given[at[0] : at[-1] + 1], given[: at[0]], given[at[-1] + 1 :]
        while rest and (rest[-1] is ... or (isinstance(rest[-1], slice) and rest[-1] == slice(None))):
            rest = rest[:-1]
        route, order = self._route(found)
        if route is None or lead not in ((), (None,)):
            return None
        mask = None
        if order == list(range(len(route.axes))) and not lead and not rest:
            mask = found[0].unchanged if isinstance(found[0], Place) else found[0]
        return _Place(route, tuple(route.axes[d] for d in order), (mask, bool(lead), tuple(rest)))

    def _route(self, found: Sequence[Any]) -> tuple[Route | None, list[int]]:
        """Of a mask of ids, or of places of one, and its dims that these are along."""
        first, order = found[0], list[int]()
        if isinstance(first, Place):
            if all(isinstance(p, Place) and p.dim is not None and p.of is first.of for p in found):
                order = [p.dim for p in found]
            first = first.of
        elif len(found) == 1 and first.dtype == torch.bool:  # whole numbers are no mask, though of a one-hot tensor
            order = list(range(first.dim()))
        return self._routes.of(first) if order and len(set(order)) == len(order) else None, order

    def _writes(self, to: Any, index: Any, value: Any) -> bool:
        """Whether it is ``to[index] += rows``, which Python spells ``to[index] = to[index] + rows``, or of all places
        ``to[index] = rows``. What else is written is what a mask selects."""
        target = self._read(to, index) if isinstance(value, Rows) else None
        if target is None or not isinstance(target.term, Read) or target.term.rest or target.lead:
            return False
        if not value.route.is_of(target.route):
            raise SelectionError("rows for an expert that are written to another one's")
        term, dims = value.term, target.term.dims
        if isinstance(term, Call) and term.func is torch.Tensor.to and term.args[1:] == (to.dtype,):
            term = term.args[0]  # as a change in place does
        is_sum = isinstance(term, Call) and getattr(term.func, "__name__", "").strip("_") in ("add", "radd")
        if isinstance(term, Call) and is_sum and not term.kwargs and len(term.args) == 2:
            grads = target.term.state.grads
            is_sum = value.term.state.grads == term.state.grads == grads
            for own, other in (term.args, term.args[::-1]) if is_sum else ():
                is_own = isinstance(own, Read) and own.state.grads == grads and _is_same(self._now(own), target.term)
                if is_own and reads_in(other):
                    if not self._routes.is_once(value.route, set(range(value.route.ids.tensor.dim())) - set(dims)):
                        raise SelectionError(
                            "`+=` of rows for an expert by ids that may name it twice for one row, as those of topk do "
                            "not: then only one of both is added, so use index_add_, which adds them all"
                        )
                    return self._remember(_Kind.ADDED, to, value.like(other, value.behind, None), target.term)
        return len(dims) == value.route.ids.tensor.dim() and self._remember(_Kind.SET, to, value, target.term)

    def _now(self, own: Read) -> Read:
        """What was read as if all had been added to it then, once it is."""
        now = self._settled.get((id(_owner(own.source.tensor)), own.source.version)) if own.is_owed else None
        return own if now is None else replace(own, source=own.source._replace(version=now.version), is_owed=False)

    def _add(self, to: torch.Tensor, dim: int, index: Any, source: Any, *, alpha: float = 1) -> torch.Tensor:
        target = self._read(to, index)
        if target is None or not isinstance(target.term, Read) or not isinstance(source, Rows):
            raise SelectionError("index_add_ of rows for an expert elsewhere than where the same mask says")
        if not source.route.is_of(target.route):
            raise SelectionError("rows for an expert that are added to another one's")
        if dim not in (0, -to.dim()) or alpha != 1 or target.term.rest or target.lead:
            raise SelectionError("index_add_ of rows for an expert along another dim than the first")
        if not self._remember(_Kind.INDEX_ADDED, to, source, target.term):
            raise SelectionError("rows for an expert of what rows of experts are added to: read them from a copy")
        return to

    def _remember(self, kind: _Kind, to: torch.Tensor, rows: Rows, target: Read) -> bool:
        """Whether it can be put off: not if it is made of what is written to, but for the places that are set."""
        if rows.lead or rows.behind != tuple(to.shape[len(target.dims) :]):
            raise SelectionError("rows of an expert that are written to rows of another size")
        for one in made_of(rows.term):
            if isinstance(one, Seen):
                if is_alias(one.tensor, to) or self._owed_to(one.tensor):
                    return False
            elif one.is_owed or (is_alias(one.source.tensor, to) and not (kind is _Kind.SET and _is_same(one, target))):
                return False
        owed = self._owed_to(to)
        owed.append(_Written(kind, Seen.now(to), rows.like(rows.term, rows.behind, None), target.dims, State.now()))
        if len(owed) == 1:
            self._written.append(owed)
        return True

    # -- what is done ------------------------------------------------------------------------------------------------

    def owed(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Owed:
        """What was to be written to these arguments, and is not; from now on the caller's. Not what may wait: more of
        the same, and what only asks for shapes or dtypes."""
        if not self._written or _asks_for_meta(func):
            return []
        used = list(_tensors((args, kwargs)))
        changed = used if _changes(func, kwargs) else []
        at = _INDEX_AT.get(func, len(args))
        if at < len(args) and (func in _READING or isinstance(args[-1], Rows)) and self._may_wait(args[0], args[at]):
            used, changed = [tensor for tensor in used if not is_alias(tensor, args[0])], []
        return [*self._readers(changed), *self._taken(used)]

    def _taken(self, used: Collection[torch.Tensor]) -> Owed:
        """What is to be written to these, behind what is made of it as it is."""
        found: Owed = []
        for written in self._written:
            if any(is_alias(written[0].to.tensor, tensor) for tensor in used) and _holds(self._written, written):
                self._written = [other for other in self._written if other is not written]
                found += [*self._readers([written[0].to.tensor]), written]
        return found

    def _readers(self, changed: Collection[torch.Tensor]) -> Owed:
        """What is to be written and made of these."""

        def reads(written: Iterable[_Written]) -> bool:
            parts = (part for one in written for part in made_of(one.rows.term))
            sources = [part.tensor if isinstance(part, Seen) else part.source.tensor for part in parts]
            return any(is_alias(source, tensor) for source in sources for tensor in changed)

        return self._taken([written[0].to.tensor for written in self._written if reads(written)]) if changed else []

    def _owed_to(self, tensor: torch.Tensor) -> list[_Written]:
        return next((w for w in self._written if is_alias(w[0].to.tensor, tensor)), [])

    def _may_wait(self, x: Any, index: Any) -> bool:
        """Whether what is still to be written to ``x`` is for others of the same experts."""
        place = self._place(x, index)
        if place is None:
            return False
        route, dims, _ = place
        owed = [(one.rows.route, one.dims) for one in self._owed_to(x)]
        return all(r.ids.tensor is route.ids.tensor and r.number != route.number and d == dims for r, d in owed)

    def owed_all(self) -> Owed:
        return self._taken([written[0].to.tensor for written in self._written])

    def settle(self, owed: Owed) -> None:
        for written in owed:
            self._settle(written)

    def _settle(self, written: Sequence[_Written]) -> None:
        """Of distinct experts of the same ids: all are computed before the first is written."""
        if not all(one.to.is_unchanged for one in written):
            raise SelectionError("rows of experts are written to a tensor that was changed meanwhile")
        written = sorted(written, key=lambda one: one.rows.route.number)
        alike = dict[object, list[_Written]]()
        for one in written:
            alike.setdefault((one.kind, id(one.to.tensor), one.state), []).append(one)
        computed = [found for ones in alike.values() for found in self._computed(ones)]
        for found in computed:
            found.write()
        to = written[0].to
        self._settled[id(_owner(to.tensor)), to.version] = Seen.now(_owner(to.tensor))

    def _computed(self, written: Sequence[_Written]) -> list[_Computed]:
        """Together, or where they are not alike one after another."""
        if not all(one.rows.route.ids.is_unchanged for one in written):
            raise SelectionError("ids of experts that were changed in place since: change a copy of them")
        try:
            return [_Computed.of(written, self._routes)]
        except Unlike:
            return [_Computed.of([one], self._routes) for one in written]


class _Computed(NamedTuple):
    """What some experts made of their rows (*places of ids, ...)."""

    of_first: _Written
    together: Together
    found: torch.Tensor

    @classmethod
    def of(
        cls,
        written: Sequence[_Written],
        routes: Routes,
    ) -> _Computed:
        ids = written[0].rows.route.ids.tensor
        with written[0].state.again():
            together = Together(ids, [one.rows.route.number for one in written], routes.limit(ids), routes.part_of)
            return cls(written[0], together, together.at_places([one.rows.term for one in written]))

    def write(self) -> None:
        first, together, found = self.of_first, self.together, self.found
        to, dims, left = first.to.tensor, first.dims, list(range(len(together.grid)))
        with first.state.again():
            if first.kind is not _Kind.SET:
                over = [d for d in left if d not in dims]
                found = together.where_any(found, 0)
                if first.kind is _Kind.ADDED:
                    found = found.to(to.dtype)
                found, left = found.sum(over) if over else found, sorted(dims)
            order = (*(left.index(d) for d in dims), *range(len(left), found.dim()))
            if found.dtype != to.dtype and first.kind is not _Kind.SET:
                raise SelectionError(f"rows of experts in {found.dtype} are added to {to.dtype}: cast them")
            if first.kind is _Kind.SET:
                to.copy_(together.where_any(found.to(to.dtype), to.permute(*_inverse(order))).permute(*order))
            else:
                to.add_(found.permute(*order))


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _asks_for_meta(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (getattr(func.__self__, "__name__", "") if name == "__get__" else name) in _META


def _changes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether it may change an argument."""
    own = getattr(func, "__name__", "")
    changing = own in ("__setitem__", "__set__") or (own.startswith("__i") and own.endswith("__"))
    return changing or (own.endswith("_") and not own.endswith("__")) or bool(kwargs.get("inplace")) or "out" in kwargs


def _is_same(own: Read, other: Any) -> bool:
    """Whether both read the same."""
    same = own.source.tensor is other.source.tensor and own.source.version == other.source.version
    return same and own.dims == other.dims and not own.rest and not other.rest


def _holds(lists: Owed, one: list[_Written]) -> bool:
    return any(other is one for other in lists)


def _owner(tensor: torch.Tensor) -> torch.Tensor:
    """Whose memory it is."""
    return tensor if tensor._base is None else tensor._base


def _tensors(arguments: Any) -> Iterator[torch.Tensor]:
    if isinstance(arguments, torch.Tensor):
        yield arguments
    elif isinstance(arguments, Mapping):
        yield from _tensors(tuple(arguments.values()))
    elif isinstance(arguments, (tuple, list)):
        for one in arguments:
            yield from _tensors(one)
