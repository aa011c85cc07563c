"""``hap.attention`` against its definition, and operator names against torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hap import attention as room
from hap.attention import attention, attention_backward
from hap.errors import ProgramError
from hap.ops import draws_random, resolve, takes_device

Tensors = tuple[torch.Tensor, ...]


def draw(queries: int = 5, keys: int = 7, dtype: torch.dtype = torch.float64) -> Tensors:
    """q, k, v, grad with batch 2, 3 heads, head sizes 4 and 4."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, queries, 4), (2, 3, keys, 4), (2, 3, keys, 4), (2, 3, queries, 4))
    return tuple(torch.randn(*shape, generator=generator, dtype=dtype) for shape in shapes)


def masks(queries: int = 5, keys: int = 7) -> dict[str, torch.Tensor | None]:
    random = torch.randn(2, 1, queries, keys, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    hides_a_row = random.clone()
    hides_a_row[0, 0, 2] = -torch.inf
    return {"none": None, "random": random, "hides a query": hides_a_row}


def by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> Tensors:
    scores = 0.3 * q @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores + mask
    if causal:
        scores = scores.masked_fill(torch.arange(k.shape[2]) > torch.arange(q.shape[2]).unsqueeze(1), -torch.inf)
    weights = torch.softmax(scores, -1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)
    return weights @ v, torch.logsumexp(scores, -1)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["none", "random", "hides a query"])
@pytest.mark.parametrize("path", ["kernel", "formulas"])
def test_forward_and_backward(path: str, name: str, is_causal: bool) -> None:
    q, k, v, grad = draw()
    mask = masks()[name]
    forward, backward = (attention, attention_backward) if path == "kernel" else (room._math, room._math_backward)
    out, logsumexp = forward(q, k, v, mask, is_causal, 0.3)
    expected, expected_logsumexp = by_definition(q, k, v, mask, is_causal)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)
    seen = expected_logsumexp > -torch.inf
    torch.testing.assert_close(logsumexp[seen], expected_logsumexp[seen], rtol=0, atol=1e-14)

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    got = backward(grad, q, k, v, mask, out, logsumexp, is_causal, 0.3)
    finite = None if mask is None else mask.clamp(min=-1e30)  # autograd's NaN for the hidden query
    by_definition(*leaves, finite, is_causal)[0].backward(grad)
    rows = seen.unsqueeze(-1)
    torch.testing.assert_close(got[0] * rows, leaves[0].grad * rows, rtol=0, atol=1e-13)
    if bool(seen.all()):
        torch.testing.assert_close(got, tuple(x.grad for x in leaves), rtol=0, atol=1e-13)


def test_a_hidden_query_gives_zeros_and_no_gradient() -> None:
    q, k, v, grad = draw()
    mask = masks()["hides a query"]
    for forward, backward in ((attention, attention_backward), (room._math, room._math_backward)):
        out, logsumexp = forward(q, k, v, mask, False, 0.3)
        assert bool((out[0, :, 2] == 0).all())
        dq, dk, dv = backward(grad, q, k, v, mask, out, logsumexp, False, 0.3)
        assert bool((dq[0, :, 2] == 0).all())
        assert all(bool(x.isfinite().all()) for x in (dq, dk, dv))


def test_contiguous_copies_of_everything_give_the_same() -> None:
    q, k, v, grad = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw())
    out, logsumexp = attention(q, k, v, None, True, 0.3)
    strided = attention_backward(grad, q, k, v, None, out, logsumexp, True, 0.3)
    copies = [x.contiguous() for x in (grad, q, k, v)]
    packed = attention_backward(*copies, None, out.contiguous(), logsumexp.contiguous(), True, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(strided, packed, strict=True))


@pytest.mark.parametrize(("batch", "heads", "queries"), [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_a_rank_without_a_share_gets_empty_tensors(batch: int, heads: int, queries: int) -> None:
    q, k = torch.empty(batch, heads, queries, 4), torch.empty(batch, heads, 5, 4)
    out, logsumexp = attention(q, k, k, None, True, 0.5)
    assert (out.shape, logsumexp.shape) == (q.shape, q.shape[:3])
    gradients = attention_backward(out, q, k, k, None, out, logsumexp, True, 0.5)
    assert [g.shape for g in gradients] == [q.shape, k.shape, k.shape]


def test_without_keys_there_is_nothing_to_see() -> None:
    q, k = torch.ones(1, 1, 2, 4), torch.empty(1, 1, 0, 4)
    out, logsumexp = attention(q, k, k, None, False, 0.5)
    assert bool((out == 0).all()) and bool((logsumexp == -torch.inf).all())


def test_what_the_cuda_kernel_wants() -> None:
    q, k, v, _ = draw(queries=33, keys=7, dtype=torch.float32)
    mask = torch.randn(2, 1, 33, 7)
    aligned = room._aligned_mask(q, k, mask)
    assert aligned is not None
    assert aligned.stride() == (33 * 16, 0, 16, 1)  # rows of 16, heads broadcast
    assert torch.equal(aligned, mask.expand(2, 3, 33, 7))
    padded = room._padded_logsumexp(torch.zeros(2, 3, 33))
    assert padded.shape == (2, 3, 64)
    assert bool((padded[..., 33:] == torch.inf).all())
    assert not room._efficient_applies(q, k, v) and not room._flash_applies(q, k, v, None, True)  # not on a GPU


@pytest.mark.parametrize(
    ("dtype", "capability", "applies"),
    [
        (torch.bfloat16, (8, 0), True),
        (torch.bfloat16, (7, 5), False),  # older GPUs have no kernel for it
        (torch.float16, (7, 0), True),
        (torch.float32, (6, 0), True),
    ],
)
def test_which_gpu_has_the_kernel(
    dtype: torch.dtype, capability: tuple[int, int], applies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    on_gpu = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 2, 4, 8))
    on_gpu.element_size = lambda: dtype.itemsize
    assert room._efficient_applies(on_gpu, on_gpu, on_gpu) is applies  # type: ignore[arg-type]


def test_low_precision_sums_in_float32() -> None:
    q, k, v, _ = draw(dtype=torch.bfloat16)
    out, logsumexp = room._math(q, k, v, None, True, 0.3)
    kernel_out, kernel_logsumexp = attention(q, k, v, None, True, 0.3)
    assert (out.dtype, logsumexp.dtype) == (kernel_out.dtype, kernel_logsumexp.dtype) == (torch.bfloat16, torch.float32)


def test_operators_by_name() -> None:
    assert resolve("aten.mm.default") is torch.ops.aten.mm.default
    assert resolve("hap.attention.default") is attention
    transposed = torch.ones(2, 3).t()
    assert resolve("aten.view.default")(transposed, (6,)).shape == (6,)  # of any strides
    for name in ("aten.nonsense.default", "aten.mm.nonsense", "nowhere.mm.default", "mm"):
        with pytest.raises(ProgramError, match=f"operator {name} does not exist in torch"):
            resolve(name)


def test_what_operators_need() -> None:
    takes = {op: takes_device(op) for op in ("aten.arange.default", "aten._to_copy.default", "aten.mm.default")}
    assert takes == {"aten.arange.default": True, "aten._to_copy.default": True, "aten.mm.default": False}
    assert not takes_device("hap.attention.default")
    assert draws_random("aten.native_dropout.default") and not draws_random("aten.mm.default")
