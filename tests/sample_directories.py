"""The models that README, docs and docstrings speak of by name, as tiny ones in the current directory."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_tokenizers import byte_level
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_trainweights import TrainWeightsConfig, quantize_directory


def write_sample_directories(directory: Path) -> None:
    """Write float models, and quantized ones beside them, under the names that the documentation uses.

    Args:
        directory: Where; it gets `Qwen/Qwen3-0.6B`, `llama` and `bert`, and the quantized `llama-int8`, `llama-int4`,
            `bert-int8` and `minilm-int8`.

    Raises:
        OSError: The disk is full or refuses.
    """
    tokenizer = byte_level()
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 1, "max_position_embeddings": 512}
    models: dict[str, PreTrainedModel] = {
        "Qwen/Qwen3-0.6B": Qwen3ForCausalLM(Qwen3Config(num_key_value_heads=2, **sizes)).to(torch.bfloat16),
        "llama": LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16),
        "bert": BertModel(BertConfig(**sizes)),
    }
    for name, model in models.items():
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    for source, target, config in (
        ("llama", "llama-int8", TrainWeightsConfig("int8", group_size=32)),  # as GGUF's Q8_0 has it
        ("Qwen/Qwen3-0.6B", "llama-int4", TrainWeightsConfig("int4", group_size=32)),
        ("bert", "bert-int8", TrainWeightsConfig("int8")),
        ("bert", "minilm-int8", TrainWeightsConfig("int8")),
    ):
        quantize_directory(directory / source, directory / target, config)
