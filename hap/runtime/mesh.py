"""``MeshProgram``: what ``hap.compile`` returns for a plan of two axes, a HapProgram on this host's part of a batch.

Inside its host everything is as on one axis. Between the hosts the program's own ``hosts_sum`` calls are all there is;
what is left to do here is to deal batches out, first to hosts, then to the ranks of each.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

from hap.capture.inputs import StepInputs
from hap.capture.seed import SEED
from hap.codegen.layout import Layout
from hap.codegen.passes.runner import Change
from hap.codegen.program import Program
from hap.graph import Graph
from hap.mesh_plan import MeshPlan
from hap.placement import GroupSizes, Shard
from hap.plan import Strategy
from hap.runtime.collectives import Communicator
from hap.runtime.data import Feed, Signature
from hap.runtime.elementwise import mark_shards_on_hosts
from hap.runtime.hosts import HostCommunicator
from hap.runtime.program import HapProgram
from hap.runtime.record import Recorder
from hap.runtime.variants import Rebuild, without_data


def dealt_to_hosts(
    graph: Graph, strategies: Mapping[str, Strategy], sizes: GroupSizes, example: StepInputs
) -> Signature:
    """How a global batch is cut for the hosts: a signature with hosts in the place of ranks."""
    placed = {n.target: strategies[n.name].outputs[0] for n in graph.sources("input") if n.target != SEED}
    names = {n.target: n.name for n in graph.sources("input")}
    feeds: dict[str, Feed] = {}
    for path, tensor in example.named:
        placement = placed.get(path)
        layout = Layout.of(placement, sizes) if isinstance(placement, Shard) else None
        feeds[path] = Feed(path, names.get(path), tuple(tensor.shape), tensor.dtype, layout)
    return Signature(feeds, without_data(example), pinned=False)


class MeshProgram(HapProgram):
    """See the module docstring. ``mesh_plan`` is the whole plan, ``plan`` the one inside this rank's host."""

    def __init__(
        self,
        program: Program,
        mesh_plan: MeshPlan,
        comm: HostCommunicator,
        model: nn.Module,
        example_inputs: Any,
        example_targets: Any,
        dealt: Signature,
        rebuild: Rebuild,
        passes: Sequence[Change] = (),
        layouts: Mapping[str, Sequence[Layout]] = MappingProxyType({}),
    ) -> None:
        """``layouts``: of each parameter, in the hosts that have it in shards."""
        inside, self._layouts = mesh_plan.inside_of(comm.host), layouts
        super().__init__(
            program, inside, comm, model, example_inputs, example_targets, rebuild, passes, dealt, comm.host
        )
        self._mesh_plan, self._host = mesh_plan, comm.host

    def _mark_shards(self) -> None:
        super()._mark_shards()
        mark_shards_on_hosts(self._shares, self._layouts)

    @property
    def mesh_plan(self) -> MeshPlan:
        return self._mesh_plan

    def record(self, folder: str | os.PathLike[str], *, every: int = 1, probe_every: int = 0) -> Recorder:
        """As ``HapProgram.record``: what ranks of one host do together is told apart from what all do."""
        plan, host = self._mesh_plan, self._host
        return Recorder(folder, self._everyone, plan, every=every, probe_every=probe_every, mesh_host=host)

    @property
    def _everyone(self) -> Communicator:
        assert isinstance(self._comm, HostCommunicator)
        return self._comm.everyone

    @property
    def _writes(self) -> bool:
        return self._host == 0

    def python_source(self) -> str:
        """The program of this host's ranks, to be read: it does not run alone."""
        return super().python_source()
