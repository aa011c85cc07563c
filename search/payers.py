"""Who pays for what in the program of ``milp``."""

from __future__ import annotations

from dataclasses import dataclass

from hap.graph import Value
from hap.placement import Placement


@dataclass(frozen=True)
class NodePayer:
    """The variables (one) that pay for option ``option`` of node class ``node_class``."""

    variables: tuple[int, ...]
    node_class: int
    option: int


@dataclass(frozen=True)
class ConversionPayer:
    """The variables whose sum is c[v,p,q]. Member m pays for converting ``values[m]`` from sources[m] to targets[m]."""

    variables: tuple[int, ...]
    values: tuple[Value, ...]
    sources: tuple[Placement, ...]
    targets: tuple[Placement, ...]
    copy: str
