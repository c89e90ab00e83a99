"""What the codec tests share: instances of every codec, inputs that suit them, and errors in the codecs' units."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.codecs.base import Codec, References
from hf_trainweights.checkpoint.codecs.coding.blocks import matrix_shape
from hf_trainweights.checkpoint.codecs.delta_uniform import DeltaUniform
from hf_trainweights.checkpoint.codecs.grouped import Grouped
from hf_trainweights.checkpoint.codecs.moments import LogRank1, UpdateSpace
from hf_trainweights.checkpoint.codecs.norm_space import NormSpace
from hf_trainweights.checkpoint.codecs.rows import RowUniform
from hf_trainweights.testing import CodecContract

# A codec that is not listed is tested as its class makes it without arguments.
_INSTANCES: dict[str, list[Codec]] = {
    "delta-uniform": [DeltaUniform(2.0**-9), DeltaUniform(2.0**-14), DeltaUniform(2.0**-19), DeltaUniform.within(1e-3)],
    "update-space": [UpdateSpace(0.25), UpdateSpace(0.5)],
    "log-rank1": [LogRank1(1), LogRank1(2)],
    "norm-space": [NormSpace(2.0**-4)],
    "row-uniform": [RowUniform(0.5), RowUniform(1.0)],
    "grouped": [Grouped({"format": "int8"}), Grouped({"format": "int4", "group_size": 32})],
}
INSTANCES: list[Codec] = [codec for codec_id, kind in CODECS.items() for codec in _INSTANCES.get(codec_id) or [kind()]]


def inputs(codec: Codec, shape: list[int], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns a tensor like those the codec is made for, and its references."""
    if codec.lossless:
        return CodecContract().inputs(codec, shape, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator).mul_(0.02)
    anchor = (weight + torch.randn(shape, generator=generator).mul_(2.0**-9)).to(dtype)
    # From 1e-3 down to 1e-9 or so: float16 reaches 6e-8.
    smallest = -16 if dtype == torch.float16 else -30
    squares = torch.rand(shape, generator=generator).mul_(smallest).exp2_().mul_(1e-3).to(dtype)
    squares.view(-1)[::5] = 0
    if codec.codec_id == "log-rank1":
        return squares, {}
    moment = torch.randn(shape, generator=generator).mul_(squares.to(torch.float32).sqrt()).to(dtype)
    if codec.codec_id in ("update-space", "norm-space"):
        return moment, {"exp_avg_sq": squares if codec.codec_id == "update-space" else squares.sqrt()}
    return weight.to(dtype), {"anchor": anchor}


def error(codec: Codec, original: Tensor, decoded: Tensor, references: References) -> float:
    """Returns the largest error of an element in the unit of the codec's bound; NaN decoded to itself is none."""
    x, y = original.double(), decoded.double()
    errors = (y - x).abs()
    if codec.codec_id == "update-space":
        errors = errors / references["exp_avg_sq"].double().sqrt()
    if codec.codec_id == "norm-space":
        errors = errors / references["exp_avg_sq"].double()
    if codec.codec_id == "row-uniform":
        rows = x.nan_to_num(0, 0, 0).view(matrix_shape(x.shape))
        errors = errors / rows.square().mean(1, keepdim=True).sqrt().expand(rows.shape).reshape(x.shape)
    if codec.codec_id == "log-rank1":
        errors = (y / x).log2().abs()
    exact = (x == y) | (x.isnan() & y.isnan())
    return errors.masked_fill(exact, 0).max().item() if errors.numel() else 0.0
