"""Node names: valid Python identifiers, unique, readable, and a function of the graph alone."""

from __future__ import annotations

import re
from collections import Counter

_PREFIX = {"parameter": "p", "buffer": "b", "input": "i", "constant": "c"}


class Names:
    """Gives names in order. Sources: ``p_wte_weight``, ``i_kwargs_labels``, ``tangent``; calls: ``mm_1``, ``mm_2``.

    Calls are numbered from 1, so that no name is a Python keyword or a builtin.
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._counts: Counter[str] = Counter()

    def source(self, kind: str, target: str) -> str:
        if kind == "tangent":
            return self._take("tangent")
        name = f"{_PREFIX[kind]}_{re.sub('[^0-9A-Za-z]', '_', target)}"
        return self._take(name) if name not in self._taken else self._numbered(f"{name}_again")

    def operator(self, op: str) -> str:
        """``aten.native_layer_norm.default`` -> ``native_layer_norm_1``."""
        return self._numbered(op.split(".")[-2].strip("_"))

    def _numbered(self, base: str) -> str:
        while True:
            self._counts[base] += 1
            name = f"{base}_{self._counts[base]}"
            if name not in self._taken:
                return self._take(name)

    def _take(self, name: str) -> str:
        assert name not in self._taken, name
        self._taken.add(name)
        return name
