"""Processes that are forked from a server, which has imported once what takes seconds to import."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable

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


def exit_code_of_fork(target: Callable[..., object], *args: object) -> int | None:
    """Return with which exit code a function of a module ends in a process of its own; None if it hung."""
    process = CONTEXT.Process(target=_call, args=(target, *args))
    process.start()
    process.join(timeout=120)
    return process.exitcode


def _call(target: Callable[..., object], *args: object) -> None:
    gc.freeze()  # what the server has imported; to look through it would copy its memory
    target(*args)
