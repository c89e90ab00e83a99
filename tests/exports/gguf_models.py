"""Tiny models of each architecture that GGUF export supports, and the tensors that their files are to hold."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from architectures import DECODER, randomize
from torch import Tensor
from transformers import PreTrainedModel

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_

SIZE = 408
# More than the tokenizer's 400 tokens, as where a model is padded.
SMALL = {**DECODER, "vocab_size": SIZE, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 128}
TIED = {**SMALL, "tie_word_embeddings": True}
EXPERTS = {"num_experts_per_tok": 2, "rms_norm_eps": 1e-5}
QWEN3_MOE = {**SMALL, **EXPERTS, "head_dim": 32, "moe_intermediate_size": 768, "num_experts": 4, "norm_topk_prob": True}
# Settings that Transformers' reader does not look for in a file are the defaults of its classes.
QWEN3 = {**SMALL, "head_dim": 128}
QWEN2_MOE = {**SMALL, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 5632}
GEMMA = {**TIED, "head_dim": 256}
GPT2 = {"vocab_size": SIZE, "n_embd": 128, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
FALCON = {key: value for key, value in TIED.items() if key not in ("num_key_value_heads", "intermediate_size")}
SPLIT_FALCON = {**FALCON, "tie_word_embeddings": False, "new_decoder_architecture": True, "num_kv_heads": 2}
BERT = {**SMALL, "num_key_value_heads": 4, "pad_token_id": 0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
LONGROPE |= {"short_factor": [1.0] * 16, "long_factor": [1 + i / 8 for i in range(16)]}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SMALL),
    "llama_tied": ("LlamaForCausalLM", TIED),
    "llama_bias": ("LlamaForCausalLM", {**SMALL, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", SMALL),
    "mixtral": ("MixtralForCausalLM", {**SMALL, **EXPERTS, "num_local_experts": 4}),
    "qwen2": ("Qwen2ForCausalLM", SMALL),
    "qwen2_tied": ("Qwen2ForCausalLM", TIED),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**QWEN2_MOE, "moe_intermediate_size": 1408}),
    "qwen3": ("Qwen3ForCausalLM", QWEN3),
    "qwen3_moe": ("Qwen3MoeForCausalLM", QWEN3_MOE),
    "phi3": ("Phi3ForCausalLM", SMALL),
    "phi3_longrope": ("Phi3ForCausalLM", {**SMALL, "rope_parameters": LONGROPE}),
    "gemma": ("GemmaForCausalLM", GEMMA),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA, "sliding_window": 16}),
    "gemma3": ("Gemma3ForCausalLM", {**GEMMA, "sliding_window": 16, "num_hidden_layers": 6}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "stablelm": ("StableLmForCausalLM", SMALL),
    "stablelm_parallel": ("StableLmForCausalLM", {**SMALL, "use_parallel_residual": True, "use_qkv_bias": True}),
    "starcoder2": ("Starcoder2ForCausalLM", TIED),
    "olmo2": ("Olmo2ForCausalLM", SMALL),
    "falcon": ("FalconForCausalLM", FALCON),
    "falcon_split": ("FalconForCausalLM", SPLIT_FALCON),
    "bert": ("BertModel", BERT),
    "distilbert": ("DistilBertModel", {"vocab_size": SIZE, "dim": 128, "hidden_dim": 128, "n_layers": 2, "n_heads": 4}),
    "roberta": ("RobertaModel", {**BERT, "pad_token_id": 1, "max_position_embeddings": 66, "type_vocab_size": 1}),
    "xlm_roberta": ("XLMRobertaModel", {**BERT, "pad_token_id": 1, "max_position_embeddings": 66}),
}

LLAMA_NAMES = {
    "model.norm": "output_norm",
    "model.layers": "blk",
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "self_attn.": "attn_",
    "_proj": "",
    "attn_o.": "attn_output.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_up.": "ffn_up.",
    "mlp.experts.down": "ffn_down_exps.weight",
    "mlp.shared_expert_gate.": "ffn_gate_inp_shexp.",
    "mlp.shared_expert.gate": "ffn_gate_shexp",
    "mlp.shared_expert.up": "ffn_up_shexp",
    "mlp.shared_expert.down": "ffn_down_shexp",
    "mlp.gate.": "ffn_gate.",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "mlp.c_fc": "ffn_up",
    "mlp.c": "ffn_down",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GPT2_NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "transformer.h": "blk",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "lm_head": "output",
}
FALCON_NAMES = {
    "transformer.word_embeddings": "token_embd",
    "transformer.ln_f": "output_norm",
    "transformer.h": "blk",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "lm_head": "output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "input_layernorm": "attn_norm",
    "ln_attn": "attn_norm_2",
    "ln_mlp": "attn_norm",
}
BERT_NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "encoder.layer": "blk",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "transformer.layer": "blk",
    "attention.q_lin": "attn_q",
    "attention.k_lin": "attn_k",
    "attention.v_lin": "attn_v",
    "attention.out_lin": "attn_output",
    "sa_layer_norm": "attn_output_norm",
    "ffn.lin1": "ffn_up",
    "ffn.lin2": "ffn_down",
    "output_layer_norm": "layer_output_norm",
}
NAMES = {
    "gemma2": LLAMA_NAMES | GEMMA_NAMES,
    "gemma3_text": LLAMA_NAMES | GEMMA_NAMES,
    "gpt2": GPT2_NAMES,
    "olmo2": LLAMA_NAMES | GEMMA_NAMES,
    "falcon": FALCON_NAMES,
    "bert": BERT_NAMES,
    "distilbert": BERT_NAMES,
    "roberta": BERT_NAMES,
    "xlm-roberta": BERT_NAMES,
}
IN_INT8 = "re:.*(q_proj|down_proj|gate_up_proj|c_attn|query_key_value|query|q_lin)"
MIXED: dict[str, Any] = {"format": "int4", "group_size": 32, "overrides": {IN_INT8: "int8"}}


def build(name: str, dtype: torch.dtype = torch.float16, **changes: Any) -> PreTrainedModel:
    """Return a random model, the same weights at every call."""
    class_name, config = MODELS[name]
    model_class = getattr(transformers, class_name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**config | changes))
        randomize(model)
    buffers = dict(model.named_buffers())
    model = model.to(dtype).eval()
    # As after a load: `to` casts the frequencies of the rotary embedding too.
    for buffer_name, buffer in buffers.items():
        owner, _, attribute = buffer_name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer)
    return model


def quantized(name: str = "llama", dtype: torch.dtype = torch.float16, **config: Any) -> PreTrainedModel:
    """Return a quantized one, in int8 unless something else is asked for."""
    model = build(name, dtype)
    quantize_(model, TrainWeightsConfig(**config or {"format": "int8"}))
    return model


def expected_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors that a file is to hold, float32, as llama.cpp's own converter reorders and names them."""
    found = {}
    for name, tensor in model.state_dict().items():
        if name.startswith("pooler.") or (name == "lm_head.weight" and model.config.tie_word_embeddings):
            continue
        file_name = name
        for old, new in NAMES.get(model.config.model_type, LLAMA_NAMES).items():
            file_name = file_name.replace(old, new)
        values = _reordered(model, name, _values(tensor, name))
        if name.endswith("experts.gate_up_proj"):
            prefix = file_name.removesuffix("mlp.experts.gate_up")
            gate, up = values.chunk(2, dim=1)
            found |= {f"{prefix}ffn_gate_exps.weight": gate, f"{prefix}ffn_up_exps.weight": up}
        elif name.endswith("mlp.gate.weight"):
            found[file_name.replace("ffn_gate.", "ffn_gate_inp.")] = values
        else:
            found[file_name] = values
    rope = getattr(model.config, "rope_parameters", None) or {}
    factors = {f"rope_factors_{each}.weight": rope.get(f"{each}_factor") for each in ("short", "long")}
    return found | {name: torch.tensor(value) for name, value in factors.items() if value}


def _values(tensor: Tensor, name: str) -> Tensor:
    """Return the values of a weight in float32, a row for each output."""
    if isinstance(tensor, QuantizedTensor):
        return tensor.format.dequantize(tensor.tensors, tensor.stored_shape, torch.float32)
    is_transposed = name.startswith("transformer.h.") and ".c_" in name and tensor.dim() == 2
    return tensor.float().T if is_transposed else tensor.float()


def _reordered(model: PreTrainedModel, name: str, values: Tensor) -> Tensor:
    config = model.config
    if type(model).__name__ in ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"):
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        if heads:
            shape = (heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            return values.reshape(shape).swapaxes(1, 2).reshape(values.shape)
    if "gemma" in config.model_type and name.endswith("norm.weight"):
        return values + 1
    if name.endswith("shared_expert_gate.weight"):
        return values.flatten()
    if "roberta" in config.model_type and name.endswith("position_embeddings.weight"):
        return values[config.pad_token_id + 1 :]
    if name.endswith("query_key_value.weight") and config.new_decoder_architecture:
        # Two groups of two heads of 32 rows with queries, one with keys, one with values.
        heads = values.split(32)
        return torch.cat([heads[i] for i in (0, 1, 4, 5, 2, 6, 3, 7)])
    return values
