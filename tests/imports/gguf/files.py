"""GGUF files of tiny models, written by the package gguf: blocks of random bits, with scales of a usual size."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from architectures import DECODER, randomize
from exports.gguf_models import MODELS as EXPORTED
from exports.gguf_models import expected_tensors
from gguf import GGMLQuantizationType as Kind
from tiny_tokenizers import byte_level
from transformers import PretrainedConfig, PreTrainedModel

from hf_trainweights.models.host.models import tied_names

SIZE = 408
SMALL = {**DECODER, "vocab_size": SIZE, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 256}
SMALL |= {"intermediate_size": 512, "num_hidden_layers": 1, "rms_norm_eps": 1e-6}
TOKENS = {"vocab_size": SIZE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
T5 = {**TOKENS, "d_model": 256, "d_kv": 64, "d_ff": 512, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
T5 |= {"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0}
GEMMA4 = {**TOKENS, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
GEMMA4 |= {"num_key_value_heads": 2, "head_dim": 64, "global_head_dim": 128, "hidden_size_per_layer_input": 256}
GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": SIZE}
GEMMA4_EXPERTS = {**GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4_EXPERTS |= {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 256}
GEMMA4_SHARED = {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
MAMBA = {**TOKENS, "hidden_size": 256, "num_hidden_layers": 2, "time_step_rank": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "norm_topk_prob": True}

# Settings that Transformers' reader does not look for in a file are the defaults of its classes.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "llama", SMALL),
    "llama_tied": ("LlamaForCausalLM", "llama", {**SMALL, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", SMALL),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", {**SMALL, "head_dim": 128}),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", {**SMALL, "head_dim": 256, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen3moe", {**SMALL, **EXPERTS, "head_dim": 64}),
    "nemotron": ("NemotronForCausalLM", "nemotron", {**SMALL, "norm_eps": 1e-5}),
    "minimax_m2": (
        "MiniMaxM2ForCausalLM",
        "minimax-m2",
        {**SMALL, "head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        "lfm2",
        {**SMALL, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "t5": ("T5ForConditionalGeneration", "t5", T5),
    "t5_untied": ("T5ForConditionalGeneration", "t5", {**T5, "tie_word_embeddings": False}),
    "t5_encoder": ("T5EncoderModel", "t5encoder", T5),
    "umt5": ("UMT5ForConditionalGeneration", "t5", T5),
    "umt5_encoder": ("UMT5EncoderModel", "t5encoder", T5),
    "gemma4": ("Gemma4ForCausalLM", "gemma4", GEMMA4),
    "gemma4_shared": (
        "Gemma4ForCausalLM",
        "gemma4",
        {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "gemma4_experts": ("Gemma4ForCausalLM", "gemma4", GEMMA4_EXPERTS),
    "mamba": (
        "MambaForCausalLM",
        "mamba",
        {**TOKENS, "hidden_size": 256, "num_hidden_layers": 2, "time_step_rank": 32},
    ),
    "bloom": ("BloomForCausalLM", "bloom", {**TOKENS, "hidden_size": 256, "n_layer": 2, "n_head": 4}),
}
# Methods of the writer that the others do not call, by the beginning of the name or the name.
_PECULIAR: dict[str, dict[str, Any]] = {
    "nemotron": {"rope_dimension_count": 32, "layer_norm_eps": 1e-5, "layer_norm_rms_eps": 1e-5},
    "minimax_m2": {"rope_dimension_count": 32, "expert_count": 4, "expert_used_count": 2}
    | {"expert_feed_forward_length": 512, "expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID},
    "lfm2": {"head_count_kv": [0, 2], "shortconv_l_cache": 3},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096},
    "qwen3_moe": {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 768},
    "t5": {"layer_norm_eps": 1e-6, "layer_norm_rms_eps": 1e-6, "relative_attn_buckets_count": 32}
    | {"decoder_block_count": 2, "decoder_start_token_id": 0},
    "mamba": {"ssm_conv_kernel": 4, "ssm_inner_size": 512, "ssm_state_size": 16, "ssm_time_step_rank": 32},
    "bloom": {"layer_norm_eps": 1e-5},
    "gemma4": {"key_length": 128, "value_length": 128, "key_length_swa": 64, "value_length_swa": 64}
    | {"sliding_window": 512, "sliding_window_pattern": [True, False] * 2, "shared_kv_layers": 0}
    | {"embedding_length_per_layer_input": 256, "head_count_kv": 2, "rope_freq_base": 1e6, "rope_freq_base_swa": 1e4}
    | {"rope_dimension_count": 128, "rope_dimension_count_swa": 64, "layer_norm_rms_eps": 1e-6},
    "gemma4_shared": {"shared_kv_layers": 2, "feed_forward_length": [512, 512, 1024, 1024]},
    "gemma4_experts": {"head_count_kv": [2, 1] * 2, "expert_count": 4, "expert_used_count": 2}
    | {"expert_feed_forward_length": 256, "embedding_length_per_layer_input": 0},
}
# Where a block has float16 numbers, the first of which are scales.
_HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ2_0": (64,),
    "TQ1_0": (52,),
    "MXFP4": (),
    "NVFP4": (),
}


def halves_of(kind: str) -> tuple[int, ...]:
    """Return where a block has float16 numbers."""
    return _HALVES[kind]


# Which kind a tensor of the file gets, by its name; None for float32.
Kinds = Callable[[str], str | None]


def blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return the bytes of random blocks, `[*, bytes of a row]`."""
    rng = np.random.default_rng(seed)
    size, nbytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    data = rng.integers(0, 256, (*shape[:-1], shape[-1] // size, nbytes), dtype=np.uint8)
    for start in _HALVES[kind]:
        halves = (rng.standard_normal((*data.shape[:-1], 1)) * 2e-4).astype(np.float16)
        data[..., start : start + 2] = halves.view(np.uint8)
    if kind == "MXFP4":
        data[..., 0] = rng.integers(116, 124, data.shape[:-1])
    elif kind == "NVFP4":
        data[..., :4] = rng.integers(1, 40, (*data.shape[:-1], 4))
    elif kind == "TQ2_0":
        digits = rng.integers(0, 3, (*data.shape[:-1], 64, 4), dtype=np.uint8)
        data[..., :64] = (digits << np.array([0, 2, 4, 6], dtype=np.uint8)).sum(-1, dtype=np.uint8)
    return data.reshape(*shape[:-1], -1)


def all_of(kind: str) -> Kinds:
    """Return the function that gives each matrix but a router the same kind."""
    float_parts = ("norm", "ffn_gate_inp", ".bias", "shortconv.conv", "conv1d", "ssm_a", "ssm_d", "attn_rel_b")
    float_parts += ("rope_freqs", ".scale", "output_scale")
    return lambda name: None if any(part in name for part in float_parts) else kind


def mixture(name: str) -> str | None:
    """Return the kind of a tensor as in a Q4_K_M file, where tensors of one layer have different kinds."""
    if all_of("")(name) is None:
        return None
    table = {"attn_v": "Q5_K", "ffn_down": "Q6_K", "attn_output": "IQ4_XS", "attn_k": "Q3_K", "output": "Q6_K"}
    table |= {"token_embd": "Q8_0"}
    return next((kind for part, kind in table.items() if part in name), "Q4_K")


def build(name: str, **changes: Any) -> PreTrainedModel:
    """Return a random model in float32, the same weights at every call."""
    class_name, _, config = MODELS[name]
    model_class = getattr(transformers, class_name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**config | changes))
        randomize(model)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1)
    return model.eval()


