"""Whole generation beside llama.cpp: the same codes in both, a prompt of 256 tokens, then 32 tokens.

`python -m benchmarks.beside_llama_cpp` takes about 25 minutes where `llama-cpp-python` is there. OpenVINO and
CTranslate2 take part if they are installed (`benchmarks.other_runtimes`). It writes
`benchmarks/results/beside_llama_cpp.json` after each model; then `python -m benchmarks.tables` writes the tables of
docs/measured/models.md. The weights are random. int8 and int4 in groups of 32, embeddings too, are written for
llama.cpp as Q8_0 and Q4_0 by `export_gguf`, so both programs multiply the same codes. They take turns within a round.
With one thread the figures are CPU time, which no neighbour stretches; with more they are the time on the wall.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import DynamicCache, LlamaForCausalLM

from benchmarks.llama_cpp_runs import LlamaCpp, instructions
from benchmarks.machine import commit, cpu_flags, cpu_name, versions
from benchmarks.other_runtimes import runtimes
from benchmarks.speed.models import quantized_llama
from hf_trainweights import KVCache, dequantize_, export_gguf
from tests.tiny_tokenizers import byte_level

RESULTS = Path(__file__).parent / "results" / "beside_llama_cpp.json"

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
MODELS: dict[str, dict[str, int]] = {
    "135M": dict(zip(_SIZES, (576, 1536, 30, 9, 3), strict=True)),
    "0.5B": dict(zip(_SIZES, (896, 4864, 24, 14, 2), strict=True)),
    "1.2B": dict(zip(_SIZES, (2048, 8192, 16, 32, 8), strict=True)),
    "3.2B": dict(zip(_SIZES, (3072, 8192, 28, 24, 8), strict=True)),
}
FORMATS = ("int4", "int8")
PROMPT_TOKENS = 256
NEW_TOKENS = 32
BATCH = 4
# A cache has integers from 64 tokens on, and attention over fewer takes no time to speak of.
BATCH_PROMPT = 64
ROUNDS = 5
_COUNTS = {"prompt": PROMPT_TOKENS, "new": NEW_TOKENS, "batch": BATCH, "batch_prompt": BATCH_PROMPT}
# OpenVINO holds a model several times in float32 while it converts it.
_MOST_CONVERTED = 700_000_000
Clock = Callable[[], float]
# llama.cpp keeps weights as they lie in the file, or packs them anew for the instructions of the processor.
BUFFERS = {"llama.cpp, plain": False, "llama.cpp, packed": True}


class Peer(LlamaCpp):
    """llama.cpp with a file of the same codes."""

    def run(self, clock: Clock) -> dict[str, float]:
        """Return the seconds of the prompt, of a token after it, and of a step of `BATCH` texts."""
        self.forget()
        start = clock()
        self.decode([(index, 0) for index in range(PROMPT_TOKENS)], last_only=True)
        prompt = clock() - start
        token = self._steps(PROMPT_TOKENS, 1, clock)
        self.forget()
        for text in range(BATCH):
            self.decode([(index, text) for index in range(BATCH_PROMPT)], last_only=True)
        return {"prompt": prompt, "token": token, "batch": self._steps(BATCH_PROMPT, BATCH, clock)}

    def _steps(self, first: int, batch: int, clock: Clock) -> float:
        start = clock()
        for index in range(NEW_TOKENS):
            self.decode([(first + index, text) for text in range(batch)], last_only=False)
        return (clock() - start) / NEW_TOKENS


class Ours:
    """A quantized model in Transformers, eager, with a cache of a kind that `generate` takes."""

    def __init__(self, model: LlamaForCausalLM, make_cache: Callable[[], Any]):
        self.model, self.make_cache = model, make_cache
        self.tokens = torch.randint(model.config.vocab_size, (1, PROMPT_TOKENS))
        self.forward: Callable[..., Any] = model

    @torch.inference_mode()
    def run(self, clock: Clock) -> dict[str, float]:
        """Return the seconds of the prompt, of a token after it, and of a step of `BATCH` texts."""
        cache = self.make_cache()
        start = clock()
        self.model(self.tokens, past_key_values=cache, logits_to_keep=1)
        prompt = clock() - start
        token = self._steps(cache, 1, clock)
        cache = self.make_cache()
        self.model(self.tokens[:, :BATCH_PROMPT].repeat(BATCH, 1), past_key_values=cache, logits_to_keep=1)
        return {"prompt": prompt, "token": token, "batch": self._steps(cache, BATCH, clock)}

    def _steps(self, cache: Any, batch: int, clock: Clock) -> float:
        tokens = torch.ones(batch, 1, dtype=torch.long)
        start = clock()
        for _ in range(NEW_TOKENS):
            tokens = self.forward(tokens, past_key_values=cache).logits[:, -1:].argmax(-1)
        return (clock() - start) / NEW_TOKENS


# Without the checks that no module of PyTorch was changed, which docs/kv_cache.md explains.
_OPTIONS: Any = {"guard_filter_fn": torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe}


class Compiled(Ours):
    """The same model under `torch.compile`; only tokens are compiled, not prompts."""

    def __init__(self, model: LlamaForCausalLM, make_cache: Callable[[], Any]):
        super().__init__(model, make_cache)
        torch._dynamo.reset()  # the programs of other models count towards the most for a function
        self.forward = torch.compile(model.forward, fullgraph=True, options=_OPTIONS)


def measure(name: str, form: str, threads: int, with_compiled: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each program and phase: seconds, and llama.cpp's best seconds over this program's."""
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    model = quantized_llama(MODELS[name], form)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "model.gguf"
        export_gguf(model, file, byte_level())
        peers = {label: Peer(file, threads, texts=BATCH, packs=packs) for label, packs in BUFFERS.items()}
        small = partial(KVCache, model.config, "int8")
        own = {
            "eager": Ours(model, partial(DynamicCache, config=model.config)),
            "eager, small cache": Ours(model, small),
        }
        programs: dict[str, Any] = {**own, **peers}
        if sum(p.numel() for p in model.parameters()) <= _MOST_CONVERTED:
            dense = quantized_llama(MODELS[name], form)
            dequantize_(dense)
            programs |= runtimes(dense.float(), form, threads, _COUNTS)
            del dense
        if with_compiled:
            programs["compiled, small cache"] = Compiled(model, small)
        for program in programs.values():
            program.run(clock)
        rounds = [{label: program.run(clock) for label, program in programs.items()} for _ in range(ROUNDS)]
        for peer in peers.values():
            peer.close()
    for label in programs:
        for phase in rounds[0][label]:
            best = [min(times[peer][phase] for peer in peers) for times in rounds]
            seconds = [times[label][phase] for times in rounds]
            ratios = [fastest / own_time for fastest, own_time in zip(best, seconds, strict=True)]
            yield {
                "model": name,
                "format": form,
                "threads": threads,
                "program": label,
                "phase": phase,
                "seconds": statistics.median(seconds),
                "ratio": statistics.median(ratios),
                "ratio_range": [min(ratios), max(ratios)],
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["135M", "0.5B", "1.2B"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    options = parser.parse_args()
    report: dict[str, Any] = {
        "machine": {"cpu": cpu_name(), "flags": cpu_flags(), "load": os.getloadavg()[0]},
        "versions": versions("llama_cpp_python", "openvino", "ctranslate2"),
        "llama_cpp": instructions(),
        "commit": commit(),
        "date": str(datetime.date.today()),
        "rows": [],
    }
    for name in options.models:
        for threads in options.threads:
            for form in FORMATS:
                for row in measure(name, form, threads, with_compiled=threads == 1):
                    print(json.dumps(row), flush=True)
                    report["rows"].append(row)
                RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
