"""Clipping by the norm of all gradients: as on one device, and what is no norm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hap.errors import ProgramError
from hap.runtime.clipping import global_norm
from hap.runtime.collectives import Communicator
from tests._support.ranks import run_ranks
from tests.runtime.test_program import batch, compiled, gradients, same, tower


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_clipping_returns_torchs_norm(norm_type: float) -> None:
    model, program = tower(), compiled(tower())
    program(**batch()).backward()
    model(**batch()).backward()
    ours, theirs = (
        program.clip_grad_norm_(0.01, norm_type),
        nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type),
    )
    torch.testing.assert_close(ours, theirs)
    same(gradients(program), gradients(model))


@pytest.mark.parametrize("norm_type", [0.0, -1.0, float("-inf"), float("nan")])
def test_clipping_by_no_norm_is_refused(norm_type: float) -> None:
    program = compiled(tower())
    program(**batch()).backward()
    with pytest.raises(ProgramError, match="it must be above zero"):
        program.clip_grad_norm_(1.0, norm_type)


def test_some_parameters_are_clipped_as_torch_clips_them() -> None:
    model, program = tower(), compiled(tower())
    for module in (program, model):
        module(**batch()).backward()
    for names in (("plan.weight", "norm.bias", "frozen.weight"), ("tied.bias",), ()):
        ours, theirs = ([dict(module.named_parameters())[name] for name in names] for module in (program, model))
        if len(names) == 1:
            ours, theirs = ours[0], theirs[0]
        torch.testing.assert_close(
            program.clip_grad_norm_(0.01, parameters=ours), nn.utils.clip_grad_norm_(theirs, 0.01), check_dtype=False
        )
        same(gradients(program), gradients(model))
    with pytest.raises(ProgramError, match=r"not the program's: take them from program.parameters()"):
        program.clip_grad_norm_(0.01, parameters=model.parameters())


def norm_of_a_nan(rank: int) -> list[float]:
    """Of shards, of which one rank's has no number."""
    comm = Communicator(torch.distributed.group.WORLD, torch.device("cpu"))
    shard = torch.full((3,), 1.0 + rank)
    found = [float(global_norm([(shard, True)], float("inf"), comm))]
    for at in range(3):
        broken = shard.clone()
        broken[1] = float("nan") if rank == at else 1.0
        found.append(float(global_norm([(broken, True)], float("inf"), comm)))
    return found


def test_a_largest_gradient_is_no_number_where_one_rank_has_none() -> None:
    for largest, *broken in run_ranks(3, norm_of_a_nan):
        assert largest == 3.0 and all(norm != norm for norm in broken)
