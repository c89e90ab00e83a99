"""The configuration of a model from the metadata and the tensors of its GGUF file, where no config.json tells it.

A size that shapes of tensors tell is taken from there. Whatever neither tells has the value that llama.cpp has built
in, see `exports.gguf.architectures`, or the default of the configuration's class.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from hf_trainweights.errors import CorruptFileError, UnsupportedError
from hf_trainweights.exports.gguf.architectures import Architecture, settings_built_in
from hf_trainweights.exports.gguf.metadata import llama3_factors
from hf_trainweights.imports.gguf.architectures import READABLE
from hf_trainweights.imports.gguf.file import GgufFile
from hf_trainweights.imports.gguf.gemma4 import gemma4_settings
from hf_trainweights.imports.layouts.base import AGAIN
from hf_trainweights.models.loading.saved_models import check_config

GIVE_BASE = "Give base_model, the directory or Hub id of the float model, whose config.json has it."

# Keys of the metadata behind the architecture's name, to the names of the setting in configurations.
_SETTINGS = {
    "block_count": ("num_hidden_layers",),
    "context_length": ("max_position_embeddings",),
    "feed_forward_length": ("intermediate_size", "ffn_hidden_size", "n_inner", "d_ff", "hidden_dim"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "decoder_block_count": ("num_decoder_layers",),
    "attention.relative_buckets_count": ("relative_attention_num_buckets",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_shared_count": ("n_shared_experts", "moe_num_shared_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob",),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "interleave_moe_layer_step": ("moe_layer_interval",),
    "attention.scale": ("attention_multiplier",),
    "attention.clamp_kqv": ("clip_qkv",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "use_parallel_residual": ("use_parallel_residual",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("conv_kernel",),
    "ssm.state_size": ("state_size",),
    "ssm.time_step_rank": ("time_step_rank",),
}
# Settings that differ from layer to layer, and are read apart.
_OF_LAYERS = {"gemma4": ("feed_forward_length", "attention.head_count_kv")}
_REQUIRED = ("block_count", "attention.head_count")
# Tensors, the dimension to look at, and the names of the setting that this size is.
_SIZES = (
    ("token_embd.weight", 0, ("vocab_size",)),
    ("token_embd.weight", 1, ("hidden_size",)),
    ("blk.0.ffn_down.weight", 1, ("intermediate_size", "ffn_hidden_size", "n_inner")),
    ("enc.blk.0.ffn_down.weight", 1, ("d_ff",)),
    ("token_types.weight", 0, ("type_vocab_size",)),
    ("blk.0.ffn_down_exps.weight", 2, ("moe_intermediate_size", "intermediate_size")),
    ("blk.0.ffn_down_shexp.weight", 1, ("shared_expert_intermediate_size",)),
)
# Settings that say whether the model has a tensor.
_HAS = {
    "attention_bias": ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"),
    "use_qkv_bias": ("blk.0.attn_q.bias",),
    "use_bias": ("blk.0.attn_q.bias",),
    "use_qk_norm": ("blk.0.attn_q_norm.weight",),
    "mlp_bias": ("blk.0.ffn_up.bias",),
    "use_conv_bias": ("blk.0.ssm_conv1d.bias",),
}
# The classes of the architecture bert by the kind of the tokenizer.
_BERTS = {"bert": "BertModel", "gpt2": "RobertaModel", "t5": "XLMRobertaModel"}
_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config_of(file: GgufFile) -> PretrainedConfig:
    """Return a configuration whose `architectures` names the class of a file's model.

    UnsupportedError: the architecture is none of `READABLE`, or a setting needs config.json.
    CorruptFileError: a size is missing or is none.
    """
    return _Settings(file).config()


def architecture_name(file: GgufFile) -> str:
    """Return the name of a file's architecture; CorruptFileError: there is none."""
    name = file.text("general.architecture")
    if name is None:
        raise CorruptFileError(str(file.path), "general.architecture in its metadata", "none", AGAIN)
    return name


