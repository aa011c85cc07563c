"""The programs that stand behind one ``HapProgram``: one for each form and shape of call, in training and evaluation.

They share the parameters' and buffers' shares, so that all of them lie alike, and nothing else. Which one a step runs
follows from the mode, from what is no tensor (``hap.runtime.forms``), and from the shapes of what it is called with. A
rank sees its own share only, which may have the same shape under two of them (a rank without a share always does):
where that can be, the ranks agree by one small sum.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from hap.capture.convert import OUTPUT
from hap.capture.inputs import StepInputs, step_inputs
from hap.capture.seed import SEED
from hap.codegen.layout import Layout
from hap.codegen.program import Program
from hap.errors import ProgramError
from hap.runtime.collectives import Communicator
from hap.runtime.data import Signature, unexpected
from hap.runtime.forms import Form, check_new, filled, form_of, is_another, is_as
from hap.runtime.step import Step

MANY = 24  # programs: whoever has had so many of them will have more
Shapes = tuple[tuple[int, ...], ...]
Key = tuple[Form, Shapes]


@dataclass(frozen=True)
class Built:
    """A program and who talks for it. ``dealt``: of a mesh of two axes, how its batch is cut for the hosts, of which
    this rank is on number ``host``; the program is then for that host's part."""

    program: Program
    comm: Communicator
    dealt: Signature | None = None
    host: int = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Built:
        """Itself, as it owns no state."""
        return self


Rebuild = Callable[[StepInputs, bool], Built]  # an example (on ``meta``), in training or not; collective


@dataclass(frozen=True)
class Variant:
    """One program on this rank. ``signature``: of its host's part of the batch; ``state``: parameters, buffers and
    constants by the names it has for them."""

    built: Built
    signature: Signature
    step: Step
    state: Mapping[str, torch.Tensor]
    seed: str | None

    @classmethod
    def of(cls, built: Built, example: StepInputs, shares: Mapping[str, torch.Tensor]) -> Variant:
        """``example``: of the whole batch, on ``meta``."""
        program, comm = built.program, built.comm
        written = torch.empty(0, device=comm.device)  # in place of the buffer that an output is returned as
        state = {s.name: written for s in program.sources_of("buffer")}
        state |= {s.name: program.constants[s.target].to(comm.device) for s in program.sources_of("constant")}
        seed = next((s.name for s in program.sources_of("input") if s.target == SEED), None)
        mine = example if built.dealt is None else built.dealt.part(built.host)
        return cls(built, Signature.of(program, mine, built.dealt is None), Step(program, comm), state, seed).on(shares)

    @property
    def batch(self) -> tuple[int, Layout | None, Layout | None]:
        """(samples of the whole batch, how hosts have them, how this host's ranks have its own)."""
        size, to_ranks = self.signature.batch
        if self.built.dealt is None:
            return size, None, to_ranks
        return *self.built.dealt.batch, to_ranks

    def shares(self, batch: Any, targets: Any) -> Any:
        """This rank's share of a global batch, in the batch's own form."""
        comm, dealt = self.built.comm, self.built.dealt
        if dealt is not None:
            mine = dealt.shares(batch, targets, self.built.host, comm.device)
            batch, targets = (mine, None) if targets is None else mine
        return self.signature.shares(batch, targets, comm.rank, comm.device)

    def on(self, shares: Mapping[str, torch.Tensor]) -> Variant:
        """The same with other parameters and buffers."""
        program = self.step.program
        kept = (*program.sources_of("parameter"), *program.sources_of("buffer"))
        own = {s.name: shares[s.target] for s in kept if not s.target.startswith(OUTPUT)}
        return replace(self, state={**self.state, **own})


