"""The modules of a compiled program: of the model's names and classes; what would be lost on them is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hap
from hap.errors import ProgramError

ONE = """
name: one
backend: gloo
hosts: [{name: here, devices: [{name: cpu, tflops: {float32: 0.02}, memory: 2GB, memory_bandwidth: 8GB/s}]}]
"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(6, 6), nn.LayerNorm(6), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.norm(self.linear(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.batch = nn.BatchNorm1d(6)
        self.training_head = self.head = nn.Linear(6, 2)  # one module under two names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.batch(x)).square().mean()

    def save_pretrained(self, path: str) -> None:
        torch.save(self.state_dict(), path)


def built() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))


def compiled(model: nn.Module) -> hap.HapProgram:
    return hap.compile(model, hap.ClusterSpec.from_yaml(ONE), example_inputs=batch(), effort="quick")


def test_modules_have_the_models_names_and_classes() -> None:
    model = built()
    program = compiled(model)
    parts = dict(program.named_modules())
    assert list(parts) == [name for name, _ in model.named_modules()]
    for name, module in model.named_modules():
        if name:
            assert isinstance(parts[name], type(module)), name
            own, theirs = (list(dict(m.named_parameters(recurse=False))) for m in (parts[name], module))
            assert own == theirs
    assert [n for n, _ in program.named_buffers()] == [n for n, _ in model.named_buffers()]
    assert "(norm): LayerNorm()" in repr(program)


def test_weights_of_norms_are_told_apart() -> None:
    """As training loops do it that leave them out of weight decay."""

    def in_norms(model: nn.Module) -> list[str]:
        norms = (nn.LayerNorm, nn.BatchNorm1d)
        return [f"{n}.{p}" for n, m in model.named_modules() if isinstance(m, norms) for p, _ in m.named_parameters()]

    model = built()
    assert in_norms(compiled(model)) == in_norms(model) != []


Change = Callable[[Any], object]
CHANGES: dict[str, tuple[Change, str]] = {
    "mode": (lambda p: p.batch.eval(), r"the mode of batch, .* eval\(\) goes for the whole program"),
    "modes": (lambda p: [m.eval() for m in p.modules() if isinstance(m, nn.BatchNorm1d)], "the mode of batch"),
    "initialisation": (lambda p: p.apply(lambda m: None), r"apply\(\) of blocks.* do that to the model before"),
    "cast": (lambda p: p.head.half(), "moving or casting of training_head"),
    "call": (lambda p: p.blocks[0](torch.zeros(8, 6)), "a call of blocks.0, .* can be asked for as an output"),
    "hook": (lambda p: p.head.register_forward_hook(print), "a hook of training_head"),
    "gradients": (lambda p: p.head.register_full_backward_hook(print), "a hook of training_head"),
    "another head": (lambda p: setattr(p, "head", nn.Linear(6, 2)), "head cannot be put into a compiled program"),
    "another parameter": (lambda p: setattr(p, "scale", nn.Parameter(torch.ones(1))), "scale cannot be put into"),
    "another norm": (lambda p: setattr(p.get_submodule("blocks.0"), "norm", nn.Identity()), "a change of blocks.0"),
    "rate": (lambda p: setattr(p.get_submodule("blocks.0.drop"), "p", 0.1), "a change of blocks.0.drop"),
    "parametrization": (lambda p: nn.utils.parametrizations.weight_norm(p.head), "a change of training_head"),
    "a part's state": (
        lambda p: p.head.state_dict(),
        r"state_dict\(\) of training_head, .* the program's own has whole",
    ),
    "a part's load": (lambda p: p.head.load_state_dict({}), r"load_state_dict\(\) of training_head, .* strict=False"),
    "momentum": (lambda p: setattr(p.batch, "momentum", None), "a change of batch, .* compiled without it"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_would_be_lost_is_refused(name: str) -> None:
    program = compiled(built())
    change, said = CHANGES[name]
    before = program.state_dict()
    with pytest.raises(ProgramError, match=said):
        change(program)
    for key, value in program.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)


def test_what_a_part_has_not_is_said() -> None:
    program = compiled(built())
    assert not hasattr(program.batch, "momentum")
    with pytest.raises(AttributeError, match=r"batch is a part of a compiled program: .* no 'reset_running_stats'"):
        torch.optim.swa_utils.update_bn([batch()], program)


def test_what_its_model_has_and_the_program_has_not_is_said() -> None:
    program = compiled(model := built())
    model.config = {}
    for name in ("save_pretrained", "config"):
        with pytest.raises(AttributeError, match=rf"no '{name}': ask the model, .*load_state_dict"):
            getattr(program, name)
    with pytest.raises(AttributeError, match="object has no attribute 'nobody_has_it'"):
        _ = program.nobody_has_it


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.tasks = nn.Embedding(9, 6), nn.ModuleDict({"a": nn.Linear(6, 9), "b": nn.Linear(6, 9)})
        self.tasks["a"].weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table((x[:, 0] > 0).long())
        return sum(task(x).square().mean() for task in self.tasks.values())


def test_lists_dicts_and_tied_weights_are_reached_as_in_the_model() -> None:
    program, named = compiled(built()), compiled(Named())
    assert len(program.blocks) == 2 and program.blocks[1] is program.get_submodule("blocks.1")
    assert list(program.blocks) == list(program.blocks[:]) == [program.blocks[0], program.blocks[-1]]
    assert program.head is program.training_head
    assert list(named.tasks) == ["a", "b"] == list(named.tasks.keys()) and "a" in named.tasks
    assert dict(named.tasks.items())["b"] is named.tasks["b"] is list(named.tasks.values())[1]
    assert named.tasks["a"].weight is named.table.weight
    assert [n for n, _ in named.named_parameters()] == [n for n, _ in Named().named_parameters()]
    for one, model in ((program, built()), (named, Named())):  # averages of a state go by the order
        assert list(one.state_dict()) == list(model.state_dict())


def test_modes_go_for_the_whole_from_outside_too() -> None:
    program = compiled(built())
    outer = nn.ModuleDict({"program": program})
    assert program.batch.train() is program.batch  # as it is
    outer.eval()
    assert not any(m.training for m in program.modules())
    outer.train()
    assert all(m.training for m in program.modules())


def test_a_copy_has_parts_of_its_own() -> None:
    program = compiled(built())
    copied = copy.deepcopy(program)
    assert [n for n, _ in copied.named_parameters()] == [n for n, _ in program.named_parameters()]
    assert isinstance(copied.head, nn.Linear) and copied.head is not program.head
    assert copied.head.weight is not program.head.weight
    with pytest.raises(ProgramError, match="the mode of batch"):
        copied.batch.eval()
    program.zero_grad()
    torch.optim.SGD(copied.parameters(), lr=1.0).zero_grad()
    copied(batch()).backward()
    assert program.head.weight.grad is None and copied.head.weight.grad is not None


class Cooled(nn.Module):
    kind = "cooled"

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.temperature, self.config, self.random_seed = nn.Linear(6, 2), 1.0, {"width": 6}, 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) / self.temperature).square().mean()


def test_what_the_model_has_is_not_set_on_its_program() -> None:
    """But as it is there, or no number, for tools that look for it, and what the program has itself."""
    model = Cooled()
    program = compiled(model)
    for name, value in (("temperature", 0.5), ("kind", "hot")):
        with pytest.raises(ProgramError, match=f"{name} is the model's, and the step was compiled with it as it was"):
            setattr(program, name, value)
    program.config, program.random_seed, program.anything, program.kind = model.config, 5, 1, model.kind
    assert program.config is model.config and program.random_seed == 5
    program.config = {}
