"""What of a call is no tensor: flags, numbers, strings, None. Together with which arguments are tensors it is the
*form* of the call, and a step is captured for each form that is met, as for each shape of batch.

What a call leaves out is as in the example inputs. None may stand where these have nothing.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable
from typing import Any

from hap.capture.inputs import StepInputs
from hap.errors import ProgramError
from hap.runtime.data import unexpected

MOST = 16  # forms of one program: what takes more values than that changes from step to step

Form = tuple[tuple[str, str], ...]


def form_of(call: StepInputs) -> Form:
    """What tells one form from another."""
    tensors = ((path, "a tensor") for path, _ in call.named)
    return (*tensors, *sorted((path, repr(value)) for path, value in call.constants.items()))


def is_same(one: Any, other: Any) -> bool:
    """Of plain constants; 1, 1.0 and True are three, as they promote dtypes differently."""
    return type(one) is type(other) and repr(one) == repr(other)


def is_as(call: StepInputs, example: StepInputs, usual: StepInputs) -> bool:
    """Whether ``call`` is of the form of ``example``, as far as it says. ``usual``: what it leaves out."""
    known, given = example.constants, call.constants
    tensors, shares = ({path for path, _ in c.named} for c in (example, call))
    if shares - tensors or tensors & given.keys() or (tensors - shares) & usual.constants.keys():
        return False
    for path, value in given.items():
        if not is_same(known[path], value) if path in known else value is not None:
            return False
    said = shares | given.keys()
    tops = {top(path) for path in said}
    left = known.keys() - said
    return not any(top(path) in tops for path in left) and all(
        path in usual.constants and is_same(usual.constants[path], known[path]) for path in left
    )


def is_another(call: StepInputs, usual: StepInputs) -> bool:
    """Whether it says something else of an argument that is no tensor, or is one where there was none, or none where
    there was one. A tensor that is missing, or too much, is no other form."""
    tensors, known, given = {path for path, _ in usual.named}, usual.constants, call.constants
    said = {path for path, _ in call.named} | given.keys()
    tops = {top(path) for path in said}
    return (
        any(path in known for path, _ in call.named)
        or any(top(path) in tops for path in known.keys() - said)
        or any(
            path in tensors or (not is_same(known[path], value) if path in known else value is not None)
            for path, value in given.items()
        )
    )


def filled(call: StepInputs, usual: StepInputs) -> StepInputs:
    """With what it leaves out, as far as that is no tensor."""
    rest = [
        itertools.takewhile(_is_plain, u[len(c) :]) for c, u in ((call.args, usual.args), (call.targets, usual.targets))
    ]
    plain = {name: value for name, value in usual.kwargs.items() if _is_plain(value)}
    return StepInputs((*call.args, *rest[0]), {**plain, **call.kwargs}, (*call.targets, *rest[1]))


def check_new(call: StepInputs, usual: StepInputs, known: Iterable[StepInputs], *, aloud: bool) -> None:
    """ProgramError unless every argument is one of the example's, or if there are ``MOST`` forms already. A number that
    is another one is warned of: it may be one that changes from step to step."""
    tops = {top(path) for path in (*dict(usual.named), *usual.constants)}
    for path, value in (*call.named, *call.constants.items()):
        if top(path) not in tops and value is not None:
            raise unexpected(path, sorted(tops))
    before, now = usual.constants, call.constants
    changed = [path for path, value in now.items() if path not in before or not is_same(before[path], value)]
    if len({form_of(example) for example in known}) >= MOST:
        raise ProgramError(
            f"{MOST} kinds of calls have been compiled for, and this is another one"
            + "".join(f" ({path} is {now[path]!r})" for path in changed[:1])
            + ": what changes from step to step must be a tensor"
        )
    numbers = [p for p in changed if isinstance(now[p], (int, float, complex)) and not isinstance(now[p], bool)]
    if numbers and aloud:
        warnings.warn(
            f"{numbers[0]} is {now[numbers[0]]!r}, for which a step of its own is compiled; what changes from step to "
            "step must be a tensor",
            stacklevel=6,  # of torch's own are two
        )


def top(path: str) -> str:
    """The argument that a path is of: ``kwargs.batch`` for ``kwargs.batch.mask``."""
    return ".".join(path.split(".")[:2])


def _is_plain(argument: Any) -> bool:
    return not StepInputs((argument,), {}, ()).named