class _Settings:
    """The settings of one file."""

    def __init__(self, file: GgufFile):
        self._file, self._name = file, architecture_name(file)
        self._class, self._architecture = self._find_class()
        config_class: Any = self._class.config_class
        self._config_class, self._default = config_class, config_class()
        self._own_names: dict[str, str] = self._default.attribute_map

    def config(self) -> PretrainedConfig:
        settings: dict[str, Any] = {"architectures": [self._class.__name__]}
        of_layers = _OF_LAYERS.get(self._name, ())
        for key, names in _SETTINGS.items():
            if key not in of_layers:
                self._set(settings, names, self._number(key))
        self._set(settings, ("num_hidden_layers",), self._layers())
        for tensor, dimension, names in _SIZES:
            shape = self._file.tensors[tensor].shape if tensor in self._file.tensors else ()
            self._set(settings, names, shape[dimension] if dimension < len(shape) else None)
        for setting, tensors in _HAS.items():
            self._set(settings, (setting,), any(tensor in self._file.tensors for tensor in tensors))
        for setting, token in _TOKENS.items():
            settings[setting] = self._file.metadata.get(f"tokenizer.ggml.{token}_token_id")
        self._add_peculiarities(settings)
        if self._class.__name__ == "Gemma4ForCausalLM":
            settings |= gemma4_settings(self._file, int(self._get(settings, "num_hidden_layers")))
        elif hasattr(self._default, "num_attention_heads"):
            self._add_heads(settings)
        where = f"{self._file.path}: {self._name}"
        check_config(settings, len(self._file.tensors), self._file.size_bytes, where)
        try:
            config = self._config_class(**settings)
        except Warning:
            raise
        except Exception as error:
            # Transformers checks few settings, so a wrong one may raise an error of any class.
            reason = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            raise CorruptFileError(where, "settings of a model", reason, GIVE_BASE) from error
        for setting, values in settings_built_in(self._architecture, config).items():
            if getattr(config, setting, values[0]) not in values:
                setattr(config, setting, values[0])
        return config

    def _find_class(self) -> tuple[type[PreTrainedModel], Architecture]:
        names = [name for name, entry in READABLE.items() if entry.name == self._name]
        if self._name == "llama":
            names = ["MixtralForCausalLM" if self._number("expert_count") else "LlamaForCausalLM"]
        elif self._name == "bert":
            kind = _BERTS.get(self._file.text("tokenizer.ggml.model") or "", "BertModel")
            names = [kind if "token_types.weight" in self._file.tensors else "DistilBertModel"]
        elif self._name.startswith("t5"):
            # In T5 the first layer alone has a bias for distances, in UMT5 each has one.
            is_umt5 = "enc.blk.1.attn_rel_b.weight" in self._file.tensors
            names = [name for name in names if name.startswith("UMT5") == is_umt5]
        elif self._name == "olmo2":
            names = ["Olmo3ForCausalLM" if self._number("attention.sliding_window") else "Olmo2ForCausalLM"]
        elif self._file.metadata.get("mamba.ssm.dt_b_c_rms") is True:
            names = []  # Falcon Mamba, whose norms add another number in llama.cpp than in Transformers
        if not names or not READABLE[names[0]].described:
            names_in_files = ", ".join(dict.fromkeys(entry.name for entry in READABLE.values() if entry.described))
            expected = f"an architecture of {names_in_files}"
            raise UnsupportedError(str(self._file.path), expected, repr(self._name), GIVE_BASE)
        return getattr(transformers, names[0]), READABLE[names[0]]

    def _layers(self) -> int:
        """Return the number of layers but those that predict further tokens, which come last.

        CorruptFileError: there are fewer tensors than layers, of which lists are made soon.
        """
        layers = int(self._number("block_count") or 0) - int(self._number("nextn_predict_layers") or 0)
        if not 0 < layers <= len(self._file.tensors):
            where, tensors = f"{self._file.path}: {self._name}.block_count", len(self._file.tensors)
            raise CorruptFileError(where, f"1 to {tensors} layers, as there are {tensors} tensors", f"{layers}", AGAIN)
        return layers

    def _set(self, settings: dict[str, Any], names: tuple[str, ...], value: Any) -> None:
        """Set the first of these settings that the configuration has, unless the file says nothing of it."""
        own = [self._own_names.get(name, name) for name in names if hasattr(self._default, name)]
        if own and value is not None:
            settings[own[0]] = value

    def _get(self, settings: dict[str, Any], name: str) -> Any:
        return settings.get(self._own_names.get(name, name))

    def _number(self, key: str) -> int | float | None:
        """Return a number of the metadata; CorruptFileError: it is none. UnsupportedError: layers have several."""
        value: Any = self._file.metadata.get(f"{self._name}.{key}")
        where = f"{self._file.path}: {self._name}.{key}"
        if hasattr(value, "tolist"):
            # Layers of another kind have 0.
            numbers = dict.fromkeys(number for number in value.tolist() if number)
            if len(numbers) > 1:
                raise UnsupportedError(where, "one number for all layers", f"{list(numbers)[:3]}", GIVE_BASE)
            value = next(iter(numbers), None)
        if value is None and key not in _REQUIRED:
            return None
        if not isinstance(value, int | float) or value < 0:
            raise CorruptFileError(where, "a number", repr(value), AGAIN)
        return value

    def _add_heads(self, settings: dict[str, Any]) -> None:
        """Add the size of a head and the rotary embedding."""
        head_size = self._head_size(settings)
        # Some classes compute it, and some that have no such setting take it nevertheless.
        if head_size * self._get(settings, "num_attention_heads") != self._get(settings, "hidden_size"):
            settings[self._own_names.get("head_dim", "head_dim")] = head_size
        elif not isinstance(getattr(self._config_class, "head_dim", None), property):
            self._set(settings, ("head_dim",), head_size)
        if hasattr(self._default, "rope_parameters"):
            settings["rope_parameters"] = self._rope(head_size)

    def _head_size(self, settings: dict[str, Any]) -> int:
        """Return the number of rows of a head; CorruptFileError: the heads do not divide the rows."""
        length = self._number("attention.key_length")
        if isinstance(length, int) and length:
            return length
        heads = self._get(settings, "num_attention_heads")
        queries = (tensor for name, tensor in self._file.tensors.items() if name.endswith(".attn_q.weight"))
        rows = next((tensor.shape[0] for tensor in queries), self._get(settings, "hidden_size"))
        if not heads or not rows or rows % heads:
            raise CorruptFileError(str(self._file.path), "heads of as many rows each", f"{heads} of {rows} rows", AGAIN)
        return rows // heads

    def _add_peculiarities(self, settings: dict[str, Any]) -> None:
        """Add settings that few architectures have."""
        tensors = self._file.tensors
        settings["tie_word_embeddings"] = "output.weight" not in tensors
        if self._architecture.skips_positions:
            if settings["pad_token_id"] is None:
                settings["pad_token_id"] = self._default.pad_token_id
            skipped = settings["pad_token_id"] + 1
            positions = tensors.get("position_embd.weight")
            settings["max_position_embeddings"] = skipped + (0 if positions is None else positions.shape[0])
        if self._architecture.slides:
            self._set(settings, ("sliding_window",), self._number("attention.sliding_window"))
            pattern: Any = self._file.metadata.get(f"{self._name}.attention.sliding_window_pattern")
            if hasattr(pattern, "tolist"):
                kinds = ("full_attention", "sliding_attention")
                settings["layer_types"] = [kinds[bool(slides)] for slides in pattern.tolist()]
            elif self._name == "exaone4" and "sliding_window" not in settings:
                layers = int(self._get(settings, "num_hidden_layers"))
                settings |= {"sliding_window": None, "layer_types": ["full_attention"] * layers}
        if f"{self._name}.use_parallel_residual" not in self._file.metadata:
            self._set(settings, ("use_parallel_residual",), "blk.0.ffn_norm.weight" not in tensors)
        if hasattr(self._default, "conv_L_cache"):
            heads: Any = self._file.metadata.get(f"{self._name}.attention.head_count_kv")
            settings["layer_types"] = ["full_attention" if number else "conv" for number in heads.tolist()]
            self._set(settings, ("block_auto_adjust_ff_dim",), False)
        if hasattr(self._default, "linear_num_key_heads"):
            self._add_linear_attention(settings)
        if hasattr(self._default, "relative_attention_num_buckets"):
            settings["feed_forward_proj"] = "gated-gelu" if "enc.blk.0.ffn_gate.weight" in tensors else "relu"
            settings["decoder_start_token_id"] = self._number("decoder_start_token_id") or 0
        if hasattr(self._default, "state_size"):
            settings["expand"] = (self._number("ssm.inner_size") or 0) // max(
                1, self._get(settings, "hidden_size") or 0
            )
        if hasattr(self._default, "new_decoder_architecture"):
            settings["new_decoder_architecture"] = "blk.0.attn_norm_2.weight" in tensors
            settings["multi_query"] = settings.get("num_kv_heads") == 1

    def _add_linear_attention(self, settings: dict[str, Any]) -> None:
        """Add the sizes of a linear attention, and the kind of each layer: every `interval`-th has a full attention."""
        layers, interval = (int(self._get(settings, "num_hidden_layers")), self._number("full_attention_interval") or 4)
        kinds = ("linear_attention", "full_attention")
        settings["layer_types"] = [kinds[(layer + 1) % int(interval) == 0] for layer in range(layers)]
        heads = int(self._number("ssm.time_step_rank") or 1)
        settings |= {
            "linear_num_value_heads": heads,
            "linear_num_key_heads": self._number("ssm.group_count"),
            "linear_key_head_dim": self._number("ssm.state_size"),
            "linear_value_head_dim": int(self._number("ssm.inner_size") or 0) // max(1, heads),
            "linear_conv_kernel_dim": self._number("ssm.conv_kernel"),
        }

    def _rope(self, head_size: int) -> dict[str, Any]:
        """Return the settings of the rotary embedding; UnsupportedError: the file has divisors that are not known."""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self._number("rope.freq_base") or 10000.0}
        turned = int(self._number("rope.dimension_count") or head_size)
        if self._architecture.partly_rotary:
            rope["partial_rotary_factor"] = turned / head_size
        kind = self._file.text(f"{self._name}.rope.scaling.type")
        factors = {name: self._file.tensors.get(f"rope_factors_{name}.weight") for name in ("short", "long")}
        by_kind = getattr(self._default, "rope_parameters", None) or {}
        of_class = by_kind.get("full_attention", by_kind)
        if kind == of_class.get("rope_type"):
            rope = {**of_class, **rope}
        if kind in ("linear", "yarn"):
            rope |= {"rope_type": kind, "factor": self._number("rope.scaling.factor")}
        if kind == "yarn":
            rope |= {"original_max_position_embeddings": self._number("rope.scaling.original_context_length")}
            for setting, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
                value = self._number(f"rope.scaling.{key}")
                rope |= {} if value is None else {setting: value}
        if all(factors.values()):
            rope |= {f"{name}_factor": _numbers(tensor) for name, tensor in factors.items()}
            rope |= {"rope_type": "longrope", "attention_factor": self._number("rope.scaling.attn_factor") or 1.0}
            rope |= {"original_max_position_embeddings": self._number("rope.scaling.original_context_length")}
        elif "rope_freqs.weight" in self._file.tensors:
            rope |= self._llama3(rope["rope_theta"], turned)
        if "sliding_attention" not in by_kind:
            return rope
        built_in = by_kind["sliding_attention"]["rope_theta"]
        # If the class has one number for all layers, so has the file.
        theta = self._number("rope.freq_base_swa") or (
            rope["rope_theta"] if built_in == of_class["rope_theta"] else built_in
        )
        return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": theta}}

    def _llama3(self, theta: float, turned: int) -> dict[str, Any]:
        """Return the settings whose divisors are those of the file: Llama 3's, with a factor of any size."""
        divisors = torch.tensor(_numbers(self._file.tensors["rope_freqs.weight"]), dtype=torch.float32)
        rope = {"rope_type": "llama3", "rope_theta": theta, "factor": float(divisors.max()), **_LLAMA3}
        wanted = llama3_factors(rope, turned)
        if wanted.shape == divisors.shape and torch.allclose(wanted, divisors, rtol=1e-5):
            return rope
        where, expected = f"{self._file.path}: rope_freqs.weight", "the divisors of Llama 3's rotary embedding"
        raise UnsupportedError(where, expected, f"others, up to {float(divisors.max()):.3g}", GIVE_BASE)


def _numbers(tensor: Any) -> list[float]:
    if tensor.kind.name != "F32":
        raise CorruptFileError("rope divisors", "float32", tensor.kind.name, AGAIN)
    return tensor.data.flatten().view(torch.float32).tolist()
