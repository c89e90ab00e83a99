"""The kinds of blocks that a GGUF file holds a weight in, and the stored tensors of this package with the same values.

Bits are moved, and nothing is rounded. A row of a file gives a row of each stored tensor, so rows may come in any
order.

| kind | becomes | kind | becomes |
|---|---|---|---|
| Q8_0 | `int8` in groups of 32 | Q4_0 | `int4` in groups of 32 |
| Q4_1, Q5_1 | `affine` with a bias | Q5_0 | `affine` of 5 bits |
| Q2_K, Q3_K, Q4_K, Q5_K, Q6_K | `affine` with the scales k2, k3, k4, k4, k6 | TQ1_0, TQ2_0 | `affine` of 2 bits |
| IQ4_NL, IQ4_XS, MXFP4, NVFP4 | `table4` | IQ3_S, IQ3_XXS | `table4`, see `lattices` |

Tensors of different kinds may be parts of one weight, such as gate and up of an expert. `ALTERNATIVES` has the wider
formats that hold the codes of a kind too.

Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.exports.gguf.blocks import E2M1_VALUES, IQ4_VALUES
from hf_trainweights.formats.affine import Affine, pack_codes
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.table4 import Table4
from hf_trainweights.imports.gguf.lattices import IQ3_S_VALUES, IQ3_XXS_VALUES, decode_iq3_s, decode_iq3_xxs
from hf_trainweights.imports.layouts.base import AGAIN


@dataclass(frozen=True)
class Blocks:
    """A way to hold the blocks of a kind.

    Args:
        format: The format of the weight that they become.
        decode: Returns the stored tensors of rows, `[n, ...]` each, of the blocks of these rows, uint8
            `[n, blocks, bytes of a block]`.
        shared: The stored tensors that all rows share, `[1, k]` each.
    """

    format: Format
    decode: Callable[[Tensor], dict[str, Tensor]]
    shared: Mapping[str, Tensor] = field(default_factory=dict)


def _halves(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """Return float16 numbers of each block, `[n, blocks * count]`."""
    return blocks[..., start : start + 2 * count].contiguous().view(torch.float16).flatten(1)


def _fields(octets: Tensor, bits: int) -> Tensor:
    """Return the fields of bytes `[*, b]`, those in the lowest bits of all bytes first, `[*, 8 / bits * b]`."""
    mask = 2**bits - 1
    return torch.cat([(octets >> shift).bitwise_and_(mask) for shift in range(0, 8, bits)], dim=-1)


def _runs(octets: Tensor, size: int, bits: int) -> Tensor:
    """Return the fields of bytes `[*, b]` as `_fields` does, of one run of `size` bytes after another."""
    return _fields(octets.unflatten(-1, (-1, size)), bits).flatten(-2)


# Codes, uint8 `[n, blocks, columns of a block]`.


def _old_codes(start: int, has_high_bits: bool) -> Callable[[Tensor], Tensor]:
    """Return the function that reads blocks of 32: perhaps four bytes of fifth bits, then the low bits."""

    def read(blocks: Tensor) -> Tensor:
        if not has_high_bits:
            return _fields(blocks[..., start:], 4)
        shifts = torch.arange(8, dtype=torch.uint8)
        high = (blocks[..., start : start + 4].unsqueeze(-1) >> shifts).bitwise_and_(1).flatten(-2)
        return _fields(blocks[..., start + 4 :], 4).bitwise_or_(high.bitwise_left_shift_(4))

    return read


def _q2_k_codes(blocks: Tensor) -> Tensor:
    return _runs(blocks[..., 16:80], 32, 2)


def _q3_k_codes(blocks: Tensor) -> Tensor:
    return _runs(blocks[..., 32:96], 32, 2).bitwise_or_(_fields(blocks[..., :32], 1).bitwise_left_shift_(2))


def _q4_k_codes(blocks: Tensor) -> Tensor:
    return _runs(blocks[..., 16:], 32, 4)


def _q5_k_codes(blocks: Tensor) -> Tensor:
    return _runs(blocks[..., 48:], 32, 4).bitwise_or_(_fields(blocks[..., 16:48], 1).bitwise_left_shift_(4))


def _q6_k_codes(blocks: Tensor) -> Tensor:
    high = _runs(blocks[..., 128:192], 32, 2).bitwise_left_shift_(4)
    return _runs(blocks[..., :128], 64, 4).bitwise_or_(high)


def _tq2_0_codes(blocks: Tensor) -> Tensor:
    """Return codes of 1 to 3, because 2 stands for 0 in `affine` of 2 bits, and 1 does in a file."""
    codes = _runs(blocks[..., :64], 32, 2)
    if bool((codes == 3).any()):
        raise CorruptFileError("TQ2_0", "codes of 0, 1 and 2", "3", AGAIN)
    return codes + 1


def _tq1_0_codes(blocks: Tensor) -> Tensor:
    """Return codes of 1 to 3 as `_tq2_0_codes` does: a byte has five digits of base 3, or four in the last bytes."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8).unsqueeze(-1)
    digits = [
        (blocks[..., start : start + size].unsqueeze(-2) * powers[:count]).flatten(-2)
        for start, size, count in ((0, 32, 5), (32, 16, 5), (48, 4, 4))
    ]
    # A byte b stands for the fraction b / 256, whose digits in base 3 are the codes. Times 3**k modulo 256 removes the
    # first k digits. Times 3, divided by 256, is the next one.
    return (torch.cat(digits, dim=-1).short() * 3 >> 8).to(torch.uint8) + 1


