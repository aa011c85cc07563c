"""Functions of ``torch.nn`` that cannot be cut as they are written, in terms that can.

- Average pooling to a single place is a mean. PyTorch takes it for that, too, but gives the result the strides of its
  argument where channels lie last, as after a layer norm over channels. A graph has no strides, and the gradient of
  such a call is written in terms of memory.
- A bag of embeddings, where all bags have one size, is a sum, mean or maximum over gathered rows. As a call of its own
  it says where each bag begins, among all of them. Bags that begin where a tensor says are left, and refused.
- The CTC loss keeps a table whose size values tell: ``hap.ctc``.
- Distances of all pairs of rows are those of all rows to all, above the diagonal.
- What is written on a diagonal, in place, is ``where``; PyTorch writes through the memory's strides.
- Of matrices: ``hap.capture.matrices``.
- The margin loss of several labels, as PyTorch takes it apart, counts places behind the last label as the first class.
- The Gaussian loss looks at its variances, whether they are negative; values are not known while a program is made.
- Padding by reflection or by the last value takes the first dim for the batch, or none where there are no more dims
  than channels and places: sequences are then the channels. That is how ``torch.stft`` pads them. Here they come first.
- ``x[mask] = value``, by a mask of booleans, is ``where`` if the value does not say how many places there are. As a
  write at places it can be dealt out by nothing, as places are counted over the whole, and a value's gradient has a
  size that depends on the mask. ``x[mask]`` that is read is ``Selected``, and so is what is read at all places of a
  mask (``mask.nonzero()``).
- What no step can have is refused, with what to write instead: ``hap.capture.refused``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hap.capture.known import Known
from hap.capture.matrices import OF_MATRICES
from hap.capture.memory import SET_DATA, set_data
from hap.capture.outside import Outside
from hap.capture.places import Place, as_mask, holds_places, places
from hap.capture.refused import COUNTING, REFUSED, explained, refuse_sparse
from hap.capture.routed import Owed, Routed
from hap.capture.routes import Routes
from hap.capture.rows import Rows
from hap.capture.sames import Sames
from hap.capture.selected import Selected
from hap.ctc import ctc_loss
from hap.errors import CaptureError


class Respelled(TorchFunctionMode):
    """While active, those functions run as they are written here, where they can. ``state``: parameters and buffers of
    the step, beside its ``inputs``; ``outside``: the model's own. ``as_places``: what is read by a mask that is known
    has a size, and cannot be dealt out along it."""

    def __init__(
        self,
        state: Mapping[str, torch.Tensor],
        inputs: Sequence[torch.Tensor],
        outside: Outside,
        *,
        as_places: bool = False,
    ) -> None:
        super().__init__()
        self._as_places = as_places
        self._sames, self.known = Sames(), Known(outside)
        self._routes = Routes(self._sames.first, lambda tensor: self.known.value(tensor) is not None)
        self._routed = Routed(self._routes, self._sames.first)
        self._state, self._inputs, self._outside = state, inputs, outside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = (self._outside.inside(given, self._state) for given in (tuple(args), kwargs or {}))
        found = self._of_experts(func, args, kwargs)
        if found is not NotImplemented:
            return found
        if func == SET_DATA:
            tensor, value = args
            return set_data(tensor, value, tuple(self._state.values()), self._inputs)
        if func is torch.Tensor.__setitem__ and isinstance(args[2], Rows):
            self._settle(self._routed.owed(func, args[:1], {}))
            args = (*args[:2], args[2].selected())
        if func in _BY_MASK:
            args = (*args[:1], *map(self._mask, args[1:2]), *args[2:])  # never what may be written to
            kwargs = {k: self._mask(a) if k == "mask" else a for k, a in kwargs.items()}
        if func in _SELECTING and any(isinstance(a, Place) for a in (*args, *kwargs.values())):
            func, args, kwargs = torch.Tensor.__getitem__, self._selected(*args, **kwargs), {}
        if holds_places((*args, *kwargs.values())):
            return Place.__torch_function__(func, types, args, kwargs)
        if any(isinstance(a, Selected) for a in (*args, *kwargs.values())):
            return Selected.__torch_function__(func, types, args, kwargs)
        asked = (args[1:], kwargs) if self._as_places and func in _READ_BY_MASK else (args, kwargs)
        has_size = func in _SIZED_BY_VALUES and self.known.all_of(asked)
        found = _INSTEAD[func](*args, **kwargs) if func in _INSTEAD and not has_size else None
        if found is None:
            with explained(func):
                found = self.known.call(func, args, kwargs)
            refuse_sparse(found, args)
            self._sames.note(func, args, kwargs, found)
            self._routes.note(func, args, kwargs, found)
        return found

    def assign(self, new: Mapping[str, torch.Tensor]) -> None:
        """From now on these are the values of these buffers, for whoever reads them outside of the model's modules."""
        self._state = {**self._state, **new}

    def settle(self) -> None:
        """While it is active: all that was put off is done."""
        self._routed.settle(self._routed.owed_all())

    def _of_experts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """NotImplemented if it has nothing to do with them; what it uses has all that was to be written to it."""
        self._settle(self._routed.owed(func, args, kwargs))
        return self._routed.call(func, args, kwargs)

    def _settle(self, owed: Owed) -> None:
        if owed:
            with self:
                self._routed.settle(owed)

    def _mask(self, index: Any) -> Any:
        return self._sames.first(as_mask(index))

    def _selected(self, input: Any, dim: int, index: Any) -> tuple[Any, ...]:
        """What ``input`` is indexed with, whole dims in front."""
        index = self._mask(index)
        behind = (slice(None),) * (dim % input.dim()) if isinstance(input, torch.Tensor) else ()
        return input, (*behind, index)


