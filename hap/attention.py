"""Attention as one operator on every device: ``hap.attention.default`` and ``hap.attention_backward.default``.

With B batch, H heads, S queries, T keys, D and E the head sizes of keys and values:

    scores    = scale * q @ k^T + mask                       (B, H, S, T); causal: key j is seen by query i iff j <= i
    logsumexp = log sum_j exp(scores)                        (B, H, S), in at least float32
    out       = exp(scores - logsumexp) @ v                  (B, H, S, E)

``mask`` is additive, of q's dtype, and broadcasts to (B, H, S, T). A query that sees no key gives zeros (and a
logsumexp that only the same device's backward understands). Capture rewrites each kernel's spelling into this one, so
a plan made from a CPU capture runs on whatever device a rank has:

- CPU: ``aten._scaled_dot_product_flash_attention_for_cpu``, which kills the process on empty tensors, so those never
  reach it;
- CUDA in float16 and bfloat16, of compute capability 8.0 or more, without a mask: the flash kernel,
  ``aten._scaled_dot_product_flash_attention``, for heads of one size up to 192, a multiple of 8; causal only where
  there are as many queries as keys, as otherwise it means the last keys by it and not the first. Up to 128 cuDNN's,
  ``aten._scaled_dot_product_cudnn_attention``, where PyTorch would choose that (``_fused_sdp_choice``: on Hopper). The
  two have the same logsumexp, so a backward may go by the other;
- else CUDA in these and float32: ``aten._scaled_dot_product_efficient_attention``, whose logsumexp is padded to a
  multiple of 32 queries and whose mask must be expanded and have rows of a multiple of 16 elements in memory;
- anything else (float64 on CUDA, head sizes the kernel cannot align, other devices): the formulas above.

These are kernels, not autograd functions: backward is a call of its own, as in the captured graph.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.attention import SDPBackend

_CUDA_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LOGSUMEXP_ALIGNMENT = 32  # queries; kAlignLSE of the efficient kernel
_MASK_ALIGNMENT = 16  # elements; what scaled_dot_product_attention pads a bias to before it calls that kernel
_HEAD_ALIGNMENT_BYTES = 16  # the efficient kernel loads 128 bits at a time
_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_CAPABILITY = (8, 0)
_CUDNN_HEAD = 128
_FLASH_HEAD, _FLASH_HEAD_ALIGNMENT = 192, 8  # elements


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out (B, H, S, E) in q's dtype, logsumexp (B, H, S)); shapes as in the module docstring."""
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        return _empty_attention(q, v)
    if q.device.type == "cpu":
        q, k, v = (_inner_contiguous(x) for x in (q, k, v))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
        )
    if _flash_applies(q, k, v, mask, is_causal):
        q, k, v = (_inner_contiguous(x) for x in (q, k, v))
        if _prefers_cudnn(q, k, v, is_causal, scale):
            found = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
                q, k, v, None, True, 0.0, is_causal, scale=scale
            )
            return found[0], found[1].reshape(q.shape[:3])
        found = torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, is_causal, scale=scale)
        return found[0], found[1]
    if _efficient_applies(q, k, v):
        q, k, v = (_inner_contiguous(x) for x in (q, k, v))
        out, logsumexp, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention.default(
            q, k, v, _aligned_mask(q, k, mask), True, 0.0, is_causal, scale=scale
        )
        return out, logsumexp[..., : q.shape[2]]
    return _math(q, k, v, mask, is_causal, scale)


def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) in the shapes of q, k, v, given ``grad`` of ``out`` and the two outputs of ``attention``."""
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if q.device.type == "cpu":
        grad, q, k, v, out = (_inner_contiguous(x) for x in (grad, q, k, v, out))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            grad, q, k, v, out, logsumexp, 0.0, is_causal, attn_mask=mask, scale=scale
        )
    if _flash_applies(q, k, v, mask, is_causal):
        grad, q, k, v, out = (_inner_contiguous(x) for x in (grad, q, k, v, out))
        return _flash_backward(grad, q, k, v, out, logsumexp.contiguous(), is_causal, scale)
    if _efficient_applies(q, k, v):
        grad, q, k, v, out = (_inner_contiguous(x) for x in (grad, q, k, v, out))
        unused_seed = _unused_seed(q.device)
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(
            grad,
            q,
            k,
            v,
            _aligned_mask(q, k, mask),
            out,
            _padded_logsumexp(logsumexp),
            unused_seed,
            unused_seed,
            0.0,
            [True, True, True, False],
            is_causal,
            scale=scale,
        )
        return dq, dk, dv
    return _math_backward(grad, q, k, v, mask, out, logsumexp, is_causal, scale)


def _flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By cuDNN or the flash kernel. None: sequences have one length each."""
    seed, lengths = _unused_seed(q.device), (None, None, q.shape[2], k.shape[2])
    if _prefers_cudnn(q, k, v, is_causal, scale):
        found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
            grad, q, k, v, out, logsumexp.unsqueeze(-1), seed, seed, None, *lengths, 0.0, is_causal, scale=scale
        )
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
            grad, q, k, v, out, logsumexp, *lengths, 0.0, is_causal, seed, seed, scale=scale
        )
    dq, dk, dv = found
    return dq, dk, dv