# Decoders: functions from blocks to stored tensors.

_Decode = Callable[[Tensor], dict[str, Tensor]]


def _plain(
    codes: Callable[[Tensor], Tensor], bits: int, scale_start: int = 0, bias_start: int | None = None
) -> _Decode:
    """Return the decoder of blocks with a float16 scale each, and perhaps a float16 bias."""

    def decode(blocks: Tensor) -> dict[str, Tensor]:
        stored = {"qdata": pack_codes(codes(blocks).flatten(1), bits), "scale": _halves(blocks, scale_start)}
        return stored if bias_start is None else {**stored, "bias": _halves(blocks, bias_start)}

    return decode


def _superblock(
    codes: Callable[[Tensor], Tensor], bits: int, scale: tuple[int, int], octets: tuple[int, int]
) -> _Decode:
    """Return the decoder of superblocks: `scale` is the start and number of float16 numbers, `octets` of bytes."""

    def decode(blocks: Tensor) -> dict[str, Tensor]:
        start, count = octets
        group_scale = blocks[..., start : start + count].flatten(1)
        return {
            "qdata": pack_codes(codes(blocks).flatten(1), bits),
            "scale": _halves(blocks, *scale),
            "group_scale": group_scale,
        }

    return decode


def _in_int8(codes: Callable[[Tensor], Tensor], values: Tensor) -> _Decode:
    """Return the decoder to `int8` of blocks with a float16 scale at their start; `values[code]` is an int8."""

    def decode(blocks: Tensor) -> dict[str, Tensor]:
        numbers = values.to(torch.int8).index_select(0, codes(blocks).flatten().int())
        return {"qdata": numbers.view(len(blocks), -1), "scale": _halves(blocks, 0)}

    return decode


def _q8_0(blocks: Tensor) -> dict[str, Tensor]:
    return {"qdata": blocks[..., 2:].contiguous().view(torch.int8).flatten(1), "scale": _halves(blocks, 0)}


def _q3_k_in_six_bits(blocks: Tensor) -> dict[str, Tensor]:
    """Return Q3_K's codes and scales as Q6_K has them."""
    octets = blocks[..., 96:108]
    low, high = _fields(octets[..., :8], 4), _fields(octets[..., 8:], 2)
    scales = (high.bitwise_left_shift_(4).bitwise_or_(low)).view(torch.int8).sub_(32).view(torch.uint8)
    codes = _q3_k_codes(blocks).add_(32 - 4)  # 4 stands for 0 in Q3_K, 32 does in Q6_K
    return {"qdata": pack_codes(codes.flatten(1), 6), "scale": _halves(blocks, 108), "group_scale": scales.flatten(1)}


def _mxfp4(blocks: Tensor) -> dict[str, Tensor]:
    return {"qdata": pack_codes(_fields(blocks[..., 1:], 4).flatten(1), 4), "scale": blocks[..., 0].contiguous()}


