"""From what a user names on the command line to a model with its example inputs.

Two ways: ``FILE.py:FUNCTION`` or ``package.module:FUNCTION``, a function without arguments that returns
``(model, example_inputs)`` or a dict with the keys of ``BuiltModel``; or the name or config file of a Hugging Face
causal language model, which is built without weights on the meta device (planning needs shapes only).
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

from hap.errors import HapError


@dataclass(frozen=True)
class BuiltModel:
    """What ``hap.plan`` needs of the user: a module, its example inputs, and the loss if the module has none."""

    model: torch.nn.Module
    example_inputs: Any
    example_targets: Any = None
    loss_fn: Callable[..., torch.Tensor] | None = None


def build_from(reference: str) -> BuiltModel:
    """Call the user's build function, with ``beside(reference)`` meanwhile.

    HapError if it cannot be found, returns something else, or a module that it imports is not there, or its file
    has the name of another module; its own errors pass."""
    where, colon, name = reference.rpartition(":")
    if not colon or not where or not name:
        raise HapError(f"{reference!r}: expected FILE.py:FUNCTION or package.module:FUNCTION")
    try:
        with beside(reference):
            function = getattr(_import(where), name, None)
            if not callable(function):
                raise HapError(f"{where} has no function {name!r}")
            return _as_built(function(), reference)
    except ModuleNotFoundError as e:
        frames = traceback.extract_tb(e.__traceback__)
        at = next(frame for frame in reversed(frames) if not frame.filename.startswith("<frozen importlib"))
        raise HapError(f"{reference} cannot be built: {e} ({at.filename}:{at.lineno})") from e
    except ImportError as e:
        if not (where.endswith(".py") and str(e).startswith("attempted relative import")):
            raise
        raise HapError(f"{reference} cannot be built: {e}; name it {_in_its_package(Path(where), name)}") from e


def _in_its_package(path: Path, function: str) -> str:
    """How a file is named that is a part of a package."""
    path, here = path.resolve(), Path.cwd()
    top = next(parent for parent in path.parents if not (parent / "__init__.py").is_file())
    if top == path.parent and path.is_relative_to(here):
        top = here  # a package may do without __init__.py
    names = path.with_suffix("").relative_to(top).parts
    return f"{'.'.join(names)}:{function}" + ("" if top == here else f", from the folder {top}")


_BESIDE: dict[Path, dict[str, ModuleType]] = {}  # the folders of users' files, and the modules that were found there


@contextmanager
def beside(reference: str) -> Iterator[None]:
    """Modules that lie beside the user's file can be imported while the body runs, as where Python is started with that
    file. A model may import some when it is first called, so whoever captures it has that in the body, too. Meanwhile
    those of other files' folders are away: they would be taken for what has their name here."""
    folder = folder_of(reference)
    is_there = str(folder) in sys.path  # for this file alone, or for good
    for other, found in _BESIDE.items():
        if other != folder:
            _put_away(found)
    sys.modules.update({n: m for n, m in _BESIDE.get(folder, {}).items() if n not in sys.modules})
    known = dict(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):  # the user's own code may have taken it away
            sys.path.remove(str(folder))
        if not is_there:
            new = [name for name, module in sys.modules.items() if known.get(name) is not module]
            _BESIDE.setdefault(folder, {}).update(_found_in(folder, new))


def folder_of(reference: str) -> Path:
    """Where Python looks first when it is started with ``FILE.py`` of ``FILE.py:FUNCTION``; of
    ``package.module:FUNCTION`` the working directory."""
    where = reference.rpartition(":")[0]
    return Path(where).resolve().parent if where.endswith(".py") else Path.cwd()


def _put_away(found: dict[str, ModuleType]) -> None:
    """These modules are no longer known to Python, nor what was imported of their packages later; ``found`` has it."""
    names = {name.partition(".")[0] for name, module in found.items() if sys.modules.get(name) is module}
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        found[name] = sys.modules.pop(name)


def _found_in(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, ModuleType]]:
    """Those of these modules that were found in the folder, and not in one inside of it that is on the path, too."""
    path = {str(folder), *(os.path.abspath(entry) for entry in sys.path)}
    for name in names:
        module = sys.modules[name]
        if not isinstance(module, ModuleType) or name.partition(".")[0] == "hap":
            continue
        told = object.__getattribute__(module, "__dict__")  # a module may import itself when it is asked for more
        places = [told.get("__file__"), *(told["__path__"] if isinstance(told.get("__path__"), Iterable) else ())]
        place = next((Path(os.path.abspath(p)) for p in places if isinstance(p, str)), None)
        above = [] if place is None else [str(parent) for parent in place.parents if str(parent) in path]
        if above[:1] == [str(folder)]:
            yield name, module


