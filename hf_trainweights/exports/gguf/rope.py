"""How llama.cpp is told of a rotary embedding: settings of the file, and factors of frequencies as tensors."""

from __future__ import annotations

import math
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import PretrainedConfig

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.exports.gguf.architectures import Architecture

_YARN = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}
_LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
_LONGROPE = {"factor", "attention_factor", "long_factor", "short_factor", "original_max_position_embeddings"}
# The kinds of rotary embedding that llama.cpp has, with the settings that it knows of each.
_SETTINGS = {"default": set(), "linear": {"factor"}, "yarn": _YARN, "llama3": _LLAMA3, "longrope": _LONGROPE}


def describe_rope(writer: gguf.GGUFWriter, architecture: Architecture, config: PretrainedConfig) -> None:
    """Write the settings of a rotary embedding, if the model has one."""
    rope = _rope(config)
    if rope is None:
        return
    kind = _kind(rope, architecture)
    writer.add_rope_dimension_count(_size(config))
    writer.add_rope_freq_base(rope["rope_theta"])
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "yarn":
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32.0))
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow", 1.0))
    if kind == "longrope":
        writer.add_rope_scaling_attn_factors(_attention_factor(rope, config))
    if "sliding_attention" in config.rope_parameters:
        sliding = config.rope_parameters["sliding_attention"]
        if sliding.get("rope_type", "default") != "default":
            raise _unsupported("default in layers that slide", sliding["rope_type"])
        writer.add_float32(f"{architecture.name}.rope.freq_base_swa", sliding["rope_theta"])


def rope_tensors(config: PretrainedConfig) -> dict[str, Tensor]:
    """Return what llama.cpp divides each frequency of a rotary embedding by, where it does not compute that itself.

    By name, float32 `[turned rows of a head / 2]`: one tensor for Llama 3's scaling, two for LongRoPE.
    """
    rope = _rope(config) or {}
    kind = rope.get("rope_type")
    if kind == "longrope":
        lengths = ("long", "short")
        factors = {f"rope_factors_{each}.weight": rope[f"{each}_factor"] for each in lengths}
        return {name: torch.tensor(values, dtype=torch.float32) for name, values in factors.items()}
    return {"rope_freqs.weight": _llama3_factors(rope, _size(config))} if kind == "llama3" else {}


def head_size(config: PretrainedConfig) -> int:
    """Return how many rows of a projection make a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _llama3_factors(rope: dict[str, Any], size: int) -> Tensor:
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    wavelengths = 2 * math.pi * rope["rope_theta"] ** exponents
    # 0 for long waves, which are slowed down by the whole factor, 1 for short ones, which stay.
    share = ((rope["original_max_position_embeddings"] / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - share) / rope["factor"] + share)).to(torch.float32)


def _attention_factor(rope: dict[str, Any], config: PretrainedConfig) -> float:
    """Return what LongRoPE multiplies sines and cosines by."""
    if "attention_factor" in rope:
        return rope["attention_factor"]
    original = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or config.max_position_embeddings / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _rope(config: PretrainedConfig) -> dict[str, Any] | None:
    """Return the settings of the layers that see all tokens, None for a model without rotary embedding."""
    rope = getattr(config, "rope_parameters", None)
    if rope is None:
        return None
    return {key: value for key, value in rope.get("full_attention", rope).items() if value is not None}


def _size(config: PretrainedConfig) -> int:
    """Return how many rows of each head are turned."""
    return int(head_size(config) * (_rope(config) or {}).get("partial_rotary_factor", 1.0))


def _kind(rope: dict[str, Any], architecture: Architecture) -> str:
    """Return the kind of a rotary embedding that llama.cpp has."""
    kind = rope.get("rope_type", "default")
    unknown = rope.keys() - {"rope_type", "rope_theta"} - _SETTINGS.get(kind, set())
    if architecture.partly_rotary or rope.get("partial_rotary_factor") == 1:
        unknown.discard("partial_rotary_factor")
    if kind not in architecture.ropes or unknown:
        found = f"{kind} with {', '.join(sorted(unknown))}" if unknown else kind
        raise _unsupported(f"one of {', '.join(architecture.ropes)}", found)
    return kind


def _unsupported(expected: str, found: str) -> UnsupportedError:
    return UnsupportedError("rope_parameters", expected, found, "For other readers there is export_compressed_tensors.")