Instead = Callable[..., torch.Tensor | Selected | Place | tuple[Place, ...] | None]  # None: as it is


def _pooled(dims: int) -> Instead:
    def pool(input: torch.Tensor, output_size: Any) -> torch.Tensor | None:
        wanted = (output_size,) * dims if isinstance(output_size, int) else tuple(output_size)
        last = range(-dims, 0)
        if all(n == 1 or (n is None and input.shape[d] == 1) for d, n in zip(last, wanted, strict=True)):
            return input.mean(tuple(last), keepdim=True)
        return None

    return pool


def _bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor | None:
    """``input`` (bags, size) -> (bags, dims). What ``padding_idx`` says counts for nothing, and a bag of it is zero."""
    if input.dim() != 2 or offsets is not None or max_norm is not None or sparse:
        return None
    rows = functional.embedding(input, weight, scale_grad_by_freq=scale_grad_by_freq)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(2)
    if padding_idx is None:
        return rows.sum(1) if mode == "sum" else rows.mean(1) if mode == "mean" else rows.max(1).values
    counts = (input != padding_idx % weight.shape[0]).unsqueeze(2)
    if mode == "max":
        most = torch.where(counts, rows, -math.inf).max(1).values
        return torch.where(counts.any(1), most, 0.0)
    total = torch.where(counts, rows, 0.0).sum(1)
    return total if mode == "sum" else total / counts.sum(1).clamp(min=1)


def _pair_distances(input: torch.Tensor, p: float = 2.0) -> torch.Tensor | None:
    """``input`` (rows, columns) -> (pairs,)."""
    if input.dim() != 2:
        return None
    n, exact = input.shape[0], "donot_use_mm_for_euclid_dist"
    first, second = torch.triu_indices(n, n, 1, device=input.device)
    return torch.cdist(input, input, p, compute_mode=exact)[first, second]


def _fill_diagonal(x: torch.Tensor, fill_value: bool | int | float, wrap: bool = False) -> torch.Tensor | None:
    """``wrap``: of a matrix with more rows than columns, one diagonal below the other."""
    if x.dim() < 2 or (x.dim() > 2 and len(set(x.shape)) > 1) or (wrap and x.shape[0] > x.shape[1]):
        return None
    first, *others = (
        torch.arange(n, device=x.device).view(-1, *(1,) * (x.dim() - 1 - d)) for d, n in enumerate(x.shape)
    )
    on_diagonal = functools.reduce(torch.logical_and, (first == other for other in others))
    return x.copy_(torch.where(on_diagonal, _like_elements(x, fill_value), x))


def _like_elements(x: torch.Tensor, value: bool | int | float) -> bool | int | float:
    """``where`` would take whole numbers to floating point first, where large ones are rounded."""
    return int(value) if isinstance(value, float) and not (x.is_floating_point() or x.is_complex()) else value


