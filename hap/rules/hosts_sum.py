"""The rule of ``hap.hosts_sum``: any dim may be sharded inside the host. Partial sums are summed inside first: which
rank of another host would have the rest of one is not defined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hap.hosts_sum import HOSTS_SUM
from hap.rules.notation import Call, Dim, Row, Rule


def hosts_sum(call: Call) -> Iterator[Row]:
    """``(x, site, hosts, ranks) -> sum``."""
    for dim, size in enumerate(call.output.shape):
        if size > 1:
            yield Row((Dim(dim),), (Dim(dim),))


RULES: Mapping[str, Rule] = {HOSTS_SUM: hosts_sum}
