"""Products with int4 weights in tiles, as which uint4 weights in groups of 32 lie there too: few rows by PyTorch's op.

For many rows a block of tiles is dequantized and multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_trainweights.kernels import int4_tiles
from hf_trainweights.kernels.arguments import MultiplyFew, check_allocated, only_fitting
from hf_trainweights.kernels.cpu_features import product_dtype
from hf_trainweights.kernels.guards import Needs, guarded
from hf_trainweights.kernels.int4_codes import codes_of, offsets_of, sixteenth, weight_of
from hf_trainweights.kernels.int4_tiles import Int4Tiles
from hf_trainweights.kernels.registration import define

# The largest M for PyTorch's op: docs/performance.md, "Thresholds".
MOST_ROWS = 32

# Weights that are dequantized at once, and the least rows of them: 2 MB of bfloat16.
_BLOCK_ELEMENTS, _BLOCK_ROWS = 1 << 20, 256


def linear(x: Tensor, held: Mapping[str, Tensor], layout: Int4Tiles, bias: Tensor | None) -> Tensor | None:
    """Return the product with what `Int4Tiles` holds; None where x is of another device or dtype than the scales."""
    qdata, scale = held["qdata"], held["scale"]
    on_cpu = x.device.type == "cpu" and x.dtype == scale.dtype
    return LINEAR(x, qdata, scale, bias, layout.tile_rows) if on_cpu else None


def prepare_few_rows(held: Mapping[str, Tensor], layout: Int4Tiles, dtype: torch.dtype) -> MultiplyFew | None:
    """As `hf_trainweights.kernels.prepare_few_rows`, of what `Int4Tiles` holds."""
    qdata, scale = held["qdata"], held["scale"]
    if qdata.dim() != 2 or layout.tile_rows != int4_tiles.tile_rows() or scale.dtype != dtype:
        return None
    N, K = qdata.shape[0], qdata.shape[1] * 2

    def multiply(x: Tensor, bias: Tensor | None) -> Tensor:
        check_allocated(x, qdata, scale, bias)
        return _add(int4_tiles.multiply_tiles(x.view(-1, K), qdata, scale), bias).view(*x.shape[:-1], N)

    return only_fitting(multiply, N, K, dtype, MOST_ROWS)


def _empty_linear(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, tile_rows: int) -> Tensor:
    del scale, bias, tile_rows
    return x.new_empty((*x.shape[:-1], qdata.shape[0]))


def _linear_cpu(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, tile_rows: int) -> Tensor:
    check_allocated(x, qdata, scale, bias)
    (N, K), G, half = (qdata.shape[0], x.shape[-1]), scale.shape[0], tile_rows // 2
    rows = x.reshape(-1, K)
    # A program that was exported on another CPU brings the tiles of that one.
    if len(rows) <= MOST_ROWS and tile_rows == int4_tiles.tile_rows():
        return _add(int4_tiles.multiply_tiles(rows.contiguous(), qdata, scale), bias).view(*x.shape[:-1], N)
    tiles = qdata.view(-1).view(torch.int64).view(-1, K, half // 8)
    dtype = product_dtype(x.dtype, len(rows))
    scales = sixteenth(scale[..., 0], dtype).view(G, 1, -1, 2, half).transpose(2, 3)
    offsets = offsets_of(scale, dtype)
    offsets = None if offsets is None else offsets.view(G, 1, -1, 2, half).transpose(2, 3)
    rows = rows.to(dtype)
    out = rows.new_empty(len(rows), len(tiles), 2, half)
    block = max(_BLOCK_ROWS, _BLOCK_ELEMENTS // K) // tile_rows
    for start in range(0, len(tiles), block):
        words = tiles[start : start + block].transpose(0, 1)
        n = words.shape[1]
        # Columns of the block: the first half of every tile, then the second, as the nibbles of a byte are laid out.
        factors = scales[:, :, :, start : start + n].reshape(G, 1, -1)
        added = None if offsets is None else offsets[:, :, :, start : start + n].reshape(G, 1, -1)
        weight = weight_of(codes_of(words).view(G, K // G, -1), factors, dtype, added)
        product = torch.mm(rows, weight.view(K, -1))
        out[:, start : start + n] = product.view(-1, 2, n, half).transpose(1, 2)
    return _add(out.view(-1, N), bias).to(x.dtype).view(*x.shape[:-1], N)


def _add(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out.add_(bias)


_guard = guarded(
    "hf_trainweights::int4_tiled_linear",
    Needs("x", ("*", "K"), any_strides=True),
    Needs("qdata", ("N", "half"), (torch.uint8,)),
    Needs("scale", ("G", "N", 2)),
    Needs("bias", ("N",), any_strides=True),
    rules={"K to be twice the bytes of a row": lambda sizes: sizes["K"] == 2 * sizes["half"]},
)

LINEAR = define(
    "int4_tiled_linear(Tensor x, Tensor qdata, Tensor scale, Tensor? bias, int tile_rows) -> Tensor",
    _empty_linear,
    CPU=_guard(_linear_cpu),
)
