"""The captured training step: one flat, plain-data list of ATen calls, forward and backward together.

A ``Graph`` is what capture produces and every later stage reads. It holds no fake tensors and no torch.fx objects, so
it can be hashed, compared and rewritten cheaply (deep-copying graph modules with fake tensors is slow).

A *node* is one operator call or one source (parameter, buffer, input, tangent, constant). A node may have several
outputs; a *value* ``Value(node, index)`` names one of them, so there are no ``getitem`` nodes. Arguments are nested
tuples of literals with ``Value`` leaves; dtypes and devices are literals too (``torch.dtype``; devices are dropped by
capture and restored by codegen).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch

SOURCES = ("parameter", "buffer", "input", "tangent", "constant")
CAST = "aten._to_copy.default"
Phase = Literal["forward", "backward"]


class Value(NamedTuple):
    """One output of one node."""

    node: str
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which nobody calls

    def __str__(self) -> str:
        return f"{self.node}:{self.index}" if self.index else self.node

    @classmethod
    def parse(cls, text: str) -> Value:
        node, _, index = text.partition(":")
        return cls(node, int(index or 0))


@dataclass(frozen=True)
class TensorMeta:
    """Global (single-device) shape and dtype of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Node:
    """One call. ``op`` is a source kind from ``SOURCES`` or an operator's full name such as ``aten.mm.default``.

    ``outputs[i]`` is ``None`` where the operator returns None or a non-tensor at that position. ``module`` is the
    qualified name of the user's module that made the call ("" for the root). ``target`` is set on sources: the
    parameter's or buffer's qualified name, or the input's path (``args.0``, ``kwargs.labels``, ``targets.0``).
    """

    name: str
    op: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[TensorMeta | None, ...] = ()
    phase: Phase = "forward"
    module: str = ""
    target: str = ""

    @cached_property
    def is_source(self) -> bool:
        return self.op in SOURCES

    @property
    def meta(self) -> TensorMeta:
        """The single output's meta; an invariant violation if there is none."""
        assert self.outputs and self.outputs[0] is not None, f"{self.name} has no tensor output"
        return self.outputs[0]

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """Tensor arguments in call order (args, then kwargs), repeated if passed twice. Rules index this tuple."""
        return tuple(values_in((self.args, tuple(v for _, v in self.kwargs))))

    def kwarg(self, name: str, default: Any = None) -> Any:
        return dict(self.kwargs).get(name, default)


@dataclass(frozen=True)
class Graph:
    """A whole training step.

    ``gradients`` maps each trainable parameter to the value of its gradient (tied parameters appear once, under their
    first name; ``tied`` maps every other name to it). ``updates`` maps mutated buffers to their new values.
    ``constants`` holds the small tensors that ``constant`` nodes refer to by name. ``output_paths`` is reserved for
    outputs beside the loss. ``reduce_dtype``: what gradients are rounded to before they are final
    (``hap.capture.narrow``); None: nothing was done to them. ``origins``: of constants (``hap.capture.origins``), for
    whoever runs the step.
    """

    name: str
    nodes: tuple[Node, ...]
    loss: Value
    gradients: Mapping[str, Value]
    updates: Mapping[str, Value] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    reduce_dtype: torch.dtype | None = None
    origins: tuple[Any, ...] = field(default=(), compare=False, repr=False)

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        return {n.name: n for n in self.nodes}

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Name -> number of the node."""
        return {n.name: i for i, n in enumerate(self.nodes)}

    @cached_property
    def users(self) -> Mapping[Value, tuple[tuple[Node, int], ...]]:
        """Value -> every (node, position in ``node.inputs``) that reads it."""
        found: dict[Value, list[tuple[Node, int]]] = {}
        for node in self.nodes:
            for position, value in enumerate(node.inputs):
                found.setdefault(value, []).append((node, position))
        return {v: tuple(u) for v, u in found.items()}

    def meta(self, value: Value) -> TensorMeta:
        found = self.by_name[value.node].outputs[value.index]
        assert found is not None, f"{value} is not a tensor"
        return found

    def sources(self, kind: str) -> tuple[Node, ...]:
        return self._sources.get(kind, ())

    @cached_property
    def _sources(self) -> Mapping[str, tuple[Node, ...]]:
        return {kind: tuple(n for n in self.nodes if n.op == kind) for kind in SOURCES}

    @cached_property
    def results(self) -> tuple[Value, ...]:
        """Every value that must survive: loss, gradients, buffer updates."""
        return (self.loss, *self.gradients.values(), *self.updates.values())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the canonical text of the whole graph: any change of structure, shape, dtype or literal."""
        digest = hashlib.sha256()
        for n in self.nodes:
            digest.update(repr((n.name, n.op, n.args, n.kwargs, n.outputs, n.phase, n.target)).encode())
        digest.update(repr((self.loss, sorted(self.gradients.items()), sorted(self.updates.items()))).encode())
        digest.update(repr(sorted(self.tied.items())).encode())
        for name in sorted(self.constants):
            digest.update(repr((name, self.constants[name].dtype, self.constants[name].tolist())).encode())
        return digest.hexdigest()


def values_in(tree: Any) -> Iterator[Value]:
    """Every ``Value`` in a nested argument, in order."""
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from values_in(item)


def map_values(tree: Any, f: Callable[[Value], Any]) -> Any:
    """The same nested argument with every ``Value`` replaced by ``f(value)``."""
    if isinstance(tree, Value):
        return f(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_values(item, f) for item in tree)
    return tree


def with_inputs(node: Node, f: Callable[[Value], Value]) -> Node:
    """The node reading ``f(value)`` wherever it read ``value``."""
    return replace(
        node,
        args=map_values(node.args, f),
        kwargs=tuple((k, map_values(v, f)) for k, v in node.kwargs),
    )


def verify_graph(graph: Graph) -> None:
    """Raise AssertionError unless the graph is well formed: unique names, topological order, results that exist."""
    seen: dict[str, Node] = {}
    for node in graph.nodes:
        assert node.name not in seen, f"{node.name} defined twice"
        for value in node.inputs:
            assert value.node in seen, f"{node.name} reads {value} before it is defined"
            outputs = seen[value.node].outputs
            assert value.index < len(outputs) and outputs[value.index] is not None, f"{node.name} reads missing {value}"
        if node.is_source:
            assert not node.inputs, f"source {node.name} has inputs"
            assert node.target or node.op == "tangent", f"source {node.name} has no target"
        seen[node.name] = node
    for value in graph.results:
        assert value.node in seen, f"result {value} does not exist"
    parameters = {n.target: n for n in graph.sources("parameter")}
    for target, value in graph.gradients.items():
        assert target in parameters, f"gradient of unknown parameter {target}"
        assert graph.meta(value).shape == parameters[target].meta.shape, f"gradient shape of {target}"
    assert graph.meta(graph.loss).shape == (), "the loss must be a scalar"
    for name in (n.target for n in graph.sources("constant")):
        assert name in graph.constants, f"constant {name} has no tensor"
