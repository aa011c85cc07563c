"""``torch.autograd.Function``: what a mask selects and rows that are sent to experts are no tensors, so such a function
would run, and its backward, which is its very purpose, would be lost without a word. Nor does any mode see its call, so
what is owed to its arguments is written before."""

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
    base: Any = torch.autograd.Function.__base__  # which is called by an ``apply`` that was read before, too

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, (Place, Rows, Selected)):
                raise SelectionError(
                    f"{cls.__name__}, a function with a backward of its own, of a tensor whose size depends on values: "
                    "call it before anything is selected"
                )
            if isinstance(leaf, torch.Tensor):
                _ = leaf.grad_fn  # a mode sees that it is asked for, and writes what rows of experts are owed to it
        return super(base, cls).apply(*args, **kwargs)

    base.apply = classmethod(apply)
    try:
        yield
    finally:
        del base.apply
