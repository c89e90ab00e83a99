"""Models with random weights, saved once: their speed and memory are those of trained ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks.speed.methods import Method
from hf_trainweights import TrainWeightsConfig, quantize_

LLAMA: dict[str, Any] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 14,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
SMALL_LLAMA = {**LLAMA, "num_hidden_layers": 2, "vocab_size": 2048}
MOE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}


def quantized_llama(sizes: dict[str, int], format_name: str) -> LlamaForCausalLM:
    """Make a Llama of random weights in bfloat16, quantized in groups of 32, embeddings too.

    Args:
        sizes: Arguments of `LlamaConfig`.
        format_name: The format, whose scales are float16, as those of llama.cpp's Q8_0 and Q4_0.
    """
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(**sizes, vocab_size=32000, max_position_embeddings=65536, tie_word_embeddings=False)
    try:
        model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    quantize_(model.half(), TrainWeightsConfig(format_name, group_size=32, include_embeddings=True))
    return model.bfloat16()


def save_models(root: Path) -> dict[str, Path]:
    """Write the models in bfloat16.

    Args:
        root: An empty directory; takes about 1.3 GB.

    Returns:
        The directories of `llama` (415M weights), `small` (two layers, few tokens), and `moe`.
    """
    torch.manual_seed(0)
    made = {
        "llama": (LlamaForCausalLM, LlamaConfig(**LLAMA)),
        "small": (LlamaForCausalLM, LlamaConfig(**SMALL_LLAMA)),
        "moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**MOE)),
    }
    for name, (model_class, config) in made.items():
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model_class(config).save_pretrained(root / name, max_shard_size="200MB")
        finally:
            torch.set_default_dtype(default)
    return {name: root / name for name in made}


def load(path: Path, method: Method) -> PreTrainedModel:
    """Return a saved model, quantized as it is loaded."""
    quantization = {"quantization_config": method.config()} if method.config is not None else {}
    return AutoModelForCausalLM.from_pretrained(path, dtype=method.dtype, **quantization).eval()
