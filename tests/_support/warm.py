"""What the server of ``ranks`` does once, when it starts: a first capture and a first step, which in every process take
half a second longer than the next, and what is there already is no garbage. Every rank is a fork of it.

Not where torch was built for CUDA: there a first backward pass starts threads, and a fork of who has them makes none.
"""

from __future__ import annotations

import gc

import torch

from hap.capture import source_values
from hap.codegen.lowering import lower
from hap.codegen.passes.runner import run_passes, standard_passes
from hap.runtime.lockstep import run_lockstep
from tests._support import cases, gpt2

torch.set_num_threads(1)
if torch.version.cuda is None:
    with torch.random.fork_rng():
        model, ids = gpt2.build(), gpt2.batch()
        program = run_passes(lower(gpt2.graph(), cases.data_parallel((5, 2, 1))), standard_passes()).program
        run_lockstep(program, source_values(gpt2.graph(), model, (ids,), ids))
        gpt2.lm_loss(model(ids), ids).backward()
        torch.optim.AdamW(model.parameters()).step()
gc.collect()
gc.freeze()
