"""Where in the user's code a capture failed, in one line."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Sequence

import torch

from hap.capture.refused import BACKWARD, RefusedError
from hap.capture.selected import SelectionError
from hap.capture.spread import is_of_collective
from hap.errors import CaptureError

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_NESTED = os.path.join(_TORCH, "nested", "")
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STDLIB = os.path.abspath(sysconfig.get_path("stdlib")) + os.sep
_DEVICES = "Unhandled FakeTensor Device Propagation"  # what torch 2.11 says of it, in a RuntimeError
_GENERATOR = "torch._C.Generator"  # of which torch 2.11 says that a graph has no such argument
# what torch says of a tensor that is neither parameter, buffer nor input, and is changed or replaced
_WITHIN = "backprop through mirrored meta"
_KEPT = ("Unexpected fake buffer", "entirely functional graph", "ATen/RegisterFunctionalization", "in tensor_tracker")
_LISTED = "is not supported for tensor subclasses"  # .numpy() and .tolist()
_DATA_DEPENDENT = ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode")

_HIGHER_ORDER = "UncapturedHigherOrderOpError"


def blame(error: Exception, subject: str, module: str, kept: Sequence[str] = ()) -> CaptureError:
    """The CaptureError to raise ``from error``: what went wrong, the user's source line, the module that ran it.
    ``kept``: the names under which the forward pass has left new tensors."""
    where = _place(error, module)
    if is_of_collective(error):
        return CaptureError(
            f"cannot capture {subject}: a collective in the model, {where}: HAP's batch is the global one, and the "
            "model sees all of its samples, as on one device: leave it out"
        )
    if any(os.path.abspath(f.filename).startswith(_NESTED) for f in traceback.extract_tb(error.__traceback__)):
        return CaptureError(
            f"cannot capture {subject}: a nested tensor {where}: samples of several sizes have no static shape: pad "
            "them to one, and mask what lies behind their ends"
        )
    if type(error).__name__ in _DATA_DEPENDENT or _LISTED in str(error):
        what, remedy = _dependence(error)
        return CaptureError(f"cannot capture {subject}: {what} {where}: {remedy}")
    if type(error).__name__ == "FakeTensorDeviceMismatchError" or _DEVICES in str(error):
        return CaptureError(
            f"cannot capture {subject}: tensors of two devices meet {where}: a tensor that the model keeps must be a "
            "registered buffer, and a new one must take its device from an input"
        )
    if type(error).__name__ == _HIGHER_ORDER:
        return CaptureError(
            f"cannot capture {subject}: torch.cond, or another call of functions, {where}: "
            "it is no plain operator, and HAP cannot shard it"
        )
    if isinstance(error, (SelectionError, RefusedError)):
        return CaptureError(f"cannot capture {subject}: {error} {where}")
    if _WITHIN in str(error):  # by ``torch.autograd.backward``
        return CaptureError(f"cannot capture {subject}: {BACKWARD} {where}")
    if isinstance(error, NotImplementedError) and _GENERATOR in str(error):
        return CaptureError(
            f"cannot capture {subject}: a draw with a generator of random numbers {where}: HAP has no place for it"
        )
    if any(said in str(error) for said in _KEPT):
        where = f"{where} ({', '.join(kept[:3])})" if kept else where
        return CaptureError(
            f"cannot capture {subject}: a tensor that is kept from step to step changes {where}, and is no buffer of "
            "the model: register it as one (what a loss function keeps, too: make it a part of the model), or, if it "
            "is made once and stays, make it in __init__, or run the model once before"
        )
    what = " ".join(str(error).split()) or "no message"
    return CaptureError(f"cannot capture {subject}: {type(error).__name__} {where}: {what[:300]}")


def _dependence(error: Exception) -> tuple[str, str]:
    """What depends on the values in a tensor, and what to do."""
    if any(f.filename == torch.nn.modules.batchnorm.__file__ for f in traceback.extract_tb(error.__traceback__)):
        return "BatchNorm with momentum=None, which divides by a count kept in a tensor,", "give it a momentum"
    if type(error).__name__ == "DynamicOutputShapeException":
        return "a tensor whose size depends on values", (
            "a boolean index, nonzero, unique and masked_select make one; use torch.where or a mask, or make a "
            "constant one in the forward pass, not of a buffer"
        )
    what = "values that leave PyTorch" if _LISTED in str(error) else "data-dependent control flow"
    return what, (
        "the program may not depend on the values in a tensor; use torch.where or a mask, or move it out of the model"
    )


def _place(error: Exception, module: str) -> str:
    frame = guilty_frame(error)
    inside = f"in module {module!r}" if module else "in the root module"
    return inside if frame is None else f"at {frame.filename}:{frame.lineno}: `{frame.line}` {inside}"


def guilty_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The deepest frame of the error (or of what caused it) that is neither torch's, nor Python's, nor capture's."""
    found = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(os.path.abspath(f.filename))]
    if found:
        return found[-1]
    cause = error.__cause__ or error.__context__
    return guilty_frame(cause) if cause is not None else None


def _is_users(filename: str) -> bool:
    if filename.startswith((_TORCH, _OURS)) or os.path.basename(filename).startswith("<frozen"):
        return False
    return not filename.startswith(_STDLIB) or "site-packages" in filename or "dist-packages" in filename
