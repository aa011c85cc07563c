"""What the ledger asks of a node, whatever its strategy: what it makes, and what it holds while it runs.

Operators of ours that are several kernels hold intermediate tensors: bytes beside arguments and outputs, at the fullest
moment. X is what x has, W what it has in the dtype of its statistics, in which batch norm computes:

    batch_norm            2 W - X    the output is not there yet
    batch_norm_backward   3 W - X
    batch_norm_squares    2 W
    batch_norm_sums       2 W, and the gradient in that dtype if its own is another
    dropout, bernoulli    a byte for each element: which to drop
    expert_mm             rows in the order of their experts, and their products in that order
    expert_mm_weight      both factors' rows in that order; one expert's product, where each is a call of its own
    attention             by formulas alone (``_attention``): three matrices of scores

What ``hap.bits`` draws at a time (up to 34 MB on a GPU) is not counted. Attention goes by formulas where
``hap.attention.has_kernel`` says that a GPU has none. A GPU is *old* below compute capability 8.0; one that the
catalogue does not know is taken to be new if it lists bfloat16, or no float16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from hap.attention import has_kernel, sums_dtype
from hap.cost_models.strides import Strides
from hap.cost_models.work import is_view
from hap.gpus import catalogue
from hap.graph import Graph, Node, TensorMeta, Value
from hap.hosts import Device
from hap.order import NONE, Postponed, program_order

Generation = Literal["cpu", "old", "new"]
ALL: frozenset[Generation] = frozenset(("cpu", "old", "new"))
_UNGROUPED: frozenset[Generation] = frozenset(("cpu", "old"))  # that have no grouped product (``hap.experts``)
_CAPABILITIES: Mapping[Generation, tuple[int, int]] = {"old": (7, 0), "new": (8, 0)}  # examples
_NEW = 80  # as the catalogue writes 8.0


class Inner(NamedTuple):
    """Intermediate tensors of ``nbytes``, if whole, on devices of generations ``on``. They are dealt out as slot
    ``slot`` of the call is (its tensor arguments, then its outputs), None: whole on every rank."""

    nbytes: int
    slot: int | None
    on: frozenset[Generation] = ALL


class Step(NamedTuple):
    """``makes``: its outputs that are tensors, by number, and their bytes; whether it is a view, and one that must copy
    what nobody converts."""

    node: Node
    makes: tuple[tuple[int, Value, int], ...]
    inner: tuple[Inner, ...]
    is_view: bool
    is_copying: bool


def find_steps(graph: Graph, strides: Strides, postponed: Postponed = NONE) -> dict[str, Step]:
    """Of every node, in the order in which they run."""
    found: dict[str, Step] = {}
    for node in program_order(graph, postponed):
        makes = tuple((i, Value(node.name, i), m.nbytes) for i, m in enumerate(node.outputs) if m is not None)
        found[node.name] = Step(node, makes, find_inner(graph, node), is_view(node), node.name in strides.copying)
    return found


def is_old(device: Device) -> bool:
    """Whether it is a GPU of a generation before Ampere: by the catalogue, or as those compute in float16 alone."""
    gpu = catalogue().get(device.gpu)
    if gpu is None or gpu.compute_capability is None:
        return "float16" in device.tflops and "bfloat16" not in device.tflops
    return gpu.compute_capability < _NEW


def generations(devices: Sequence[Device], backend: str, world_size: int) -> list[Generation]:
    """Of every device; of ``world_size`` that are not known, if there are none."""
    if backend != "nccl":
        return ["cpu"] * world_size
    return ["old" if is_old(d) else "new" for d in devices] or ["new"] * world_size


def find_inner(graph: Graph, node: Node) -> tuple[Inner, ...]:
    """What the call holds beside its arguments and outputs."""
    if node.is_source or not node.op.startswith("hap."):
        return ()
    metas, output = [graph.meta(v) for v in node.inputs], len(node.inputs)
    match node.op.split(".")[1]:
        case "batch_norm":
            return (Inner(2 * _wide(metas[0], metas[1]) - node.meta.nbytes, 0),)
        case "batch_norm_backward":
            return (Inner(3 * _wide(metas[1], metas[2]) - node.meta.nbytes, 1),)
        case "batch_norm_squares":
            return (Inner(2 * _wide(metas[0], metas[1]), 0),)
        case "batch_norm_sums":
            copies = 2 if metas[0].dtype == metas[2].dtype else 3
            return (Inner(copies * _wide(metas[1], metas[2]), 1),)
        case "dropout" | "bernoulli":
            return (Inner(node.meta.numel, output),)
        case "expert_mm":
            return (Inner(metas[0].nbytes, 0), Inner(node.meta.nbytes, output))
        case "expert_mm_weight":
            one = math.prod(node.meta.shape[1:]) * node.meta.dtype.itemsize
            return (Inner(metas[0].nbytes, 0), Inner(metas[1].nbytes, 1), Inner(one, None, _UNGROUPED))
        case "attention":
            return _attention(node, metas[:3], backward=False)
        case "attention_backward":
            return _attention(node, metas[1:4], backward=True)
    return ()


def _wide(x: TensorMeta, statistic: TensorMeta) -> int:
    """Bytes of x in the dtype of its statistics."""
    return x.numel * statistic.dtype.itemsize


def _attention(node: Node, factors: Sequence[TensorMeta], *, backward: bool) -> tuple[Inner, ...]:
    """By formulas, on the devices that have no kernel. With P the matrix of scores, Q, K, V and O what
    the others have, all in the dtype of sums, and C copies of each factor of a product: one that lies in order, and one
    in that dtype if its own is narrower::

        forward    C Q + C K + P; 3 P: scores, less their logsumexp, exponential; 2 P + C V + O
        backward   the gradient, if narrower, and 3 P; 2 P with a product's factors, and what the products before made

    Only batch and heads are ever dealt out, those of all tensors alike."""
    q, k, v = factors
    heads = [m.shape[3] for m in factors]
    on = frozenset(g for g, capability in _CAPABILITIES.items() if not has_kernel(q.dtype, heads, capability))
    if not on:
        return ()
    width = sums_dtype(q.dtype).itemsize
    p = math.prod(q.shape[:3]) * k.shape[2] * width
    of_q, of_k, of_v = (m.numel * width for m in factors)
    of_o = math.prod(q.shape[:3]) * v.shape[3] * width
    is_narrow = q.dtype.itemsize < width
    copies, made = 1 + is_narrow, sum(m.nbytes for m in node.outputs if m is not None)
    if backward:
        every = of_q + of_k + of_v
        factors_of = (copies * of_v + of_o, of_q + copies * of_k, of_q + of_k + copies * of_q, every + of_o)
        peak = is_narrow * of_o + max(3 * p, 2 * p + max(*factors_of, every + is_narrow * made))
    else:
        peak = max(copies * (of_q + of_k) + p, 3 * p, 2 * p + copies * of_v + of_o)
    return (Inner(max(0, peak - made), len(node.inputs), on),)
