"""How a user's model is found: a function of a file or a module, what lies beside it, a model of Hugging Face."""

import os
import sys
from pathlib import Path

import pytest
import torch

from hap import cli
from hap.build import beside, build_from, build_hugging_face
from hap.errors import HapError
from hap.guard import check_folder
from hap.mesh_plan import MeshPlan, load_plan, parse_plan
from hap.plan import Plan

TINY = """
import torch

def build():
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    return {"model": model, "example_inputs": (torch.zeros(8, 6),), "loss_fn": lambda out: out.square().mean()}

def pair():
    return torch.nn.Linear(2, 1), (torch.zeros(3, 2),)

def nothing():
    return None

def typo():
    return {"model": torch.nn.Linear(2, 1), "example_inputs": (), "loss": None}

def no_module():
    return "gpt2", ()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "tiny_model.py"
    path.write_text(TINY)
    return path


CLUSTER = """
name: one
backend: gloo
hosts: [{name: a, devices: [{name: d, tflops: {float32: 1}, memory: 1GB, memory_bandwidth: 1GB/s}]}]
"""
TRAIN = """
from its_net import Net

def build():
    from its_batch import batch
    return {"model": Net(), "example_inputs": (batch,), "loss_fn": lambda out: out.square().mean()}
"""
NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, WIDTH)

    def forward(self, x):
        from its_activation import activation
        return activation(self.linear(x))
"""


def project(folder: Path, width: int) -> str:
    """A script with what it imports beside it: at once, when its function is called, when its model is."""
    folder.mkdir()
    (folder / "its_train.py").write_text(TRAIN)
    (folder / "its_net.py").write_text(NET.replace("WIDTH", str(width)))
    (folder / "its_batch.py").write_text("import torch\nbatch = torch.zeros(8, 6)\n")
    (folder / "its_activation.py").write_text("from torch import tanh as activation\n")
    return f"{folder}/its_train.py:build"


def width_of(plan: Plan | MeshPlan) -> int:
    """``hap.plan`` counts 6 weights and a bias for each."""
    return plan.provenance.parameters // 7


