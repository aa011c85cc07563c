"""``hap advise``: what would make training faster on this cluster, each way planned, beside what is there now.

The ways are those of the literature on communication that a planner can judge (survey: arXiv 2404.06114, sections III
to VI), in three classes: what one device would compute, too; the same but for rounding; a larger batch,
which is other training. What another class would take, compressed further or stale, is not among them but for
``hap.Acco``, which no plan predicts. Better hardware is at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from hap import api
from hap.build import BuiltModel
from hap.capture import capture
from hap.capture.inputs import step_inputs
from hap.capture.narrow import narrowed
from hap.cluster import ClusterSpec
from hap.errors import HapError
from hap.graph import Graph
from hap.mesh_plan import MeshPlan
from hap.plan import Plan
from hap.reduce_dtype import REDUCE_DTYPES, ReduceName
from hap.report.words import quantity, table
from hap.rules.choices import batch_of
from hap.search.planner import Effort
from hap.starting import in_words, left_out
from hap.whatif import what_helps

Trains = Literal["the same", "the same, rounded", "larger batches", "the same, on other hardware"]
NOW = "as it is"
LARGER = 4  # batches of a step
LOWER = (torch.bfloat16, torch.float16)
NARROW: ReduceName = "bfloat16"
HELPS = 3  # changes of hardware that are told of
WORTH = 0.01  # a gain below is none


@dataclass(frozen=True)
class Option:
    """One way. ``how``: what to type; ``samples_per_s``: None if it does not go, and ``why_not``."""

    name: str
    trains: Trains
    how: str
    devices: int
    samples_per_s: float | None
    why_not: str = ""


@dataclass(frozen=True)
class Advice:
    """The options, the fastest first; those that do not go are last."""

    options: tuple[Option, ...]

    @property
    def now(self) -> Option:
        return next(option for option in self.options if option.name == NOW)

    @property
    def best(self) -> Option | None:
        """The fastest way to train the same on the same hardware, if it is worth it; None: as it is."""
        best = next((o for o in self.options if o.trains == "the same" and o.samples_per_s is not None), None)
        if best is None or best.name == NOW:
            return None
        gain = self.gain(best)
        return best if gain is None or gain > WORTH else None

    def gain(self, option: Option) -> float | None:
        """Beside now; None where one of the two does not go."""
        now = self.now.samples_per_s
        return None if not now or option.samples_per_s is None else option.samples_per_s / now - 1

    def to_json(self) -> dict[str, Any]:
        best = self.best
        rows = [{**asdict(option), "gain": self.gain(option)} for option in self.options]
        return {"best": None if best is None else best.name, "options": rows}

    def __str__(self) -> str:
        best = self.best
        if best is None:
            first = "nothing that trains the same is faster than what a plain hap plan makes"
        else:
            gain = self.gain(best)
            first = f"{best.name}{'' if gain is None else f' is {gain:.0%} faster, and trains the same'}: {best.how}"
        rows = [["", "trains", "devices", "samples/s", "beside now", "how"]]
        for o in self.options:
            gain = self.gain(o)
            speed = o.why_not if o.samples_per_s is None else quantity(o.samples_per_s)
            rows.append(
                [
                    o.name,
                    o.trains,
                    str(o.devices) if o.samples_per_s else "",
                    speed,
                    "" if gain is None else f"{gain:+.1%}",
                    o.how,
                ]
            )
        return "\n".join([first, "", *table(rows, right=(2, 3, 4))])


def advise(
    built: BuiltModel,
    cluster: ClusterSpec,
    *,
    optimizer: str = "adamw",
    effort: Effort = "normal",
    progress: Callable[[str], None] = lambda name: None,
) -> Advice:
    """Plan every way that goes with this model and this cluster. ``progress`` is told what is planned next.

    HapError if no way goes.
    """
    adviser = _Adviser(built, cluster, optimizer, effort)
    found: list[Option] = []
    for name, trains, way in adviser.ways():
        progress(name)
        try:
            found += way()
        except (HapError, _Nothing) as e:
            found.append(Option(name, trains, "", cluster.world_size, None, " ".join(str(e).split())))
    if all(option.samples_per_s is None for option in found):
        raise HapError(next(option.why_not for option in found))
    return Advice(tuple(sorted(found, key=lambda o: -(o.samples_per_s or 0.0))))


class _Nothing(Exception):
    """A way that is none here, and why."""


@dataclass(frozen=True, eq=False)
class _Adviser:
    built: BuiltModel
    cluster: ClusterSpec
    optimizer: str
    effort: Effort

    def ways(self) -> Iterator[tuple[str, Trains, Callable[[], list[Option]]]]:
        yield NOW, "the same", self.as_it_is
        yield "slow devices left out", "the same", self.left_out
        yield "the batch in parts", "the same", lambda: self.in_parts(False)
        yield "the batch in parts, slow devices left out", "the same", lambda: self.in_parts(True)
        yield "two axes", "the same", self.two_axes
        yield f"gradients in {NARROW}", "the same, rounded", self.narrow_gradients
        yield "autocast", "the same, rounded", self.lower_precision
        yield f"{LARGER} batches a step", "larger batches", self.larger_batch

    def as_it_is(self) -> list[Option]:
        """And on other hardware: by so much as the step with nothing overlapped, its shares dealt out anew, is
        shorter."""
        plan = self._plan()
        speed, step_s = self._speed(plan), plan.predicted.step_s
        helps = sorted(what_helps(plan, self.graph, self.cluster), key=lambda h: h.step_s)[:HELPS]
        found = [self._option(NOW, "the same", "hap plan", plan)]
        for one in helps:
            faster = speed * step_s / one.step_s
            found.append(Option(one.change, "the same, on other hardware", "", plan.world_size, faster))
        return found

    def left_out(self) -> list[Option]:
        plan = self._plan(leave_out=True)
        if not left_out(plan):
            raise _Nothing("no device is better left out")
        return [self._option(f"without {in_words(plan)}", "the same", "hap plan --leave-out", plan)]

    def in_parts(self, leave_out: bool) -> list[Option]:
        plan = self._plan(leave_out=leave_out, gradient_accumulation_steps="best")
        count = plan.gradient_accumulation_steps
        if leave_out and not left_out(plan):
            raise _Nothing("no device is better left out")
        if count == 1:
            raise _Nothing("whole it is fastest")
        how = f"hap plan{' --leave-out' if leave_out else ''} --gradient-accumulation-steps best"
        name = f"the batch in {count} parts" + (f", without {in_words(plan)}" if leave_out else "")
        return [self._option(name, "the same", how, plan, count)]

    def two_axes(self) -> list[Option]:
        if len(self.cluster.hosts) == 1:
            raise _Nothing("there is one host")
        plan = api.plan_mesh(self.built.model, self.cluster, **self._given)
        return [self._option("two axes", "the same", "hap plan --mesh hosts", plan)]

    def narrow_gradients(self) -> list[Option]:
        if narrowed(self.graph, REDUCE_DTYPES[NARROW]).gradients == self.graph.gradients:
            raise _Nothing("no gradient is wider")
        plan, how = self._plan(reduce_dtype=NARROW), f"hap plan --reduce-dtype {NARROW}"
        return [self._option(f"gradients exchanged in {NARROW}", "the same, rounded", how, plan)]

    def lower_precision(self) -> list[Option]:
        dtype, kind = self.lower, "cuda" if self.cluster.backend == "nccl" else "cpu"
        name = str(dtype).removeprefix("torch.")
        with torch.autocast("cpu", dtype):
            plan = self._plan()
        how = f'hap.compile inside torch.autocast("{kind}", {dtype})'
        how += ", program.grad_scaler()" if dtype == torch.float16 else ""
        return [self._option(f"{name} autocast", "the same, rounded", how, plan)]

    def larger_batch(self) -> list[Option]:
        plan = self._plan(gradient_accumulation_steps=LARGER)
        how = f"hap plan --gradient-accumulation-steps {LARGER}, program.no_sync()"
        return [self._option(f"{LARGER} batches a step", "larger batches", how, plan)]

    @cached_property
    def graph(self) -> Graph:
        built = self.built
        return capture(built.model, built.example_inputs, loss_fn=built.loss_fn, example_targets=built.example_targets)

    @property
    def lower(self) -> torch.dtype:
        """The dtype for autocast: bfloat16, or what all devices have."""
        if all(p.dtype != torch.float32 for p in self.built.model.parameters()):
            raise _Nothing("no parameter is float32")
        for dtype in LOWER:
            if all(str(dtype).removeprefix("torch.") in device.tflops for device in self.cluster.devices):
                return dtype
        raise _Nothing("not all devices are described with bfloat16 or float16")

    @property
    def _given(self) -> dict[str, Any]:
        return {
            "example_inputs": self.built.example_inputs,
            "example_targets": self.built.example_targets,
            "loss_fn": self.built.loss_fn,
            "optimizer": self.optimizer,
            "effort": self.effort,
        }

    def _plan(self, **more: Any) -> Plan:
        return api.plan(self.built.model, self.cluster, **self._given, **more)

    def _option(self, name: str, trains: Trains, how: str, plan: Plan | MeshPlan, parts: int = 1) -> Option:
        return Option(name, trains, how, plan.world_size, self._speed(plan, parts))

    def _speed(self, plan: Plan | MeshPlan, parts: int = 1) -> float:
        """Samples a second, as run; ``parts``: of the batch, of which the plan is for one."""
        inputs = step_inputs(self.built.example_inputs, self.built.example_targets)
        samples = batch_of(t.shape for _, t in inputs.named) or 1
        return samples / (plan.predicted.as_run_s * parts)
