"""Encoders, and the inputs that they are timed on: MiniLM with its real weights, and shapes with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer, BertConfig, BertModel, ViTConfig, ViTModel

from benchmarks.minilm import MODEL, minilm
from benchmarks.quality import sentences

Inputs = dict[str, Tensor]
# Sentences and tokens of each: a query, a few sentences, a few paragraphs.
TEXT_SHAPES = [(1, 16), (8, 32), (8, 128)]
IMAGES = [1, 8]
# What embeddings are compared on; MiniLM gets real sentences, padded as a tokenizer pads them.
COMPARED = 32


@dataclass(frozen=True)
class Encoder:
    """An encoder to be timed.

    Args:
        name: What tables call it.
        build: Makes it in float32; a second call makes an equal one.
        inputs: Makes what it is timed on, by the name of a shape.
        compared: Makes what its embeddings are compared on.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Inputs]]
    compared: Callable[[], Inputs]


def pooled(hidden: Tensor, inputs: Inputs) -> Tensor:
    """Return the mean over the tokens of each hidden state `[B, T, C]`, of unit length; padding does not count."""
    mask = inputs.get("attention_mask", hidden.new_ones(hidden.shape[:2])).unsqueeze(-1)
    return F.normalize((hidden * mask).sum(dim=1) / mask.sum(dim=1), dim=1)


def _bert(**sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    return BertModel(BertConfig(**sizes), add_pooling_layer=False).eval()


def _vit() -> nn.Module:
    torch.manual_seed(0)
    return ViTModel(ViTConfig(num_hidden_layers=2), add_pooling_layer=False).eval()


def _texts() -> dict[str, Inputs]:
    """Return real text, cut into rows that are full: the time of a row does not depend on what it says."""
    ids = AutoTokenizer.from_pretrained(MODEL)(" ".join(sentences()), return_tensors="pt", verbose=False)["input_ids"]
    rows = {f"{B}x{T}": ids[0, : B * T].view(B, T) for B, T in TEXT_SHAPES}
    return {name: {"input_ids": ids, "attention_mask": torch.ones_like(ids)} for name, ids in rows.items()}


def _sentences() -> Inputs:
    encoded = AutoTokenizer.from_pretrained(MODEL)(sentences(COMPARED), padding=True, return_tensors="pt")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def _images(count: int) -> Inputs:
    return {"pixel_values": torch.randn(count, 3, 224, 224, generator=torch.Generator().manual_seed(0))}


def _shapes_of_bert(name: str, layers: int, **sizes: int) -> Encoder:
    def build() -> nn.Module:
        return _bert(num_hidden_layers=layers, **sizes)

    return Encoder(name, build, _texts, _sentences)


# All layers of a model take the same time, so a few of them tell the ratio of two methods.
ENCODERS = [
    Encoder("MiniLM-L6", minilm, _texts, _sentences),
    _shapes_of_bert("BERT-base, 2 layers", 2),
    _shapes_of_bert("BERT-large, 1 layer", 1, hidden_size=1024, num_attention_heads=16, intermediate_size=4096),
    Encoder("ViT-base, 2 layers", _vit, lambda: {f"{B}x197": _images(B) for B in IMAGES}, lambda: _images(max(IMAGES))),
]