def write_gguf(
    path: Path,
    name: str = "llama",
    kinds: Kinds = mixture,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    change: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, values: values,
    **writer_options: Any,
) -> PreTrainedModel:
    """Write a file and return the float model that gave it its names and its float tensors.

    A model whose rows the file does not reorder has the values of the file, as the package gguf dequantizes them.

    Args:
        path: The file.
        name: One of `MODELS`.
        kinds: The kind of each tensor.
        metadata: Further methods of the writer, with their argument.
        extra: Further float32 tensors.
        change: Changes a float tensor.
        writer_options: Options of the writer.
    """
    model = build(name)
    config = model.config
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, MODELS[name][1], **writer_options)
    for call, value in {**_settings(name, config), **(metadata or {})}.items():
        getattr(writer, f"add_{call}")(value)
    add_tokenizer(writer, config.vocab_size)
    for number, (tensor_name, values) in enumerate(_tensors(model, name).items()):
        kind = kinds(tensor_name)
        if kind is None:
            writer.add_tensor(tensor_name, change(tensor_name, values).contiguous().numpy())
            continue
        data = blocks(kind, tuple(values.shape), number)
        writer.add_tensor(tensor_name, data, raw_dtype=Kind[kind])
        if name not in EXPORTED:
            # These are views of the model's parameters.
            values.copy_(torch.from_numpy(gguf.quants.dequantize(data, Kind[kind])))
    for tensor_name, array in (extra or {}).items():
        writer.add_tensor(tensor_name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _settings(name: str, config: PretrainedConfig) -> dict[str, Any]:
    """Return the methods of the writer that describe a model, with their arguments."""
    calls = {
        "name": name if "umt5" in name else "tiny",  # Transformers' reader looks for umt5 there
        "block_count": config.num_hidden_layers,
        "context_length": getattr(config, "max_position_embeddings", 512),
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "d_ff", getattr(config, "intermediate_size", 1024)),
        "head_count": getattr(config, "num_attention_heads", 0),
        "layer_norm_rms_eps": getattr(config, "rms_norm_eps", 1e-5),
        "vocab_size": config.vocab_size,
    }
    if name.startswith("gemma4"):  # its configuration refuses questions for what layers have of their own
        return calls | _PECULIAR["gemma4"] | _PECULIAR.get(name, {})
    if hasattr(config, "num_key_value_heads"):
        calls |= {"head_count_kv": config.num_key_value_heads, "rope_freq_base": 10000.0}
    if name.startswith("llama"):
        calls["rope_dimension_count"] = config.hidden_size // config.num_attention_heads
    elif calls["head_count"]:
        calls["key_length"] = calls["value_length"] = getattr(config, "head_dim", None) or 64
    family = name.removeprefix("um").partition("_")[0]
    return {**calls, **_PECULIAR.get(family, {}), **_PECULIAR.get(name, {})}


