"""Processes that are forked from a server, which has imported once what takes seconds to import."""

from __future__ import annotations

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "hf_trainweights.distributed",
        "hf_trainweights.checkpoint.loop.manager",
        "torch.distributed.fsdp",
        "transformers.trainer",
        "transformers.models.llama.modeling_llama",
        "pytest",
    ]
)