class TestBeside:
    def test_a_script_is_planned_with_the_modules_beside_it(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = list(sys.path)
        (tmp_path / "c.yaml").write_text(CLUSTER)
        for width in (4, 5):  # modules of one name in two folders are two
            reference = project(tmp_path / f"wide{width}", width)
            with pytest.raises(SystemExit) as exit_:
                cli.main(["plan", reference, "-c", f"{tmp_path}/c.yaml", "--json"])
            out, err = capsys.readouterr()
            assert exit_.value.code == 0, err
            assert width_of(parse_plan(out)) == width
            assert sys.path == before

    def test_the_plans_of_a_folder_are_each_of_their_own_script(self, tmp_path: Path) -> None:
        before = list(sys.path)
        (tmp_path / "c.yaml").write_text(CLUSTER)
        for width in (4, 5):
            project(tmp_path / f"wide{width}", width)
        entry = "{name}.plan.json: {{model: '{name}/its_train.py:build', cluster: c.yaml, effort: quick}}\n"
        (tmp_path / "check.yaml").write_text("".join(entry.format(name=name) for name in ("wide4", "wide5")))
        assert all(result.written for result in check_folder(tmp_path, update=True))
        assert [width_of(load_plan(tmp_path / f"wide{width}.plan.json")) for width in (4, 5)] == [4, 5]
        assert sys.path == before

    def test_so_are_those_with_packages_that_have_no_init_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nor is what lies beside one script found for another, where it is missing."""
        monkeypatch.delitem(sys.modules, "its_activation", raising=False)  # a command leaves it
        for width in (4, 5):
            folder = tmp_path / f"wide{width}"
            project(folder, width)
            (folder / "its_parts" / "deep").mkdir(parents=True)
            (folder / "its_net.py").rename(folder / "its_parts" / "deep" / "net.py")
            (folder / "its_train.py").write_text(TRAIN.replace("its_net", "its_parts.deep.net"))
            with beside(f"{folder}/its_train.py:build"):
                built = build_from(f"{folder}/its_train.py:build")
                assert built.model.linear.out_features == width and built.model(torch.zeros(1, 6)).shape == (1, width)
        for width in (4, 5):  # and they are there again, whatever was forgotten meanwhile
            with beside(reference := f"{tmp_path}/wide{width}/its_train.py:build"):
                again = build_from(reference).model
                assert again.linear.out_features == width and again(torch.zeros(1, 6)).shape == (1, width)
        reference = project(tmp_path / "wide6", 6)
        (tmp_path / "wide6" / "its_activation.py").unlink()
        with beside(reference), pytest.raises(ModuleNotFoundError, match="its_activation"):
            build_from(reference).model(torch.zeros(1, 6))

    def test_from_python_the_path_is_as_it_was_once_the_model_is_built(self, tmp_path: Path) -> None:
        before = list(sys.path)
        reference = project(tmp_path / "wide", 4)
        model = build_from(reference).model
        assert sys.path == before
        with beside(reference):
            assert model(torch.zeros(1, 6)).shape == (1, 4)
        assert sys.path == before

    def test_a_module_of_the_working_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for width in (4, 5):
            project(tmp_path / f"wide{width}", width)
            monkeypatch.chdir(tmp_path / f"wide{width}")
            assert build_from("its_train:build").model.linear.out_features == width

    def test_what_is_installed_and_what_runs_is_no_namesake(self, tmp_path: Path) -> None:
        known = {name: sys.modules[name] for name in ("typer", "json", "hap", "__main__")}
        for name in known:
            (tmp_path / f"{name}.py").write_text("")
        with beside(f"{tmp_path}/train.py:build"):
            assert {name: sys.modules[name] for name in known} == known

    @pytest.mark.parametrize("by", ["file", "module"])
    @pytest.mark.parametrize(("lacking", "line"), [("its_net", 2), ("its_batch", 5)], ids=["at once", "when called"])
    def test_a_module_that_is_not_there_is_one_line(
        self,
        by: str,
        lacking: str,
        line: int,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        project(tmp_path / "here", 4)
        monkeypatch.chdir(tmp_path / "here")
        (tmp_path / "here" / f"{lacking}.py").unlink()
        for name in ("its_train", "its_net", "its_batch"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        reference = "its_train.py:build" if by == "file" else "its_train:build"
        file = "its_train.py" if by == "file" else tmp_path / "here" / "its_train.py"
        with pytest.raises(SystemExit) as exit_:
            cli.main(["plan", reference, "-c", "c.yaml"])
        out, err = capsys.readouterr()
        said = f"error: {reference} cannot be built: No module named '{lacking}' ({file}:{line})\n"
        assert (exit_.value.code, out, err) == (2, "", said)


class TestBuild:
    def test_a_pair_or_a_dict(self, script: Path) -> None:
        assert isinstance(build_from(f"{script}:pair").model, torch.nn.Linear)
        built = build_from(f"{script}:build")
        assert built.loss_fn is not None and built.example_targets is None

    def test_a_file_that_changed_within_a_second_is_read_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Python's cache of bytecode, where it is on, knows a file by its size and the second of its last change."""
        monkeypatch.setattr(sys, "dont_write_bytecode", False)
        file = tmp_path / "changing_model.py"
        for width in (24, 48):
            file.write_text(
                f"import torch\n\n\ndef build():\n    return torch.nn.Linear(6, {width}), (torch.ones(1, 6),)\n"
            )
            os.utime(file, (1_700_000_000, 1_700_000_000))
            model = build_from(f"{file}:build").model
            assert isinstance(model, torch.nn.Linear) and model.out_features == width
        assert [found.name for found in tmp_path.iterdir()] == ["changing_model.py"]

    def test_a_module_on_the_path(self, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(script.parent)
        assert isinstance(build_from("tiny_model:pair").model, torch.nn.Linear)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("absent", "has no function 'absent'"),
            ("nothing", "must return (model, example_inputs) or a dict"),
            ("typo", "unknown keys loss; known: model, example_inputs, example_targets, loss_fn"),
            ("no_module", "the model is a str, not a torch.nn.Module"),
        ],
    )
    def test_refusals(self, script: Path, name: str, message: str) -> None:
        with pytest.raises(HapError) as refusal:
            build_from(f"{script}:{name}")
        assert message in str(refusal.value)

    @pytest.mark.parametrize("stem", ["types", "copy", "torch", "sys"])
    def test_a_file_does_not_replace_another_module(self, tmp_path: Path, stem: str) -> None:
        known, file = sys.modules[stem], tmp_path / f"{stem}.py"
        file.write_text(TINY)
        with pytest.raises(HapError, match=f"{stem}.py: Python has a module '{stem}' loaded from elsewhere; rename"):
            build_from(f"{file}:build")
        assert sys.modules[stem] is known

    @pytest.mark.parametrize("packages", [True, False])
    def test_a_file_with_relative_imports_is_named_in_its_package(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packages: bool
    ) -> None:
        folder = tmp_path / "its_package" / "inner"
        folder.mkdir(parents=True)
        (folder / "its_models.py").write_text("from ..its_sizes import SIZE\n" + TINY)
        (folder.parent / "its_sizes.py").write_text("SIZE = 6\n")
        for place in (folder, folder.parent) if packages else ():
            (place / "__init__.py").touch()
        monkeypatch.chdir(tmp_path)
        with pytest.raises(HapError) as refusal:
            build_from("its_package/inner/its_models.py:build")
        assert str(refusal.value).endswith("; name it its_package.inner.its_models:build")
        assert build_from("its_package.inner.its_models:build").loss_fn is not None
        if packages:
            monkeypatch.chdir(folder)
            with pytest.raises(HapError) as refusal:
                build_from("its_models.py:build")
            assert str(refusal.value).endswith(f"its_package.inner.its_models:build, from the folder {tmp_path}")

    @pytest.mark.parametrize("reference", ["x.py", ":build", "no_such.py:build", "no_such_module:build", ".x:build"])
    def test_no_such_place(self, reference: str) -> None:
        with pytest.raises(HapError):
            build_from(reference)