def _tensors(model: PreTrainedModel, name: str) -> dict[str, torch.Tensor]:
    """Return tensors of the names and shapes of a file."""
    if name in EXPORTED:
        return expected_tensors(model)
    number = next(each for each, written in gguf.MODEL_ARCH_NAMES.items() if written == MODELS[name][1])
    names, tensors = gguf.get_tensor_name_map(number, 8), {}
    tied = not MODELS[name][2].get("tie_word_embeddings", True)
    left_out = tied_names(model).keys() - ({"lm_head.weight"} if tied else set())
    for key, values in model.state_dict().items():
        if key in left_out:
            continue
        stem = key.replace("e_score_correction_bias", "gate.e_score_correction.bias")
        stem = stem.replace("transformer.", "") if name == "bloom" else stem
        stem = stem.replace("layer_scalar", "layer_scalar.weight").replace("router.scale", "router.proj.scale")
        stem = stem.replace("router.per_expert_scale", "experts.down_proj.scale")
        parts = {stem: values[:, 0] if "conv.conv" in key or "conv1d.weight" in key else values}
        if key.endswith("A_log"):
            parts = {stem: -values.exp()}
            values.copy_(torch.from_numpy(np.log(values.exp().numpy())))  # as a reader gets it back
        if key.endswith("gate_up_proj") and "gemma4" in name:
            parts = {f"{key}.weight": values}
        elif key.endswith("gate_up_proj"):
            halves = zip(("gate_proj.weight", "up_proj.weight"), values.chunk(2, dim=1), strict=True)
            parts = {key.replace("gate_up_proj", part): half for part, half in halves}
        elif key.endswith("experts.down_proj"):
            parts = {f"{key}.weight": values}
        tensors |= {names.get_name(part, (".weight", ".bias", ".scale")): half for part, half in parts.items()}
    if "gemma4" in name:
        tensors["rope_freqs.weight"] = torch.tensor([1.0] * 16 + [1e30] * 48)
    return tensors


def add_tokenizer(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    """Write a tokenizer of bytes, with so many tokens."""
    tokenizer = byte_level()
    tokens = [*tokenizer.convert_ids_to_tokens(range(len(tokenizer))), *(f"<pad{n}>" for n in range(vocabulary))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens[:vocabulary])
    writer.add_token_types([1] * vocabulary)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
