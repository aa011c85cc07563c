"""The module that is traced: the user's model on fake tensors, called with the example inputs, returning its loss.

Beside the loss it returns the outputs that were asked for by name, detached: what trains is the loss alone. So it does
the buffers that modules gave another tensor (``self.count = self.count + 1``) instead of changing the one that they
have, which the backward pass may still need; ``assigned`` has their names.

The copy is made with ``copy.deepcopy`` whose memo already holds a fake tensor for every parameter and buffer, so no
weight is allocated or touched, and a model on ``meta`` or on a GPU gives the same copy as one on the CPU. The copy's
tensors are handed to it by ``torch.func.functional_call``: tied weights are then one tensor, and autograd adds their
gradients.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx.traceback
from torch import nn

from hap.capture.counters import Calls
from hap.capture.dropout import ByDropout
from hap.capture.inputs import StepInputs
from hap.capture.kept import Followed, bind_anew
from hap.capture.outside import Hook, Outside
from hap.capture.recurrent import LayerByLayer
from hap.capture.respell import Respelled
from hap.capture.spread import forward_of
from hap.capture.torch_private import pytree
from hap.errors import CaptureError

MODULE_KEY = "hap_module"  # under node.meta["custom"]


class Step(nn.Module):
    """``parameters`` and ``buffers`` are the fake tensors, by the user's names; they are registered as p0.., b0...
    ``outside``: the model's own; ``hooks``: of its parameters; ``as_places``: as of ``Respelled``; ``calls``: what is
    kept between those of a trace."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
        inputs: StepInputs,
        loss_fn: Callable[..., Any] | None,
        outputs: tuple[str, ...],
        outside: Outside,
        hooks: Mapping[str, Sequence[Hook]],
        as_places: bool,
        calls: Calls,
    ) -> None:
        super().__init__()
        self.outputs, self.outside, self.hooks, self.as_places = outputs, outside, hooks, as_places
        self.calls = calls
        self.unregistered = (model, loss_fn)  # a tuple, so that their parameters are not this module's too
        self.parameter_names, self.buffer_names = tuple(parameters), tuple(buffers)
        self.inputs = inputs
        self.failed: tuple[Exception, str] | None = None
        self.assigned: tuple[str, ...] = ()
        for i, parameter in enumerate(parameters.values()):
            self.register_parameter(f"p{i}", parameter)
        for i, buffer in enumerate(buffers.values()):
            self.register_buffer(f"b{i}", buffer)
        for name, module in model.named_modules():
            self._follow(name, module)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        model, loss_fn = self.unregistered
        self.calls.begin()
        call = self.inputs.rebuild(tensors)
        parameters = {name: getattr(self, f"p{i}") for i, name in enumerate(self.parameter_names)}
        buffers = {name: getattr(self, f"b{i}") for i, name in enumerate(self.buffer_names)}
        state = {**parameters, **buffers}
        respelled = Respelled(dict(state), tensors, self.outside, as_places=self.as_places)
        for name, hooks in self.hooks.items():
            for hook in hooks:
                parameters[name].register_hook(_under(respelled, hook))
        with LayerByLayer(), ByDropout(), respelled:
            output = torch.func.functional_call(model, state, call.args, dict(call.kwargs))
            respelled.settle()
            for name, parameter in parameters.items():
                if state[name] is not parameter:
                    raise CaptureError(
                        f"the forward pass replaces parameter {name}: a frozen one can be changed in place instead, "
                        "under torch.no_grad()"
                    )
            new = {name: state[name] for name, buffer in buffers.items() if state[name] is not buffer}
            for name, buffer in new.items():
                _check_assigned(name, buffers[name], buffer)
            respelled.assign(new)
            self.assigned = tuple(new)
            found = [find_output(output, name).detach().clone() for name in self.outputs]
            with self.outside.lent(model):
                loss = find_loss(output, loss_fn, call.targets)
                respelled.settle()
            found += [buffer.detach().clone() for buffer in new.values()]
        self.calls.end(respelled.known.value)
        return loss, *found

    def failed_module(self, error: Exception) -> str:
        """The innermost module that ``error`` left, "" if it was raised outside of any or in the root."""
        return self.failed[1] if self.failed is not None and self.failed[0] is error else ""

    def _follow(self, name: str, module: nn.Module) -> None:
        """Mark what ``module.forward`` calls with its name, and remember the name if it raises."""
        module.forward = _Followed(self, name, forward_of(module))


