"""What every rank would do for itself without a word, each training on its own, is refused on all or warned of."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import hap
from hap.capture import capture
from hap.codegen.layout import Layout
from hap.errors import ProgramError
from hap.mesh_plan import parse_plan
from hap.runtime.alike import TOLERANCE, _told, _weights
from hap.runtime.shards import KEY, Share, check_loaded, mark
from tests._support.mesh import make_mesh
from tests._support.ranks import run_alike

TWO = """
name: two
backend: gloo
hosts:
  - name: here
    devices: [{name: cpu, count: 2, tflops: {float64: 0.02, float32: 0.02}, memory: 2GB, memory_bandwidth: 8GB/s}]
    link: {bandwidth: 2GB/s, latency: 50us}
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.b(torch.tanh(self.a(x))) - y).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(seed: int = 0, size: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(size, 8, dtype=torch.float64, generator=generator), "y": torch.zeros(size, 4).double()}


def plan(x: str) -> str:
    """``a.weight`` in equal shards, ``b`` whole, the input ``x`` as it says."""
    placements = {"a.*": "S(0)", "b.*": "R", "kwargs.x": x, "kwargs.y": x}
    pins = hap.Pins(placements=placements, ratios=(1, 1))
    cluster = hap.ClusterSpec.from_yaml(TWO)
    return hap.plan(net(), cluster, example_inputs=batch(), pins=pins, effort="quick").to_json()


def compiled(text: str) -> hap.HapProgram:
    return hap.compile(net(), plan=parse_plan(text), example_inputs=batch())  # type: ignore[arg-type]