class TestHuggingFace:
    def test_a_type_is_built_without_weights_ready_to_train(self) -> None:
        built = build_hugging_face("gpt2", batch=4, sequence=16)
        assert all(p.is_meta for p in built.model.parameters())
        assert sum(p.numel() for p in built.model.parameters()) == 124_439_808
        assert built.model.training
        assert {k: tuple(v.shape) for k, v in built.example_inputs.items()} == {"input_ids": (4, 16), "labels": (4, 16)}

    def test_a_batch_of_8_and_512_tokens_unless_told_otherwise(self) -> None:
        assert build_hugging_face("gpt2").example_inputs["input_ids"].shape == (8, 512)

    def test_a_config_file(self, tmp_path: Path) -> None:
        config = tmp_path / "config.json"
        config.write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11}')
        assert build_hugging_face(str(config), batch=1).model.config.n_layer == 1

    @pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "no_such"}'])
    def test_a_config_file_that_is_none(self, tmp_path: Path, content: str) -> None:
        config = tmp_path / "config.json"
        config.write_text(content)
        with pytest.raises(HapError, match=r"config\.json"):
            build_hugging_face(str(config), batch=1)

    def test_longer_than_its_positions(self) -> None:
        with pytest.raises(HapError, match="--seq 2000 is longer than the model's 1024 positions"):
            build_hugging_face("gpt2", batch=1, sequence=2000)

    def test_no_language_model(self) -> None:
        with pytest.raises(HapError, match="vit is not a causal language model"):
            build_hugging_face("vit", batch=1)

    def test_what_is_wrong_with_a_config_is_told(self, tmp_path: Path) -> None:
        file = tmp_path / "odd.json"
        file.write_text('{"model_type": "gpt2", "n_embd": 10, "n_head": 3}')
        with pytest.raises(HapError, match=r"odd.json cannot be built \(.*divisible by num_heads.*\)$"):
            build_hugging_face(str(file))
        file.write_text('{"model_type": "gpt2", "n_layer": "two"}')
        with pytest.raises(HapError, match=r"odd.json: not a config of gpt2 \(.*'n_layer'.*\)$"):
            build_hugging_face(str(file))
