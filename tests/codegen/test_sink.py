"""The pass that has what is only handed out wait for the end."""

from __future__ import annotations

from dataclasses import replace

from hap.codegen.passes.sink import sink_results
from hap.codegen.program import Call, Convert
from hap.graph import Value
from tests.codegen.test_passes import data_parallel


def test_what_is_only_handed_out_waits_for_the_end() -> None:
    """A sum is gathered and viewed to be a gradient; another is read by a product and stays."""
    program = data_parallel()
    gradient = next(c for c in program.backward if isinstance(c, Convert))
    at = program.backward.index(gradient)
    view = Call(("viewed",), "aten.view.default", (Value(gradient.output), [-1]), (), "")
    double = Call(("doubled",), "aten.mul.Tensor", (Value("viewed"), 2), (), "")
    held = {**program.held, "viewed": program.held[gradient.output], "doubled": program.held[gradient.output]}
    longer = replace(
        program, backward=(*program.backward[: at + 1], view, double, *program.backward[at + 1 :]), held=held
    )
    assert sink_results(longer).backward == (*program.backward, view, double)
    last = program.gradients[next(reversed(program.gradients))]
    reader = Call(("late",), "aten.add.Tensor", (Value("doubled"), Value(last)), (), "")
    local = Call(("own",), "aten.add.Tensor", (Value("doubled"), Value(gradient.input)), (), "")
    for extra, expected in ((reader, (view, double, reader)), (local, ())):
        held = {**longer.held, extra.outputs[0]: program.held[last]}
        more = replace(longer, backward=(*longer.backward, extra), held=held)
        tail = sink_results(more).backward[len(program.backward) :]
        assert tail[: len(expected)] == expected


def test_products_stay() -> None:
    """At the end they would have all that they read, activations among it, live until then."""
    program = data_parallel()
    sums = (c for c in program.backward if isinstance(c, Convert))
    gradient = next(c for c in sums if len(program.held[c.output].meta.shape) == 2)
    at = program.backward.index(gradient)
    for op, expected in (("aten.mul.Tensor", -1), ("aten.mm.default", at + 1)):
        made = Call(("made",), op, (Value(gradient.output), Value(gradient.output)), (), "")
        held = {**program.held, "made": program.held[gradient.output]}
        longer = replace(program, backward=(*program.backward[: at + 1], made, *program.backward[at + 1 :]), held=held)
        assert sink_results(longer).backward[expected] == made
