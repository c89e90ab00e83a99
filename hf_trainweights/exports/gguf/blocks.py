"""Bytes of GGUF's blocks from the stored tensors of imported weights: the same bytes that an import has read.

Each function takes rows of stored tensors, `[*, N, k]`, and returns uint8 `[*, N, blocks, bytes of a block]`.

Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import gguf
import torch
from torch import Tensor

from hf_trainweights.formats.affine import Affine
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.packing import unpack_int4
from hf_trainweights.formats.planes import unpack_planes
from hf_trainweights.formats.table4 import Table4
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

IQ4_VALUES = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.0], device="cpu")
"""The values of IQ4_NL's and IQ4_XS's codes."""
E2M1_VALUES = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], device="cpu") / 2
"""The values of MXFP4's and NVFP4's codes in GGUF, which has no negative zero."""

Kind = gguf.GGMLQuantizationType
Encode = Callable[[Mapping[str, Tensor]], Tensor]


def _codes(stored: Mapping[str, Tensor], bits: int, block_size: int) -> Tensor:
    """Return uint8 codes `[*, N, blocks, columns of a block]`."""
    qdata = stored["qdata"].contiguous()
    codes = (unpack_int4(qdata) + 8).view(torch.uint8) if bits == 4 else unpack_planes(qdata, bits)
    return codes.unflatten(-1, (-1, block_size))


def _joined(codes: Tensor, size: int, bits: int) -> Tensor:
    """Join runs of `8 // bits * size` codes into `size` bytes, whose lowest bits are the first `size` codes."""
    fields = codes.unflatten(-1, (-1, 8 // bits, size))
    octets = fields[..., 0, :].clone()
    for index in range(1, 8 // bits):
        octets |= fields[..., index, :] << index * bits
    return octets.flatten(-2)


def _halves(stored: Mapping[str, Tensor], name: str, blocks: int) -> Tensor:
    """Return the bytes of the float16 numbers that a stored tensor has for each block, `[*, N, blocks, bytes]`."""
    return stored[name].contiguous().view(torch.uint8).unflatten(-1, (blocks, -1))


def _old(bits: int, has_bias: bool) -> Encode:
    """Return the function for ggml's older kinds. A block has a scale, perhaps a bias, perhaps fifth bits, low bits."""

    def encode(stored: Mapping[str, Tensor]) -> Tensor:
        codes = _codes(stored, bits, 32)
        parts = [_halves(stored, "scale", codes.shape[-2])]
        if has_bias:
            parts.append(_halves(stored, "bias", codes.shape[-2]))
        if bits == 5:
            parts.append(_joined(codes >> 4, 1, 1))
        return torch.cat([*parts, _joined(codes & 15, 16, 4)], dim=-1)

    return encode


def _superblocks(bits: int, make: Callable[[Tensor, Tensor, Tensor], list[Tensor]]) -> Encode:
    """Return the function for superblocks of 256 codes; `make` orders the bytes of codes, numbers and scales.

    An imported weight keeps the bytes of a superblock's packed scales as `group_scale`, and its one or two float16
    numbers, by which all of them are multiplied, as `scale`.
    """

    def encode(stored: Mapping[str, Tensor]) -> Tensor:
        codes = _codes(stored, bits, 256)
        numbers = _halves(stored, "scale", codes.shape[-2])
        return torch.cat(make(codes, numbers, stored["group_scale"].unflatten(-1, (codes.shape[-2], -1))), dim=-1)

    return encode


def _q2_k(codes: Tensor, numbers: Tensor, scales: Tensor) -> list[Tensor]:
    return [scales, _joined(codes, 32, 2), numbers]


def _q3_k(codes: Tensor, numbers: Tensor, scales: Tensor) -> list[Tensor]:
    return [_joined(codes >> 2, 32, 1), _joined(codes & 3, 32, 2), scales, numbers]


def _q4_k(codes: Tensor, numbers: Tensor, scales: Tensor) -> list[Tensor]:
    return [numbers, scales, _joined(codes, 32, 4)]


def _q5_k(codes: Tensor, numbers: Tensor, scales: Tensor) -> list[Tensor]:
    return [numbers, scales, _joined(codes >> 4, 32, 1), _joined(codes & 15, 32, 4)]


def _q6_k(codes: Tensor, numbers: Tensor, scales: Tensor) -> list[Tensor]:
    return [_joined(codes & 15, 64, 4), _joined(codes >> 4, 32, 2), scales, numbers]


def _iq4_xs(codes: Tensor, numbers: Tensor, scales: Tensor) -> list[Tensor]:
    return [numbers, scales, _joined(codes, 16, 4)]


def _mxfp4(stored: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([stored["scale"].unsqueeze(-1), _joined(_codes(stored, 4, 32), 16, 4)], dim=-1)


_ENCODERS: dict[Format, tuple[gguf.GGMLQuantizationType, Encode]] = {
    Affine(4, 32, "plain", "bias"): (Kind.Q4_1, _old(4, has_bias=True)),
    Affine(5, 32, "plain", "none"): (Kind.Q5_0, _old(5, has_bias=False)),
    Affine(5, 32, "plain", "bias"): (Kind.Q5_1, _old(5, has_bias=True)),
    Affine(2, 16, "k2", "none"): (Kind.Q2_K, _superblocks(2, _q2_k)),
    Affine(3, 16, "k3", "none"): (Kind.Q3_K, _superblocks(3, _q3_k)),
    Affine(4, 32, "k4", "none"): (Kind.Q4_K, _superblocks(4, _q4_k)),
    Affine(5, 32, "k4", "none"): (Kind.Q5_K, _superblocks(5, _q5_k)),
    Affine(6, 16, "k6", "none"): (Kind.Q6_K, _superblocks(6, _q6_k)),
    Table4(32, "plain"): (Kind.IQ4_NL, _old(4, has_bias=False)),
    Table4(32, "iq4_xs"): (Kind.IQ4_XS, _superblocks(4, _iq4_xs)),
    Table4(32, "e8m0"): (Kind.MXFP4, _mxfp4),
}
_TABLES = {Kind.IQ4_NL: IQ4_VALUES, Kind.IQ4_XS: IQ4_VALUES, Kind.MXFP4: E2M1_VALUES}


def encoder_of(weight: QuantizedTensor) -> tuple[gguf.GGMLQuantizationType, Encode] | None:
    """Return the kind of blocks that holds a weight as it is stored, and the function that writes them, or None."""
    kind, encode = _ENCODERS.get(weight.format, (None, None))
    # A block has float16 numbers, or in MXFP4 exponents as bytes.
    if kind is None or encode is None or weight.tensors["scale"].dtype not in (torch.float16, torch.uint8):
        return None
    # llama.cpp has the table of each kind built in, so a weight with another table cannot be written.
    table = _TABLES.get(kind)
    has_built_in_table = table is None or bool((weight.tensors["table"] == table).all())
    return (kind, encode) if has_built_in_table and weight.numel() else None
