"""Measures how fast a larger model of random weights decodes in each format, compared with the float model.

The demo's own model fits into the caches of a CPU, so smaller weights do not make it faster. A larger model decodes as
fast as the CPU reads its weights from memory, and smaller weights are read sooner.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_trainweights.kernels.cpu_features import capabilities
from hf_trainweights.models.choosing.config import TrainWeightsConfig
from hf_trainweights.models.quantize_in_place import quantize_
from hf_trainweights.tensor.modules import get_model_size_in_bytes
from hf_trainweights_cli.demo.training import Report

LINE = "speed"
_SECONDS_PER_FORMAT = 2.5
_LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Shape:
    """Size of the model; the default has 105M weights.

    `hidden_size` must be a multiple of 128. The vocabulary is small, because embeddings stay in float.
    """

    hidden_size: int = 1024
    num_layers: int = 8
    vocab_size: int = 2048


@dataclass(frozen=True)
class Speed:
    """The speed of decoding in one format.

    Args:
        format: The format's name, or the dtype of the float model.
        memory_bytes: Bytes of the model's weights in memory.
        token_seconds: Time for a token, the median of several rounds.
        float_token_seconds: Time for a token of the float model, which takes turns with this model in each round.
        times_smaller: Memory of the float model / memory.
        times_faster: float_token_seconds / token_seconds.
    """

    format: str
    memory_bytes: int
    token_seconds: float
    float_token_seconds: float
    times_smaller: float = 1.0
    times_faster: float = 1.0


def fast_dtype() -> torch.dtype:
    """Return the float dtype that people choose on this CPU: bfloat16 if it has instructions for it, else float32."""
    has = capabilities().get
    return torch.bfloat16 if has("avx512_bf16") or has("amx_bf16") else torch.float32


def measure_speed(formats: Sequence[str], shape: Shape, report: Report) -> tuple[Speed, ...]:
    """Measure each format in turns with the float model, so that other load of the machine slows both down."""
    report(LINE, "make a model", 0, 1 + len(formats))
    model = _random_model(shape)
    model_bytes = get_model_size_in_bytes(model)
    rows, float_seconds = [], list[float]()
    for done, name in enumerate(formats, start=1):
        report(LINE, name, done, 1 + len(formats))
        # One at a time: the more models a process holds, the slower each of them decodes.
        quantized = copy.deepcopy(model)
        quantize_(quantized, TrainWeightsConfig(name))
        float_times, times = zip(*_rounds(model, quantized), strict=True)
        float_seconds += float_times
        count, before, seconds = get_model_size_in_bytes(quantized), median(float_times), median(times)
        rows.append(Speed(name, count, seconds, before, model_bytes / count, before / seconds))
    report(LINE, "done", 1 + len(formats), 1 + len(formats))
    dtype = str(model.dtype).removeprefix("torch.")
    return (Speed(dtype, model_bytes, median(float_seconds), median(float_seconds)), *rows)


def _rounds(first: nn.Module, second: nn.Module) -> list[tuple[float, float]]:
    for model in (first, second):
        _token_seconds(model)  # sets up buffers and code paths
    rounds = []
    end = time.perf_counter() + _SECONDS_PER_FORMAT
    while len(rounds) < _LEAST_ROUNDS or time.perf_counter() < end:
        rounds.append((_token_seconds(first), _token_seconds(second)))
    return rounds


@torch.no_grad()
def _token_seconds(model: nn.Module) -> float:
    start = time.perf_counter()
    model(input_ids=torch.tensor([[1]]), use_cache=False)
    return time.perf_counter() - start


def _random_model(shape: Shape) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.hidden_size * 11 // 4,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.hidden_size // 64,
        num_key_value_heads=shape.hidden_size // 64,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    return model.to(fast_dtype()).eval()  # type: ignore[arg-type]
