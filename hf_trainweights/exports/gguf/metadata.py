"""What a GGUF file says of a model beside its tensors: sizes, experts, attention, name and licence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import yaml
from huggingface_hub import ModelCard
from transformers import PretrainedConfig, PreTrainedModel

from hf_trainweights.exports.gguf.architectures import Architecture
from hf_trainweights.exports.gguf.rope import describe_rope, head_size

# What Transformers calls the same setting in different architectures.
_EPSILON_NAMES = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
_FEED_FORWARD_NAMES = ("ffn_hidden_size", "hidden_dim", "intermediate_size")
# DistilBERT has no setting for it.
_DEFAULT_EPSILON = 1e-12


def describe_model(writer: gguf.GGUFWriter, model: PreTrainedModel, architecture: Architecture) -> None:
    """Write the sizes and settings of a model."""
    config = model.config
    writer.add_vocab_size(vocabulary_size(model))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(_context_length(architecture, config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(_feed_forward_length(config))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(key_value_heads(config))
    writer.add_key_length(head_size(config))
    writer.add_value_length(head_size(config))
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(_first(config, _EPSILON_NAMES) or _DEFAULT_EPSILON)
    _describe_experts(writer, config)
    describe_rope(writer, architecture, config)
    _describe_attention(writer, architecture, config)


def _describe_experts(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    experts = _first(config, ("num_local_experts", "num_experts"))
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    if shared := getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(shared)


def _describe_attention(writer: gguf.GGUFWriter, architecture: Architecture, config: PretrainedConfig) -> None:
    """Write which tokens attend to which, and how far scores and logits may go."""
    sliding = [kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or []]
    if architecture.slides and any(sliding):
        writer.add_sliding_window(config.sliding_window)
        writer.add_array(f"{architecture.name}.attention.sliding_window_pattern", sliding)
    if getattr(config, "attn_logit_softcapping", None) is not None:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None) is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture.encoder:
        writer.add_causal_attention(False)
        writer.add_token_type_count(getattr(config, "type_vocab_size", 1))


def describe_source(writer: gguf.GGUFWriter, model: PreTrainedModel, directory: Path | None) -> None:
    """Write the name of a model and the licence that its card names."""
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
    """Return how many tokens a model has embeddings for."""
    embeddings: Any = model.get_input_embeddings()
    return embeddings.weight.shape[0]


def key_value_heads(config: PretrainedConfig) -> int:
    """Return how many heads of keys and values a layer has."""
    if getattr(config, "multi_query", False) and not config.new_decoder_architecture:
        return 1
    return _first(config, ("num_key_value_heads", "num_kv_heads")) or config.num_attention_heads


def skipped_positions(architecture: Architecture, config: PretrainedConfig) -> int:
    """Return how many of its first positions a model never uses. They are not in a file."""
    return config.pad_token_id + 1 if architecture.skips_positions else 0


def _first(config: PretrainedConfig, names: Iterable[str]) -> Any:
    """Return the first of these settings that a model has, None if it has none of them."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _feed_forward_length(config: PretrainedConfig) -> int:
    if hasattr(config, "n_inner"):  # GPT-2's, which may be None
        return config.n_inner or 4 * config.hidden_size
    return _first(config, _FEED_FORWARD_NAMES)


def _context_length(architecture: Architecture, config: PretrainedConfig) -> int:
    length = config.max_position_embeddings - skipped_positions(architecture, config)
    # Where llama.cpp has no window, all tokens attend to each other, which is the same as long as they fit into one.
    window = None if architecture.slides else getattr(config, "sliding_window", None)
    return min(length, window or length)
