"""What operators of ours hold while they run: beside what PyTorch allocates, and in the ledger of every device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.allocations import Allocations
from hap import attention
from hap.cluster import ClusterSpec
from hap.conversion import find_needs
from hap.cost_models.evaluate import evaluate
from hap.cost_models.fold import device_numbers
from hap.cost_models.memory import Walk
from hap.cost_models.steps import find_inner
from hap.graph import Graph, Node, Value
from hap.hosts import Device
from hap.ops import resolve
from hap.placement import Shard
from hap.plan import Strategy
from tests.cost_models.build import P, R, loose, node, source

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def held(call: Callable[..., Any], *args: Any) -> int:
    """Bytes that the call holds at its fullest beside its arguments and outputs; views are of their base."""
    seen = Allocations()
    seen.keep(a for a in args if isinstance(a, torch.Tensor))
    before = seen.now
    seen.restart()
    with seen:
        found = call(*args)
    outputs = found if isinstance(found, tuple) else (found,)
    return seen.peak - before - sum(t.untyped_storage().nbytes() for t in outputs)


def told(op: str, args: tuple[Any, ...], *outputs: torch.Tensor, on: str = "cpu") -> int:
    """The same, as the ledger has it of a device of generation ``on``."""
    graph, call = graph_of(op, args, *outputs)
    return sum(inner.nbytes for inner in find_inner(graph, call) if on in inner.on)


def graph_of(op: str, args: tuple[Any, ...], *outputs: torch.Tensor) -> tuple[Graph, Node]:
    tensors = {id(a): a for a in args if isinstance(a, torch.Tensor)}
    names = {key: f"t{i}" for i, key in enumerate(tensors)}
    sources = [source(names[key], tuple(t.shape), dtype=t.dtype) for key, t in tensors.items()]
    given = [Value(names[id(a)]) if isinstance(a, torch.Tensor) else a for a in args]
    metas = [source("o", tuple(t.shape), dtype=t.dtype).meta for t in outputs]
    call = Node("call", op, tuple(given), (), tuple(metas))
    return loose(*sources, call), call


def run(op: str, *args: Any) -> tuple[int, int]:
    """What a call holds on a CPU, and what the ledger says."""
    found = resolve(op)(*args)
    outputs = found if isinstance(found, tuple) else (found,)
    return held(resolve(op), *args), told(op, args, *outputs)


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
def test_batch_norm_computes_in_the_dtype_of_its_statistics(dtype: torch.dtype) -> None:
    """All four to within what is there of each channel, of x 131 or 262 kB."""
    x = torch.randn(16, 8, 16, 32).to(dtype)
    grad, per_channel = torch.randn_like(x), torch.ones(8, dtype=attention.sums_dtype(dtype))
    mean = rstd = weight = bias = per_channel
    for op, args in {
        "hap.batch_norm.default": (x, mean, rstd, weight, bias),
        "hap.batch_norm_squares.default": (x, mean),
        "hap.batch_norm_sums.default": (grad, x, mean, rstd),
        "hap.batch_norm_backward.default": (grad, x, mean, rstd, weight, mean, mean),
    }.items():
        real, said = run(op, *args)
        assert said == pytest.approx(real, abs=10 * per_channel.nbytes), op


def test_products_with_experts_sort_rows() -> None:
    """To within ids, which are 8 bytes a row of 1,024."""
    x, weight, grad = torch.randn(1024, 64), torch.randn(4, 64, 128), torch.randn(1024, 128)
    ids = torch.arange(1024) % 4
    real, said = run("hap.expert_mm.default", x, weight, ids)
    assert said == x.nbytes + grad.nbytes and real - 5 * ids.nbytes <= said <= real
    real, said = run("hap.expert_mm_weight.default", x, grad, ids, 4)
    assert said == x.nbytes + grad.nbytes + weight[0].nbytes and real - 5 * ids.nbytes <= said <= real
    args = (x, grad, ids, 4)
    assert told("hap.expert_mm_weight.default", args, weight, on="new") == x.nbytes + grad.nbytes


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_dropout_holds_a_mask(dtype: torch.dtype) -> None:
    """And what is drawn of it at a time, which is not counted."""
    x = torch.ones(1024, 512, dtype=dtype)
    real, said = run("hap.dropout.default", x, torch.tensor(3), 0.1, 0, None)
    at_a_time = 9 * 65536 * torch.get_num_threads()
    assert said == x.numel() and said <= real <= said + at_a_time + 100_000


@pytest.mark.parametrize("dtype", [BF16, F64])
@pytest.mark.parametrize("shape", [(64, 64, 32, 32), (256, 256, 32, 32), (32, 256, 64, 16), (256, 32, 64, 64)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_by_formulas_holds_three_matrices_of_scores(
    dtype: torch.dtype, shape: tuple[int, int, int, int], causal: bool
) -> None:
    """Of heads side by side in memory, as models have them; to within what is there of each query, and a causal mask's
    bytes."""
    queries, keys, of_keys, of_values = shape
    q, k, v, grad = (
        torch.randn(2, n, 2, size).to(dtype).transpose(1, 2)
        for n, size in ((queries, of_keys), (keys, of_keys), (keys, of_values), (queries, of_values))
    )
    forward = (q, k, v, None, causal, 0.1)
    out, logsumexp = attention._math(*forward)
    op = "hap.attention.default"
    says = told(op, forward, out, logsumexp, on="old")
    assert 0.95 * held(attention._math, *forward) <= says <= 1.1 * held(attention._math, *forward)
    backward = (grad, q, k, v, None, out, logsumexp, causal, 0.1)
    real = held(attention._math_backward, *backward)
    says = told("hap.attention_backward.default", backward, q, k, v, on="old")
    assert 0.95 * real <= says <= 1.1 * real
    scores = 2 * 2 * queries * keys * logsumexp.dtype.itemsize
    assert shape[:2] != (256, 256) or real == pytest.approx(3 * scores, rel=0.2)


@pytest.mark.parametrize(
    ("dtype", "head", "on"),
    [
        (BF16, 64, {"old"}),
        (F16, 64, set()),
        (F32, 64, set()),
        (F32, 6, {"old", "new"}),
        (BF16, 12, {"old", "new"}),
        (F64, 64, {"old", "new"}),
    ],
)
def test_attention_goes_by_formulas_where_there_is_no_kernel(dtype: torch.dtype, head: int, on: set[str]) -> None:
    q = torch.empty(2, 3, 32, head, dtype=dtype, device="meta")
    k, v = torch.empty_like(q), torch.empty_like(q)
    logsumexp = torch.empty(2, 3, 32, dtype=F32, device="meta")
    args = (q, k, v, None, False, 0.1)
    generations = ("cpu", "old", "new")
    assert {g for g in generations if told("hap.attention.default", args, q, logsumexp, on=g)} == on


def attending() -> tuple[Graph, dict[str, Strategy]]:
    """Attention of a batch of 8, in bfloat16, dealt out over the batch."""
    like = (8, 4, 256, 64)
    sources = [source(name, like, dtype=BF16) for name in "qkv"]
    arguments = [*map(Value, "qkv"), None, False, 0.1]
    metas = (source("o", like, dtype=BF16).meta, source("l", like[:3]).meta)
    call = Node("call", "hap.attention.default", tuple(arguments), (), metas)
    loss = node("loss", "aten.sum.default", [Value("call")], (), dtype=BF16)
    graph = Graph("attending", (*sources, call, loss), Value("loss"), {})
    dealt = Shard(0, 1, 8, 1, "batch")
    strategies = {name: Strategy((), (dealt,)) for name in "qkv"}
    strategies |= {"call": Strategy((dealt,) * 3, (dealt, dealt)), "loss": Strategy((dealt,), (P,))}
    return graph, strategies


def test_only_devices_without_a_kernel_hold_scores() -> None:
    """Shares 3 of a V100 and 5 of an A100: 3 samples' scores three times, but for outputs that are not yet there."""
    graph, strategies = attending()
    walk, sizes = Walk(graph, strategies, find_needs(graph, strategies)), {"batch": (3, 5)}
    devices = tuple(Device(i, gpu, "h", gpu, {}, 1, 1.0, 1.0) for i, gpu in enumerate(("V100-16GB", "A100-40GB")))
    at = walk.moments["call"]

    def inside(backend: str, devices: tuple[Device, ...]) -> list[float]:
        found = walk.held(sizes, 2, "sgd", backend=backend, devices=devices)
        return list(found["temporary"][at])

    a_sample = 3 * 4 * 256 * 256 * 4 - 4 * 256 * 64 * 2 - 4 * 256 * 4
    assert inside("nccl", devices) == [3 * a_sample, 0]
    assert inside("gloo", devices) == inside("nccl", ()) == [0, 0]


def test_a_plan_for_old_gpus_is_told_of_their_scores() -> None:
    graph, strategies = attending()
    whole = {name: Strategy((R,) * len(s.inputs), (R,) * len(s.outputs)) for name, s in strategies.items()}

    def peak(gpu: str) -> int:
        text = f"hosts: [{{name: h, devices: [{{gpu: {gpu}, tflops: {{float32: 1}}}}]}}]"
        return evaluate(graph, whole, {}, ClusterSpec.from_yaml(text)).memory_bytes[0]

    a_sample = 3 * 4 * 256 * 256 * 4 - 4 * 256 * 64 * 2 - 4 * 256 * 4
    assert peak("T4") - peak("A100-40GB") == 8 * a_sample


def test_old_and_new_gpus_of_the_same_rates_are_not_alike() -> None:
    """To what counts devices that are alike once."""
    old, new = (Device(0, "d", "host", gpu, {}, 1, 1.0, 1.0) for gpu in ("T4", "L4"))
    other = Device(1, "other", "host", "of my own", {}, 1, 1.0, 1.0)
    assert device_numbers(old) != device_numbers(new) == device_numbers(other)
