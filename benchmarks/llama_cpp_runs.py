"""llama.cpp as a program that benchmarks time: a model from a file, and tokens at positions of several texts."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp

# The most tokens that are processed at once.
_BATCH_TOKENS = 512


@llama_cpp.llama_log_callback
def _ignore(level: int, text: bytes, data: Any) -> None:
    """Take a line of llama.cpp's log."""


llama_cpp.llama_log_set(_ignore, ctypes.c_void_p())
llama_cpp.llama_backend_init()


def instructions() -> str:
    """Return the instructions that llama.cpp was built for."""
    return llama_cpp.llama_print_system_info().decode()


class LlamaCpp:
    """A model of llama.cpp.

    Args:
        file: Its GGUF file.
        threads: Threads.
        texts: How many texts it holds at a time.
        tokens: The room for tokens of each text.
        packs: Whether weights are packed anew for the instructions of the processor.
        settings: Further settings of its context, by llama.cpp's names.
    """

    def __init__(
        self, file: Path, threads: int, texts: int = 1, tokens: int = 512, packs: bool = True, **settings: int
    ):
        options = llama_cpp.llama_model_default_params()
        options.use_extra_bufts = packs
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), options)
        chosen = llama_cpp.llama_context_default_params()
        settings |= {"n_ctx": texts * tokens, "n_batch": _BATCH_TOKENS, "n_ubatch": _BATCH_TOKENS, "n_seq_max": texts}
        for name, value in (settings | {"n_threads": threads, "n_threads_batch": threads}).items():
            setattr(chosen, name, value)
        self._context = llama_cpp.llama_init_from_model(self._model, chosen)
        self._batch = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)

    def close(self) -> None:
        """Free the model and what was computed."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def forget(self) -> None:
        """Forget all texts."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def decode(self, places: Sequence[tuple[int, int]], last_only: bool) -> None:
        """Process one token at each position of a text, `(position, text)`; logits for the last one, or for all."""
        batch = self._batch
        batch.n_tokens = len(places)
        for index, (position, text) in enumerate(places):
            batch.token[index], batch.pos[index] = 5 + position % 200, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, text
            batch.logits[index] = not last_only or index == len(places) - 1
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        # Logits are computed only once they are asked for.
        llama_cpp.llama_get_logits(self._context)
