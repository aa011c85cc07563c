"""Numbers that a model keeps in Python and changes as it goes: a program's calls have those of the step it was made of.

A temperature that falls from step to step, a count of calls, are seen where they are attributes of a module. A count
that nothing reads does no harm, and a cache that knows for what length it was made changes once: so where a number has
changed, the step is traced once more, and refused if that comes to another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from hap.errors import CaptureError
from hap.graph import Graph


def steady(traced: Callable[[], Graph], modules: Sequence[object], subject: str) -> Graph:
    """What ``traced`` returns, if it does so again where it has changed numbers of ``modules``. CaptureError."""
    before = _numbers(modules)
    graph = traced()
    changed = [name for name, number in _numbers(modules).items() if before.get(name, number) != number]
    if changed and traced().fingerprint != graph.fingerprint:
        raise CaptureError(
            f"cannot capture {subject}: the forward pass changes the number {changed[0]!r}, and the step with it, "
            "but a program's steps are all alike: keep it in a buffer"
        )
    return graph


def _numbers(modules: Sequence[object]) -> dict[str, float]:
    found: dict[str, float] = {}
    for root in modules:
        for name, module in root.named_modules() if isinstance(root, nn.Module) else ():
            found |= {f"{name}.{k}".lstrip("."): v for k, v in vars(module).items() if isinstance(v, (int, float))}
    return found
