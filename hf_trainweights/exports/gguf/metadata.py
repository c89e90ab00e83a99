"""Write the metadata of a GGUF file: a model's sizes, experts, attention, rotary embedding, pooling and name."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import torch
import yaml
from huggingface_hub import ModelCard
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from hf_trainweights.errors import ConfigError
from hf_trainweights.exports.gguf.architectures import Architecture, unsupported

# Transformers' names of one setting in different architectures.
_EPSILON_NAMES = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
_FEED_FORWARD_NAMES = ("ffn_hidden_size", "hidden_dim", "intermediate_size")
# DistilBERT has no setting for epsilon, and always uses this one.
_DEFAULT_EPSILON = 1e-12

_YARN = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}
_LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
_LONGROPE = {"factor", "attention_factor", "long_factor", "short_factor", "original_max_position_embeddings"}
# The kinds of rotary embedding in llama.cpp, and the settings that each may have.
_SETTINGS = {"default": set(), "linear": {"factor"}, "yarn": _YARN, "llama3": _LLAMA3, "longrope": _LONGROPE}

_MODULES = "modules.json"
# By the values of `pooling_mode` in sentence-transformers 6, and by the ends of the older keys `pooling_mode_...`.
_TYPES = {
    "mean": gguf.PoolingType.MEAN,
    "mean_tokens": gguf.PoolingType.MEAN,
    "cls": gguf.PoolingType.CLS,
    "cls_token": gguf.PoolingType.CLS,
    "lasttoken": gguf.PoolingType.LAST,
}
# Modules of a sentence encoder that a file need not hold. llama.cpp normalizes embeddings by itself.
_WITHOUT_WEIGHTS = ("Transformer", "Pooling", "Normalize")


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
    """Write the sliding window, whether tokens attend to later tokens, and the caps of scores and logits."""
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
    """Write the name of a model, and the licence and author in its card."""
    writer.add_type(gguf.GGUFType.MODEL)
    name = directory.resolve().name if directory else Path(model.config.name_or_path or "").name
    writer.add_name(name or type(model).__name__)
    card = directory / "README.md" if directory else None
    if card is not None and card.is_file():
        # A card that cannot be read is ignored.
        with contextlib.suppress(ValueError, yaml.YAMLError):
            fields = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
            for key, add in (("license", writer.add_license), ("author", writer.add_author)):
                if isinstance(fields.get(key), str):
                    add(fields[key])


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of tokens that a model has embeddings for."""
    embeddings: Any = model.get_input_embeddings()
    return embeddings.weight.shape[0]


def key_value_heads(config: PretrainedConfig) -> int:
    """Return the number of heads of keys and values in a layer."""
    if getattr(config, "multi_query", False) and not config.new_decoder_architecture:
        return 1
    return _first(config, ("num_key_value_heads", "num_kv_heads")) or config.num_attention_heads


def skipped_positions(architecture: Architecture, config: PretrainedConfig) -> int:
    """Return the number of first positions that a model never uses, and that a file leaves out."""
    return config.pad_token_id + 1 if architecture.skips_positions else 0


