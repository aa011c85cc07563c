"""``torch.autocast`` at capture: the casts become part of the graph, in the forward and in the backward pass.

A step is captured under the autocast that is active where ``hap.plan`` or ``hap.compile`` is called, whichever device
it is for: it is traced on CPU tensors under the CPU's autocast with the same dtype, and where the user's is CUDA's,
what CUDA's computes in float32 is made float32 here too (torch's list, "CUDA ops that autocast to float32"). When the
program runs, its calls are fixed, so no autocast may touch them again.

Autocasts inside of the step, such as a region in float32, are for the device that they name in eager PyTorch. Under
the CPU's, and where there is no CUDA, those for CUDA do nothing, here as there. Otherwise the step is taken for one on
GPUs, and as it is traced on CPU tensors, autocasts for either device are for both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hap.capture.torch_private import casts_for_cuda_on_cpu

_DEVICES = ("cuda", "cpu")
_WORDS = """
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss
    cosine_similarity cumprod cumsum dist erfinv exp expm1 frobenius_norm group_norm hinge_embedding_loss huber_loss
    kl_div l1_loss layer_norm linalg_matrix_norm linalg_vector_norm log log10 log1p log2 log_softmax logsumexp
    margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss native_layer_norm nll_loss nll_loss2d norm
    nuclear_norm pdist poisson_nll_loss pow prod reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss
    softmax softplus sum tan triplet_margin_loss upsample_bicubic2d upsample_bilinear2d upsample_linear1d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d

    __pow__ __rdiv__ __rpow__ __rtruediv__ cross_entropy gaussian_nll_loss gumbel_softmax interpolate linalg_norm
    local_response_norm lp_pool1d lp_pool2d lp_pool3d multilabel_soft_margin_loss normalize pairwise_distance softmin
    special_expm1 special_log1p special_log_softmax special_logsumexp special_softmax triplet_margin_with_distance_loss
"""  # the first are those of ATen/autocast_mode.h, the others functions that are made of them
IN_FLOAT32 = frozenset(_WORDS.split())


@dataclass(frozen=True)
class Autocast:
    """``device`` and ``dtype`` of the autocast that is active; None for both if there is none."""

    device: str | None = None
    dtype: torch.dtype | None = None

    @classmethod
    def here(cls) -> Autocast:
        """The one at the place of the call."""
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                return cls(device, torch.get_autocast_dtype(device))
        return cls()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """As it was where ``here`` was called, whatever is active now."""
        with contextlib.ExitStack() as stack:
            for device in _DEVICES:
                if self.device == device:
                    stack.enter_context(torch.autocast(device, dtype=self.dtype))
                elif torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            yield

    @contextlib.contextmanager
    def on_cpu(self) -> Iterator[None]:
        """Around a trace on CPU tensors: their autocast, with this dtype, and what is CUDA's in it."""
        with contextlib.ExitStack() as stack:
            if self.device == "cuda" or (self.device is None and torch.cuda.is_available()):
                stack.enter_context(_one_for_both())
                stack.enter_context(casts_for_cuda_on_cpu())
                stack.enter_context(_LikeCuda())
            if self.dtype is not None:
                stack.enter_context(torch.autocast("cpu", dtype=self.dtype, cache_enabled=False))
            yield


@contextlib.contextmanager
def _one_for_both() -> Iterator[None]:
    """While active, an autocast that is entered for the CPU or for CUDA is entered for both."""
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    before: list[tuple[str, bool, torch.dtype]] = []  # of the other device, of all that are entered

    def entered(self: torch.autocast) -> Any:
        found = enter(self)
        if self.device in _DEVICES:
            other = _DEVICES[1 - _DEVICES.index(self.device)]
            before.append((other, torch.is_autocast_enabled(other), torch.get_autocast_dtype(other)))
            _set(other, torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device))
        return found

    def left(self: torch.autocast, *error: Any) -> Any:
        if self.device in _DEVICES:
            _set(*before.pop())
        return leave(self, *error)

    torch.autocast.__enter__, torch.autocast.__exit__ = entered, left  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__, torch.autocast.__exit__ = enter, leave  # type: ignore[method-assign]


def _set(device: str, enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)


class _LikeCuda(TorchFunctionMode):
    """While active under an autocast, what CUDA's computes in float32 gets its low-precision arguments in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        is_average = name == "interpolate" and "area" in (*args[3:4], kwargs.get("mode"))
        if name not in IN_FLOAT32 or is_average or not torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)
        args, kwargs = [_wide(a) for a in args], {k: _wide(v) for k, v in kwargs.items()}
        with torch.autocast("cpu", enabled=False):
            return func(*args, **kwargs)


def _wide(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor) and argument.dtype in (torch.float16, torch.bfloat16):
        return argument.float()
    return argument
