"""A traced joint graph as plain data: torch.fx nodes with fake tensors in, a ``Graph`` out.

Nothing is simplified here beyond what the language has no word for: ``getitem`` becomes ``Value(node, index)``, lists
become tuples, devices and layouts go, and keyword arguments that only repeat the schema's default go.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from hap.capture.names import Names
from hap.capture.origins import origins_of
from hap.capture.outside import Outside
from hap.capture.step import MODULE_KEY
from hap.capture.torch_private import JointTrace, OpOverload, Role, is_fake
from hap.errors import CaptureError
from hap.graph import Graph, Node, TensorMeta, Value, values_in

OUTPUT = "<output>."  # no module's name
_LARGEST_CONSTANT = 1 << 20  # elements; the graph is hashed, compared and printed
_NEUTRAL_FORMATS = (torch.contiguous_format, torch.preserve_format)
_CONJUGATES = ("aten._conj.default", "aten.conj_physical.default")
_STRIDED = ("aten.as_strided", "aten.as_strided_scatter", "aten.as_strided_copy", "aten.set_")


def to_graph(
    trace: JointTrace,
    *,
    name: str,
    parameters: Sequence[str],
    buffers: Sequence[str],
    inputs: Sequence[str],
    tied: Mapping[str, str],
    outputs: Sequence[str] = (),
    assigned: Sequence[str] = (),
    frozen: Collection[str] = (),
    outside: Outside,
    loss_fn: object = None,
) -> Graph:
    """The trace as a ``Graph``; the sequences give the user's name for each placeholder's or output's index.

    An output beside the loss is the update of a buffer of its own, ``OUTPUT`` and its name, which nothing reads; behind
    the ``outputs`` come the values of buffers that were ``assigned``, whatever was written to those before. A
    parameter of those that are ``frozen`` is a buffer if the forward pass changes it. ``loss_fn``: the user's own.
    """
    trace, buffers = _written(trace, parameters, buffers, frozen)
    targets: dict[str, Sequence[str]] = {"parameter": parameters, "buffer": buffers, "input": inputs, "tangent": ("",)}
    _check_effects(trace)
    _check_roles((*trace.placeholders, *trace.outputs), targets)
    converter = _Converter(trace.module)
    for fx_node, role in _in_source_order(trace.placeholders):
        converter.add_source(fx_node, role.kind, targets[role.kind][role.index])
    for fx_node in trace.module.graph.nodes:
        if fx_node.op == "get_attr":
            converter.add_constant(fx_node)
        elif fx_node.op == "call_function" and not _is_check(fx_node):
            converter.add_call(fx_node)
    gradients, updates, replaced = {}, {}, dict[str, Value]()
    for fx_node, role in trace.outputs:
        value = converter.values[fx_node]
        if role.kind == "loss":
            loss = value
        elif role.kind == "output" and role.index >= len(outputs):
            replaced[assigned[role.index - len(outputs)]] = value
        elif role.kind == "output":
            target = OUTPUT + outputs[role.index]
            updates[target] = value
            converter.nodes.append(
                Node(
                    converter.names.source("buffer", target),
                    "buffer",
                    outputs=(_meta(fx_node.meta["val"]),),
                    target=target,
                )
            )
        elif role.kind == "gradient":
            gradients[parameters[role.index]] = value
        else:
            updates[buffers[role.index]] = value
    updates |= replaced
    changing = {*parameters, *updates} - (set(frozen) - updates.keys())
    for constant, _ in converter.built_in:
        outside.check_constant(constant, changing)
    origins = origins_of(converter.built_in, (outside.model(), loss_fn))
    nodes, constants = tuple(converter.nodes), converter.constants
    return Graph(name, nodes, loss, gradients, updates, dict(tied), constants, origins=origins)


def _written(
    trace: JointTrace, parameters: Sequence[str], buffers: Sequence[str], frozen: Collection[str]
) -> tuple[JointTrace, Sequence[str]]:
    """The same with those parameters as further buffers that are frozen and changed in place: a codebook or an encoder
    that follows averages."""
    changed = [r.index for _, r in trace.outputs if r.kind == "changed_parameter" and parameters[r.index] in frozen]
    number = {index: len(buffers) + i for i, index in enumerate(changed)}

    def role(of: Role) -> Role:
        if of.kind == "parameter" and of.index in number:
            return Role("buffer", number[of.index])
        return Role("update", number[of.index]) if of.kind == "changed_parameter" and of.index in number else of

    placeholders, outputs = (tuple((node, role(r)) for node, r in ends) for ends in (trace.placeholders, trace.outputs))
    return JointTrace(trace.module, placeholders, outputs), (*buffers, *(parameters[index] for index in changed))


def _check_effects(trace: JointTrace) -> None:
    """``with_effects(token, op, ...)`` is how torch keeps a call that has no result."""
    for fx_node in trace.module.graph.nodes:
        if fx_node.op == "call_function" and str(fx_node.target) == "with_effects":
            module = fx_node.meta.get("custom", {}).get(MODULE_KEY, "")
            raise CaptureError(
                f"module {module!r} calls {fx_node.args[1]}, which acts on values while the program runs: use a form "
                "that does not check them, such as torch.linalg.lu_factor_ex for lu_factor"
            )


def _check_roles(described: Sequence[tuple[Any, Role]], targets: Mapping[str, Sequence[str]]) -> None:
    for _, role in described:
        changed, _, kind = role.kind.partition("_")
        if changed == "changed":
            remedy = "detach the new value" if kind == "buffer" else "change a clone of it"
            remedy += ", or freeze it (requires_grad_(False))" if kind == "parameter" else ""
            raise CaptureError(f"the forward pass changes {kind} {targets[kind][role.index]} in place: {remedy}")


def _in_source_order(placeholders: Sequence[tuple[Any, Role]]) -> list[tuple[Any, Role]]:
    kinds = ("parameter", "buffer", "input", "tangent")
    return sorted(placeholders, key=lambda found: (kinds.index(found[1].kind), found[1].index))


class _Converter:
    """One pass over the fx nodes; ``values`` maps each fx node to the value that stands for it."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self.module = module
        self.names = Names()
        self.nodes: list[Node] = []
        self.values: dict[Any, Value] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.built_in: list[tuple[torch.Tensor, torch.Tensor]] = []  # the user's own, each with a copy
        self._by_content: dict[str, Value] = {}
        self._backward: set[str] = set()
        self._modules: dict[str, str] = {}

    def add_source(self, fx_node: Any, kind: str, target: str) -> None:
        node = Node(self.names.source(kind, target), kind, outputs=(_meta(fx_node.meta["val"]),), target=target)
        if kind == "tangent":
            node = Node(node.name, kind, outputs=node.outputs, phase="backward")
            self._backward.add(node.name)
        self._append(fx_node, node)

    def add_constant(self, fx_node: Any) -> None:
        """Equal tensors become one constant."""
        tensor = operator.attrgetter(fx_node.target)(self.module)
        if not isinstance(tensor, torch.Tensor):
            return  # a branch of a higher-order operator, or a generator: refused where it is called
        _check_constant(tensor)
        content = tensor.detach().cpu().contiguous().clone()
        self.built_in.append((tensor, content))
        self._keep(fx_node, content)

    def _keep(self, fx_node: Any, content: torch.Tensor) -> None:
        key = hashlib.sha256(repr((content.dtype, content.shape, content.tolist())).encode()).hexdigest()
        if key not in self._by_content:
            target = f"constant_{len(self.constants)}"
            self.constants[target] = content
            name = self.names.source("constant", target)
            self._append(fx_node, Node(name, "constant", outputs=(_meta(content),), target=target))
            self._by_content[key] = self.values[fx_node]
        self.values[fx_node] = self._by_content[key]

    def add_call(self, fx_node: Any) -> None:
        if fx_node.target is operator.getitem:
            source, index = fx_node.args
            self.values[fx_node] = Value(self.values[source].node, index)
            return
        op, module = fx_node.target, fx_node.meta.get("custom", {}).get(MODULE_KEY, "")
        if not isinstance(op, OpOverload):
            raise CaptureError(f"module {module!r} calls {op}, which is no plain operator: HAP cannot shard it")
        if op.namespace == "profiler":  # where a range that a profiler shows begins, and ends
            return
        name = f"{op.namespace}.{op._schema.name.split('::')[1]}.{op._overloadname}"
        if name in _CONJUGATES and isinstance(
            fx_node.args[0], complex
        ):  # autograd's, of a number that a call was given
            self._keep(fx_node, torch.tensor(fx_node.args[0].conjugate(), dtype=fx_node.meta["val"].dtype))
            return
        if name.rpartition(".")[0] in _STRIDED:
            raise CaptureError(
                f"module {module!r} calls {name}, whose result depends on memory layout: use view or slices"
            )
        if any(n not in self.values for n in fx_node.all_input_nodes):
            raise CaptureError(
                f"module {module!r} calls {name} with a generator of random numbers: HAP has no place for it"
            )
        args = tuple(self._argument(a) for a in fx_node.args)
        kwargs = self._keywords(op, fx_node.kwargs)
        inputs = tuple(values_in((args, tuple(v for _, v in kwargs))))
        backward = any(v.node in self._backward for v in inputs)
        if backward and not module:  # autograd's additions of gradients have no forward call
            module = self._modules.get(inputs[0].node, "")
        outputs = fx_node.meta["val"]
        outputs = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
        node = Node(
            self.names.operator(name),
            name,
            args,
            kwargs,
            tuple(_meta(o) for o in outputs),
            "backward" if backward else "forward",
            module,
        )
        if backward:
            self._backward.add(node.name)
        self._append(fx_node, node)

    def _append(self, fx_node: Any, node: Node) -> None:
        self.nodes.append(node)
        self._modules[node.name] = node.module
        self.values[fx_node] = Value(node.name)

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, torch.fx.Node):
            return self.values[argument]
        if isinstance(argument, (tuple, list)):
            return tuple(self._argument(a) for a in argument)
        return argument

    def _keywords(self, op: OpOverload, kwargs: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
        kept = []
        for key, value in kwargs.items():
            if key in ("device", "pin_memory") or (key == "layout" and value in (None, torch.strided)):
                continue
            if key == "memory_format" and value in _NEUTRAL_FORMATS:
                continue
            if not isinstance(value, torch.fx.Node) and key in defaults and _same_literal(value, defaults[key]):
                continue
            kept.append((key, self._argument(value)))
        return tuple(kept)


def _is_check(fx_node: Any) -> bool:
    """A check of values (``one_hot`` has one) has no result, and values are not known when a program is made."""
    return str(fx_node.target).startswith(("aten._assert_async", "aten._assert_scalar", "aten._assert_tensor_metadata"))


def _same_literal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def _meta(value: Any) -> TensorMeta | None:
    return TensorMeta(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None


def _check_constant(tensor: torch.Tensor) -> None:
    shape = tuple(tensor.shape)
    if is_fake(tensor) or tensor.device.type == "meta":
        raise CaptureError(f"a tensor of shape {shape} that the model keeps has no data: register it as a buffer")
    if tensor.numel() > _LARGEST_CONSTANT:
        raise CaptureError(f"a tensor of shape {shape} is built into the program: register it as a buffer")
