"""``torch.autograd.Function``: what a mask selects and rows that are sent to experts are no tensors, so such a function
would run, and its backward, which is its very purpose, would be lost without a word."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from hap.capture.places import Place
from hap.capture.rows import Rows
from hap.capture.selected import Selected, SelectionError
from hap.capture.torch_private import pytree


@contextlib.contextmanager
def of_tensors() -> Iterator[None]:
    """While active, such functions of anything else are refused."""
    own = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, (Place, Rows, Selected)) for leaf in pytree.tree_leaves((args, kwargs))):
            raise SelectionError(
                f"{cls.__name__}, a function with a backward of its own, of a tensor whose size depends on values: "
                "call it before anything is selected"
            )
        return own.__func__(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = own  # type: ignore[method-assign]
