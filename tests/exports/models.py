"""Quantized models that exports are tried on, and what they compute."""

from __future__ import annotations

import contextlib
import copy
import resource
from collections.abc import Iterator
from typing import Any

import torch
from architectures import ARCHITECTURES, TEXT, randomize
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import BartConfig, BartForConditionalGeneration
from weights import random_codes

from hf_trainweights import TrainWeightsConfig, dequantize_, quantize_
from hf_trainweights.formats import get_format
from hf_trainweights.models.host.models import cache_argument

FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "int8 g32": {"format": "int8", "group_size": 32},
    "int4 g32": {"format": "int4", "group_size": 32},
    "int4 g64": {"format": "int4", "group_size": 64},
    "float8": {"format": "float8_e4m3"},
    "coded": {"format": "coded", "bits": 3.5},
    "uint2": {"format": "uint2"},
    "uint3": {"format": "uint3"},
    "uint4 g32": {"format": "uint4", "group_size": 32},
    "uint6": {"format": "uint6"},
    "codebook4": {"format": "codebook4"},
    "codebook4 with column scales": {"format": "codebook4", "column_scale": True},
    "int4 with column scales": {"format": "int4", "group_size": 32, "column_scale": True},
    "affine": {"format": "affine", "bits": 4, "group_size": 32},
    "affine3 bias": {"format": "affine", "bits": 3, "group_size": 64, "offset": "bias"},
    "affine8 counted from 1": {"format": "affine", "bits": 8, "group_size": 32, "offset": "zero_point_minus_1"},
    "table4 nested": {"format": "table4", "group_size": 64, "scales": "nested"},
    "table4 e4m3": {"format": "table4", "group_size": 16, "scales": "e4m3_divided"},
    "float8 e8m0": {"format": "float8_e4m3", "group_size": 32, "scales": "e8m0"},
}


class Convolutional(nn.Module):
    """Images to scores: convolution, norm, pooling, Linear, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(2)
        self.scores = nn.Sequential(
            nn.Flatten(), nn.Linear(4 * 4 * 4, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 8)
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.scores(self.pool(torch.relu(self.norm(self.convolution(image)))))


class Branching(nn.Module):
    """Takes one way or another, by its input, and has a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 64)
        self.up = nn.Linear(64, 64)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        values = self.table(ids)
        if int(ids.sum()) % 2 == 0:
            values = torch.relu(self.up(values))
        return self.down(values)

    @torch.jit.export
    def embed(self, ids: Tensor) -> Tensor:
        return self.table(ids)


def bart() -> BartForConditionalGeneration:
    """Return a tiny BART, which is none of the architectures that everything is tried on."""
    sizes = {name: TEXT[name] for name in ("vocab_size", "max_position_embeddings")}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    widths = {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 2}
    torch.manual_seed(0)
    model = BartForConditionalGeneration(BartConfig(**sizes, **layers, **widths, **tokens, forced_eos_token_id=None))
    randomize(model)
    return model.eval()


def images(batch: int) -> Tensor:
    return torch.randn(batch, 1, 8, 8, generator=torch.Generator().manual_seed(batch))


def quantized(model: nn.Module | str, config: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a quantized model, with its embeddings; a text names one of the architectures."""
    if isinstance(model, str):
        model = ARCHITECTURES[model].build(dtype)
    form = get_format(FORMATS[config])
    with random_codes(form):
        quantize_(model, TrainWeightsConfig("int8", overrides={"re:.*": form.get_config()}, include_embeddings=True))
    return model


@contextlib.contextmanager
def no_file_beyond(size_bytes: int) -> Iterator[None]:
    """Let this process write no file that is larger within the context, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def dequantized_outputs(model: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor]:
    """Return what a copy of the model with dequantized weights computes, without a cache, as exports do."""
    copied = copy.deepcopy(model).eval()
    dequantize_(copied)
    if cache_argument(copied):
        kwargs = {"use_cache": False, **kwargs}
    with torch.no_grad():
        return [leaf for leaf in tree_leaves(copied(*args, **kwargs)) if isinstance(leaf, Tensor)]
