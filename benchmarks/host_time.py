"""The time that a CPU takes beside the arithmetic: a compiled step of a model of tiny layers, and one tiny product.

Run `python -m benchmarks.host_time`; it needs no network and takes three minutes. Times are CPU time of one thread, the
least of many rounds in which all programs take turns. It writes `benchmarks/results/host_time.json`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import commit, cpu_flags, cpu_name, versions
from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_
from hf_trainweights.formats import get_format

RESULTS = Path(__file__).parent / "results" / "host_time.json"
LAYERS, WIDTH = 12, 32
PRODUCT = 64
CONFIGS = {"float": None, "int8": TrainWeightsConfig("int8"), "int4": TrainWeightsConfig("int4", group_size=32)}
# A part of the text of a guard by which Dynamo looks at a quantized weight itself.
GUARDS = ("QuantizedTensor", "__tensor_flatten__")


def least_us(functions: Mapping[str, Callable[[], Any]], rounds: int, calls: int) -> dict[str, float]:
    """Return the least CPU time of a call of each function, in us; the functions take turns."""
    least = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.thread_time()
            for _ in range(calls):
                function()
            least[name] = min(least[name], (time.thread_time() - start) / calls * 1e6)
    return least


def make_model(config: TrainWeightsConfig | None) -> LlamaForCausalLM:
    """Return a Llama in bfloat16 whose products take no time to speak of."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "vocab_size": 64}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **sizes, **heads)).bfloat16().eval()
    if config is not None:
        quantize_(model, config)
    return model


def count_calls(function: Callable[[], Any]) -> int:
    """Return how many functions of Python a call runs."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        del frame, argument
        count += event == "call"

    sys.setprofile(note)
    function()
    sys.setprofile(None)
    return count


def count_guards(model: torch.nn.Module) -> int:
    """Return how many guards of a model's programs look at a quantized weight."""
    function: Any = type(model).forward
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    functions = {function.__code__, type(model).forward.__code__}
    entries = [entry for code in functions for entry in _debug_get_cache_entry_list(code)]
    assert entries
    lines = [line for entry in entries for line in str(entry.guard_manager).splitlines()]
    return sum(any(text in line for text in GUARDS) for line in lines)


def measure_steps() -> dict[str, dict[str, float]]:
    """Return the time, the calls and the guards of a compiled step of each model."""
    token, steps, rows = torch.ones(1, 1, dtype=torch.long), {}, {}
    for name, config in CONFIGS.items():
        torch._dynamo.reset()
        model = make_model(config)
        compiled = torch.compile(model, fullgraph=True)

        def step(compiled: Any = compiled) -> Any:
            return compiled(token, use_cache=False)

        for _ in range(3):
            step()
        rows[name] = {"python_calls": count_calls(step), "guards_on_weights": count_guards(model)}
        steps[name] = step
    for name, us in least_us(steps, rounds=200, calls=5).items():
        rows[name]["us"] = us
    return rows


def measure_products() -> dict[str, dict[str, float]]:
    """Return the time of `F.linear` of one row by dtype, in eager mode."""
    rows = {}
    for dtype in (torch.bfloat16, torch.float32):
        x, weight = torch.randn(1, PRODUCT).to(dtype), torch.randn(PRODUCT, PRODUCT).to(dtype)
        weights = {"float": weight, "int8": QuantizedTensor.quantize(weight, get_format({"format": "int8"}))}
        functions = {name: partial(F.linear, x, weight) for name, weight in weights.items()}
        rows[str(dtype).removeprefix("torch.")] = least_us(functions, rounds=400, calls=50)
    return rows


@torch.no_grad()
def main() -> None:
    """Measure, print and store the results."""
    torch.set_num_threads(1)
    machine = {"commit": commit(), "cpu": cpu_name(), "cpu_flags": cpu_flags(), "versions": versions()}
    result = {**machine, "step": measure_steps(), "product": measure_products()}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
