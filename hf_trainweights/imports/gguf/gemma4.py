"""The settings of Gemma 4, whose layers differ in heads, widths and keys, from the metadata and tensors of a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.imports.gguf.file import GgufFile
from hf_trainweights.imports.layouts.base import AGAIN

_NAME = "gemma4"
# Settings that are one number, by their keys in the metadata.
_NUMBERS = {
    "attention.key_length_swa": "head_dim",
    "attention.key_length": "global_head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
}


def gemma4_settings(file: GgufFile, layers: int) -> dict[str, Any]:
    """Return the settings of a model with `layers` layers; CorruptFileError: one is missing or of another type."""
    slides = [bool(layer) for layer in _by_layer(file, "attention.sliding_window_pattern", layers)]
    heads = _by_layer(file, "attention.head_count_kv", layers)
    widths = _by_layer(file, "feed_forward_length", layers)
    full = next((layer for layer in range(layers) if not slides[layer]), 0)
    has_experts = "blk.0.ffn_gate_inp.weight" in file.tensors
    settings = {setting: _number(file, key) for key, setting in _NUMBERS.items()}
    return settings | {
        "layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides],
        "num_key_value_heads": next((heads[layer] for layer in range(layers) if slides[layer]), heads[0]),
        "num_global_key_value_heads": heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "vocab_size_per_layer_input": _rows(file, "per_layer_token_embd.weight") or _rows(file, "token_embd.weight"),
        "enable_moe_block": has_experts,
        "num_experts": _rows(file, "blk.0.ffn_gate_inp.weight"),
        "top_k_experts": _number(file, "expert_used_count") if has_experts else None,
        "moe_intermediate_size": _number(file, "expert_feed_forward_length") if has_experts else None,
        "rope_parameters": {"full_attention": _rope_of_full_layers(file), "sliding_attention": _rope_of_others(file)},
    }


def _rope_of_full_layers(file: GgufFile) -> dict[str, Any]:
    """Return the rotary embedding that turns the first part of each head; the divisors of the rest are huge."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None or tensor.kind.name != "F32":
        raise CorruptFileError(f"{file.path}: rope_freqs.weight", "float32 divisors", "none", AGAIN)
    divisors: Tensor = tensor.data.flatten().view(torch.float32)
    turned = int((divisors == 1).sum())
    if not bool((divisors[turned:] >= 1e30).all()):
        raise CorruptFileError(f"{file.path}: rope_freqs.weight", "1, then 1e30 or more", "other divisors", AGAIN)
    theta = _number(file, "rope.freq_base")
    return {"rope_type": "proportional", "partial_rotary_factor": turned / len(divisors), "rope_theta": theta}


def _rope_of_others(file: GgufFile) -> dict[str, Any]:
    theta = file.metadata.get(f"{_NAME}.rope.freq_base_swa", 10000.0)
    return {"rope_type": "default", "rope_theta": theta}


def _number(file: GgufFile, key: str) -> Any:
    value = file.metadata.get(f"{_NAME}.{key}")
    if type(value) not in (int, float):
        raise CorruptFileError(f"{file.path}: {_NAME}.{key}", "a number", repr(value)[:100], AGAIN)
    return value


def _by_layer(file: GgufFile, key: str, layers: int) -> Sequence[int]:
    """Return a number for each layer; a file may have one number for all."""
    value: Any = file.metadata.get(f"{_NAME}.{key}")
    numbers = value.tolist() if hasattr(value, "tolist") else [value] * layers
    if len(numbers) != layers or not layers or not all(isinstance(number, int) for number in numbers):
        expected = f"an integer for each of {layers} layers"
        raise CorruptFileError(f"{file.path}: {_NAME}.{key}", expected, repr(value)[:100], AGAIN)
    return numbers


def _rows(file: GgufFile, name: str) -> int | None:
    return file.tensors[name].shape[0] if name in file.tensors else None
