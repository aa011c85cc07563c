"""The modules of a compiled program: where the model's modules were, so that parameters have their names.

They are of the model's classes for whoever asks by ``isinstance``, such as to leave the weights of norms out of weight
decay, and hold this rank's shares. They compute nothing: the whole step does. So what would have changed it on one
device (a mode, a hook, another layer in the place of one), or would have been a whole tensor there, is refused. The
program is their root, and refuses so, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from hap.errors import ProgramError
from hap.runtime.forgotten import Forgotten

if TYPE_CHECKING:
    from hap.runtime.acco import Acco

_IN_STEPS = (bool, int, float, complex, str, torch.Tensor)  # attributes that a step may go by
Place = tuple[dict[str, Any], str, torch.Tensor]  # a module's own table, a name there, and what it has under it


class Root(nn.Module):
    """What a program refuses because its parts are no layers. ``close`` ends the making of it."""

    _trainer: weakref.ref[Acco] | None = None

    def close(self, model: nn.Module, places: Iterable[Place]) -> None:
        """From now on nothing is set that ``model`` has, and the program knows where it hung its tensors."""
        own = {name for of in type(self).__mro__ for name in vars(of)} | self.__dict__.keys()
        kinds = (of for of in type(model).__mro__ if of not in nn.Module.__mro__)
        plain = {name for of in kinds for name, value in vars(of).items() if not callable(value)}
        names = {name for name in (vars(model).keys() | plain) - own if not name.startswith("_")}
        self.__dict__.update(_hap_places=tuple(places), _hap_model=weakref.ref(model), _hap_names=names)
        self.__dict__["_hap_forgotten"] = Forgotten(model)

    @property
    def forgotten(self) -> Forgotten:
        """What is done to the model, and not to the program."""
        found: Forgotten = self.__dict__["_hap_forgotten"]
        return found

    def check_idle(self) -> None:
        """ProgramError while ``Acco`` has batches under way: it has newer values, and would write over others."""
        trainer = None if self._trainer is None else self._trainer()
        if trainer is not None and trainer.is_under_way:
            raise ProgramError("hap.Acco has batches of this program under way: acco.finish() first")

    @torch.compiler.disable
    def check_call(self, stacklevel: int = 8) -> None:  # of torch's own are three
        """ProgramError if a call was given other parameters or buffers than the program's, or constants changed."""
        self.forgotten.look(stacklevel)
        for table, name, tensor in self.__dict__["_hap_places"]:
            if table[name] is not tensor:
                raise ProgramError(
                    f"{name} was replaced for this call, as by torch.func.functional_call, and a program computes with "
                    "its own parameters: give it values by load_state_dict(), or write into them"
                )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """What ``DistributedDataParallel`` asks a module for before all else."""
        raise ProgramError("a compiled program is distributed already: leave DistributedDataParallel out")

    def __dir__(self) -> list[str]:
        """Without what raises for whoever looks at all attributes."""
        return [name for name in super().__dir__() if name != "_ddp_params_and_buffers_to_ignore"]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_hap_model", lambda: None)()
            if model is None or not (hasattr(type(model), name) or name in vars(model)):
                raise
            said = f"a compiled program has no {name!r}: ask the model, which has it, and, where it is to have the "
            raise AttributeError(f"{said}program's values, model.load_state_dict(program.state_dict()) first") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if "_hap_places" in self.__dict__:
            tables = (self.__dict__.get(t, {}) for t in ("_parameters", "_buffers", "_modules"))
            if isinstance(value, (nn.Module, nn.Parameter)) or any(name in table for table in tables):
                raise ProgramError(
                    f"{name} cannot be put into a compiled program: change the model, and compile it again"
                )
            if name == "__class__":
                raise ProgramError("a compiled program is distributed already: leave fully_shard out")
            before = getattr(self.__dict__["_hap_model"](), name, None)
            if name in self.__dict__["_hap_names"] and isinstance(before, _IN_STEPS) and before is not value:
                raise ProgramError(
                    f"{name} is the model's, and the step was compiled with it as it was: make it an input of the "
                    "model, a tensor if it changes from step to step, or change the model and compile it again"
                )
        super().__setattr__(name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        raise ProgramError("a compiled program cannot be moved or cast; compile it with device= and the model's dtype")


class Part(nn.Module):
    """See the module docstring. ``path``: its name in the model; ``like``: its class there."""

    _path: str
    _like: type[nn.Module]

    def __init__(self, path: str, like: type[nn.Module]) -> None:
        super().__init__()
        self.__dict__.update(_path=path, _like=like, _is_made=True)

    @property  # type: ignore[misc]
    def __class__(self) -> type[nn.Module]:  # type: ignore[override]
        like: type[nn.Module] = self.__dict__.get("_like", Part)
        return like

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise ProgramError(f"{what} of {self._path}, which is a part of a compiled program: {instead}")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            said = f"{self._path} is a part of a compiled program: its parameters and buffers, and no {name!r}"
            raise AttributeError(said) from None

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("a call", "its steps run whole; what it returns can be asked for as an output of the model")

    def train(self, mode: bool = True) -> Part:
        if mode != self.training:
            self._refuse(
                "the mode",
                f"{'train' if mode else 'eval'}() goes for the whole program; a model in which some "
                "modules are in evaluation is compiled as it is",
            )
        return self

    def apply(self, fn: Any) -> NoReturn:
        self._refuse("apply()", "do that to the model before it is compiled")

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        self._refuse("moving or casting", "compile the model with device= and its dtype")

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("state_dict()", "the program's own has whole tensors under the model's names")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse(
            "load_state_dict()",
            "the program's own takes whole tensors under the model's names, with strict=False some of them",
        )

    def _no_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("a hook", "hooks of modules are part of the step if the model has them when it is compiled")

    register_forward_hook = register_forward_pre_hook = _no_hook
    register_state_dict_pre_hook = register_state_dict_post_hook = _no_hook
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _no_hook
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _no_hook

    def _no_change(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("a change", "the step was compiled without it; change the model, and compile it again")

    register_parameter = register_buffer = register_module = add_module = __delattr__ = _no_change

    def __setattr__(self, name: str, value: Any) -> None:
        if "_is_made" in self.__dict__:
            self._no_change()
        super().__setattr__(name, value)


class Several(Part):
    """Of a list, a sequence or a dict of modules: its parts, as the model has them."""

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules if issubclass(self._like, nn.ModuleDict) else self._modules.values())

    def __getitem__(self, which: Any) -> Any:
        if issubclass(self._like, nn.ModuleDict):
            return self._modules[which]
        return list(self._modules.values())[which]

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def keys(self) -> Iterable[str]:
        return self._modules.keys()

    def values(self) -> Iterable[Any]:
        return self._modules.values()

    def items(self) -> Iterable[tuple[str, Any]]:
        return self._modules.items()


def build_parts(root: nn.Module, model: nn.Module) -> None:
    """Hang a part under ``root`` for every module of ``model``: one where one module has two names."""
    parts: dict[int, nn.Module] = {id(model): root}
    for path, module in model.named_modules(remove_duplicate=False):
        if path:
            if id(module) not in parts:
                several = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
                parts[id(module)] = (Several if several else Part)(path, type(module))
            parent, _, name = path.rpartition(".")
            part_at(root, parent)._modules[name] = parts[id(module)]


def hold(root: nn.Module, name: str, tensor: torch.Tensor) -> Place:
    """Hang ``tensor`` under ``root`` at its dotted name. Written into the modules' own tables, since the user's names
    may be those of our attributes."""
    path, _, last = name.rpartition(".")
    part = part_at(root, path)
    table: dict[str, Any] = part._parameters if isinstance(tensor, nn.Parameter) else part._buffers
    table[last] = tensor
    return table, last, tensor


def part_at(root: nn.Module, path: str) -> nn.Module:
    """By the tables alone: a name may be that of an attribute."""
    found = root
    for name in path.split(".") if path else ():
        child = found._modules[name]
        assert child is not None
        found = child
    return found


def set_mode(root: nn.Module, mode: bool) -> None:
    """Of ``root`` and all of its parts."""
    for module in root.modules():
        module.__dict__["training"] = mode
