"""The only door to torch's private modules. What it needs of them, and what breaks when they move:

- ``FakeTensorMode``: tensors without storage. Always fake *CPU* tensors: on ``meta`` AOTAutograd silently drops
  gradients, on fake ``cuda`` a CPU-only build dies. Its ``dispatch`` sees all calls.
- ``aot_export_joint_with_descriptors``: the joint graph, with descriptors that say which placeholder is which parameter
  and which output is whose gradient.
- ``backward_pass_autocast`` (since torch 2.9): whether the backward pass is traced under the forward pass's autocast.
- ``_is_exporting_flag``, ``_is_compiling_flag``: libraries (Hugging Face's masks) ask them before they look at values.
- ``TracingContext``: tells AOTAutograd which fake mode the arguments belong to.
- ``_set_mkldnn_enabled``: keeps kernels of one kind of CPU out of the trace.
- ``get_decompositions``: torch's decompositions, as Python functions.
- ``_is_alias_of``: whether two tensors lie in one memory, while there is none.
- ``_will_engine_execute_node``: whether the backward pass that is under way goes on to a node.
- ``_current_graph_task_id``: which backward pass is under way.
- ``Distribution._validate_args``: whether distributions check their arguments.
- ``_clip_grads_with_norm_``: what clipping by a norm ends with, whoever imported it before.
- ``GradScaler._unscale_grads_``: what every scaler's step begins with.
- ``Optimizer.state_dict``, ``load_state_dict``: nothing private, but no hook of torch's is of all optimizers.
- ``autocast_mode._cast``: what ``torch.amp.custom_fwd(cast_inputs=...)`` casts, by device.
- ``DataDependentOutputException``, ``DynamicOutputShapeException``: what a fake tensor raises where values are wanted.
- ``FunctionalTensor.tolist``: which no mode sees, unlike that of other tensors.
- ``_disable_current_modes``, ``DisableTorchFunction``: something is computed for once, not traced.
- ``_is_functional_tensor``, ``is_functorch_wrapped_tensor``: what a traced tensor holds is a plain one by its type.
- ``lift_fresh_copy``: a tensor becomes a constant of the trace.
- ``_pytree``: the tensors among arguments, however they are put together.
- ``CheckpointFunction.apply``: activation checkpointing whose backward pass calls the autograd engine by itself, which
  cannot be traced.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch._decomp import get_decompositions
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    ForwardTokenAOTInput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.amp import autocast_mode
from torch.distributions import Distribution
from torch.nn.utils import clip_grad
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction

from hap.errors import CaptureError

__all__ = [
    "Fakes", "JointTrace", "OpOverload", "Role", "ValuesWanted", "as_constant", "as_list", "casts_for_cuda_on_cpu",
    "current_pass", "get_decompositions", "has_values", "is_alias", "is_fake", "is_traced", "no_trace", "pytree",
    "trace_joint", "untraced", "watch_clipping", "watch_optimizer_states", "watch_scaling",
]  # fmt: skip

_OWN_LIST = FunctionalTensor.tolist
no_trace = threading.RLock()  # while it is held: torch.compiler.is_compiling() says of all threads what goes for one
ValuesWanted = (DataDependentOutputException, DynamicOutputShapeException)


@dataclass(frozen=True)
class Role:
    """What a placeholder is, or what an output belongs to. ``index`` counts within its kind, in registration order.

    ``changed_parameter`` and ``changed_input`` are in-place changes, ``changed_buffer`` one by a value that needs
    gradients; an in-place change of a buffer by any other value is an ``update``. A ``token`` orders side effects.
    """

    kind: Literal[
        "parameter", "buffer", "input", "tangent", "loss", "output", "gradient", "update",
        "changed_parameter", "changed_input", "changed_buffer", "token",
    ]  # fmt: skip
    index: int = 0


@dataclass(frozen=True)
class JointTrace:
    """The joint graph: ``module.graph`` with a role for each placeholder and each (not None) output."""

    module: torch.fx.GraphModule
    placeholders: tuple[tuple[torch.fx.Node, Role], ...]
    outputs: tuple[tuple[torch.fx.Node, Role], ...]


class Fakes:
    """Makes the fake tensors of one capture: contiguous, on the CPU, without storage."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.mode.dispatch = _without_collectives(self.mode.dispatch)  # type: ignore[method-assign]

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        with self.mode:
            return torch.empty(like.shape, dtype=like.dtype, device="cpu")

    def parameter(self, like: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(self.tensor(like), requires_grad=like.requires_grad)


def _without_collectives(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """They would be called here and now, on nothing, and not be traced."""

    def dispatched(func: OpOverload, *rest: Any) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError(f"{func} in a model")
        return dispatch(func, *rest)

    return dispatched


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether it is of a trace, and of no use outside of that."""
    return isinstance(tensor, (FakeTensor, FunctionalTensor)) or torch._is_functional_tensor(tensor)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor as any program has it, on the CPU: not of a trace, not what such a tensor is made of."""
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu":
        return False
    return not torch._is_functional_tensor(tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_alias(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they share memory, as a tensor and its view do."""
    return bool(torch._C._is_alias_of(one, other))  # type: ignore[attr-defined]


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Inside of a trace: what is called here is computed, and nobody sees it."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def as_list(tensor: torch.Tensor) -> Any:
    """Inside of a trace: what wants the values of a traced tensor, and raises ``ValuesWanted``."""
    return _OWN_LIST(tensor) if isinstance(tensor, FunctionalTensor) else tensor.tolist()


@contextlib.contextmanager
def casts_for_cuda_on_cpu() -> Iterator[None]:
    """While active, arguments that ``torch.amp.custom_fwd`` casts where they are on a GPU are cast on the CPU."""
    cast = autocast_mode._cast

    def on_cpu(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast(value, "cpu" if device_type == "cuda" else device_type, dtype)

    autocast_mode._cast = on_cpu
    try:
        yield
    finally:
        autocast_mode._cast = cast


def as_constant(value: torch.Tensor) -> torch.Tensor:
    """Inside of a trace: this value as a constant of it."""
    return torch.ops.aten.lift_fresh_copy.default(value)


def is_added_to_grad(node: Any) -> bool | None:
    """Inside of a backward pass, of the node that adds a gradient to a leaf's ``.grad``: whether the pass gets there;
    None if what would be added is handed out instead, as ``torch.autograd.grad`` does."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError as error:
        if "autograd.grad()" not in str(error):
            raise
        return None


def current_pass() -> int:
    """The number of the backward pass that is under way in this thread, which no other has had; -1 outside of any."""
    return torch._C._current_graph_task_id()


def watch_clipping(check: Callable[[Sequence[torch.Tensor]], None]) -> None:
    """From now on ``check`` sees the parameters before ``torch.nn.utils.clip_grad_norm_`` scales their gradients."""
    scale = clip_grad._clip_grads_with_norm_

    @functools.wraps(scale)
    def watched(parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        check(given)
        scale(given, *args, **kwargs)

    for module, name in ((clip_grad, "_clip_grads_with_norm_"), (nn.utils, "clip_grads_with_norm_")):
        setattr(module, name, watched)


def watch_scaling(check: Callable[[torch.amp.GradScaler, torch.optim.Optimizer], None]) -> None:
    """From now on ``check`` is called before a scaler looks at an optimizer's gradients."""
    unscale = torch.amp.GradScaler._unscale_grads_

    @functools.wraps(unscale)
    def watched(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        check(self, optimizer)
        return unscale(self, optimizer, *args, **kwargs)

    torch.amp.GradScaler._unscale_grads_ = watched  # type: ignore[method-assign]


def watch_optimizer_states(
    saved: Callable[[torch.optim.Optimizer, dict[str, Any]], None],
    loaded: Callable[[torch.optim.Optimizer, Mapping[str, Any]], None],
) -> None:
    """From now on ``saved`` is called with what an optimizer's ``state_dict`` returns, and ``loaded`` with what
    ``load_state_dict`` is given."""
    save, load = torch.optim.Optimizer.state_dict, torch.optim.Optimizer.load_state_dict

    @functools.wraps(save)
    def watched_save(self: torch.optim.Optimizer) -> dict[str, Any]:
        found = save(self)
        saved(self, found)
        return found

    @functools.wraps(load)
    def watched_load(self: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        loaded(self, state_dict)
        load(self, state_dict)

    torch.optim.Optimizer.state_dict = watched_save  # type: ignore[method-assign]
    torch.optim.Optimizer.load_state_dict = watched_load  # type: ignore[method-assign]


def trace_joint(
    step: nn.Module,
    inputs: Sequence[torch.Tensor],
    fakes: Fakes,
    decompositions: Mapping[OpOverload, Callable[..., Any]],
) -> JointTrace:
    """Trace forward and backward of ``step(*inputs)``, which returns the loss and detached outputs: the forward pass
    under the autocast that is active, the backward pass under none, as ``loss.backward()`` is called outside of it.

    What the step raises comes through.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_export_flags())
        stack.enter_context(_quiet())
        stack.enter_context(_without_mkldnn())
        stack.enter_context(_unchecked_distributions())
        stack.enter_context(_without_reentry())
        stack.enter_context(_seen_lists())
        stack.enter_context(functorch_config.patch(backward_pass_autocast="off"))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(tracing(TracingContext(fakes.mode)))
        joint = aot_export_joint_with_descriptors(stack, step, tuple(inputs), decompositions=dict(decompositions))
        module = joint.graph_module
    nodes = list(module.graph.nodes)
    placeholders = tuple((n, _input_role(n.meta["desc"])) for n in nodes if n.op == "placeholder")
    (output,) = (n for n in nodes if n.op == "output")
    described = zip(output.args[0], output.meta["desc"], strict=True)
    wanted = ((n, d) for n, d in described if n is not None and not _is_of_input(d))
    return JointTrace(module, placeholders, tuple((n, _output_role(d)) for n, d in wanted))


def _is_of_input(descriptor: Any) -> bool:
    """Whether it is a gradient that ends in an input's ``.grad``: of one that the forward pass told to need gradients,
    since it asks for them itself."""
    return isinstance(descriptor, GradAOTOutput) and isinstance(descriptor.grad_of, PlainAOTInput)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch logs a traceback before it raises what capture turns into one line."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def _without_mkldnn() -> Iterator[None]:
    """With it an LSTM in float32 is one call that only CPUs have, and whose fake gradients share a value at first.

    ``torch.backends.mkldnn.flags`` does the same, and warns of hardware that is not there.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextlib.contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """``torch.distributions`` looks at values to check its arguments, unless it is told not to."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextlib.contextmanager
def _without_reentry() -> Iterator[None]:
    """What checkpointing with ``use_reentrant=True`` would call again is called once. As there, nothing gets a gradient
    if no argument needs one, parameters included."""

    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        needed = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        with contextlib.nullcontext() if needed else torch.no_grad():
            return function(*args)

    CheckpointFunction.apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        del CheckpointFunction.apply


@contextlib.contextmanager
def _seen_lists() -> Iterator[None]:
    FunctionalTensor.tolist = torch.Tensor.tolist  # type: ignore[method-assign]
    try:
        yield
    finally:
        FunctionalTensor.tolist = _OWN_LIST  # type: ignore[method-assign]


@contextlib.contextmanager
def _export_flags() -> Iterator[None]:
    names = ("_is_exporting_flag", "_is_compiling_flag")
    with no_trace:
        before = {name: getattr(torch.compiler, name) for name in names}
        try:
            for name in names:
                setattr(torch.compiler, name, True)
            yield
        finally:
            for name, value in before.items():
                setattr(torch.compiler, name, value)


def _input_role(descriptor: Any) -> Role:
    match descriptor:
        case ParamAOTInput(target=target):
            return Role("parameter", int(target[1:]))
        case BufferAOTInput(target=target):
            return Role("buffer", int(target[1:]))
        case PlainAOTInput(idx=index):
            return Role("input", index)
        case TangentAOTInput(output=PlainAOTOutput(idx=0)):
            return Role("tangent")
        case TangentAOTInput(output=InputMutationAOTOutput(mutated_input=BufferAOTInput(target=target))):
            return Role("changed_buffer", int(target[1:]))
        case TangentAOTInput(output=InputMutationAOTOutput() as mutation):
            return _output_role(mutation)
        case ForwardTokenAOTInput(idx=index):
            return Role("token", index)
    raise CaptureError(f"the program needs an input that HAP does not know: {descriptor}")


def _output_role(descriptor: Any) -> Role:
    match descriptor:
        case PlainAOTOutput(idx=0):
            return Role("loss")
        case PlainAOTOutput(idx=index):
            return Role("output", index - 1)
        case GradAOTOutput(grad_of=ParamAOTInput(target=target)):
            return Role("gradient", int(target[1:]))
        case InputMutationAOTOutput(mutated_input=BufferAOTInput(target=target)):
            return Role("update", int(target[1:]))
        case InputMutationAOTOutput(mutated_input=ParamAOTInput(target=target)):
            return Role("changed_parameter", int(target[1:]))
        case InputMutationAOTOutput(mutated_input=PlainAOTInput(idx=index)):
            return Role("changed_input", index)
        case ForwardTokenAOTOutput(idx=index):
            return Role("token", index)
    raise CaptureError(f"the program has an output that HAP does not know: {descriptor}")