def _first(config: PretrainedConfig, names: Iterable[str]) -> Any:
    """Return the value of the first of these settings that a model has, or None."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _feed_forward_length(config: PretrainedConfig) -> int:
    if hasattr(config, "n_inner"):  # GPT-2's setting, which may be None
        return config.n_inner or 4 * config.hidden_size
    return _first(config, _FEED_FORWARD_NAMES)


def _context_length(architecture: Architecture, config: PretrainedConfig) -> int:
    length = config.max_position_embeddings - skipped_positions(architecture, config)
    # If llama.cpp has no sliding window, all tokens attend to each other. Within the model's window that is the same.
    window = None if architecture.slides else getattr(config, "sliding_window", None)
    return min(length, window or length)


def describe_rope(writer: gguf.GGUFWriter, architecture: Architecture, config: PretrainedConfig) -> None:
    """Write the settings of a rotary embedding, if the model has one; `rope_tensors` has Llama 3's and LongRoPE's."""
    rope = _rope(config)
    if rope is None:
        return
    kind = _rope_kind(rope, architecture)
    writer.add_rope_dimension_count(_rotary_size(config))
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
            raise unsupported("rope_parameters", "default in layers that slide", sliding["rope_type"])
        writer.add_float32(f"{architecture.name}.rope.freq_base_swa", sliding["rope_theta"])


def rope_tensors(config: PretrainedConfig) -> dict[str, Tensor]:
    """Return the tensors of divisors of a rotary embedding's frequencies, if llama.cpp does not compute them itself.

    Each is float32 `[rotary dimensions / 2]`. There is one tensor for Llama 3's scaling, and two for LongRoPE.
    """
    rope = _rope(config) or {}
    kind = rope.get("rope_type")
    if kind == "longrope":
        factors = {f"rope_factors_{length}.weight": rope[f"{length}_factor"] for length in ("long", "short")}
        return {name: torch.tensor(values, dtype=torch.float32) for name, values in factors.items()}
    return {"rope_freqs.weight": llama3_factors(rope, _rotary_size(config))} if kind == "llama3" else {}


def head_size(config: PretrainedConfig) -> int:
    """Return the dimension of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def llama3_factors(rope: dict[str, Any], size: int) -> Tensor:
    """Return the divisors that Llama 3's scaling gives for the frequencies of `size` rotary dimensions."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    wavelengths = 2 * math.pi * rope["rope_theta"] ** exponents
    # 0 for long waves, whose frequency is divided by the full factor; 1 for short waves, whose frequency stays.
    share = ((rope["original_max_position_embeddings"] / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - share) / rope["factor"] + share)).to(torch.float32)


def _attention_factor(rope: dict[str, Any], config: PretrainedConfig) -> float:
    """Return LongRoPE's factor for sines and cosines."""
    if "attention_factor" in rope:
        return rope["attention_factor"]
    original = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or config.max_position_embeddings / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _rope(config: PretrainedConfig) -> dict[str, Any] | None:
    """Return the rotary settings of the layers with full attention, or None for a model without rotary embedding."""
    rope = getattr(config, "rope_parameters", None)
    if rope is None:
        return None
    return {key: value for key, value in rope.get("full_attention", rope).items() if value is not None}


def _rotary_size(config: PretrainedConfig) -> int:
    """Return the number of rotary dimensions: those of each head that the rotary embedding turns."""
    return int(head_size(config) * (_rope(config) or {}).get("partial_rotary_factor", 1.0))


def _rope_kind(rope: dict[str, Any], architecture: Architecture) -> str:
    """Return the kind of a rotary embedding, after a check that llama.cpp has it with all of its settings."""
    kind = rope.get("rope_type", "default")
    unknown = rope.keys() - {"rope_type", "rope_theta"} - _SETTINGS.get(kind, set())
    if architecture.partly_rotary or rope.get("partial_rotary_factor") == 1:
        unknown.discard("partial_rotary_factor")
    if kind not in architecture.ropes or unknown:
        description = f"{kind} with {', '.join(sorted(unknown))}" if unknown else kind
        raise unsupported("rope_parameters", f"one of {', '.join(architecture.ropes)}", description)
    return kind


def describe_pooling(writer: gguf.GGUFWriter, directory: Path | None) -> None:
    """Write the pooling of a sentence encoder, if its directory describes it."""
    if directory is None or not (directory / _MODULES).is_file():
        return
    for module in _read(directory / _MODULES, list):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in _WITHOUT_WEIGHTS:
            raise unsupported(str(directory / _MODULES), ", ".join(_WITHOUT_WEIGHTS), kind)
        config = directory / str(module.get("path", "")) / "config.json"
        if kind == "Pooling" and config.is_file():
            modes = _modes(_read(config, dict))
            if len(modes) != 1 or modes[0] not in _TYPES:
                expected = "one pooling, by mean, cls or lasttoken"
                raise unsupported(str(config), expected, ", ".join(modes) or "none")
            writer.add_pooling_type(_TYPES[modes[0]])


def _modes(settings: dict[str, Any]) -> list[str]:
    if isinstance(mode := settings.get("pooling_mode"), str):
        return [mode]
    prefix = "pooling_mode_"
    return [key.removeprefix(prefix) for key, value in settings.items() if key.startswith(prefix) and value is True]


def _read(path: Path, expected: type) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        next_step = "Save the sentence encoder again, or delete the file."
        raise ConfigError(str(path), "a JSON file", f"{type(error).__name__}: {error}", next_step) from error
    modules = content if isinstance(content, list) else [content]
    if not isinstance(content, expected) or not all(isinstance(module, dict) for module in modules):
        next_step = "Save the sentence encoder again, or delete the file."
        raise ConfigError(str(path), "what sentence-transformers writes there", type(content).__name__, next_step)
    return content