class Variants:
    """All that one ``HapProgram`` has needed so far; the first is what it was compiled as, for ``example``. What they
    agree on they agree on with ``everyone`` who runs the job."""

    def __init__(
        self,
        first: Variant,
        example: StepInputs,
        training: bool,
        shares: Mapping[str, torch.Tensor],
        everyone: Communicator,
        rebuild: Rebuild | None,
    ) -> None:
        self.first, self._shares, self._everyone, self._rebuild = first, shares, everyone, rebuild
        self._comm, self._usual = first.built.comm, example
        self._examples = {key_of(example): example}
        self._built = {(key_of(example), training): first}
        self._doubtful: dict[tuple[tuple[Key, ...], frozenset[str], bool], bool] = {}
        self._options: Mapping[str, Any] | None = None  # torch.compile's

    @property
    def is_compiled(self) -> bool:
        """By ``torch.compile``."""
        return self._options is not None

    def compile(self, options: Mapping[str, Any]) -> None:
        """What there is, and what there will be, by ``torch.compile``."""
        self._options = options
        for variant in self._built.values():
            variant.step.compile(options)

    def choose(self, call: StepInputs, training: bool) -> Variant:
        """The one that ``call``, this rank's share, is for; if none is, one that says what is wrong with it. What is
        new is compiled for: a form, or a form in a shape that another one has had. Collective."""
        own = [key for key, example in self._examples.items() if is_as(call, example, self._usual)]
        if self._rebuild is None or not is_another(call, self._usual):
            return self._get(self._fitting(call, own or [key_of(self._usual)], training), training)
        if not own:
            check_new(call, self._usual, self._examples.values(), aloud=self._everyone.rank == 0)
        paths = [path for path, _ in call.named]
        shapes: dict[Shapes, Key] = {}
        for key in (*own, *self._examples):
            known = dict(self._examples[key].named)
            if known.keys() >= set(paths):
                shapes.setdefault(tuple(tuple(known[path].shape) for path in paths), key)
        if not shapes:
            raise ProgramError("this call has tensors where no other had: hand it to shard_batch first, whole")
        key = self._fitting(call, list(shapes.values()), training)
        if key not in own:
            whole = dict(self._examples[key].named)
            example = filled(call.rebuild([whole[path] for path in paths]), self._usual)
            self.for_example(example, training)
            key = key_of(example)
        return self._get(key, training)

    def _fitting(self, call: StepInputs, keys: Sequence[Key], training: bool) -> Key:
        """Of these the one whose batch ``call`` is this rank's share of, or the first if none is. Collective."""
        if len(keys) == 1:
            return keys[0]
        known = [self._any(key, training).signature for key in keys]
        fits = [int(_fits(signature, call, self._comm.rank)) for signature in known]
        if self._are_doubtful(tuple(keys), frozenset(path for path, _ in call.named), training):
            fits = self._agreed(fits)
        return keys[fits.index(1) if 1 in fits else 0]

    def learn(self, others: Variants) -> None:
        """What others of the same program, with parameters and buffers of their own, have needed."""
        for key, variant in others._built.items():
            if key not in self._built:
                self._examples[key[0]] = others._examples[key[0]]
                self._built[key] = variant.on(self._shares)

    def for_batch(self, batch: Any, targets: Any, training: bool) -> Variant:
        """What deals out a global batch. A shape that is new is compiled, which is collective.

        ProgramError if the inputs are not those that were compiled, or other than in their sizes.
        """
        given = without_data(step_inputs(batch, targets))
        metas = dict(given.named)
        alike = [example for example in self._examples.values() if is_as(given, example, self._usual)]
        for example in alike:
            known = dict(example.named)
            if all(path in known and known[path].shape == t.shape for path, t in metas.items()):
                return self._get(key_of(example), training)
        if alike or not is_another(given, self._usual):
            _check(metas, dict((alike or [self._usual])[0].named))
        else:
            check_new(given, self._usual, self._examples.values(), aloud=self._everyone.rank == 0)
        return self.for_example(filled(given, self._usual), training)

    def for_size(self, size: int, training: bool) -> Variant:
        """What deals out a global batch of ``size`` samples that is otherwise like the first. Collective if it is
        new."""
        before, *_ = self.first.batch
        pieces = [t.new_empty((size, *t.shape[1:])) if t.shape[:1] == (before,) else t for _, t in self._usual.named]
        return self.for_example(self._usual.rebuild(pieces), training)

    def for_example(self, example: StepInputs, training: bool) -> Variant:
        """That for an example on ``meta``, compiled if it is new."""
        key = key_of(example)
        if key not in self._examples:
            self._need_rebuild("this shape of batch")
            self._examples[key] = example
            if len(self._examples) == MANY and self._everyone.rank == 0:
                warnings.warn(
                    f"{MANY} shapes of batches and kinds of calls have been compiled for, each of which takes seconds "
                    "and keeps a program: pad batches to a few lengths",
                    stacklevel=4,
                )
            try:
                self._get(key, training)
            except Exception:
                del self._examples[key]
                raise
        return self._get(key, training)

    def nothing(self, training: bool) -> StepInputs:
        """The share of a rank that holds none of some batch; of the first one's form if it always holds some. Local:
        ranks that have a share do not ask."""
        rank, form = self._comm.rank, form_of(self._usual)
        known = [self._any(key, training).signature for key in self._examples if key[0] == form]
        empty = [s for s in known if (layout := s.batch[1]) is not None and layout.sizes[rank] == 0]
        return (empty or known)[0].nothing(rank)

    def _any(self, key: Key, training: bool) -> Variant:
        """In the mode that there is, rather in this one: batches are dealt alike in both."""
        return self._built.get((key, training)) or self._built[key, not training]

    def _get(self, key: Key, training: bool) -> Variant:
        if (key, training) not in self._built:
            self._need_rebuild("training" if training else "evaluation")
            assert self._rebuild is not None
            example = self._examples[key]
            with torch.inference_mode(False):  # what is made here goes into training steps, too
                made = Variant.of(self._rebuild(example, training), example, self._shares)
            if self._options is not None:
                made.step.compile(self._options)
            self._built[key, training] = made
        return self._built[key, training]

    def _need_rebuild(self, what: str) -> None:
        if self._rebuild is None:
            raise ProgramError(f"not compiled for {what}, and made without its model: use hap.compile")

    def _are_doubtful(self, keys: tuple[Key, ...], paths: frozenset[str], training: bool) -> bool:
        """Whether on any rank two of them take shares of the same shapes where a call has tensors, as far as is known:
        of other hosts it is not. Alike on every rank."""
        if self._everyone is not self._comm:
            return True
        asked = keys, paths, training
        if asked not in self._doubtful:
            known = [self._any(key, training).signature for key in keys]
            seen = ([dict(s.local_shapes(rank)) for s in known] for rank in range(self._comm.world_size))
            self._doubtful[asked] = any(
                _may_be_either(one, other, paths) for shapes in seen for one, other in itertools.combinations(shapes, 2)
            )
        return self._doubtful[asked]

    def _agreed(self, fits: list[int]) -> list[int]:
        """1 where all ranks say so."""
        everyone = self._everyone
        votes = torch.tensor(fits, device=everyone.device)
        if everyone.group is not None:
            with everyone.wire():
                dist.all_reduce(votes, group=everyone.group)
        return [int(v == everyone.world_size) for v in votes.tolist()]