def _import(where: str) -> ModuleType:
    if not where.endswith(".py"):
        if where.startswith("."):
            raise HapError(f"{where!r} is relative to no package: name it in full")
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as e:
            if e.name is None or not f"{where}.".startswith(f"{e.name}."):
                raise  # the user's module was found and misses one of its own imports
            raise HapError(f"no module named {where!r} (a file needs its .py)") from None
    path = Path(where)
    if not path.is_file():
        raise HapError(f"{where}: no such file")
    known = sys.modules.get(path.stem)
    if known is not None and not _is_users(known, path):
        raise HapError(f"{where}: Python has a module {path.stem!r} loaded from elsewhere; rename the file")
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=_Script(path.stem, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickling look their module up
    spec.loader.exec_module(module)
    return module


def _is_users(module: ModuleType, path: Path) -> bool:
    """Whether a module is this file, or came from one that was named as it is."""
    if isinstance(getattr(module, "__loader__", None), _Script):
        return True
    place = getattr(module, "__file__", None)
    return place is not None and Path(place).resolve() == path.resolve()


class _Script(importlib.machinery.SourceFileLoader):
    """Compiled each time, as what Python is started with: its cache knows a file by its size and the second of its last
    change, so another model could be taken for the one before."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _as_built(result: Any, reference: str) -> BuiltModel:
    if isinstance(result, BuiltModel):
        return result
    if isinstance(result, tuple) and len(result) == 2:
        result = dict(zip(("model", "example_inputs"), result, strict=True))
    known = [f.name for f in fields(BuiltModel)]
    if not isinstance(result, Mapping) or not {"model", "example_inputs"} <= set(result):
        raise HapError(f"{reference} must return (model, example_inputs) or a dict with the keys {', '.join(known)}")
    if unknown := sorted(set(result) - set(known)):
        raise HapError(f"{reference} returned unknown keys {', '.join(unknown)}; known: {', '.join(known)}")
    if not isinstance(result["model"], torch.nn.Module):
        raise HapError(f"{reference}: the model is a {type(result['model']).__name__}, not a torch.nn.Module")
    return BuiltModel(**result)


def build_hugging_face(source: str, batch: int | None = None, sequence: int | None = None) -> BuiltModel:
    """A causal language model with its own loss; ``source`` is a config file, a model type (``gpt2``) or a hub name.

    ``batch`` x ``sequence`` token ids are the example inputs; the batch defaults to 8, the sequence to 512 or the
    model's own limit.
    The model is in training mode with its config's dropout, as it would be trained.
    """
    try:
        import transformers
    except ModuleNotFoundError:
        raise HapError("--hf needs the transformers package: pip install transformers") from None
    config = _hugging_face_config(source)
    limit = getattr(config, "max_position_embeddings", None) or 512
    if sequence is not None and sequence > limit:
        raise HapError(f"--seq {sequence} is longer than the model's {limit} positions")
    config.use_cache = False
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config).train()
    except ValueError as e:
        said = next(iter(str(e).splitlines()), type(e).__name__)
        unknown = said.startswith("Unrecognized configuration class")  # no such model is of this kind
        what = "is not a causal language model" if unknown else "cannot be built"
        raise HapError(f"{source} {what} ({said})") from None
    model.loss_type = "ForCausalLM"  # some class names hide it from transformers, which then warns and assumes it
    ids = torch.zeros(batch or 8, sequence or min(512, limit), dtype=torch.int64)
    return BuiltModel(model, {"input_ids": ids, "labels": ids})


def _hugging_face_config(source: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if source.endswith(".json"):
        try:
            values = json.loads(Path(source).read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise HapError(f"{source}: not a readable config file ({e})") from None
        if not isinstance(values, dict) or values.get("model_type") not in CONFIG_MAPPING:
            raise HapError(f"{source}: no model_type that transformers knows")
        try:
            return AutoConfig.for_model(**values)
        except Exception as e:  # of several kinds, as whoever wrote the model checks its values
            raise HapError(f"{source}: not a config of {values['model_type']} ({' '.join(str(e).split())})") from None
    if source in CONFIG_MAPPING:
        return AutoConfig.for_model(source)
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError):
        raise HapError(f"{source!r} is no config file, no model type and no model that can be reached") from None
