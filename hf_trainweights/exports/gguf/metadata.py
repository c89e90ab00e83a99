"""What a GGUF file says of a model beside its tensors: sizes, rotary embedding, experts, name and licence."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import gguf
import torch
import yaml
from huggingface_hub import ModelCard
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from hf_trainweights.errors import UnsupportedError

_YARN = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}
_LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
# The kinds of rotary embedding that llama.cpp has, with the settings that it knows of each.
_ROPE_SETTINGS = {"default": set(), "linear": {"factor"}, "yarn": _YARN, "llama3": _LLAMA3}


def describe_model(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    """Write the sizes and settings of a model.

    Args:
        writer: Where to.
        model: A model of one of `ARCHITECTURES`.

    Raises:
        UnsupportedError: llama.cpp does not have its rotary embedding.
    """
    config = model.config
    writer.add_vocab_size(vocabulary_size(model))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(_context_length(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head_size(config))
    writer.add_value_length(_head_size(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    experts = getattr(config, "num_local_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    writer.add_rope_dimension_count(_head_size(config))
    _describe_rope(writer, _rope(config))


def describe_source(writer: gguf.GGUFWriter, model: PreTrainedModel, directory: Path | None) -> None:
    """Write the name of a model and the licence that its card names.

    Args:
        writer: Where to.
        model: The model.
        directory: Where it was saved; None if that is not known.
    """
    writer.add_type(gguf.GGUFType.MODEL)
    name = directory.resolve().name if directory else Path(model.config.name_or_path or "").name
    writer.add_name(name or type(model).__name__)
    card = directory / "README.md" if directory else None
    if card is not None and card.is_file():
        # A card that cannot be read says nothing.
        with contextlib.suppress(ValueError, yaml.YAMLError):
            said = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
            for key, add in (("license", writer.add_license), ("author", writer.add_author)):
                if isinstance(said.get(key), str):
                    add(said[key])


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return how many tokens a model has embeddings for.

    Args:
        model: The model.
    """
    embeddings: Any = model.get_input_embeddings()
    return embeddings.weight.shape[0]


def rope_factors(config: PretrainedConfig) -> Tensor | None:
    """Return what llama.cpp divides each frequency of the rotary embedding by, None where it computes that itself.

    Args:
        config: Of a model of one of `ARCHITECTURES`.

    Returns:
        Float32 `[head size / 2]` for Llama 3's scaling.
    """
    rope = _rope(config)
    if rope.get("rope_type") != "llama3":
        return None
    size, low, high = _head_size(config), rope["low_freq_factor"], rope["high_freq_factor"]
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    wavelengths = 2 * math.pi * rope["rope_theta"] ** exponents
    # 0 for long waves, which are slowed down by the whole factor, 1 for short ones, which stay.
    share = ((rope["original_max_position_embeddings"] / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - share) / rope["factor"] + share)).to(torch.float32)


def _head_size(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _context_length(config: PretrainedConfig) -> int:
    # With these architectures llama.cpp attends to all tokens, which is the same as long as they fit into one window.
    window = getattr(config, "sliding_window", None)
    return min(config.max_position_embeddings, window or config.max_position_embeddings)


def _rope(config: PretrainedConfig) -> dict:
    return {key: value for key, value in config.rope_parameters.items() if value is not None}


def _describe_rope(writer: gguf.GGUFWriter, rope: dict) -> None:
    kind = rope.get("rope_type", "default")
    unknown = rope.keys() - {"rope_type", "rope_theta"} - _ROPE_SETTINGS.get(kind, set())
    if kind not in _ROPE_SETTINGS or unknown:
        found = f"{kind} with {', '.join(sorted(unknown))}" if unknown else kind
        next_step = "For other readers there is export_compressed_tensors."
        raise UnsupportedError("rope_parameters", f"one of {', '.join(_ROPE_SETTINGS)}", found, next_step)
    writer.add_rope_freq_base(rope["rope_theta"])
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32.0))
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow", 1.0))
