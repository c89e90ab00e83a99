"""Tiny models whose caches tests fill, and the kinds of caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from hf_trainweights.cache.layers import LEAST_TOKENS

VOCAB, WINDOW = 300, 40
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": VOCAB}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
KINDS: list[Any] = ["bf16", "int8", ("int8", "int4"), "int4"]


def llama(**options: Any) -> PreTrainedModel:
    return made(LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, **options)))


def mistral(sliding_window: int = WINDOW) -> PreTrainedModel:
    return made(MistralForCausalLM(MistralConfig(**SIZES, **HEADS, sliding_window=sliding_window)))


def made(model: PreTrainedModel) -> PreTrainedModel:
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model.eval().bfloat16()


def prompt(count: int = LEAST_TOKENS + 20, batch: int = 2) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCAB, (batch, count), generator=torch.Generator().manual_seed(count))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