def _empty_attention(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """No batch, head or query: empty outputs. No key: zeros, and the logarithm of an empty sum."""
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    return out, q.new_full(q.shape[:3], -torch.inf, dtype=sums_dtype(q.dtype))


def _flash_applies(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
) -> bool:
    if q.device.type != "cuda" or mask is not None or q.dtype not in _FLASH_DTYPES:
        return False
    if is_causal and q.shape[2] != k.shape[2]:
        return False
    head = q.shape[3]
    fits = head == k.shape[3] == v.shape[3] and head <= _FLASH_HEAD and head % _FLASH_HEAD_ALIGNMENT == 0
    return fits and torch.cuda.get_device_capability(q.device) >= _FLASH_CAPABILITY and torch.version.hip is None


def _prefers_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float) -> bool:
    if q.shape[3] > _CUDNN_HEAD:
        return False
    choice = torch.ops.aten._fused_sdp_choice.default(q, k, v, None, 0.0, is_causal, scale=scale)
    return bool(choice == SDPBackend.CUDNN_ATTENTION.value)


def _efficient_applies(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    heads = [x.shape[3] for x in (q, k, v)]
    return q.device.type == "cuda" and has_kernel(q.dtype, heads, torch.cuda.get_device_capability(q.device))


def has_kernel(dtype: torch.dtype, heads: Iterable[int], capability: tuple[int, int]) -> bool:
    """Whether some kernel of a GPU of this compute capability takes heads of these sizes; else it goes by the formulas,
    as the ledger must know (``hap.cost_models.steps``)."""
    if dtype not in _CUDA_DTYPES:
        return False
    if dtype == torch.bfloat16 and capability < _FLASH_CAPABILITY:
        return False  # older GPUs have no kernel for it
    return all(head * dtype.itemsize % _HEAD_ALIGNMENT_BYTES == 0 for head in heads)


def _unused_seed(device: torch.device) -> torch.Tensor:
    """Of dropout, of which there is none."""
    return torch.empty((), dtype=torch.int64, device=device)


def _inner_contiguous(x: torch.Tensor) -> torch.Tensor:
    """The kernels take any strides but the innermost, which must be 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _aligned_mask(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask as (B, H, S, T), broadcast without copying, its rows starting at multiples of 16 elements in memory."""
    if mask is None:
        return None
    queries, keys = q.shape[2], k.shape[2]
    mask = mask.expand(*mask.shape[:-1], keys)
    padded = torch.nn.functional.pad(mask, (0, -keys % _MASK_ALIGNMENT)).contiguous()
    return padded[..., :keys].expand(q.shape[0], q.shape[1], queries, keys)


def _padded_logsumexp(logsumexp: torch.Tensor) -> torch.Tensor:
    """(B, H, S) padded to a multiple of 32 with +inf, so that the padding's probabilities are zero."""
    missing = -logsumexp.shape[2] % _LOGSUMEXP_ALIGNMENT
    if not missing:
        return logsumexp.contiguous()
    return torch.nn.functional.pad(logsumexp, (0, missing), value=torch.inf).contiguous()


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are kept in: the logsumexp's, whatever a kernel's own tracing says of it."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _scores(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, scale: float) -> torch.Tensor:
    wide = sums_dtype(q.dtype)
    scores = q.to(wide) @ k.to(wide).transpose(-2, -1) * scale
    if mask is not None:
        scores = scores + mask
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores


def _probabilities(scores: torch.Tensor, logsumexp: torch.Tensor) -> torch.Tensor:
    """exp(scores - logsumexp), and 0 (not NaN) for a query that sees no key."""
    finite = logsumexp.masked_fill(logsumexp == -torch.inf, 0.0)
    return torch.exp(scores - finite.unsqueeze(-1))


def _math(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(q, k, mask, is_causal, scale)
    logsumexp = torch.logsumexp(scores, dim=-1)
    out = _probabilities(scores, logsumexp) @ v.to(scores.dtype)
    return out.to(q.dtype), logsumexp


def _math_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dS = P * (dP - rowsum(dO * O)) (FlashAttention, Dao et al. 2022, appendix B.2)."""
    p = _probabilities(_scores(q, k, mask, is_causal, scale), logsumexp)
    wide_grad = grad.to(p.dtype)
    delta = (wide_grad * out.to(p.dtype)).sum(-1, keepdim=True)
    ds = p * (wide_grad @ v.to(p.dtype).transpose(-2, -1) - delta) * scale
    dq = ds @ k.to(p.dtype)
    dk = ds.transpose(-2, -1) @ q.to(p.dtype)
    dv = p.transpose(-2, -1) @ wide_grad
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
