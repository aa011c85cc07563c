"""Rules that are found by running the operator: in a child process, within a time limit, remembered on disk.

``discover_rule("mylib.op.default")`` says that an operator which the table lacks may be run to find how it can be
sharded. Each call of it in a graph is then made small and tried (``hap.rules.propose``); what is proved are its rows,
and an operator for which nothing is proved runs whole on every rank, which the plan's explanation says.

Kernels may die of small shapes, so a forked child tries: SIGSEGV or SIGFPE becomes the verdict ``crashed``. (A spawned
one would not know the user's operators.) Only functions are tried: an operator that changes its arguments, returns a
view of them, draws random numbers or has outputs whose shape depends on values is refused in words.

**On disk** (``$XDG_CACHE_HOME/hap/rules``, else ``~/.cache/hap/rules``) lies one file per operator's schema, structure
of arguments, torch version and text of these rules. An operator of PyTorch's own is its version's; any other may have
changed under the same name, so its remembered rows are proved again before they are believed.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal, NoReturn

import torch

from hap.errors import MissingRuleError, RuleError
from hap.ops import why_untried
from hap.rules.notation import Call, Row, call_key
from hap.rules.propose import Proposal, propose, still_hold
from hap.rules.remember import Memory
from hap.rules.table import DEFAULT_TABLE, RuleTable

LIMIT_S = 60.0
Outcome = Literal["found", "whole", "crashed", "too slow"]


@dataclass(frozen=True)
class Discovery:
    """What was found for one kind of call: ``whole`` where no row was proved, ``detail`` says why in words."""

    op: str
    outcome: Outcome
    rows: tuple[Row, ...]
    detail: str


@dataclass(frozen=True)
class DiscoveredRule:
    """The rule of an operator whose rows are found when a call of it is first met. Found rows are kept here."""

    op: str
    found: dict[Any, Discovery] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, call: Call) -> tuple[Row, ...]:
        return self.discovery(call).rows

    def discovery(self, call: Call) -> Discovery:
        key = call_key(call)
        if key not in self.found:
            self.found[key] = discover(call)
        return self.found[key]


def discover_rule(op: str, *, table: RuleTable = DEFAULT_TABLE) -> None:
    """Let HAP find how ``op``, ``namespace.name.overload``, can be sharded, by running it on small tensors.

        discover_rule("mylib.scale_rows.default")

    It runs on the CPU, in a child process, when a model that calls it is planned. Where nothing is proved it runs whole
    on every device. RuleError if it has a rule, or is none that can be tried: it changes or returns its arguments,
    draws random numbers, or has outputs of no fixed shape.
    """
    why = why_untried(op)
    if why is not None:
        raise RuleError(f"no rule of {op} can be discovered: {why}; add one with hap.register_rule")
    table.add(op, DiscoveredRule(op))


def discover(call: Call, *, limit_s: float = LIMIT_S, memory: Memory | None = None) -> Discovery:
    """What can be proved of one kind of call: remembered, or found in a child process within ``limit_s`` seconds.

    MissingRuleError if the operator cannot be tried (``hap.ops.why_untried``).
    """
    op = call.node.op
    why = why_untried(op)
    if why is not None:
        raise MissingRuleError(f"operator {op} has no sharding rule, and none can be discovered: {why}")
    memory = memory or Memory.on_disk()
    known = memory.recall(call)
    if known is not None and _believed(call, known.rows, limit_s):
        return Discovery(op, "found" if known.rows else "whole", known.rows, known.detail)
    found = in_child(lambda: propose(call), limit_s)
    if isinstance(found, Proposal):
        memory.keep(call, found)
        return Discovery(op, "found" if found.rows else "whole", found.rows, found.detail)
    if found is None:
        return Discovery(op, "too slow", (), f"trying it took more than {limit_s:g} seconds")
    return Discovery(op, "crashed", (), f"trying it ended the process ({found})")


def _believed(call: Call, rows: tuple[Row, ...], limit_s: float) -> bool:
    """Whether remembered rows need no proof, or pass it again. That there are none is not believed of a user's."""
    if call.node.op.startswith(("aten.", "prims.")):
        return True
    return bool(rows) and in_child(lambda: still_hold(call, rows), limit_s) is True


def in_child(work: Callable[[], Any], limit_s: float) -> Any:
    """What ``work`` returns in a forked child; None if it takes longer, or in a word what ended it.

    Forked by hand, as ``multiprocessing`` gives the children of daemons (of data loaders, of launchers) no children.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        _run_and_end(sender, work)
    sender.close()
    code: int | None = None
    try:
        if not receiver.poll(limit_s):
            return None
        return receiver.recv()
    except (EOFError, OSError):
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    finally:
        receiver.close()
        if code is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _run_and_end(sender: Connection, work: Callable[[], Any]) -> NoReturn:
    """In the child: nothing of the parent's is cleaned up, and nobody sees a dying kernel's last words."""
    try:
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        torch.set_num_threads(1)
        sender.send(work())
    except Exception as e:  # told, as a crash is
        sender.send(f"{type(e).__name__}: {e}")
    finally:
        os._exit(0)