def _nvfp4(blocks: Tensor) -> dict[str, Tensor]:
    scale = blocks[..., :4].flatten(1).view(torch.float8_e4m3fn)
    return {"qdata": pack_codes(_runs(blocks[..., 4:], 8, 4).flatten(1), 4), "scale": scale}


def _table4(group_size: int, scales: str, values: Tensor, decode: _Decode) -> Blocks:
    return Blocks(Table4(group_size, scales), decode, {"table": values.to(torch.float32).unsqueeze(0)})


_NIBBLES = _old_codes(2, has_high_bits=False)
_FIVE_BITS = _old_codes(2, has_high_bits=True)
_SCALES_K4 = ((0, 2), (4, 12))

ALTERNATIVES: dict[str, tuple[Blocks, ...]] = {
    "Q4_0": (
        Blocks(Int4(32), _plain(_NIBBLES, 4)),
        Blocks(Int8(32), _in_int8(_NIBBLES, torch.arange(-8, 8, device="cpu"))),
    ),
    "Q4_1": (
        Blocks(Affine(4, 32, "plain", "bias"), _plain(_old_codes(4, False), 4, bias_start=2)),
        Blocks(Affine(5, 32, "plain", "bias"), _plain(_old_codes(4, False), 5, bias_start=2)),
    ),
    "Q5_0": (
        Blocks(Affine(5, 32, "plain", "none"), _plain(_FIVE_BITS, 5)),
        Blocks(Int8(32), _in_int8(_FIVE_BITS, torch.arange(-16, 16, device="cpu"))),
    ),
    "Q5_1": (Blocks(Affine(5, 32, "plain", "bias"), _plain(_old_codes(4, True), 5, bias_start=2)),),
    "Q8_0": (Blocks(Int8(32), _q8_0),),
    "Q2_K": (Blocks(Affine(2, 16, "k2", "none"), _superblock(_q2_k_codes, 2, (80, 2), (0, 16))),),
    "Q3_K": (
        Blocks(Affine(3, 16, "k3", "none"), _superblock(_q3_k_codes, 3, (108, 1), (96, 12))),
        Blocks(Affine(6, 16, "k6", "none"), _q3_k_in_six_bits),
    ),
    "Q4_K": (
        Blocks(Affine(4, 32, "k4", "none"), _superblock(_q4_k_codes, 4, *_SCALES_K4)),
        Blocks(Affine(5, 32, "k4", "none"), _superblock(_q4_k_codes, 5, *_SCALES_K4)),
    ),
    "Q5_K": (Blocks(Affine(5, 32, "k4", "none"), _superblock(_q5_k_codes, 5, *_SCALES_K4)),),
    "Q6_K": (Blocks(Affine(6, 16, "k6", "none"), _superblock(_q6_k_codes, 6, (208, 1), (192, 16))),),
    "TQ1_0": (Blocks(Affine(2, 256, "plain", "none"), _plain(_tq1_0_codes, 2, scale_start=52)),),
    "TQ2_0": (Blocks(Affine(2, 256, "plain", "none"), _plain(_tq2_0_codes, 2, scale_start=64)),),
    "IQ4_NL": (_table4(32, "plain", IQ4_VALUES, _plain(_NIBBLES, 4)), Blocks(Int8(32), _in_int8(_NIBBLES, IQ4_VALUES))),
    "IQ4_XS": (
        _table4(32, "iq4_xs", IQ4_VALUES, _superblock(lambda blocks: _runs(blocks[..., 8:], 16, 4), 4, (0, 1), (2, 6))),
    ),
    "IQ3_S": (_table4(32, "iq4_xs", IQ3_S_VALUES, decode_iq3_s),),
    "IQ3_XXS": (_table4(32, "iq4_xs", IQ3_XXS_VALUES, decode_iq3_xxs),),
    "MXFP4": (_table4(32, "e8m0", E2M1_VALUES, _mxfp4),),
    "NVFP4": (_table4(16, "e4m3", E2M1_VALUES, _nvfp4),),
}
"""The ways to hold each kind of blocks exactly, the smallest first."""

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""The dtypes of the kinds that hold one float a value."""