def refusal(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except ProgramError as e:
        return str(e)
    return ""


def of_data(rank: int, whole: str, dealt: str) -> dict[str, str]:
    program, said = compiled(whole), dict[str, str]()
    mine = batch()
    mine["x"][3] += rank  # of one sample
    said["another sample"] = refusal(program, **mine)
    program = compiled(whole)
    mine = batch()
    mine["x"][:2] = torch.tensor([float("nan"), -0.0 if rank else 0.0], dtype=torch.float64).view(2, 1)
    mine["x"] *= 1 + 1e-15 * rank
    said["alike"] = refusal(program, **mine)
    said["looked at once"] = refusal(program, **batch(rank))
    mine = {k: v.flip(0) if rank else v for k, v in batch(7, 6).items()}
    said["another shape, in another order"] = refusal(program, **program.shard_batch(mine))
    program.eval()
    said["another mode"] = refusal(program, **batch(rank))
    said["in shards"] = refusal(compiled(dealt), **{k: v[:4] for k, v in batch(rank).items()})
    return said


def test_data_that_is_not_the_same_on_all_ranks_is_refused_when_it_is_whole_on_each() -> None:
    for said in run_alike(2, of_data, plan("R"), plan("S(0)")):
        for kind in ("another sample", "another shape, in another order", "another mode"):
            assert said[kind].startswith("input kwargs.x is not the same on all ranks"), (kind, said)
        assert said["alike"] == said["looked at once"] == said["in shards"] == ""


def of_parameters(rank: int, text: str) -> dict[str, str]:
    program, said = compiled(text), dict[str, str]()
    torch.manual_seed(5)
    for parameter in program.parameters():  # a's share is another one's in size, so b's numbers are other ones
        nn.init.normal_(parameter[: 8 - rank].detach() if parameter.shape == (8, 8) else parameter)
    said["drawn"] = refusal(program, **program.shard_batch(batch()))
    program = compiled(text)
    program.load_state_dict(program.state_dict())
    averaged = copy.deepcopy(program)
    said["loaded"] = refusal(program, **program.shard_batch(batch()))
    with torch.no_grad():
        averaged.get_parameter("b.bias").add_(1e-3 * rank)
    said["a copy, later"] = refusal(averaged, **program.shard_batch(batch()))
    return said


def test_whole_parameters_that_ranks_initialised_apart_are_refused_at_the_first_step() -> None:
    for said in run_alike(2, of_parameters, plan("S(0)")):
        assert said["drawn"].startswith("b.weight is whole on every rank, and was given other values on one rank")
        assert said["loaded"] == said["a copy, later"] == ""


def of_hosts(rank: int, text: str) -> dict[str, str]:
    """Of a host of two ranks and one of one; whole in the first is its part of the batch."""
    program, said = compiled(text), dict[str, str]()
    assert program._variants.first.signature.feeds["kwargs.x"].layout is None
    said["dealt"] = refusal(program, **program.shard_batch(batch()))
    program = compiled(text)
    said["other in the host"] = refusal(program, **program.shard_batch(batch(rank)))
    program = compiled(text)
    with torch.no_grad():
        program.get_parameter("b.bias").add_(float(rank == 2))
    said["other in a host"] = refusal(program, **program.shard_batch(batch()))
    return said


def test_hosts_have_parts_and_each_of_their_ranks_the_whole_part() -> None:
    graph, seeds = capture(net(), batch()), range(100)
    x = next(node.name for node in graph.sources("input") if node.target == "kwargs.x")
    b = next(node.name for node in graph.sources("parameter") if node.target == "b.bias")
    plans = (make_mesh(graph, (2, 1), (5, 3), seed) for seed in seeds)
    text = next(p.to_json() for p in plans if {str(p.inside[0].strategy(n).outputs[0]) for n in (x, b)} == {"R"})
    for said in run_alike(3, of_hosts, text):
        assert said["dealt"] == ""
        assert said["other in the host"].startswith("input kwargs.x is not the same on all ranks")
        assert said["other in a host"].startswith("b.bias is whole on every rank")


def test_what_is_told_of_a_tensor() -> None:
    weights = _weights()

    def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
        a, b = _told(one, weights), _told(other, weights)
        return bool(((a - b)[:2].abs() > TOLERANCE * torch.maximum(a[4], b[4])).any())

    ids = torch.arange(1 << 19) % 50_000
    large = torch.rand(1 << 19)
    assert not differ(ids, ids.clone()) and differ(ids, ids.flip(0)) and differ(ids, ids.roll(1 << 18))
    assert not differ(large, large * (1 + 1e-6)) and differ(large, large.flip(0)) and differ(large, large.roll(1))
    flags = torch.rand(1000) < 0.5
    assert not differ(flags, flags.clone()) and differ(flags, ~flags)
    assert not differ(torch.zeros(0), torch.zeros(0)) and differ(torch.tensor(1), torch.tensor(2))
    assert not differ(torch.full((3,), float("inf")), torch.full((3,), float("inf")))
    assert differ(torch.tensor([1 + 2j]), torch.tensor([2 + 1j]))


def of_optimizers(rank: int, text: str, folder: str) -> dict[str, str]:
    program, said = compiled(text), dict[str, str]()
    optimizer = torch.optim.AdamW(program.parameters())

    def step() -> None:
        program(**program.shard_batch(batch())).backward()
        optimizer.step()

    step()
    torch.save(optimizer.state_dict(), Path(folder) / f"{rank}.pt")
    dist.barrier()
    own, other = (torch.load(Path(folder) / f"{r}.pt", weights_only=True) for r in (rank, 1 - rank))
    said["own"] = refusal(optimizer.load_state_dict, own)
    step()
    resumed = torch.optim.AdamW(compiled(text).parameters())
    said["other"] = refusal(resumed.load_state_dict, other)
    whole = [p for name, p in program.named_parameters() if name.startswith("b.")]
    of_whole = torch.optim.AdamW(whole)
    said["of whole ones"] = refusal(of_whole.load_state_dict, torch.optim.AdamW(whole).state_dict()) + "".join(
        key for key in of_whole.state_dict() if key.startswith("hap")
    )
    model = torch.optim.AdamW(net().parameters())
    said["in one of the model"] = refusal(model.load_state_dict, own)
    unsaid = {key: value for key, value in own.items() if not key.startswith("hap")}
    with pytest.warns(UserWarning, match="does not say whose shares it is of"):
        resumed.load_state_dict(unsaid)
    unsaid["state"][0] = {key: torch.zeros(16, 8) for key in ("exp_avg", "exp_avg_sq")}
    said["of the whole"] = refusal(resumed.load_state_dict, unsaid)
    zero = ZeroRedundancyOptimizer(program.parameters(), torch.optim.AdamW, lr=0.1)
    said["zero"] = refusal(zero.step)
    said["zero of whole ones"] = refusal(ZeroRedundancyOptimizer(whole, torch.optim.AdamW, lr=0.1).step)
    return said


def test_the_state_of_an_optimizer_is_one_ranks(tmp_path: Path) -> None:
    for rank, said in enumerate(run_alike(2, of_optimizers, plan("S(0)"), str(tmp_path))):
        assert said["own"] == said["of whole ones"] == said["zero of whole ones"] == ""
        assert said["other"].startswith(f"this optimizer state is rank {1 - rank}'s, and this is rank {rank}: ")
        assert "save_checkpoint(directory, optimizer)" in said["other"]
        assert said["in one of the model"].startswith("this optimizer state is of a.weight dealt out in another way")
        assert said["of the whole"].startswith(
            "this optimizer state has (16, 8) for a.weight, of which this rank has (8,"
        )
        assert said["zero"].startswith(
            "ZeroRedundancyOptimizer deals out parameters by itself, and a.weight is in shards"
        )


def wrapped(rank: int, text: str) -> dict[str, str]:
    program, share = compiled(text), {k: v[:4] for k, v in batch().items()}
    zeros = {name: torch.zeros_like(p) for name, p in program.named_parameters()}
    said = {
        "ddp": refusal(DistributedDataParallel, program),
        "functional": refusal(functional_call, program, zeros, (), share),
        "as it is": refusal(program, **share),
    }
    said["fsdp"] = refusal(fully_shard, program)
    return said


def test_what_distributes_models_is_refused() -> None:
    for said in run_alike(2, wrapped, plan("S(0)")):
        assert said["ddp"] == "a compiled program is distributed already: leave DistributedDataParallel out"
        assert said["functional"].startswith("weight was replaced for this call, as by torch.func.functional_call")
        assert said["as it is"] == ""
        assert "compiled program" in said["fsdp"]


def test_an_optimizers_state_that_has_nothing_of_shards_is_anybodys() -> None:
    """What was written by another format than torch's has lists instead of tuples."""
    share = nn.Parameter(torch.zeros(2, 3))
    mark(share, Share("w", 1, Layout(0, 1, 1, (2, 2))))
    optimizer = torch.optim.SGD([share], lr=0.1, momentum=0.9)
    saved = optimizer.state_dict() | {KEY: [["w", 0, 0, 1, 1, [2, 2]]]}
    check_loaded(optimizer, saved)
    saved["state"] = {0: {"momentum_buffer": torch.zeros(2, 3)}}
    with pytest.raises(ProgramError, match="rank 0's, and this is rank 1"):
        check_loaded(optimizer, saved)
    check_loaded(optimizer, saved | {KEY: [["w", 1, 0, 1, 1, [2, 2]]]})
