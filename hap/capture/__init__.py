"""Capture: a ``torch.nn.Module`` with a loss -> the ``Graph`` of its whole training step.

    graph = capture(model, {"input_ids": ids, "labels": ids})
    graph = capture(model, x, loss_fn=torch.nn.functional.mse_loss, example_targets=y)

The step is traced on fake tensors, so the model may sit on any device, ``meta`` included, and nothing is allocated.
Shapes are those of the examples and are global: they are the whole batch of one step. Only the loss, the gradients,
the buffers that the forward pass changes and the outputs that were asked for survive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hap.capture.autocast import Autocast
from hap.capture.blame import blame
from hap.capture.chance import no_chance
from hap.capture.cleanup import clean
from hap.capture.convert import to_graph
from hap.capture.counters import Calls, forget_cached, steady
from hap.capture.custom import of_tensors
from hap.capture.decompose import decompositions
from hap.capture.experts import as_batched
from hap.capture.inputs import StepInputs, input_paths, step_inputs
from hap.capture.interpret import interpret, source_values
from hap.capture.kept import Kept
from hap.capture.narrow import narrowed
from hap.capture.origins import Origins, numbers_of
from hap.capture.outside import Outside, hooks_of
from hap.capture.selected import SelectionError
from hap.capture.state import model_state
from hap.capture.step import Step, copy_with, frozen_loss
from hap.capture.torch_private import Fakes, trace_joint
from hap.errors import CaptureError
from hap.graph import Graph, verify_graph
from hap.reduce_dtype import ReduceDtype, read_reduce_dtype

__all__ = ["Outside", "capture", "capture_step", "input_paths", "interpret", "model_state", "skeleton", "source_values"]


def capture(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    example_targets: Any = None,
    outputs: Sequence[str] = (),
    reduce_dtype: ReduceDtype = None,
    name: str = "",
) -> Graph:
    """Capture one training step of ``model``.

    ``example_inputs``: a tensor, a tuple or list of positionals, a mapping of keywords, or ``((args...), {kwargs})``;
    real, fake or on ``meta``; only shapes and dtypes matter. What is not a tensor is a constant of the capture.
    The loss is ``loss_fn(output, *example_targets)`` if given, else ``output.loss``, ``output["loss"]``, the output
    itself or its first element: a scalar. ``outputs`` names further tensors to return, as paths into what the model
    returns (``logits``, ``hidden_states.3``, ``1``; ``output`` where it is one tensor); they are detached. Under
    ``torch.autocast`` its casts are captured. ``reduce_dtype`` (bfloat16 or float16): gradients are rounded to it and
    widened again (``hap.capture.narrow``). The model is not changed and none of its tensors is read.

    CaptureError, one line, when the step is not one static graph: values decide what runs, there is no scalar loss, an
    operator has no graph form, or the user's code raises; the message names the user's line and module.
    """
    name = name or type(model).__name__
    if example_targets is not None and loss_fn is None:
        raise CaptureError("example_targets needs a loss_fn to receive them")
    dtype = read_reduce_dtype(reduce_dtype)
    graph = capture_step(
        model, step_inputs(example_inputs, example_targets), loss_fn=loss_fn, outputs=outputs, name=name
    )
    return narrowed(graph, dtype)


def capture_step(
    model: nn.Module,
    inputs: StepInputs,
    *,
    loss_fn: Callable[..., Any] | None = None,
    outputs: Sequence[str] = (),
    name: str = "",
    outside: Outside | None = None,
) -> Graph:
    """``capture`` of a call whose inputs were read already. ``outside``: of the model that ``loss_fn`` may know, if it
    is another one."""
    with torch.inference_mode(False), torch.enable_grad(), Autocast.here().on_cpu():
        graph = clean(_trace(model, inputs, loss_fn, name, tuple(outputs), outside))
    verify_graph(graph)
    return graph


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of ``model`` that captures like it, with parameters and buffers on ``meta``. CaptureError."""
    state = model_state(model)
    replacements: dict[int, torch.Tensor] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in state.parameters.values()
    }
    replacements |= {id(b): torch.empty_like(b, device="meta") for b in state.buffers.values()}
    for name, hooks in hooks_of(state.parameters).items():
        for hook in hooks:
            replacements[id(state.parameters[name])].register_hook(hook)
    return copy_with(model, replacements)


def _trace(
    model: nn.Module,
    inputs: StepInputs,
    loss_fn: Callable[..., Any] | None,
    name: str,
    outputs: tuple[str, ...],
    outside: Outside | None,
) -> Graph:
    """The graph as traced, before it is cleaned."""
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise CaptureError(f"{name} deals out the batch by itself, as HAP does: give HAP its .module")
    state = model_state(model)
    outside, hooks = outside or Outside.of(model, state), hooks_of(state.parameters)
    fakes = Fakes()
    parameters = {n: fakes.parameter(p) for n, p in state.parameters.items()}
    buffers = {n: fakes.tensor(b) for n, b in state.buffers.items()}
    fake = {**parameters, **buffers}
    replacements = {id(t): fake[n] for n, t in (*state.parameters.items(), *state.buffers.items())}
    copied, loss = copy_with(model, replacements), frozen_loss(loss_fn)

    def traced(calls: Calls, as_places: bool = False) -> Graph:
        step = Step(copied, parameters, buffers, inputs, loss, outputs, outside.and_of(fake), hooks, as_places, calls)
        try:
            with as_batched(), no_chance(name), of_tensors():
                trace = trace_joint(step, [fakes.tensor(t) for _, t in inputs.named], fakes, decompositions())
        except CaptureError:
            raise
        except Exception as e:
            first = calls.first or calls.before
            blamed = blame(e, name, step.failed_module(e), first.traced_in(Kept((copied, loss))))
            if isinstance(e, SelectionError) and not as_places:
                calls.before.restore()
                with contextlib.suppress(CaptureError):  # what it says is of the same line
                    return traced(calls, as_places=True)
            raise blamed from e
        return to_graph(
            trace,
            name=name,
            parameters=tuple(parameters),
            buffers=tuple(buffers),
            inputs=[path for path, _ in inputs.named],
            tied=state.tied,
            outputs=outputs,
            assigned=step.assigned,
            frozen=[n for n, p in state.parameters.items() if not p.requires_grad],
            outside=outside,
            loss_fn=loss_fn,
        )

    users, numbers = Kept((model, outside.model(), loss_fn)), tuple(numbers_of(loss_fn))
    try:
        outside.turn(copied)
        graph = steady(traced, (copied, loss), name)
        unchanged = [number for number in numbers if not number.has_changed()]
        return replace(graph, origins=Origins((*graph.origins, *unchanged)))
    finally:
        users.restore()
        forget_cached(users.caches)
