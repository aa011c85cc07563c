"""Products in which every row has one of several matrices: what the experts of a mixture compute.

With S rows, E experts, and ``ids`` (S,) saying which expert each row goes to:

    expert_mm         x (S, K), weight (E, K, N), ids -> (S, N)       out[s] = x[s] @ weight[ids[s]]
    expert_mm_weight  x (S, K), grad (S, N), ids -> (E, K, N)         out[e] = sum of x[s]^T grad[s] over ids[s] = e

Who gathers ``weight[ids]`` for batched products, as Hugging Face's ``batched_mm`` does, writes and reads S K N numbers;
here rows are sorted by expert, and no weight is copied. ``place`` is which of all experts these are, ``(dim, outer, n,
unit, start)`` as ``hap.placement`` has it, or None for all: ids count from the first of all experts, and a row that
goes to another rank's gives zeros here and adds nothing.

On CUDA the sorted rows go to ``torch.nn.functional.grouped_mm`` where it takes them (compute capability 8.0, two or
four bytes a number, dims of multiples of 16 bytes), and everywhere else to one product for each expert, for which the
host waits to know how many rows each has. These are no autograd functions: the backward pass is calls of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_GROUPED = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 16  # bytes; of rows and of columns, whichever are contiguous

Place = Sequence[int]  # dim, outer, n, unit, start


@torch.compiler.disable  # how many rows an expert has is not known before it runs
def expert_mm(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, place: Place | None = None) -> torch.Tensor:
    """(S, N); zeros in rows of experts that ``weight`` does not hold."""
    order, ends = _sorted(_own(ids, weight.shape[0], place), weight.shape[0])
    rows = x[order]
    if _grouped_applies(rows, weight):
        found = torch.nn.functional.grouped_mm(rows, weight, offs=ends)
        held = torch.arange(len(rows), device=x.device) < ends[-1]  # what follows is not written
        found = found.masked_fill(~held.unsqueeze(1), 0.0)
    else:
        found = x.new_zeros(x.shape[0], weight.shape[2])
        for expert, (start, end) in enumerate(_ranges(ends)):
            found[start:end] = rows[start:end] @ weight[expert]
    out = torch.empty_like(found)
    out[order] = found
    return out


@torch.compiler.disable
def expert_mm_weight(
    x: torch.Tensor, grad: torch.Tensor, ids: torch.Tensor, experts: int, place: Place | None = None
) -> torch.Tensor:
    """(E, K, N); ``experts``: how many E are."""
    order, ends = _sorted(_own(ids, experts, place), experts)
    rows, grads = x[order], grad[order]
    if experts and _grouped_applies(rows, grads):
        found = torch.nn.functional.grouped_mm(rows.t(), grads, offs=ends)
        rowless = torch.diff(ends, prepend=ends.new_zeros(1)) == 0  # whose products some GPUs leave unwritten
        return found.masked_fill_(rowless.view(-1, 1, 1), 0.0)
    found = x.new_zeros(experts, x.shape[1], grad.shape[1])
    for expert, (start, end) in enumerate(_ranges(ends)):
        found[expert] = rows[start:end].t() @ grads[start:end]
    return found


def _own(ids: torch.Tensor, count: int, place: Place | None) -> torch.Tensor:
    """Every row's expert among the ``count`` that are here; ``count`` if it is not. Ids may count from the end, and are
    refused if there is no such expert, as in ``weight[ids]``."""
    here = torch.arange(count, device=ids.device)
    if place is None:
        return here[ids]
    _, outer, n, unit, start = place
    inside = max(1, count // outer)  # of each of the outer parts
    numbers = (here // inside * n + start) * unit + here % inside
    known = torch.full((outer * n * unit,), count, dtype=torch.int64, device=ids.device)
    known[numbers] = here
    return known[ids]


def _sorted(own: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows' order by expert, those of no expert here at the end; where each expert's rows end, int32 (count,)."""
    found, order = torch.sort(own, stable=True)
    experts = torch.arange(count, device=own.device)
    return order, torch.searchsorted(found, experts, right=True, out_int32=True)


def _ranges(ends: torch.Tensor) -> list[tuple[int, int]]:
    """(first, end) of each expert's rows."""
    found: list[int] = ends.tolist()
    return list(zip([0, *found], found, strict=False))


def _grouped_applies(*factors: torch.Tensor) -> bool:
    """Whether PyTorch's grouped product takes these, the sorted rows among them."""
    device, dtype = factors[0].device, factors[0].dtype
    if device.type != "cuda" or dtype not in _GROUPED or not all(f.numel() for f in factors):
        return False
    if torch.cuda.get_device_capability(device) < (8, 0) or not hasattr(torch.nn.functional, "grouped_mm"):
        return False
    dims = (f.shape[-2:] if f.ndim == 3 else f.shape[-1:] for f in factors)
    return all(size * dtype.itemsize % _ALIGNMENT == 0 for sizes in dims for size in sizes)