class _Followed(Followed):
    """That of a copy which the forward pass makes of the module is the copy's."""

    def __init__(self, step: Step, name: str, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self._step, self._name, self._forward = step, name, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with torch.fx.traceback.annotate({MODULE_KEY: self._name}):
                return self._forward(*args, **kwargs)
        except Exception as e:
            if self._step.failed is None or self._step.failed[0] is not e:
                self._step.failed = (e, self._name)
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> _Followed:
        return _Followed(self._step, self._name, copy.deepcopy(self._forward, memo))


def _under(mode: Respelled, hook: Hook) -> Hook:
    def hooked(gradient: torch.Tensor) -> torch.Tensor | None:
        with mode:
            return hook(gradient)

    return hooked


def find_loss(output: Any, loss_fn: Callable[..., Any] | None, targets: tuple[Any, ...]) -> torch.Tensor:
    """``loss_fn(output, *targets)``, else the output's ``loss``, the output itself, or the first of a tuple.

    CaptureError unless it is a scalar floating-point tensor that depends on a trainable parameter.
    """
    loss = loss_fn(output, *targets) if loss_fn is not None else _own_loss(output)
    if not isinstance(loss, torch.Tensor):
        what = "the loss_fn" if loss_fn is not None else f"the model (which returns a {type(output).__name__})"
        remedy = "return a scalar tensor" if loss_fn is not None else "pass labels to the model, or a loss_fn"
        raise CaptureError(f"no loss in what {what} returns: {remedy}")
    if loss.dim() != 0:
        raise CaptureError(
            f"the loss must be a scalar, and has shape {tuple(loss.shape)}: reduce it, or pass a loss_fn"
        )
    if not loss.dtype.is_floating_point:
        raise CaptureError(f"the loss must be floating-point, and is {loss.dtype}")
    if not loss.requires_grad:
        raise CaptureError("the loss depends on no trainable parameter")
    return loss


def find_output(output: Any, path: str) -> torch.Tensor:
    """The tensor at ``path``: keys, attributes and positions of the model's output, joined by dots; ``output`` is it
    all where the model returns one tensor. CaptureError naming what there is."""
    found = output
    for step in path.split("."):
        if isinstance(found, torch.Tensor) and found is output and path == "output":
            return found
        there = found if isinstance(found, Mapping) else dict(_items(found))
        if step not in there:
            known = ", ".join(map(str, there)) or "one tensor, named 'output'"
            raise CaptureError(f"the model returns no output {path!r}; it returns: {known}")
        found = there[step]
    if not isinstance(found, torch.Tensor):
        raise CaptureError(f"output {path!r} of the model is a {type(found).__name__}, no tensor")
    return found


def _items(found: Any) -> list[tuple[str, Any]]:
    if isinstance(found, (tuple, list)):
        return [(str(position), item) for position, item in enumerate(found)]
    return [] if isinstance(found, torch.Tensor) else [(k, v) for k, v in getattr(found, "__dict__", {}).items()]


def _own_loss(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if getattr(output, "loss", None) is not None:
        return output.loss
    return output[0] if isinstance(output, (tuple, list)) and output else None


def _check_assigned(name: str, buffer: torch.Tensor, new: torch.Tensor) -> None:
    if new.shape != buffer.shape or new.dtype != buffer.dtype:
        raise CaptureError(f"the forward pass replaces buffer {name} by a tensor of another shape or dtype")
    if new.requires_grad:
        raise CaptureError(f"the forward pass replaces buffer {name} by what needs gradients: detach the new value")


def frozen_loss(loss_fn: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The loss function as part of the program: the tensors of a loss module (class weights) become constants."""
    if not isinstance(loss_fn, nn.Module):
        return loss_fn
    if any(p.requires_grad for p in loss_fn.parameters()):
        raise CaptureError("the loss_fn has trainable parameters: make it a part of the model")
    state = (*loss_fn.parameters(), *loss_fn.buffers())
    return copy_with(loss_fn, {id(t): _constant(t) for t in state})


def copy_with(model: nn.Module, replacements: Mapping[int, torch.Tensor]) -> nn.Module:
    """A deep copy of ``model`` with the tensors whose ``id`` is a key replaced. CaptureError if it cannot be copied.

    A tensor that is neither parameter nor buffer is a constant of the program and moves to the CPU, if it has data.
    What the last forward pass left in a list or a dict, which has no copy of its own, is one, too. Functions that close
    over the model, as hooks do, close over the copy. Modules of classes that are made only with arguments, and static
    methods, neither of which Python copies, are copied, too.
    """
    memo: dict[int, Any] = dict(replacements)
    made = {module: object.__new__(type(module)) for module in model.modules() if _is_made_anew(type(module))}
    memo.update((id(module), new) for module, new in made.items())
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, staticmethod):
                memo[id(value)] = value
            for tensor in pytree.tree_leaves(value):
                is_constant = isinstance(tensor, torch.Tensor) and (tensor is value or not tensor.is_leaf)
                if is_constant and id(tensor) not in memo:
                    memo[id(tensor)] = _constant(tensor)
    try:
        copied = copy.deepcopy(model, memo)
        for module, new in made.items():
            vars(new).update(copy.deepcopy(vars(module), memo))
        bind_anew(copied, memo)
        return copied
    except Exception as e:
        raise CaptureError(f"the model cannot be copied for capture: {type(e).__name__}: {e}") from e


def _is_made_anew(kind: type[nn.Module]) -> bool:
    """Its ``__new__`` may ask for arguments, and it does not say how it is copied."""
    own = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__")
    says = any(name in vars(base) for base in kind.__mro__[:-1] for name in own)
    return kind.__new__ is not object.__new__ and not says


def _constant(tensor: torch.Tensor) -> torch.Tensor:
    """It still says whether it needs gradients: if it is read then, that is refused (``Outside.check_constant``)."""
    found = tensor.detach() if tensor.is_meta else tensor.detach().cpu()
    return found.requires_grad_(tensor.requires_grad)
