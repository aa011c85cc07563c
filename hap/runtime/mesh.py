"""``MeshProgram``: what ``hap.compile`` returns for a plan of two axes, a HapProgram on this host's part of a batch.

Inside its host everything is as on one axis. Between the hosts the program's own ``hosts_sum`` calls are all there is;
what is left to do here is to deal batches out, first to hosts, then to the ranks of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from hap.capture.inputs import StepInputs
from hap.capture.seed import SEED
from hap.codegen.layout import Layout
from hap.codegen.passes.runner import Change
from hap.codegen.program import Program
from hap.errors import ProgramError
from hap.graph import Graph
from hap.mesh_plan import MeshPlan
from hap.placement import Shard
from hap.plan import Strategy
from hap.runtime.collectives import Communicator
from hap.runtime.data import Feed, ShareSampler, Signature
from hap.runtime.hosts import HostCommunicator
from hap.runtime.program import HapProgram
from hap.runtime.variants import without_data

_META = torch.device("meta")


def dealt_to_hosts(graph: Graph, strategies: Mapping[str, Strategy], plan: MeshPlan, example: StepInputs) -> Signature:
    """How a global batch is cut for the hosts: a signature with hosts in the place of ranks."""
    placed = {n.target: strategies[n.name].outputs[0] for n in graph.sources("input") if n.target != SEED}
    names = {n.target: n.name for n in graph.sources("input")}
    feeds: dict[str, Feed] = {}
    for path, tensor in example.named:
        placement = placed.get(path)
        layout = Layout.of(placement, plan.sizes) if isinstance(placement, Shard) else None
        feeds[path] = Feed(path, names.get(path), tuple(tensor.shape), tensor.dtype, layout)
    return Signature(feeds, without_data(example))


class HostSampler(ShareSampler):
    """A ``ShareSampler`` of the rows that ``to_hosts`` gives to ``host``."""

    def __init__(self, *given: Any, to_hosts: Layout | None, host: int, **options: Any) -> None:
        super().__init__(*given, **options)
        self.to_hosts, self.host = to_hosts, host

    def _mine(self, batch: torch.Tensor, layout: Layout | None) -> list[int]:
        return super()._mine(batch if self.to_hosts is None else self.to_hosts.take(batch, self.host), layout)


def _refuse(example: StepInputs, training: bool) -> NoReturn:
    raise ProgramError(
        "a plan of two axes runs the shape of batch, the mode (training or not) and the flags that it was planned for; "
        "plan on one axis for more"
    )


class MeshProgram(HapProgram):
    """See the module docstring. ``mesh_plan`` is the whole plan, ``plan`` the one inside this rank's host.

    It runs the shape of batch and the mode that it was planned for, and no other (ProgramError).
    """

    def __init__(
        self,
        program: Program,
        mesh_plan: MeshPlan,
        comm: HostCommunicator,
        model: nn.Module,
        example_inputs: Any,
        example_targets: Any,
        dealt: Signature,
        passes: Sequence[Change] = (),
    ) -> None:
        local = dealt.shares(example_inputs, example_targets, comm.host, _META)
        inputs, targets = local if example_targets is not None else (local, None)
        inside = mesh_plan.inside_of(comm.host)
        super().__init__(program, inside, comm, model, inputs, targets, _refuse, passes)
        self._mesh_plan, self._dealt, self._host = mesh_plan, dealt, comm.host

    @property
    def mesh_plan(self) -> MeshPlan:
        return self._mesh_plan

    def shard_batch(self, batch: Any, targets: Any = None) -> Any:
        """This rank's share of a global batch, in the batch's own form, on this rank's device."""
        mine = self._dealt.shares(batch, targets, self._host, self.device)
        return super().shard_batch(mine) if targets is None else super().shard_batch(*mine)

    def batch_sampler(
        self, dataset_len: int, shuffle: bool = True, seed: int = 0, drop_last: bool = True
    ) -> ShareSampler:
        """As ``HapProgram.batch_sampler``; a smaller last batch is always dropped, as the plan is for one size."""
        size, to_hosts = self._dealt.batch
        if not drop_last and dataset_len % size:
            raise ProgramError(f"a plan of two axes takes batches of {size}, and {dataset_len} leaves a smaller one")
        _, to_ranks = self._variants.first.signature.batch
        return HostSampler(
            dataset_len, size, to_ranks, self._comm.rank, shuffle=shuffle, seed=seed, to_hosts=to_hosts, host=self._host
        )

    def no_sync(self) -> NoReturn:
        raise ProgramError("a plan of two axes sums gradients over the ranks in every backward pass: plan on one axis")

    def record(self, folder: object, *, every: int = 1, probe_every: int = 0) -> NoReturn:
        raise ProgramError("a plan of two axes is not recorded: its hosts' collectives are not told apart yet")

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
