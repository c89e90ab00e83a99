"""Files of tiny models of architectures that are read but not written, in the rows that llama.cpp computes with.

`benchmarks.llama_cpp_imports` compares llama.cpp's logits of these files with those of the imported models.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from architectures import randomize
from gguf import GGMLQuantizationType as Kind
from imports.gguf.files import SIZE, add_tokenizer
from transformers import PreTrainedModel

from hf_trainweights.exports.gguf.rows import Origin, origins_of
from hf_trainweights.imports.gguf.architectures import READABLE
from hf_trainweights.models.choosing.selection import is_experts, is_transposed
from hf_trainweights.models.host.checkpoints import names_not_saved
from hf_trainweights.models.host.models import tied_names

PLAIN: dict[str, Any] = {"vocab_size": SIZE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
PLAIN |= {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
PLAIN |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False}
TIED = {**PLAIN, "tie_word_embeddings": True}
HEADS = {**PLAIN, "head_dim": 64}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1}
MULTIPLIERS |= {"logits_scaling": 2.0}
SCALES = {"attention_scale": 0.1, "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 2.0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
ROUTED = {**EXPERTS, "num_hidden_layers": 3, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
ROUTED |= {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True}
OF_EXPERTS: dict[str, Any] = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 128}
OF_ROUTED = {**OF_EXPERTS, "expert_shared_count": 1, "leading_dense_block_count": 1, "expert_weights_norm": True}
OF_ROUTED |= {"expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID, "expert_weights_scale": 1.5}
LINEAR: dict[str, Any] = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32}
LINEAR |= {"linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "head_dim": 64}
LINEAR |= {"layer_types": ["linear_attention", "full_attention"]}
OF_LINEAR: dict[str, Any] = {"ssm_conv_kernel": 4, "ssm_state_size": 32, "ssm_group_count": 2, "ssm_inner_size": 128}
OF_LINEAR |= {"ssm_time_step_rank": 4, "full_attention_interval": 2, "rope_dimension_count": 16}
SECTIONS = {"rope_dimension_sections": [11, 11, 10, 0]}
QWEN_EXPERTS = {**PLAIN, **LINEAR, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 128}
QWEN35_EXPERTS = {name: value for name, value in QWEN_EXPERTS.items() if name != "intermediate_size"}
OF_QWEN_EXPERTS = {**OF_LINEAR, **OF_EXPERTS, "expert_shared_feed_forward_length": 128}
NEOX = {name: value for name, value in PLAIN.items() if name != "num_key_value_heads"}
ERNIE = {**HEADS, "num_hidden_layers": 3, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 2}
ERNIE |= {"moe_intermediate_size": 128, "moe_layer_start_index": 1, "moe_layer_end_index": -1}
OF_ERNIE = {**OF_EXPERTS, "expert_shared_count": 2, "interleave_moe_layer_step": 1, "leading_dense_block_count": 1}
OF_ERNIE |= {"expert_shared_feed_forward_length": 256}
LLAMA4 = {**HEADS, **ROPE, "intermediate_size": 256, "intermediate_size_mlp": 512, "num_hidden_layers": 4}
LLAMA4 |= {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
OF_LLAMA4 = {"expert_count": 4, "expert_used_count": 1, "expert_feed_forward_length": 256, "feed_forward_length": 512}
OF_LLAMA4 |= {"interleave_moe_layer_step": 2}
MINISTRAL3: dict[str, Any] = {**HEADS, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
MINISTRAL3["rope_parameters"] |= {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16384}
LFM2_MOE = {**TIED, **EXPERTS, "num_experts": 4, "num_dense_layers": 1, "num_hidden_layers": 3}
LFM2_MOE |= {"layer_types": ["conv", "full_attention", "conv"]}
OF_LFM2_MOE = {**OF_EXPERTS, "head_count_kv": [0, 2, 0], "shortconv_l_cache": 3, "leading_dense_block_count": 1}
OF_LFM2_MOE |= {"expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID}
LATENT = {**PLAIN, **ROUTED, **ROPE, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64}
LATENT |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
DEEPSEEK_V2 = {**LATENT, "norm_topk_prob": False, "topk_method": "greedy", "routed_scaling_factor": 1.0}
OF_LATENT = {**OF_ROUTED, "head_count_kv": 1, "key_length": 96, "value_length": 64, "key_length_mla": 64}
OF_LATENT |= {"value_length_mla": 32, "q_lora_rank": 64, "kv_lora_rank": 64, "rope_dimension_count": 32}
OF_DEEPSEEK_V2 = {**OF_LATENT, "expert_gating_func": gguf.ExpertGatingFuncType.SOFTMAX, "expert_weights_scale": 1.0}
OF_DEEPSEEK_V2 |= {"expert_weights_norm": False}
FOUR_LAYERS: dict[str, Any] = {"num_hidden_layers": 4}
THETAS: dict[str, Any] = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
THETAS["full_attention"] = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
THETAS["full_attention"] |= {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 64}
OLMO3_YARN = {**PLAIN, **FOUR_LAYERS, "sliding_window": 16, "rope_parameters": THETAS}
OF_YARN = {"rope_scaling_type": gguf.RopeScalingType.YARN, "rope_scaling_factor": 4.0, "rope_scaling_orig_ctx_len": 64}

# The class of a model, its configuration, and methods of the writer that describe it with their arguments.
SPECS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "granite": ("GraniteForCausalLM", {**PLAIN, **MULTIPLIERS}, SCALES),
    "granitemoe": (
        "GraniteMoeForCausalLM",
        {**PLAIN, **MULTIPLIERS, "num_local_experts": 4, "num_experts_per_tok": 2},
        {**SCALES, "expert_count": 4, "expert_used_count": 2},
    ),
    "smollm3": ("SmolLM3ForCausalLM", {**TIED, **FOUR_LAYERS}, {}),
    "arcee": ("ArceeForCausalLM", PLAIN, {}),
    "olmo": ("OlmoForCausalLM", PLAIN, {"layer_norm_eps": 1e-5}),
    "olmo3": ("Olmo3ForCausalLM", {**PLAIN, **FOUR_LAYERS, "sliding_window": 16}, {"sliding_window": 16}),
    "olmo3_yarn": ("Olmo3ForCausalLM", OLMO3_YARN, {"sliding_window": 16, **OF_YARN}),
    "olmoe": (
        "OlmoeForCausalLM",
        {**PLAIN, "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
        {"expert_count": 4, "expert_used_count": 2},
    ),
    "seed_oss": ("SeedOssForCausalLM", {**HEADS, "attention_bias": True}, {}),
    "exaone4": (
        "Exaone4ForCausalLM",
        {**PLAIN, **FOUR_LAYERS, "sliding_window": None, "layer_types": ["full_attention"] * 4},
        {},
    ),
    "ernie4_5": ("Ernie4_5ForCausalLM", {**HEADS, "use_bias": False}, {}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", ERNIE, OF_ERNIE),
    "cohere": ("CohereForCausalLM", {**TIED, "logit_scale": 0.25}, {"logit_scale": 0.25, "layer_norm_eps": 1e-5}),
    "cohere2": (
        "Cohere2ForCausalLM",
        {**TIED, **FOUR_LAYERS, "logit_scale": 0.25, "sliding_window": 16, "head_dim": 64},
        {"logit_scale": 0.25, "layer_norm_eps": 1e-5, "sliding_window": 16},
    ),
    "glm4": ("Glm4ForCausalLM", {**HEADS, "attention_bias": True}, {"rope_dimension_count": 32}),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        {**HEADS, **ROUTED, "use_qk_norm": True, "attention_bias": True},
        {**OF_ROUTED, "rope_dimension_count": 32},
    ),
    "dots1": ("Dots1ForCausalLM", {**HEADS, **ROUTED, "num_key_value_heads": 4}, OF_ROUTED),
    "phi2": (
        "PhiForCausalLM",
        {**PLAIN, "num_key_value_heads": 4},
        {"rope_dimension_count": 32, "layer_norm_eps": 1e-5, "add_bos_token": False},
    ),
    "gptneox": (
        "GPTNeoXForCausalLM",
        NEOX,
        {"rope_dimension_count": 16, "parallel_residual": True, "layer_norm_eps": 1e-5},
    ),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", {**HEADS, **ROPE}, {}),
    "lfm2_moe": ("Lfm2MoeForCausalLM", LFM2_MOE, OF_LFM2_MOE),
    "jais2": ("Jais2ForCausalLM", PLAIN, {"layer_norm_eps": 1e-5}),
    "qwen3_next": ("Qwen3NextForCausalLM", QWEN_EXPERTS, OF_QWEN_EXPERTS),
    "qwen3_5": ("Qwen3_5ForCausalLM", {**PLAIN, **LINEAR}, {**OF_LINEAR, **SECTIONS}),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", QWEN35_EXPERTS, {**OF_QWEN_EXPERTS, **SECTIONS}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", DEEPSEEK_V2, OF_DEEPSEEK_V2),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT, OF_LATENT),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", LATENT, OF_LATENT),
    "ministral3": ("Ministral3ForCausalLM", MINISTRAL3, {}),
    "llama4": ("Llama4ForCausalLM", LLAMA4, OF_LLAMA4),
}


def build(name: str) -> PreTrainedModel:
    """Return a random model in float32, the same weights at every call."""
    class_name, settings, _ = SPECS[name]
    model_class = getattr(transformers, class_name)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**settings)).float().eval()
        randomize(model)
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "A_log" not in parameter_name:
                parameter.add_(0.1 * torch.randn(parameter.shape))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("correction_bias", "expert_bias")):
                buffer.normal_(std=0.1)
    return model


def write_architecture(path: Path, name: str, kind: str = "Q8_0") -> PreTrainedModel:
    """Write a file whose large matrices are blocks of a kind; return the float model with the values of the file."""
    model, architecture = build(name), replace(READABLE[SPECS[name][0]], split_latent=True)
    writer = gguf.GGUFWriter(path, architecture.name)
    for call, value in {**_settings(model), **SPECS[name][2]}.items():
        getattr(writer, f"add_{call}")(value)
    add_tokenizer(writer, SIZE)
    left_out = names_not_saved(model) | tied_names(model).keys()
    tensors = {key: values for key, values in model.state_dict().items() if key not in left_out}
    origins, unknown = origins_of(tensors, architecture, model.config)
    assert not unknown
    transposed = _transposed(model)
    for target, origin in origins.items():
        values = tensors[origin.source]
        values = values.mT if origin.source in transposed else values
        rows = _in_file(origin, values)
        if rows.dim() < 2 or rows.shape[-1] % gguf.GGML_QUANT_SIZES[Kind[kind]][0] or "ffn_gate_inp" in target:
            writer.add_tensor(target, rows.contiguous().numpy())
            if origin.offset:  # a sum is rounded
                values.copy_(rows - origin.offset)
            continue
        data = gguf.quants.quantize(rows.contiguous().numpy(), Kind[kind])
        writer.add_tensor(target, data, raw_dtype=Kind[kind])
        numbers = _in_file(origin, torch.arange(values.numel()).view(values.shape))
        dequantized = torch.from_numpy(gguf.quants.dequantize(data, Kind[kind]))
        flat = values.flatten()
        flat[numbers.flatten()] = dequantized.flatten()
        values.copy_(flat.view(values.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _in_file(origin: Origin, values: torch.Tensor) -> torch.Tensor:
    """Return values, or numbers of values, as a file has them."""
    rows = origin.take(values)
    rows = rows if origin.columns is None else rows[..., origin.columns]
    if not rows.is_floating_point():
        return rows
    return -rows.exp() if origin.negative_exponential else rows + origin.offset


def _transposed(model: PreTrainedModel) -> set[str]:
    return {
        f"{module_name}.{leaf}"
        for module_name, module in model.named_modules()
        for leaf, parameter in module.named_parameters(recurse=False)
        if is_experts(module, parameter) and is_transposed(module, parameter)
    }


def _settings(model: PreTrainedModel) -> dict[str, Any]:
    """Return the methods of the writer that describe every model, with their arguments."""
    config: Any = model.config
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    epsilon = getattr(config, "rms_norm_eps", getattr(config, "norm_eps", None))
    calls = {
        "name": "tiny",
        "block_count": config.num_hidden_layers,
        "context_length": 256,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", 512),
        "head_count": heads,
        "head_count_kv": getattr(config, "num_key_value_heads", heads),
        "vocab_size": SIZE,
        "rope_freq_base": float(config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"]),
        "key_length": head_size,
        "value_length": head_size,
        "rope_dimension_count": head_size,
    }
    return calls if epsilon is None else {**calls, "layer_norm_rms_eps": epsilon}
