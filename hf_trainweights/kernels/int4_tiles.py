"""int4 weights as torch._weight_int4pack_mm_for_cpu reads them: a layout of this CPU's memory, never of a file.

| tensor | shape | dtype |
|---|---|---|
| `qdata` | `[*, N, K // 2]`, in memory `[*, N // tile_rows, K, tile_rows // 2]` | uint8 |
| `scale` | `[*, K // group_size, N, 2]`: the scale, and the zero point 0 | bfloat16 |

Byte j of column k of a tile holds rows j (low nibble) and j + tile_rows / 2 (high nibble), each as code + 8. How many
rows a tile has depends on the instructions that PyTorch finds: 64 with AVX-512, 32 with AVX2.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_trainweights.formats.base import Format
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.kernels import compiled
from hf_trainweights.kernels.cpu_features import has_amx
from hf_trainweights.kernels.guards import Needs, guarded
from hf_trainweights.kernels.layouts import Layout

_logger = logging.getLogger(__name__)

# What each thread moves at a time, and what it is moved through, stay in the second-level cache.
_BLOCK_BYTES = 1 << 19


@dataclass(frozen=True)
class Int4Tiles(Layout):
    """The tensors of `Int4` in another order; no code and no scale changes.

    Args:
        tile_rows: Rows of a tile: 64 or 32, as `tile_rows()` finds it.
    """

    name: ClassVar[str] = "int4_tiles"
    tile_rows: int

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether tiles can hold an int4 weight.

        Args:
            shape: Shape of the stored weight, `[*, N, K]`.
        """
        return 0 not in shape and shape[-2] % self.tile_rows == 0

    def take_rows(self, held: Mapping[str, Tensor], indices: Tensor) -> dict[str, Tensor]:
        """Return `Int4`'s tensors of some rows."""
        qdata, half = held["qdata"], self.tile_rows // 2
        scale = torch.embedding(held["scale"][..., 0].t(), indices)
        tiles = qdata.view(-1, qdata.shape[1], 2, half)
        octets = tiles[indices // self.tile_rows, :, :, indices % half]
        shift = (indices % self.tile_rows // half * 4).to(torch.uint8)
        even, odd = (octets >> shift.view(-1, 1, 1) & 15).unbind(-1)
        return {"qdata": (even | (odd << 4)).view(torch.int32), "scale": scale}

    def from_canonical(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `Int4`'s tensors as tiles."""
        qdata, scale = tensors["qdata"].contiguous(), tensors["scale"]
        rows = qdata.view(torch.int16).view(-1, 2, self.tile_rows // 4, 2, qdata.shape[-1] * 2)
        tiles = rows.new_empty(len(rows), rows.shape[-1], 2, 2, self.tile_rows // 4)
        _exchange_codes(rows.permute(3, 0, 1, 2, 4), tiles.permute(2, 0, 3, 4, 1))
        scale_and_zero = scale.new_zeros(*scale.mT.shape, 2)
        scale_and_zero[..., 0] = scale.mT
        return {"qdata": tiles.view(torch.uint8).view(*qdata.shape[:-1], -1), "scale": scale_and_zero}

    def to_canonical(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `Int4`'s tensors from tiles."""
        qdata, scale = held["qdata"].contiguous(), held["scale"]
        tiles = qdata.view(torch.int16).view(-1, qdata.shape[-1] // 2, 2, 2, self.tile_rows // 4)
        rows = tiles.new_empty(len(tiles), 2, self.tile_rows // 4, 2, tiles.shape[1])
        _exchange_codes(tiles.permute(2, 0, 3, 4, 1), rows.permute(3, 0, 1, 2, 4))
        qdata = rows.view(torch.uint8).view(qdata.shape).view(torch.int32)
        return {"qdata": qdata, "scale": scale[..., 0].mT.contiguous()}


def _exchange_codes(source: Tensor, target: Tensor) -> None:
    """Copy words of four codes of a row to words of four codes of a column, or back: the same exchange of codes.

    In between, words of two rows, and of the two halves of a tile, exchange parts of their bits eight bytes at a time.
    Both are transposed 2 by 2 matrices, and words move in half the time that bytes take.

    Args:
        source: Int16, `[2, tiles, 2, tile_rows / 4, K / 4]`: row of a pair, tile, half of the tile, pair, word.
        target: The same, of another memory layout; filled.
    """
    # A slice may have no experts, and thus no tiles.
    step = max(1, _BLOCK_BYTES * torch.get_num_threads() // max(1, source[:, :1].nbytes))
    buffer = source.new_empty(2, min(step, source.shape[1]), *source.shape[2:])
    scratch = buffer.new_empty(buffer.numel() // 8, dtype=torch.int64)
    for given, filled in zip(source.split(step, dim=1), target.split(step, dim=1), strict=True):
        words = buffer[:, : given.shape[1]]
        wide = words.copy_(given).view(torch.int64)
        _exchange(wide[0], wide[1], 8, 0x00FF00FF00FF00FF, scratch)
        _exchange(wide[:, :, 0], wide[:, :, 1], 4, 0x0F0F0F0F0F0F0F0F, scratch)
        filled.copy_(words)


def _exchange(first: Tensor, second: Tensor, bits: int, mask: int, scratch: Tensor) -> None:
    """Exchange, in place, what `mask` covers of `first >> bits` and of `second`."""
    difference = torch.bitwise_right_shift(first, bits, out=scratch[: first.numel()].view(first.shape))
    second.bitwise_xor_(difference.bitwise_xor_(second).bitwise_and_(mask))
    first.bitwise_xor_(difference.bitwise_left_shift_(bits))


def choose_layout(form: Format, shape: Sequence[int], dtype: torch.dtype) -> Int4Tiles | None:
    """Return the tiles that this CPU has an op for, or None: also where compiled products read the stored tensors.

    Args:
        form: The format of the weight; every group size fits.
        shape: Shape of an int4 weight on the CPU, as stored.
        dtype: Dtype of its scales and of the activations.
    """
    del form
    # With AMX, PyTorch's products of many rows are faster.
    return None if compiled.is_available() and not has_amx() else find_tiles(shape, dtype)


def find_tiles(shape: Sequence[int], dtype: torch.dtype) -> Int4Tiles | None:
    """Return the tiles in which PyTorch's op multiplies a weight of four bits, or None where it is none of its.

    Args:
        shape: Shape of the weight on the CPU, as stored.
        dtype: Dtype of its scales and of the activations.
    """
    # For float16 and float32 the op is scalar: at M = 4 it takes 25 times as long as F.linear.
    rows = tile_rows() if dtype == torch.bfloat16 else None
    tiles = None if rows is None else Int4Tiles(rows)
    return tiles if tiles is not None and tiles.fits(shape) else None


@functools.cache
def tile_rows() -> int | None:
    """Return the rows of a tile on this machine, None if PyTorch's op reads another layout than the two known.

    Found by multiplying the unit matrix with a weight of all codes and both signs: that checks the op's arithmetic too.
    """
    # Whoever builds a skeleton on the meta device may be the first to ask.
    with torch.device("cpu"):
        return _find_tile_rows()


def _find_tile_rows() -> int | None:
    N, K = 64, 32
    codes = (torch.arange(N * K) * 7 // 3 % 16 - 8).view(N, K).to(torch.float32)
    codes[:, 0] = -8.0
    weight = codes * torch.where(torch.arange(N) % 3 == 0, -0.5, 0.25).unsqueeze(1)
    tensors = Int4(32).quantize(weight.to(torch.bfloat16))
    expected = Int4(32).dequantize(tensors, (N, K), torch.bfloat16)
    for rows in (64, 32):
        tiles = Int4Tiles(rows).from_canonical(tensors)
        try:
            product = multiply_tiles(torch.eye(K, dtype=torch.bfloat16), tiles["qdata"], tiles["scale"])
        except (AttributeError, RuntimeError) as error:
            _logger.debug("torch._weight_int4pack_mm_for_cpu: %s", error)
            return None
        if torch.equal(product.t(), expected):
            return rows
    _logger.debug("torch._weight_int4pack_mm_for_cpu reads an unknown layout on this CPU: int4 is dequantized instead.")
    return None


@guarded(
    "torch._weight_int4pack_mm_for_cpu",
    Needs("x", ("M", "K")),
    Needs("qdata", ("N", "half"), (torch.uint8,)),
    Needs("scale", ("G", "N", 2)),
    rules={
        "K to be twice the bytes of a row": lambda sizes: sizes["K"] == 2 * sizes["half"],
        "G to divide K": lambda sizes: sizes["G"] > 0 and sizes["K"] % sizes["G"] == 0,
        "N to be a multiple of 32": lambda sizes: sizes["N"] % 32 == 0,
    },
)
def multiply_tiles(x: Tensor, qdata: Tensor, scale: Tensor) -> Tensor:
    """Return `x @ weight.t()` by PyTorch's own op.

    Args:
        x: `[M, K]`, contiguous, of the dtype of `scale`.
        qdata: Tiles of a weight `[N, K]`.
        scale: `[K // group_size, N, 2]`.

    Returns:
        A new tensor `[M, N]`.
    """
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, qdata, x.shape[1] // scale.shape[0], scale)
