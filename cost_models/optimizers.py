"""What the planner knows of optimizers: what they keep, what their update takes, and what they must see whole.

Most optimizers treat every element of a parameter by itself, so a rank updates its shard alone. Others do not: Muon
makes each matrix's momentum orthogonal, by five steps of Newton and Schulz in bfloat16 that multiply it with itself;
Adafactor keeps means of rows and columns, and scales an update by the parameter's norm. In a plan for such an optimizer
these parameters are in no shards: whole on every rank, all of which make the same update, or, of Muon, whole on one
(``search.owners``). Muon is for matrices alone: what an embedding looks up, and whatever has not two dims, is AdamW's,
as its authors do it.
"""

from __future__ import annotations

from typing import NamedTuple

from hap.errors import PlanError
from hap.graph import Graph, Node, Value

NEWTON_SCHULZ = 5  # steps, torch's default, ...
PRODUCTS = 3  # ... each of so many calls
EMBEDDING = frozenset({"aten.embedding.default"})


class Kind(NamedTuple):
    """``states``: tensors of a parameter's size and dtype that are kept for it; no master copies, nor Adafactor's means
    of rows and columns; of Muon what AdamW keeps of its part. ``whole``: of which parameters it must see all.
    ``temporaries``: such tensors while it updates all parameters at once, as ``foreach``, PyTorch's default on GPUs,
    does: of Adam the roots of the second moments. Plain SGD has none but with weight decay, which no plan knows of."""

    states: int
    whole: str = "none"  # of "none", "matrices", "all"
    temporaries: int = 0


KINDS = {
    "sgd": Kind(0),
    "sgd+momentum": Kind(1),
    "adam": Kind(2, temporaries=1),
    "adamw": Kind(2, temporaries=1),
    "muon": Kind(2, "matrices"),
    "adafactor": Kind(0, "all"),
}


def kind_of(optimizer: str) -> Kind:
    """PlanError for a name that is not known."""
    if optimizer not in KINDS:
        raise PlanError(f"unknown optimizer {optimizer!r} (known: {', '.join(KINDS)})")
    return KINDS[optimizer]


def optimizer_state_bytes(optimizer: str, nbytes: int) -> int:
    """State for a parameter of ``nbytes``. PlanError for a name that is not known."""
    return kind_of(optimizer).states * nbytes


def update_bytes(optimizer: str, backend: str, nbytes: int) -> int:
    """What the update of a parameter of ``nbytes`` holds beside all others' on GPUs. On CPUs parameters are updated one
    by one. PlanError for a name that is not known."""
    return kind_of(optimizer).temporaries * nbytes if backend == "nccl" else 0


def sees_whole(optimizer: str, graph: Graph, node: Node) -> bool:
    """Whether an update of this parameter is made from all of it."""
    whole = kind_of(optimizer).whole
    if node.op != "parameter" or node.target not in graph.gradients or whole == "none":
        return False
    return whole == "all" or _is_matrix(graph, node)


def update_flops(optimizer: str, graph: Graph, node: Node) -> float:
    """Of the products of an update, in bfloat16: of an m x n matrix X, m <= n, each step of Newton and Schulz makes
    X X^T, its square, and their sum times X."""
    if optimizer != "muon" or not sees_whole(optimizer, graph, node):
        return 0.0
    return newton_schulz_flops(*node.meta.shape)


def newton_schulz_flops(rows: int, columns: int) -> float:
    """Of the products that make a matrix orthogonal."""
    m, n = sorted((rows, columns))
    return float(NEWTON_SCHULZ * (2 * m * m * n + 2 * m**3 + 2 * m * m * n))


def _is_matrix(graph: Graph, node: Node) -> bool:
    looked_up = any(reader.op in EMBEDDING for reader, _ in graph.users.get(Value(node.name), ()))
    return len(node.meta.shape) == 2 and not looked_up
