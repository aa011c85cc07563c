"""Checkpoints by ``torch.distributed.checkpoint``: every rank writes what it holds, and reads what it will hold.

A program's parameters, buffers and optimizer state are pieces of whole tensors, as unequal as the plan. They are stored
as chunks of those, so a checkpoint loads under any other plan, with other shares or another number of ranks, and no
rank ever has a whole tensor that it holds a piece of. Its keys, each also a path of the nested dict that PyTorch's
``dcp_to_torch_save`` makes of it:

    model.<name>                     a parameter or buffer under its first name
    optimizer.<name>.<key>           what an optimizer keeps of a parameter, in the parameter's or (whole) another shape
    hap                              options of parameter groups, numbers that optimizers keep, the random seed, extras

A block of ``Layout`` along its dim is one chunk; of a piece there are ``outer`` of them. Of equal chunks one rank
writes each, and where the hosts of a mesh hold the same in pieces of their own, the first host's ranks write.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hap.codegen.layout import Layout
from hap.errors import ProgramError
from hap.runtime.collectives import Communicator

T = TypeVar("T")
_REST = "hap"
_FORMAT = 1
_METADATA = ".metadata"  # torch.distributed.checkpoint writes it last
_PLAIN = (bool, int, float, str, type(None))  # numbers, in a wide sense


@dataclass(frozen=True)
class Piece:
    """What a rank holds of a whole tensor of ``shape``: all of it, or its piece under ``layout``."""

    local: torch.Tensor
    shape: tuple[int, ...]
    layout: Layout | None
    rank: int

    def chunks(self) -> Iterator[ChunkStorageMetadata]:
        """Where the blocks of the piece lie in the whole; none of an empty piece."""
        if self.local.numel() == 0:
            return
        offsets, sizes = [0] * len(self.shape), list(self.shape)
        for block in range(1 if self.layout is None else self.layout.outer):
            if self.layout is not None:
                dim, unit, counts = self.layout.dim, self.layout.unit, self.layout.sizes
                offsets[dim] = (block * sum(counts) + sum(counts[: self.rank])) * unit
                sizes[dim] = counts[self.rank] * unit
            yield ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    def block(self, offsets: Sequence[int]) -> torch.Tensor:
        """The part of ``local`` that is the chunk at these offsets."""
        if self.layout is None:
            return self.local
        dim, unit, counts = self.layout.dim, self.layout.unit, self.layout.sizes
        length = counts[self.rank] * unit
        return self.local.narrow(dim, offsets[dim] // (sum(counts) * unit) * length, length)


@dataclass(frozen=True)
class Held:
    """A parameter or buffer of a program: its piece, and the parameter that optimizers know."""

    piece: Piece
    parameter: torch.nn.Parameter | None


Rest = dict[str, Any]


def save(
    directory: str | os.PathLike[str],
    held: Mapping[str, Held],
    optimizers: Sequence[torch.optim.Optimizer],
    rest: Rest,
    comm: Communicator,
    *,
    writes: bool,
) -> None:
    """Write a checkpoint into a directory that has none yet and that all ranks see. Collective. ``writes``: whether
    this rank's pieces are those that are written. ProgramError on every rank if the directory has a checkpoint, or for
    what an optimizer keeps that cannot be cut."""

    def gathered() -> tuple[dict[str, Piece], Rest]:
        if (Path(directory) / _METADATA).exists():
            raise ProgramError(f"{directory} holds a checkpoint already: save each into a directory of its own")
        pieces, numbers = _kept(held, optimizers)
        groups = [_group(held, group) for optimizer in optimizers for group in optimizer.param_groups]
        everything = {**rest, "format": _FORMAT, "groups": groups, "numbers": numbers}
        _check_plain(everything)
        return pieces, everything

    pieces, everything = _on_all(comm, gathered)
    planner = _Save(pieces if writes else {}, everything)
    with _quietly(comm):
        dcp.save({}, checkpoint_id=directory, planner=planner, process_group=comm.group, no_dist=comm.group is None)


def load(
    directory: str | os.PathLike[str],
    held: Mapping[str, Held],
    optimizers: Sequence[torch.optim.Optimizer],
    comm: Communicator,
) -> Rest:
    """Overwrite all of ``held`` and the optimizers' states by those of the checkpoint; what else it holds. Collective.
    ProgramError on every rank, before anything is overwritten, if it is of another model or other parameter groups."""
    stored = _on_all(comm, lambda: _metadata(directory)).state_dict_metadata
    rest: Rest = {}
    _read(directory, _Load({}, rest), comm)

    def fitting() -> tuple[dict[str, Piece], dict[str, dict[str, Any]], dict[frozenset[str], Mapping[str, Any]]]:
        if rest["format"] != _FORMAT:
            raise ProgramError(f"{directory} is of format {rest['format']}, and this version reads {_FORMAT}")
        pieces = _model_pieces(held)
        _check_model(pieces, stored)
        options = _matching_groups(held, optimizers, rest["groups"])
        states: dict[str, dict[str, Any]] = {name: dict(found) for name, found in rest["numbers"].items()}
        for name, key, piece in _empty_states(held, stored) if optimizers else ():
            pieces[f"optimizer.{name}.{key}"] = piece
            states.setdefault(name, {})[key] = piece.local
        return pieces, states, options

    pieces, states, options = _on_all(comm, fitting)
    _read(directory, _Load(pieces, {}), comm)
    names = _names(held)
    for optimizer in optimizers:
        own = optimizer.state_dict()
        params = [p for group in optimizer.param_groups for p in group["params"]]
        own["state"] = {i: states[names[p]] for i, p in enumerate(params) if names[p] in states}
        groups = zip(own["param_groups"], optimizer.param_groups, strict=True)
        own["param_groups"] = [{**group, **options[_key(held, given)]} for group, given in groups]
        optimizer.load_state_dict(own)
    return rest


def _on_all(comm: Communicator, make: Callable[[], T]) -> T:
    """What ``make`` gives. What fails on one rank fails on all: else the others would wait for it."""
    found, cause, failed = None, None, ""
    try:
        found = make()
    except Exception as e:
        cause, failed = e, str(e) if isinstance(e, ProgramError) else f"{type(e).__name__}: {e}"
    first = next((message for message in comm.gather_objects(failed) if message), "")
    if first:
        raise ProgramError(first) from cause
    return cast(T, found)


def _check_plain(rest: Rest) -> None:
    """That what is written can be read again without running code that comes with it."""
    file = BytesIO()
    torch.save(rest, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except UnpicklingError as e:
        found = re.search(r"GLOBAL (\S+)", str(e))
        what = found.group(1) if found else "something"
        raise ProgramError(
            f"extra, or an optimizer's options, hold {what}: only plain containers, numbers, strings and tensors "
            "can be saved"
        ) from None


def _read(directory: str | os.PathLike[str], planner: _Load, comm: Communicator) -> None:
    with _quietly(comm):
        dcp.load({}, checkpoint_id=directory, planner=planner, process_group=comm.group, no_dist=comm.group is None)


def _model_pieces(held: Mapping[str, Held]) -> dict[str, Piece]:
    """All but tensors without elements."""
    return {f"model.{name}": one.piece for name, one in held.items() if math.prod(one.piece.shape)}


# ---- optimizers ----


def _names(held: Mapping[str, Held]) -> dict[torch.Tensor, str]:
    return {one.parameter: name for name, one in held.items() if one.parameter is not None}


def _name_of(names: Mapping[torch.Tensor, str], parameter: torch.Tensor) -> str:
    if parameter not in names:
        raise ProgramError(f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the program's")
    return names[parameter]


def _kept(
    held: Mapping[str, Held], optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[dict[str, Piece], dict[str, dict[str, Any]]]:
    """All pieces, of the model and of what optimizers keep, by path; the numbers that they keep, by parameter."""
    pieces, numbers = _model_pieces(held), dict[str, dict[str, Any]]()
    for name, key, value in _states(held, optimizers):
        found = _state_piece(held[name], key, value, name)
        if found is None:
            numbers.setdefault(name, {})[key] = value.cpu() if isinstance(value, torch.Tensor) else value
        else:
            pieces[f"optimizer.{name}.{key}"] = found
    return pieces, numbers


def _states(held: Mapping[str, Held], optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, str, Any]]:
    """What the optimizers keep: of which parameter, under which key, and what."""
    names = _names(held)
    for optimizer in optimizers:
        for parameter, kept in optimizer.state.items():
            if not isinstance(parameter, torch.Tensor):
                raise ProgramError(f"the optimizer's state has {parameter!r}, which is no parameter: save it as extra")
            name = _name_of(names, parameter)
            if math.prod(held[name].piece.shape):
                yield from ((name, key, value) for key, value in kept.items())


def _state_piece(one: Held, key: str, value: Any, name: str) -> Piece | None:
    """How a tensor that an optimizer keeps is cut: as its parameter is, if it has its shape. None for numbers."""
    if isinstance(value, _PLAIN) or (isinstance(value, torch.Tensor) and value.dim() == 0 and one.piece.shape):
        return None
    if isinstance(value, torch.Tensor):
        if value.shape == one.piece.local.shape:
            return replace(one.piece, local=value.detach())
        if one.piece.layout is None:
            return Piece(value.detach(), tuple(value.shape), None, one.piece.rank)
    what = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise ProgramError(
        f"the optimizer keeps {key!r} of {name}, {what}: only numbers and tensors of the shape of the parameter, "
        f"here {tuple(one.piece.local.shape)}, can be saved of a parameter in shards"
    )


def _empty_states(held: Mapping[str, Held], stored: Mapping[str, Any]) -> Iterator[tuple[str, str, Piece]]:
    """Room for every tensor that the checkpoint has of an optimizer's: of which parameter, under which key, and cut as
    the parameter is now."""
    for path, meta in stored.items():
        kind, _, name_and_key = path.partition(".")
        if kind != "optimizer":
            continue
        name, _, key = name_and_key.rpartition(".")
        if name not in held:
            raise ProgramError(f"the checkpoint has a state of {name}, which is not a parameter of the program")
        shape, piece = tuple(meta.size), held[name].piece
        if shape != piece.shape and piece.layout is not None:
            raise ProgramError(f"the checkpoint has {key!r} of {name} in shape {shape}, which cannot be cut as it is")
        layout = piece.layout if shape == piece.shape else None
        local = shape if layout is None else layout.local_shape(shape, piece.rank)
        yield name, key, Piece(torch.empty(local, dtype=meta.properties.dtype), shape, layout, piece.rank)


def _group(held: Mapping[str, Held], group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's options, with its parameters by name."""
    names = _names(held)
    options = {key: value for key, value in group.items() if key != "params"}
    return {"names": [_name_of(names, p) for p in group["params"]], "options": options}