def _multilabel_margin(
    input: torch.Tensor,
    target: torch.Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor | None:
    """``input`` (rows, classes), ``target`` (rows, classes): labels, and -1 behind the last one; or of one row."""
    if size_average is not None or reduce is not None:
        raise CaptureError("multilabel_margin_loss with size_average or reduce: use reduction")
    if reduction not in ("none", "mean", "sum"):
        return None
    rows, labels = torch.atleast_2d(input), torch.atleast_2d(target)
    classes = torch.arange(rows.shape[1], device=input.device)
    ends = torch.where(labels == -1, classes, rows.shape[1]).amin(1, keepdim=True)
    counts = classes < ends  # (rows, places)
    of_label = rows.gather(1, torch.where(counts, labels, 0))
    is_label = (torch.where(counts, labels, -1).unsqueeze(2) == classes).any(1)  # (rows, classes)
    short = (1 - of_label.unsqueeze(2) + rows.unsqueeze(1)).clamp(min=0) / rows.shape[1]
    loss = torch.where(counts.unsqueeze(2) & ~is_label.unsqueeze(1), short, 0.0).sum((1, 2))
    loss = loss if input.dim() == 2 else loss.squeeze(0)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _gaussian_nll(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor | None:
    """Variances below ``eps`` count as that, with the gradient of what they are."""
    if not isinstance(var, torch.Tensor) or reduction not in ("none", "mean", "sum"):
        return None
    if var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    differ = [b for a, b in zip(input.shape, var.shape, strict=False) if a != b]
    if var.dim() != input.dim() or differ not in ([], [1]):
        return None
    var = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (var.log() + (input - target).square() / var + (math.log(2 * math.pi) if full else 0.0))
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _padded(input: torch.Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> torch.Tensor | None:
    """``input`` (channels, spatial...), or one sample of that."""
    channels = input.dim() - 1 - len(pad) // 2
    if mode not in ("reflect", "replicate") or channels not in (0, 1) or (channels and input.shape[0] != 1):
        return None
    samples = input.transpose(0, 1) if channels else input.unsqueeze(1)
    padded = functional.pad(samples, pad, mode)
    return padded.transpose(0, 1) if channels else padded.squeeze(1)


def _stft(
    input: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    center: bool = True,
    pad_mode: str = "reflect",
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor | None:
    """``input`` (sequences, length), padded before instead of inside."""
    padded = _padded(input, (n_fft // 2,) * 2, pad_mode) if center and input.dim() == 2 else None
    if padded is None:
        return None
    return torch.stft(padded, n_fft, hop_length, win_length, window, False, pad_mode, *args, **kwargs)


def _written(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor | None:
    """``x[index] = value`` in place; ``index`` is a mask, beside which whole dims may stand."""
    found = _placed(x, index if isinstance(index, tuple) else (index,))
    if found is None:
        return None
    mask, behind = found
    if isinstance(value, torch.Tensor):
        while value.dim() and value.shape[0] == 1:
            value = value[0]
        if value.dtype != x.dtype or value.dim() > behind:
            return None
    elif not isinstance(value, (bool, int, float)):
        return None
    else:
        value = _like_elements(x, value)
    return x.copy_(torch.where(mask[(..., *(None,) * behind)], value, x))


def _read(x: torch.Tensor, index: Any) -> Selected | None:
    """``x[index]`` by a mask of the first dims."""
    found = _placed(x, index if isinstance(index, tuple) else (index,))
    if found is None or found[0].dim() + found[1] != x.dim() or not found[0].dim():
        return None
    return Selected.of(x, found[0])


def _masked_select(input: torch.Tensor, mask: torch.Tensor) -> Selected | None:
    return Selected.of(input, mask) if mask.shape == input.shape and mask.dim() else None


def _places(input: torch.Tensor, *, as_tuple: bool = False) -> tuple[Place, ...] | Place | None:
    return places(input, as_tuple)


def _where(condition: torch.Tensor, *others: Any, **named: Any) -> tuple[Place, ...] | Place | None:
    return None if others or named else places(condition, as_tuple=True)


def _copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Of a module that is copied in the forward pass: its parameters are none here. The copy's have no gradients."""
    return memo.setdefault(id(tensor), tensor.detach().clone())


def _placed(x: torch.Tensor, index: tuple[Any, ...]) -> tuple[torch.Tensor, int] | None:
    """The only mask in ``index``, and how many dims of ``x`` lie behind its own; None if there is anything else than
    whole dims beside it."""
    numbers = [n for n, i in enumerate(index) if isinstance(i, torch.Tensor)]
    whole = [i is ... or (isinstance(i, slice) and i == slice(None)) for i in index]
    if len(numbers) != 1 or sum(whole) != len(index) - 1:
        return None
    (place,), mask = numbers, index[numbers[0]]
    behind = len(index) - 1 - place if ... in index[:place] else x.dim() - place - mask.dim()
    first = x.dim() - behind - mask.dim()
    if mask.dtype != torch.bool or first < 0 or behind < 0 or mask.shape != x.shape[first : x.dim() - behind]:
        return None
    return mask, behind


_READ_BY_MASK = (torch.Tensor.__getitem__, torch.Tensor.masked_select, torch.masked_select)
_BY_MASK = (*_READ_BY_MASK, torch.Tensor.__setitem__)
_FINDING = (torch.Tensor.nonzero, torch.nonzero, torch.Tensor.argwhere, torch.argwhere, torch.where)
_SIZED_BY_VALUES = (*_READ_BY_MASK, *_FINDING, *COUNTING)  # what they make, unless that is known
_SELECTING = (torch.Tensor.index_select, torch.index_select)
_INSTEAD: Mapping[Any, Instead] = {
    **REFUSED,
    **OF_MATRICES,
    torch.Tensor.__deepcopy__: _copied,
    torch.Tensor.__getitem__: _read,
    torch.Tensor.__setitem__: _written,
    torch.Tensor.masked_select: _masked_select,
    torch.masked_select: _masked_select,
    torch.Tensor.nonzero: _places,
    torch.nonzero: _places,
    torch.Tensor.argwhere: _places,
    torch.argwhere: _places,
    torch.where: _where,
    torch.pdist: _pair_distances,
    torch.Tensor.fill_diagonal_: _fill_diagonal,
    torch.Tensor.stft: _stft,
    torch.stft: _stft,
    functional.pad: _padded,
    functional.adaptive_avg_pool1d: _pooled(1),
    functional.adaptive_avg_pool2d: _pooled(2),
    functional.adaptive_avg_pool3d: _pooled(3),
    functional.ctc_loss: ctc_loss,
    functional.embedding_bag: _bag,
    functional.gaussian_nll_loss: _gaussian_nll,
    functional.multilabel_margin_loss: _multilabel_margin,
}
