"""Lay out the tensors of a GGUF file: codes and scales in blocks, floats as they are.

Weights that were imported from GGUF get their bytes back, see `blocks`; int8 and int4 become blocks of 32.

| | bytes of a block | codes |
|---|---|---|
| Q8_0 | a float16 scale, 32 codes | int8 |
| Q4_0 | a float16 scale, 16 bytes | code + 8; the first 16 codes in the low bits, the others in the high bits |

The value of a weight is code * scale, in float32. If a group is longer than a block, its blocks repeat the scale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import gguf
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.exports.gguf.architectures import Architecture, unsupported
from hf_trainweights.exports.gguf.blocks import encoder_of
from hf_trainweights.exports.gguf.metadata import rope_tensors
from hf_trainweights.exports.gguf.rows import Origin, Take, all_rows, origins_of
from hf_trainweights.formats.packing import unpack_int4
from hf_trainweights.models.host.checkpoints import names_not_saved
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

BLOCK_SIZE = 32

Kind = gguf.GGMLQuantizationType
_QUANTIZED = {"int8": Kind.Q8_0, "int4": Kind.Q4_0}
_FLOAT = {torch.float32: Kind.F32, torch.float16: Kind.F16, torch.bfloat16: Kind.BF16}
# Endings of the names of tensors that llama.cpp reads only in float32. Vectors are always float32 too.
_ALWAYS_FLOAT32 = (
    *("_norm.weight", ".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight"),
    *("position_embd.weight", "token_types.weight"),
)
# llama.cpp cannot read these in blocks: it adds the first row as it is stored.
_NEVER_IN_BLOCKS = "token_types.weight"

_IN_FLOAT = "Quantize the model again and leave it in float (modules_to_not_convert)."


class FileTensor(NamedTuple):
    """A tensor of a file, with its shape in values. `make` returns its bytes, uint8 of any shape, for the write."""

    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """The shape, with the last dimension in bytes."""
        return gguf.quant_shape_to_byte_shape(self.shape, self.kind)

    @property
    def nbytes(self) -> int:
        """The number of bytes in a file."""
        return math.prod(self.byte_shape)


def lay_out(model: PreTrainedModel, tensors: Mapping[str, Tensor], architecture: Architecture) -> dict[str, FileTensor]:
    """Return the tensors of a file by name; their bytes are made when they are written."""
    left_out = names_not_saved(model)
    names = [name for name in tensors if name not in left_out]
    origins, unknown = origins_of(names, architecture, model.config)
    if unknown:
        where = ", ".join(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in unknown))
        raise unsupported(where, f"tensors that llama.cpp's {architecture.name} has", "others")
    file_tensors = {name: _lay_out(name, tensors[origin.source], origin) for name, origin in origins.items()}
    for name, tensor in rope_tensors(model.config).items():
        file_tensors[name] = _lay_out(name, tensor, Origin("rope_parameters", all_rows))
    return file_tensors


def _lay_out(name: str, tensor: Tensor, origin: Origin) -> FileTensor:
    """Convert a tensor of the model to a tensor of the file."""
    if isinstance(tensor, QuantizedTensor):
        if name != _NEVER_IN_BLOCKS:
            return _lay_out_quantized(origin.source, tensor, origin.take)
        # code * scale is not rounded in float32.
        tensor = tensor.format.dequantize(tensor.tensors, tensor.stored_shape, torch.float32)
    if tensor.dtype not in _FLOAT:
        expected = "a tensor in float32, float16 or bfloat16"
        raise UnsupportedError(origin.source, expected, str(tensor.dtype), "Cast the model to one of these.")
    dtype = torch.float32 if tensor.dim() <= 1 or name.endswith(_ALWAYS_FLOAT32) else tensor.dtype
    shape = tuple(_rows(tensor.to("meta"), origin).shape)
    return FileTensor(_FLOAT[dtype], shape, lambda: _rows(tensor, origin).to(dtype).contiguous().view(torch.uint8))


def _rows(tensor: Tensor, origin: Origin) -> Tensor:
    rows = origin.take(tensor.mT if origin.transposed else tensor)
    return rows.float() + origin.offset if origin.offset else rows


def _lay_out_quantized(name: str, weight: QuantizedTensor, take: Take) -> FileTensor:
    shape = tuple(take(torch.empty(weight.stored_shape, device="meta")).shape)
    if encoder := encoder_of(weight):
        imported_kind, encode = encoder
        by_rows = weight.tensors.keys() - set(weight.format.shared_names)
        return FileTensor(imported_kind, shape, lambda: encode({key: take(weight.tensors[key]) for key in by_rows}))
    _check(name, weight)
    codes, scale = weight.tensors["qdata"], weight.tensors["scale"]
    count = weight.stored_shape[-1] // BLOCK_SIZE
    kind = _QUANTIZED[weight.format.name]
    blocks = _q8_0 if kind == Kind.Q8_0 else _q4_0
    return FileTensor(kind, shape, lambda: blocks(take(codes), _repeat(take(scale), count)))


def _check(name: str, weight: QuantizedTensor) -> None:
    form, K = weight.format, weight.stored_shape[-1]
    if form.name not in _QUANTIZED or form.tensor_names != ("qdata", "scale"):
        raise UnsupportedError(name, "int8 or int4, which GGUF has blocks for", str(form), _IN_FLOAT)
    G = weight.scale.shape[-1]
    if weight.numel() == 0 or K % (G * BLOCK_SIZE):
        fault = f"rows of {K} in {G} groups"
        next_step = "Quantize the model again with group_size 32, or leave it in float (modules_to_not_convert)."
        raise UnsupportedError(name, f"groups that blocks of {BLOCK_SIZE} weights divide", fault, next_step)
    scale = weight.scale.float()
    inexact = int((scale.to(torch.float16).float() != scale).sum())
    if inexact:
        fault = f"{inexact} of {scale.numel()} scales in {weight.scale.dtype} that it cannot"
        next_step = "Quantize the float model with dtype=torch.float16, and export that: its scales are float16."
        raise UnsupportedError(
            name, "scales that float16 holds exactly, because blocks have no others", fault, next_step
        )


def _repeat(scale: Tensor, count: int) -> Tensor:
    """Repeat scales for each of the `count` blocks of a row, as two bytes `[*, count, 2]`."""
    halves = scale.to(torch.float16).repeat_interleave(count // scale.shape[-1], dim=-1)
    return halves.unsqueeze(-1).view(torch.uint8)


def _q8_0(codes: Tensor, scales: Tensor) -> Tensor:
    return torch.cat([scales, codes.unflatten(-1, (-1, BLOCK_SIZE)).view(torch.uint8)], dim=-1)


def _q4_0(words: Tensor, scales: Tensor) -> Tensor:
    nibbles = (unpack_int4(words) + 8).view(torch.uint8)
    low, high = nibbles.unflatten(-1, (-1, 2, BLOCK_SIZE // 2)).unbind(-2)
    return torch.cat([scales, low | high << 4], dim=-1)
