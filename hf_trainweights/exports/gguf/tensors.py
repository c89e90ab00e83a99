"""The tensors of a GGUF file: where each comes from, and its codes and scales in blocks of 32, floats as they are.

| | bytes of a block | codes |
|---|---|---|
| Q8_0 | a float16 scale, 32 codes | int8 |
| Q4_0 | a float16 scale, 16 bytes | code + 8; the first 16 codes in the low bits, the others in the high bits |

Each weight is code times scale, in float32. Where a group is longer than a block, its blocks repeat the scale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import gguf
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.exports.gguf.architectures import Architecture, unsupported
from hf_trainweights.exports.gguf.metadata import key_value_heads, rope_tensors, skipped_positions
from hf_trainweights.formats.packing import unpack_int4
from hf_trainweights.models.host.checkpoints import names_not_saved
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

_Take = Callable[[Tensor], Tensor]


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


class _Place(NamedTuple):
    """Where a tensor of a file comes from.

    Args:
        source: The name of the model's tensor.
        take: Takes its rows out of that tensor, and out of each stored tensor of a quantized one alike: whole rows,
            so that codes and scales stay together.
        transposed: Whether the rows of a float tensor are its columns there. A quantized one is stored by rows anyway.
        offset: What is added to each value of a float tensor.
    """

    source: str
    take: _Take
    transposed: bool = False
    offset: float = 0.0


def lay_out(model: PreTrainedModel, tensors: Mapping[str, Tensor], architecture: Architecture) -> dict[str, FileTensor]:
    """Return a file's tensors, made when they are asked for; none of the model's is in a kernel's private layout."""
    left_out = names_not_saved(model)
    places = _places([name for name in tensors if name not in left_out], architecture, model.config)
    found = {name: _lay_out(name, tensors[place.source], place) for name, place in places.items()}
    factors = rope_tensors(model.config)
    return found | {name: _lay_out(name, each, _Place("rope_parameters", _whole)) for name, each in factors.items()}


def _places(names: Iterable[str], architecture: Architecture, config: PretrainedConfig) -> dict[str, _Place]:
    """Return by their names in a file where its tensors come from; UnsupportedError: llama.cpp has no place for one."""
    known = gguf.get_tensor_name_map(architecture.number, config.num_hidden_layers)
    found, unknown = {}, []
    for source in names:
        if source.startswith(architecture.unused):
            continue
        transposed = source.endswith(architecture.transposed)
        offset = architecture.norm_offset if source.endswith("norm.weight") else 0.0
        for name, take in _float_names(source, architecture, config).items():
            target = known.get_name(name, try_suffixes=(".weight", ".bias"))
            if target is None:
                unknown.append(source)
            else:
                found[target] = _Place(source, take, transposed, offset)
    if unknown:
        where = ", ".join(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in unknown))
        raise unsupported(where, f"tensors that llama.cpp's {architecture.name} has", "others")
    return found


def _float_names(name: str, architecture: Architecture, config: PretrainedConfig) -> dict[str, _Take]:
    """Return the names that gguf knows a tensor of Transformers by, and the rows that go there."""
    owner, _, parameter = name.rpartition(".")
    if parameter == "gate_up_proj":
        return {f"{owner}.gate_proj.weight": partial(_half, 0), f"{owner}.up_proj.weight": partial(_half, 1)}
    if parameter == "down_proj":
        return {f"{name}.weight": _whole}
    projection = owner.rpartition(".")[2]
    if projection == "query_key_value":
        return {name: partial(_by_kind, key_value_heads(config), config.num_attention_heads)}
    if projection == "position_embeddings":
        return {name: itemgetter(slice(skipped_positions(architecture, config), None))}
    if projection == "shared_expert_gate":
        return {name: itemgetter(0)}
    heads = {"q_proj": config.num_attention_heads, "k_proj": key_value_heads(config)}
    if architecture.interleaved and projection in heads:
        return {name: partial(_interleave, heads[projection])}
    return {name: _whole}


def _whole(tensor: Tensor) -> Tensor:
    """Return all rows of a tensor."""
    return tensor


def _half(number: int, tensor: Tensor) -> Tensor:
    return tensor.chunk(2, dim=-2)[number]


def _interleave(heads: int, tensor: Tensor) -> Tensor:
    """Return rows such that those that the rotary embedding turns together are neighbours."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _by_kind(groups: int, heads: int, tensor: Tensor) -> Tensor:
    """Return the rows of all queries, then those of all keys, then those of all values.

    They come in groups of some heads of queries, one of keys and one of values, the three fused into one projection.
    """
    grouped = tensor.unflatten(0, (groups, heads // groups + 2, -1))
    return torch.cat([part.flatten(0, 2) for part in (grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:])])


def _lay_out(name: str, tensor: Tensor, place: _Place) -> FileTensor:
    """Return the tensor of a file that one of the model becomes, which is in no kernel's private layout."""
    if isinstance(tensor, QuantizedTensor):
        if name != _NEVER_IN_BLOCKS:
            return _lay_out_quantized(place.source, tensor, place.take)
        # In float32 code times scale is not rounded.
        tensor = tensor.format.dequantize(tensor.tensors, tensor.stored_shape, torch.float32)
    if tensor.dtype not in _FLOAT:
        expected = "a tensor in float32, float16 or bfloat16"
        raise UnsupportedError(place.source, expected, str(tensor.dtype), "Cast the model to one of these.")
    dtype = torch.float32 if tensor.dim() <= 1 or name.endswith(_ALWAYS_FLOAT32) else tensor.dtype
    shape = tuple(_rows(tensor.to("meta"), place).shape)
    return FileTensor(_FLOAT[dtype], shape, lambda: _rows(tensor, place).to(dtype).contiguous().view(torch.uint8))


def _rows(tensor: Tensor, place: _Place) -> Tensor:
    rows = place.take(tensor.mT if place.transposed else tensor)
    return rows.float() + place.offset if place.offset else rows


def _lay_out_quantized(name: str, weight: QuantizedTensor, take: _Take) -> FileTensor:
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
    nibbles = (unpack_int4(words) + 8).view(torch.uint8)
    low, high = nibbles.unflatten(-1, (-1, 2, BLOCK_SIZE // 2)).unbind(-2)
    return torch.cat([scales, low | high << 4], dim=-1)
