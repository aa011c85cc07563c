"""The rules of random numbers: functions of the global position, so any dim may be sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hap.rules.notation import Call, Dim, Place, Row, Rule, Shape


def _drawn(place: int) -> Rule:
    """``(size, ..., seed, site, shard)``, with the place of the piece at ``place``."""

    def rule(call: Call) -> Iterator[Row]:
        for dim, size in enumerate(call.output.shape):
            if size > 1:
                yield Row(("R",), (Dim(dim),), (Shape(0), Place(place)))

    return rule


RULES: Mapping[str, Rule] = {
    "hap.bernoulli.default": _drawn(4),
    "hap.rand.default": _drawn(3),
    "hap.randn.default": _drawn(3),
    "hap.randint.default": _drawn(5),
}
