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

from hf_trainweights.formats.base import BLOCK_ELEMENTS, Format
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.packing import CODES_PER_WORD

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Int4Tiles(Int4):
    """The tensors of `Int4` in another order; no code and no scale changes.

    Args:
        group_size: As for `Int4`.
        tile_rows: Rows of a tile: 64 or 32, as `tile_rows()` finds it.

    Raises:
        ConfigError: `group_size` is none that `Int4` has.
    """

    name: ClassVar[str] = "int4_tiles"
    tile_rows: int = 64

    @property
    def canonical(self) -> Int4:
        """The format of files."""
        return Int4(self.group_size)

    def fallback(self, shape: Sequence[int]) -> Format:
        """Return the canonical format where the tiles do not divide N."""
        fits = 0 not in shape and shape[-2] % self.tile_rows == 0
        return self if fits and self.canonical.fallback(shape) == self.canonical else self.canonical.fallback(shape)

    def tensor_specs(
        self, shape: Sequence[int], scale_dtype: torch.dtype
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return `qdata` as `[*, N, K // 2]` uint8 and `scale` as `[*, K // group_size, N, 2]`."""
        *lead, N, K = shape
        return {
            "qdata": ((*lead, N, K // 2), torch.uint8),
            "scale": ((*lead, K // self.group_size, N, 2), scale_dtype),
        }

    def shape_of(self, qdata: Tensor) -> tuple[int, ...]:
        """Return `[*, N, K]`, two columns for each byte of a row."""
        return (*qdata.shape[:-1], qdata.shape[-1] * 2)

    def quantize(self, weight: Tensor, name: str = "weight") -> dict[str, Tensor]:
        """Quantize to the canonical format, then tile.

        Args:
            weight: As for `Int4`.
            name: What errors call the weight.

        Raises:
            QuantizationError: The weight is none that `Int4` can hold.
        """
        return self.from_canonical(self.canonical.quantize(weight, name))

    def dequantize_rows(self, tensors: Mapping[str, Tensor], K: int, dtype: torch.dtype) -> Tensor:
        """Return what the canonical tensors stand for."""
        return self.canonical.dequantize_rows(self.to_canonical(tensors), K, dtype)

    def take_rows(self, tensors: Mapping[str, Tensor], indices: Tensor) -> dict[str, Tensor]:
        """Return `Int4`'s tensors of some rows."""
        qdata, half = tensors["qdata"], self.tile_rows // 2
        scale = torch.embedding(tensors["scale"][..., 0].t(), indices)
        tiles = qdata.view(-1, qdata.shape[1], 2, half)
        octets = tiles[indices // self.tile_rows, :, :, indices % half]
        shift = (indices % self.tile_rows // half * 4).to(torch.uint8)
        even, odd = (octets >> shift.view(-1, 1, 1) & 15).unbind(-1)
        return {"qdata": (even | (odd << 4)).view(torch.int32), "scale": scale}

    def from_canonical(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `Int4`'s tensors as tiles."""
        qdata, scale = tensors["qdata"].contiguous(), tensors["scale"]
        half = self.tile_rows // 2
        octets = qdata.view(torch.uint8).view(-1, 2, half, qdata.shape[-1] * CODES_PER_WORD // 2)
        tiles = octets.new_empty(len(octets), octets.shape[-1], 2, half)
        for source, target in self._blocks(octets, tiles):
            even, odd = _exchange_nibbles(source[:, 0], source[:, 1])
            target[:, :, 0] = even.transpose(1, 2)
            target[:, :, 1] = odd.transpose(1, 2)
        scale_and_zero = scale.new_zeros(*scale.mT.shape, 2)
        scale_and_zero[..., 0] = scale.mT
        return {"qdata": tiles.view(*qdata.shape[:-1], octets.shape[-1]), "scale": scale_and_zero}

    def to_canonical(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `Int4`'s tensors from tiles."""
        qdata, scale = tensors["qdata"].contiguous(), tensors["scale"]
        half = self.tile_rows // 2
        tiles = qdata.view(-1, qdata.shape[-1], 2, half)
        octets = tiles.new_empty(len(tiles), 2, half, tiles.shape[1])
        for source, target in self._blocks(tiles, octets):
            first, second = _exchange_nibbles(source[:, :, 0], source[:, :, 1])
            target[:, 0] = first.transpose(1, 2)
            target[:, 1] = second.transpose(1, 2)
        return {"qdata": octets.view(qdata.shape).view(torch.int32), "scale": scale[..., 0].mT.contiguous()}

    def _blocks(self, source: Tensor, target: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return matching parts of few tiles, so that temporaries stay small however large the weight is."""
        tiles = max(1, BLOCK_ELEMENTS // max(1, source[0].numel()))
        return list(zip(source.split(tiles), target.split(tiles), strict=True))


def _exchange_nibbles(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return both low nibbles in one byte and both high ones in another; its own inverse."""
    return (first & 15) | (second << 4), (first >> 4) | (second & 240)


def layout(form: Int4, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Format:
    """Return the layout in which a weight is multiplied fastest: tiles where this CPU has an op for them.

    Args:
        form: Format of the weight.
        shape: Shape of the stored weight.
        dtype: Dtype of its scales and of the activations.
        device: Where it is.
    """
    # For float16 and float32 the op is scalar: at M = 4 it takes 25 times as long as F.linear.
    rows = tile_rows() if device.type == "cpu" and dtype == torch.bfloat16 else None
    if rows is None:
        return form
    tiles = Int4Tiles(form.group_size, rows)
    return tiles if tiles.fallback(shape) == tiles else form


@functools.cache
def tile_rows() -> int | None:
    """Return the rows of a tile on this machine, None if PyTorch's op reads another layout than the two known.

    Found by multiplying the unit matrix with a weight of all codes and both signs: that checks the op's arithmetic too.
    """
    N, K = 64, 32
    codes = (torch.arange(N * K) * 7 // 3 % 16 - 8).view(N, K).to(torch.float32)
    codes[:, 0] = -8.0
    weight = codes * torch.where(torch.arange(N) % 3 == 0, -0.5, 0.25).unsqueeze(1)
    tensors = Int4(32).quantize(weight.to(torch.bfloat16))
    expected = Int4(32).dequantize(tensors, (N, K), torch.bfloat16)
    for rows in (64, 32):
        tiles = Int4Tiles(32, rows).from_canonical(tensors)
        try:
            product = multiply_tiles(torch.eye(K, dtype=torch.bfloat16), tiles["qdata"], tiles["scale"])
        except (AttributeError, RuntimeError) as error:
            _logger.debug("torch._weight_int4pack_mm_for_cpu: %s", error)
            return None
        if torch.equal(product.t(), expected):
            return rows
    _logger.debug("torch._weight_int4pack_mm_for_cpu reads an unknown layout on this CPU: int4 is dequantized instead.")
    return None


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