def key_of(call: StepInputs) -> Key:
    """What tells one call from another."""
    return form_of(call), tuple(tuple(tensor.shape) for _, tensor in call.named)


def _check(given: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """A new shape must name every input, each with the dtype and number of dims it was compiled with."""
    for path in given:
        if path not in expected:
            raise unexpected(path, expected)
    for path, like in expected.items():
        if path not in given:
            raise ProgramError(f"input {path} is missing: a batch of a new shape must be given whole")
        if given[path].dim() != like.dim() or given[path].dtype != like.dtype:
            raise ProgramError(
                f"input {path}: the program takes {like.dtype} of {like.dim()} dims, "
                f"got {given[path].dtype} of {given[path].dim()}"
            )


def _fits(signature: Signature, call: StepInputs, rank: int) -> bool:
    shapes = dict(signature.local_shapes(rank))
    return all(shapes.get(path, tuple(tensor.shape)) == tuple(tensor.shape) for path, tensor in call.named)


def _may_be_either(one: Mapping[str, Any], other: Mapping[str, Any], paths: frozenset[str]) -> bool:
    """Whether shares have these shapes in both, as far as both read what a call has at these paths."""
    return all(one[path] == other[path] for path in paths & one.keys() & other.keys())


def without_data(call: StepInputs) -> StepInputs:
    """The same call with its tensors on ``meta``."""
    return call.rebuild([t.detach().to("meta") for _, t in call.named])


def split_outputs(updates: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(the model's outputs by name, buffers' new values by target)."""
    outputs = {t.removeprefix(OUTPUT): value for t, value in updates.items() if t.startswith(OUTPUT)}
    return outputs, {t: value for t, value in updates.items() if not t.startswith(OUTPUT)}
