"""What ``hap.compile`` keeps of a model so that its program can be had again for another batch shape or mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hap.capture import Outside, capture_step, model_state, skeleton
from hap.capture.autocast import Autocast
from hap.capture.inputs import StepInputs
from hap.capture.narrow import narrowed
from hap.carry import carry_over
from hap.codegen.lowering import lower
from hap.codegen.program import Program
from hap.graph import Graph
from hap.mesh_plan import MeshPlan
from hap.plan import Plan


class Recompiler:
    """The model's structure on ``meta``, its loss, its plan and the autocast it was captured under."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[..., Any] | None,
        graph: Graph,
        plan: Plan | MeshPlan,
        outputs: Sequence[str] = (),
    ) -> None:
        self._training, self._model = model.training, skeleton(model)
        self._outside = Outside.of(model, model_state(model))
        self._loss_fn, self.first, self._plan = loss_fn, graph, plan
        self._outputs = outputs
        self._autocast = Autocast.here()

    def program(self, example: StepInputs, training: bool) -> Program:
        """The program for an example on ``meta``, in training or in evaluation. CaptureError, MissingRuleError."""
        assert isinstance(self._plan, Plan), "of a plan of one axis"
        graph = self.graph(example, training)
        return lower(graph, carry_over(self._plan, self.first, graph))

    def graph(self, example: StepInputs, training: bool) -> Graph:
        """The step's graph.

        The mode that was compiled is that of every module of the model; the other one is all of them turned.
        """
        model = self._model if training == self._training else skeleton(self._model).train(training)
        with self._autocast.again():
            graph = capture_step(
                model,
                example,
                loss_fn=self._loss_fn,
                outputs=self._outputs,
                name=self.first.name,
                outside=self._outside,
            )
        return narrowed(graph, self.first.reduce_dtype)
