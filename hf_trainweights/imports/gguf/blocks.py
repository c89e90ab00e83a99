"""The kinds of blocks that a GGUF file holds a weight in, and the stored tensors of this package with the same values.

Only bits are moved. A row of a file gives a row of each stored tensor, so rows can be read in any order.

| kind | becomes | kind | becomes |
|---|---|---|---|
| Q8_0 | `int8` in groups of 32 | Q4_0 | `int4` in groups of 32 |

Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_trainweights.formats.base import Format
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.packing import pack_int4


@dataclass(frozen=True)
class Blocks:
    """A kind of blocks.

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


def _q8_0(blocks: Tensor) -> dict[str, Tensor]:
    return {"qdata": blocks[..., 2:].contiguous().view(torch.int8).flatten(1), "scale": _halves(blocks, 0)}


def _q4_0(blocks: Tensor) -> dict[str, Tensor]:
    codes = _fields(blocks[..., 2:], 4).view(torch.int8).sub_(8)
    return {"qdata": pack_int4(codes.flatten(1)), "scale": _halves(blocks, 0)}


BLOCKS = {
    "Q8_0": Blocks(Int8(32), _q8_0),
    "Q4_0": Blocks(Int4(32), _q4_0),
}

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""The dtypes of the kinds that hold one float a value."""
