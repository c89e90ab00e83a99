"""Tensors as llama.cpp lays them out: codes and scales in blocks of 32, floats as they are.

| | bytes of a block | codes |
|---|---|---|
| Q8_0 | a float16 scale, 32 codes | int8 |
| Q4_0 | a float16 scale, 16 bytes | code + 8; the first 16 codes in the low bits, the others in the high bits |

Each weight is code times scale, in float32. Where a group is longer than a block, its blocks repeat the scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import gguf
import torch
from torch import Tensor

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.exports.gguf.names import Place, Take
from hf_trainweights.exports.sources import as_int8
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

BLOCK_SIZE = 32

Kind = gguf.GGMLQuantizationType
_QUANTIZED = {"int8": Kind.Q8_0, "int4": Kind.Q4_0}
_FLOAT = {torch.float32: Kind.F32, torch.float16: Kind.F16, torch.bfloat16: Kind.BF16}
# What llama.cpp computes with in float32 alone, beside vectors.
_ALWAYS_FLOAT32 = (
    *("_norm.weight", ".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight"),
    *("position_embd.weight", "token_types.weight"),
)
# What it does not read in blocks either: it adds the first row as it is.
_NEVER_IN_BLOCKS = "token_types.weight"

_IN_FLOAT = "Quantize the model again and leave it in float (modules_to_not_convert)."


class FileTensor(NamedTuple):
    """A tensor of a file, with its shape in values; its bytes, uint8 of any shape, are made when they are written."""

    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """The shape, the last dimension in bytes."""
        return gguf.quant_shape_to_byte_shape(self.shape, self.kind)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in a file."""
        return math.prod(self.byte_shape)


def lay_out(name: str, tensor: Tensor, place: Place) -> FileTensor:
    """Return the tensor of a file that one of the model becomes, which is in no kernel's private layout."""
    if isinstance(tensor, QuantizedTensor):
        if name != _NEVER_IN_BLOCKS:
            return _lay_out_quantized(place.source, as_int8(tensor), place.take)
        # In float32 code times scale is not rounded.
        tensor = tensor.format.dequantize(tensor.tensors, tensor.stored_shape, torch.float32)
    if tensor.dtype not in _FLOAT:
        expected = "a tensor in float32, float16 or bfloat16"
        raise UnsupportedError(place.source, expected, str(tensor.dtype), "Cast the model to one of these.")
    dtype = torch.float32 if tensor.dim() <= 1 or name.endswith(_ALWAYS_FLOAT32) else tensor.dtype
    shape = tuple(_rows(tensor.to("meta"), place).shape)
    return FileTensor(_FLOAT[dtype], shape, lambda: _rows(tensor, place).to(dtype).contiguous().view(torch.uint8))


def _rows(tensor: Tensor, place: Place) -> Tensor:
    rows = place.take(tensor.mT if place.transposed else tensor)
    return rows.float() + place.offset if place.offset else rows


def _lay_out_quantized(name: str, weight: QuantizedTensor, take: Take) -> FileTensor:
    _check(name, weight)
    codes, scale = weight.tensors["qdata"], weight.tensors["scale"]
    count = weight.stored_shape[-1] // BLOCK_SIZE
    kind = _QUANTIZED[weight.format.name]
    blocks = _q8_0 if kind == Kind.Q8_0 else _q4_0
    shape = tuple(take(torch.empty(weight.stored_shape, device="meta")).shape)
    return FileTensor(kind, shape, lambda: blocks(take(codes), _repeat(take(scale), count)))


def _check(name: str, weight: QuantizedTensor) -> None:
    form, K = weight.format, weight.stored_shape[-1]
    if form.name not in _QUANTIZED or form.tensor_names != ("qdata", "scale"):
        raise UnsupportedError(name, "int8 or int4, which GGUF has blocks for", str(form), _IN_FLOAT)
    G = weight.scale.shape[-1]
    if weight.numel() == 0 or K % (G * BLOCK_SIZE):
        found = f"rows of {K} in {G} groups"
        next_step = "Quantize the model again with group_size 32, or leave it in float (modules_to_not_convert)."
        raise UnsupportedError(name, f"groups that blocks of {BLOCK_SIZE} weights divide", found, next_step)
    scale = weight.scale.float()
    inexact = int((scale.to(torch.float16).float() != scale).sum())
    if inexact:
        found = f"{inexact} of {scale.numel()} scales in {weight.scale.dtype} that it cannot"
        next_step = "Quantize the float model with dtype=torch.float16, and export that: its scales are float16."
        raise UnsupportedError(
            name, "scales that float16 holds exactly, because blocks have no others", found, next_step
        )


def _repeat(scale: Tensor, count: int) -> Tensor:
    """Return the scale of each of `count` blocks of a row, as two bytes `[*, count, 2]`."""
    halves = scale.to(torch.float16).repeat_interleave(count // scale.shape[-1], dim=-1)
    return halves.unsqueeze(-1).view(torch.uint8)


def _q8_0(codes: Tensor, scales: Tensor) -> Tensor:
    return torch.cat([scales, codes.unflatten(-1, (-1, BLOCK_SIZE)).view(torch.uint8)], dim=-1)


def _q4_0(words: Tensor, scales: Tensor) -> Tensor:
    # Eight codes to a word, each + 8 already, the first one in the lowest bits.
    octets = words.contiguous().view(torch.uint8)
    nibbles = torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)
    low, high = nibbles.unflatten(-1, (-1, 2, BLOCK_SIZE // 2)).unbind(-2)
    return torch.cat([scales, low | high << 4], dim=-1)
