"""A token after long contexts, by each cache of keys and values; and the error of attention that each kind costs.

`python -m benchmarks.kv_cache` takes about 20 minutes on a machine that does nothing else, and writes
`benchmarks/results/kv_cache.json` after each row; then `python -m benchmarks.tables` writes the tables of
docs/kv_cache.md and docs/measured/thresholds.md. `--only errors`, `speed`, `rows` or `bound` measures one part again.
Caches are filled with random keys and values, so no prompt has to be processed; the weights are random and int4. Peers
that are not installed are left out. `ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2`
before `--only rows` shows the rows of a CPU without AVX512.
"""

from __future__ import annotations

import argparse
import datetime
import inspect
import itertools
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
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM, QuantizedCache, StaticCache

from benchmarks.machine import commit, cpu_flags, cpu_name, versions
from benchmarks.minilm import MODEL, minilm
from benchmarks.speed.models import quantized_llama
from hf_trainweights import KVCache, export_gguf
from hf_trainweights.cache.stores import IntegerStore
from hf_trainweights.kernels.attention import attend

RESULTS = Path(__file__).parent / "results" / "kv_cache.json"
LIMIT = os.environ.get("ONEDNN_MAX_CPU_ISA")
MODELS: dict[str, dict[str, int]] = {
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.2B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
TOKENS = (256, 2048, 8192, 32768)
# The longest context of the large model takes more memory than it tells.
MOST_TOKENS = {"0.5B": 32768, "1.2B": 8192}
# Contexts that `--contexts` measures again; all if there are none.
CONTEXTS: list[tuple[str, int]] = []
BASELINE = "DynamicCache"
CHUNK = 4096
ROUNDS = 5


def quantized(backend: str, bits: int, config: LlamaConfig, tokens: int) -> Any:
    return QuantizedCache(backend, config, nbits=bits, residual_length=128)


CACHES: dict[str, Callable[[LlamaConfig, int], Any]] = {
    BASELINE: lambda config, tokens: DynamicCache(config=config),
    "StaticCache": lambda config, tokens: StaticCache(config=config, max_cache_len=tokens + 64),
    "KVCache bf16": lambda config, tokens: KVCache(config, "bf16"),
    "KVCache int8": lambda config, tokens: KVCache(config, "int8"),
    "KVCache int8/int4": lambda config, tokens: KVCache(config, ("int8", "int4")),
    "KVCache int4": lambda config, tokens: KVCache(config, "int4"),
    "quanto, 4 bits": lambda config, tokens: quantized("quanto", 4, config, tokens),
    "hqq, 8 bits": lambda config, tokens: quantized("hqq", 8, config, tokens),
    "fp8": lambda config, tokens: QuantizedCache("fp8", config),
}
# llama.cpp's caches: the type of keys and values, and whether it attends block by block.
LLAMA_CPP = {"llama.cpp f16": ("F16", 0), "llama.cpp f16, flash": ("F16", 1), "llama.cpp q8_0, flash": ("Q8_0", 1)}
# Its cache is filled by processing tokens, which takes the square of their number.
# llama.cpp reads a prompt to fill its caches, for half an hour at the longest contexts.
MOST_TOKENS_OF_LLAMA_CPP = {"0.5B": 8192, "1.2B": 2048}


def fill(cache: Any, config: LlamaConfig, tokens: int) -> None:
    """Store random keys and values of so many tokens in every layer."""
    generator = torch.Generator().manual_seed(1)
    for start in range(0, tokens, CHUNK):
        shape = (1, config.num_key_value_heads, min(CHUNK, tokens - start), config.head_dim)
        states = torch.randn(shape, generator=generator).bfloat16()
        for layer in range(config.num_hidden_layers):
            cache.update(states, states, layer)


def bytes_of(cache: Any) -> int | None:
    """Return the bytes of a cache, None where it does not say."""
    if isinstance(cache, KVCache):
        return cache.stored_bytes
    if isinstance(cache, QuantizedCache):
        return None
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@torch.inference_mode()
def speed(failures: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield a row for each model, context and cache: milliseconds a token, and the ratio within a round."""
    torch.set_num_threads(1)
    for name in MODELS:
        contexts = [tokens for tokens in TOKENS if tokens <= MOST_TOKENS[name]]
        if CONTEXTS:
            contexts = [tokens for tokens in contexts if (name, tokens) in CONTEXTS]
        if not contexts:
            continue
        model = quantized_llama(MODELS[name], "int4")
        for tokens in contexts:
            filled = {}
            for cache_name, make in CACHES.items():
                try:
                    filled[cache_name] = make(model.config, tokens)
                    fill(filled[cache_name], model.config, tokens)
                    step(model, filled[cache_name])
                except (ImportError, ValueError, RuntimeError) as error:
                    filled.pop(cache_name, None)
                    failures[f"{name}, {tokens} tokens, {cache_name}"] = f"{type(error).__name__}: {error}"[:200]
            is_short = tokens <= MOST_TOKENS_OF_LLAMA_CPP[name]
            programs = llama_cpp_programs(model, tokens, failures) if is_short else {}
            steps = {key: partial(step, model, cache) for key, cache in filled.items()}
            steps |= {
                key: partial(llama_cpp_step, program, itertools.count(tokens)) for key, program in programs.items()
            }
            for key in programs:
                steps[key]()
            rounds = [{key: take() for key, take in steps.items()} for _ in range(ROUNDS)]
            for program in programs.values():
                program.close()
            for key in steps:
                cache = filled.get(key)
                ratios = [each[BASELINE] / each[key] for each in rounds]
                yield {
                    "model": name,
                    "tokens": tokens,
                    "cache": key,
                    "milliseconds": 1e3 * statistics.median(each[key] for each in rounds),
                    "speedup": statistics.median(ratios),
                    "lowest": min(ratios),
                    "highest": max(ratios),
                    "bytes": None if cache is None else bytes_of(cache),
                }


def step(model: nn.Module, cache: Any) -> float:
    """Return the CPU seconds of one token."""
    return _seconds(partial(model, torch.ones(1, 1, dtype=torch.long), past_key_values=cache))


def llama_cpp_programs(model: LlamaForCausalLM, tokens: int, failures: dict[str, str]) -> dict[str, Any]:
    """Return llama.cpp with each of its caches, filled with so many tokens."""
    try:
        from benchmarks.llama_cpp_runs import LlamaCpp
        from tests.tiny_tokenizers import byte_level
    except ImportError as error:
        failures["llama.cpp"] = str(error)
        return {}
    programs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        export_gguf(model, Path(directory) / "model.gguf", byte_level())
        for name, (kind, flash) in LLAMA_CPP.items():
            code = {"F16": 1, "Q8_0": 8}[kind]
            options = {"type_k": code, "type_v": code, "flash_attn_type": flash}
            program = LlamaCpp(Path(directory) / "model.gguf", 1, tokens=tokens + 256, **options)
            for start in range(0, tokens, 256):
                program.decode([(start + index, 0) for index in range(256)], last_only=True)
            programs[name] = program
    return programs


def llama_cpp_step(program: Any, positions: Iterator[int]) -> float:
    return _seconds(partial(program.decode, [(next(positions), 0)], last_only=False))


SCHEMES: dict[str, tuple[int, int] | None] = {
    "bf16": None,
    "int8": (8, 8),
    "int8/int4": (8, 4),
    "int4": (4, 4),
    "int8, keys not equalized": (8, 8),
    "int4, keys not equalized": (4, 4),
}
FACTORS = (1, 10, 30)


@torch.inference_mode()
def errors(failures: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield for each scheme the relative error of attention in MiniLM, its key channels as they are or made larger."""
    layers = states_of_minilm()
    for scheme in SCHEMES:
        row: dict[str, Any] = {"scheme": scheme}
        for factor in FACTORS:
            found = [attention_error(*layer, scheme, factor) for layer in layers]
            row[f"x{factor}"] = statistics.mean(found)
        yield row


def states_of_minilm() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return queries, keys and values `[batch, heads, tokens, columns]` of each layer, for docstrings of Python."""
    texts = [text for text in map(inspect.getdoc, vars(inspect).values()) if text and len(text) > 200][:24]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    inputs = tokenizer(texts, truncation=True, max_length=128, return_tensors="pt", padding=True)
    model, outputs = minilm(), {}
    for name, module in model.named_modules():
        if name.endswith(("self.query", "self.key", "self.value")):
            module.register_forward_hook(lambda _, __, out, name=name: outputs.__setitem__(name, out))
    model(**inputs)
    full = inputs["attention_mask"].sum(1) == inputs["attention_mask"].shape[1]
    heads = model.config.num_attention_heads
    split = {name: out[full].unflatten(-1, (heads, -1)).transpose(1, 2) for name, out in outputs.items()}
    prefixes = sorted({name.rpartition(".")[0] for name in split})
    return [tuple(split[f"{prefix}.{part}"] for part in ("query", "key", "value")) for prefix in prefixes]


def attention_error(query: Tensor, key: Tensor, value: Tensor, scheme: str, factor: int) -> float:
    """Return the relative error of attention, with every 16th key channel `factor` times as large."""
    larger = torch.ones(key.shape[-1])
    larger[::16] = factor
    query, key = query / larger, key * larger
    exact = F.scaled_dot_product_attention(query, key, value)
    bits = SCHEMES[scheme]
    if bits is None:
        stored = key.bfloat16().float(), value.bfloat16().float()
    else:
        counted = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool)
        is_equalized = "not" not in scheme
        stored = (
            IntegerStore.of(key, bits[0], is_equalized, counted).load(0, torch.float32),
            IntegerStore.of(value, bits[1], False, counted).load(0, torch.float32),
        )
    error = F.scaled_dot_product_attention(query, *stored) - exact
    return (error.norm() / exact.norm()).item()


# Heads of keys, query heads for each, columns, tokens, bits of the codes.
SHAPES = ((2, 7, 64, 8192, 8), (8, 4, 64, 8192, 8), (8, 1, 128, 4096, 8), (8, 4, 128, 4096, 4))
ROWS = (8, 16, 32, 64, 128, 256)


@torch.inference_mode()
def rows(failures: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield for each shape and number of tokens at once how many times as fast codes are as dequantizing and SDPA."""
    torch.set_num_threads(1)
    for heads, shared, columns, tokens, bits in SHAPES:
        states = torch.randn(2, 1, heads, tokens, columns).bfloat16()
        counted = torch.ones(1, tokens, dtype=torch.bool)
        keys, values = (IntegerStore.of(x, bits, side == 0, counted) for side, x in enumerate(states))
        for count in ROWS:
            query = torch.randn(1, heads * shared, count, columns).bfloat16()
            mask = torch.ones(1, 1, count, tokens, dtype=torch.bool).tril(tokens - count)
            ways = (partial(by_codes, query, keys, values, mask), partial(by_floats, query, keys, values, mask))
            rounds = [[_seconds(way) for way in ways] for _ in range(ROUNDS)]
            ratio = statistics.median(floats / codes for codes, floats in rounds)
            sizes = {"heads": heads, "shared": shared, "columns": columns, "tokens": tokens, "bits": bits}
            yield {**sizes, "rows": count, "rows_of_head": shared * count, "speedup": ratio}


# The shapes of `bound`, and bits of keys and of values. So many bytes of other layers are read before a layer is again.
BOUND_SHAPES = ((2, 7, 64, 8192), (8, 4, 64, 8192))
BOUND_BITS = ((8, 8), (8, 4), (4, 4))
ROTATED_BYTES = 120_000_000
BOUND_ROUNDS = 25


@torch.inference_mode()
def bound(failures: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield for each shape the microseconds of attention of one token, and of reading the same bytes and no more.

    Each is the mean over layers, of which there are more than a third-level cache holds; of a layer it is the least of
    all rounds. `cached` is the attention to a layer that the caches hold: what the arithmetic takes.
    """
    torch.set_num_threads(1)
    for (heads, shared, columns, tokens), bits in itertools.product(BOUND_SHAPES, BOUND_BITS):
        layer_bytes = heads * tokens * columns * sum(bits) // 8
        counted = torch.ones(1, tokens, dtype=torch.bool)
        query = torch.randn(1, heads * shared, 1, columns).bfloat16()
        calls: list[dict[str, Callable[[], object]]] = []
        for _ in range(1 + ROTATED_BYTES // layer_bytes):
            states = torch.randn(2, 1, heads, tokens, columns).bfloat16()
            keys, values = (IntegerStore.of(x, bits[side], side == 0, counted) for side, x in enumerate(states))
            stored = [tensor for store in (keys, values) for tensor in (store.stored.codes, store.stored.scale)]
            calls.append(
                {"attention": partial(by_codes, query, keys, values, None), "reading": partial(read_all, stored)}
            )
        least = {way: [float("inf")] * len(calls) for way in calls[0]}
        for _, way in itertools.product(range(BOUND_ROUNDS), least):
            for layer, takes in enumerate(calls):
                least[way][layer] = min(least[way][layer], _seconds(takes[way]))
        seconds = {way: statistics.mean(layers) for way, layers in least.items()}
        seconds["cached"] = min(_seconds(calls[0]["attention"]) for _ in range(4 * BOUND_ROUNDS))
        sizes = {"heads": heads, "shared": shared, "columns": columns, "tokens": tokens, "bits": bits}
        times = {f"{way}_microseconds": round(1e6 * took, 1) for way, took in seconds.items()}
        yield {**sizes, **times, "ratio": round(seconds["attention"] / seconds["reading"], 2)}


def read_all(tensors: list[Tensor]) -> None:
    """Read tensors by the fastest of PyTorch's sums and maxima, as fast as a loop of vectors in C."""
    for tensor in tensors:
        tensor.view(torch.int64).max()


def by_codes(query: Tensor, keys: IntegerStore, values: IntegerStore, mask: Tensor | None) -> Tensor | None:
    return attend(query, keys.stored, values.stored, slice(0, keys.length), query.shape[-1] ** -0.5, mask)


def by_floats(query: Tensor, keys: IntegerStore, values: IntegerStore, mask: Tensor) -> Tensor:
    dense = keys.load(0, query.dtype), values.load(0, query.dtype)
    return F.scaled_dot_product_attention(query, *dense, mask, enable_gqa=True)


def _seconds(call: Callable[[], Any]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


PARTS: dict[str, Callable[[dict[str, str]], Iterator[dict[str, Any]]]] = {
    "errors": errors,
    "speed": speed,
    "rows": rows,
    "bound": bound,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--contexts", nargs="+", default=[], metavar="MODEL:TOKENS", help="of speed, keep all others")
    options = parser.parse_args()
    CONTEXTS.extend((name, int(tokens)) for name, tokens in (context.split(":") for context in options.contexts))
    report = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for part in options.only:
        machine = {"cpu": cpu_name(), "flags": cpu_flags(), "load": os.getloadavg()[0]}
        date = str(datetime.date.today())
        facts = {"machine": machine, "versions": versions("hqq", "llama_cpp_python"), "commit": commit(), "date": date}
        failures: dict[str, str] = {}
        measured: list[dict[str, Any]] = []
        if part == "speed" and CONTEXTS:
            others = [row for row in report[part]["rows"] if (row["model"], row["tokens"]) not in CONTEXTS]
            measured, failures = others, report[part]["failures"]
        for row in PARTS[part](failures):
            measured.append(row)
            print(row, flush=True)
            report[f"{part}, {LIMIT}" if LIMIT else part] = {**facts, "rows": measured, "failures": failures}
            RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