def _key(held: Mapping[str, Held], group: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(_group(held, group)["names"])


def _matching_groups(
    held: Mapping[str, Held], optimizers: Sequence[torch.optim.Optimizer], saved: Sequence[Mapping[str, Any]]
) -> dict[frozenset[str], Mapping[str, Any]]:
    """The saved options of every group, by the names in it. ProgramError unless they are the same groups."""
    options = {frozenset(group["names"]): group["options"] for group in saved}
    own = [_key(held, group) for optimizer in optimizers for group in optimizer.param_groups]
    if optimizers and set(own) != set(options):
        other = min((set(own) ^ set(options)), key=lambda names: (len(names), sorted(names)))
        whose = "the optimizer" if other in set(own) else "the checkpoint"
        raise ProgramError(
            f"{whose} has a group of {len(other)} parameters ({', '.join(sorted(other)[:3])}, ...) that "
            f"{'the checkpoint' if whose == 'the optimizer' else 'the optimizer'} has not: give all optimizers, "
            "with the groups that they were saved with"
        )
    return options


# ---- torch.distributed.checkpoint ----


def _metadata(directory: str | os.PathLike[str]) -> Metadata:
    if not (Path(directory) / _METADATA).exists():
        raise ProgramError(f"{directory} holds no checkpoint (or not one that was finished)")
    metadata = dcp.FileSystemReader(directory).read_metadata()
    if _REST not in metadata.state_dict_metadata:
        raise ProgramError(f"{directory} holds a checkpoint that save_checkpoint did not write")
    return metadata


def _check_model(pieces: Mapping[str, Piece], stored: Mapping[str, Any]) -> None:
    there = {path for path in stored if path.startswith("model.")}
    missing, unexpected = sorted(pieces.keys() - there), sorted(there - pieces.keys())
    if missing or unexpected:
        raise ProgramError(f"the checkpoint does not fit: missing {missing[:3]}, unexpected {unexpected[:3]}")
    for path, piece in pieces.items():
        if tuple(stored[path].size) != piece.shape:
            raise ProgramError(f"{path}: the checkpoint holds {tuple(stored[path].size)}, the model has {piece.shape}")


@contextmanager
def _quietly(comm: Communicator) -> Iterator[None]:
    """A program of one rank needs no process group, and that is no reason for a warning."""
    with warnings.catch_warnings():
        if comm.group is None:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _Save(dcp.DefaultSavePlanner):
    """Writes pieces, and what is not a tensor once."""

    def __init__(self, pieces: Mapping[str, Piece], rest: Rest) -> None:
        super().__init__()
        self.pieces, self.rest = pieces, rest

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(path, p, chunk) for path, p in self.pieces.items() for chunk in p.chunks()]
        if self.is_coordinator:
            items.append(WriteItem(MetadataIndex(_REST), WriteItemType.BYTE_IO))
        paths = {path: _path(path) for path in self.pieces}
        self.plan = SavePlan(items, planner_data={**paths, _REST: (_REST,)})
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn == _REST:
            return self.rest
        assert index.offset is not None
        return self.pieces[index.fqn].block(index.offset)


class _Load(dcp.DefaultLoadPlanner):
    """Fills pieces, or ``rest`` where there are none."""

    def __init__(self, pieces: Mapping[str, Piece], rest: Rest) -> None:
        super().__init__()
        self.pieces, self.rest = pieces, rest

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        if not self.pieces:
            index, nothing = MetadataIndex(_REST), torch.Size((0,))
            return LoadPlan([ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)])
        items: list[ReadItem] = []
        for path, piece in self.pieces.items():
            meta = self.metadata.state_dict_metadata[path]
            assert isinstance(meta, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(path, meta, list(piece.chunks()))
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        self.rest.update(torch.load(value, weights_only=True, map_location="cpu"))

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.pieces[index.fqn].block(index.offset)


def _write_item(path: str, piece: Piece, chunk: ChunkStorageMetadata) -> WriteItem:
    data = TensorWriteData(chunk, TensorProperties(dtype=piece.local.dtype), torch.Size(piece.shape))
    return WriteItem(MetadataIndex(path, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _path(path: str) -> tuple[str, ...]:
    """Of the nested dict: ``("model", name)``, ``("optimizer", name, key)``."""
    kind, _, rest = path.partition(".")
    return (kind, rest) if kind == "model" else (kind, *rest.rsplit(".", 1))
