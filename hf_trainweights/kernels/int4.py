"""int4 weights on a CPU: a few rows by PyTorch's own op on tiles, many by products with dequantized blocks.

On a CPU a bfloat16 weight lies in memory in tiles (`int4_tiles`) where that op takes them; otherwise, and for float16
and float32, as it is on disk. A block of either is dequantized in whole words: eight nibbles at a time become bytes of
16 * code, which one conversion and one product with scale / 16 make weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.packing import CODES_PER_WORD
from hf_trainweights.kernels import compiled, cuda, int4_tiles
from hf_trainweights.kernels.cpu_features import product_dtype
from hf_trainweights.kernels.guards import Needs, guarded
from hf_trainweights.kernels.int4_tiles import Int4Tiles, multiply_tiles
from hf_trainweights.kernels.registration import define
from hf_trainweights.kernels.scratch import SCRATCH

# The largest M for PyTorch's op: docs/performance.md, "Thresholds".
TILED_ROWS = 32

# Weights that are dequantized at once, and the least rows of them: 2 MB of bfloat16.
BLOCK_ELEMENTS = 1 << 20
BLOCK_ROWS = 256

# The highest bit of each nibble, and the high nibble of each byte.
_MASKS = {
    dtype: tuple(int.from_bytes(bytes([byte]) * dtype.itemsize, "little", signed=True) for byte in (0x88, 0xF0))
    for dtype in (torch.int32, torch.int64)
}


def linear(
    x: Tensor, held: Mapping[str, Tensor], form: Int4, layout: Int4Tiles | None, bias: Tensor | None
) -> Tensor | None:
    """As `hf_trainweights.kernels.linear`.

    Args:
        x: `[*, K]`.
        held: `qdata` and `scale`.
        form: The format.
        layout: The tiles that they are in; None for the stored tensors.
        bias: `[N]` or None.
    """
    qdata, scale = held["qdata"], held["scale"]
    if x.dtype not in FLOAT_DTYPES or torch.promote_types(scale.dtype, x.dtype) != x.dtype:
        return None
    if layout is None:
        served = x.device.type == "cpu" or cuda.serves(x, qdata, form.group_size)
        return LINEAR(x, qdata, scale, bias) if served else None
    on_cpu = x.device.type == "cpu" and x.dtype == scale.dtype
    return TILED_LINEAR(x, qdata, scale, bias, layout.tile_rows) if on_cpu else None


def prepare_few_rows(
    held: Mapping[str, Tensor], form: Int4, layout: Int4Tiles | None, dtype: torch.dtype
) -> compiled.MultiplyFew | None:
    """As `hf_trainweights.kernels.prepare_few_rows`: by PyTorch's op on tiles, compiled on the stored tensors.

    Args:
        held: `qdata` and `scale`.
        form: The format.
        layout: The tiles that they are in; None for the stored tensors.
        dtype: Dtype of x.
    """
    del form
    qdata, scale = held["qdata"], held["scale"]
    if layout is None and qdata.dim() == 2 and qdata.device.type == "cpu" and scale.dtype == dtype:
        product = _find_compiled(qdata, scale, dtype)
        return product and compiled.settle(product, qdata, scale, dtype, compiled.most_rows(dtype))
    if layout is None or layout.tile_rows != int4_tiles.tile_rows() or scale.dtype != dtype:
        return None
    if qdata.dim() != 2:
        return None
    N, K = qdata.shape[0], qdata.shape[1] * 2

    def multiply_few(x: Tensor, bias: Tensor | None) -> Tensor | None:
        M = x.numel() // K
        if not 0 < M <= TILED_ROWS or not x.is_contiguous():
            return None
        return _add(multiply_tiles(x.view(M, K), qdata, scale), bias).view(*x.shape[:-1], N)

    return multiply_few


def slowness(form: Int4, dtype: torch.dtype) -> str | None:
    """As `hf_trainweights.kernels.slowness`: without compiled products only PyTorch's op in bfloat16 is fast.

    Args:
        form: The format of the weights.
        dtype: Dtype that they show.
    """
    del form
    if compiled.leaves_many_rows(dtype):
        return (
            "int4 weights in float32: on this CPU a product of many tokens takes longer than one with float weights. "
            'int8 with activations="int8" is fast.'
        )
    if dtype == torch.bfloat16 or compiled.is_available():
        return None
    return (
        "int4 weights without bfloat16 activations: on the CPU they take longer than float weights. "
        "dtype=torch.bfloat16, or int8, is fast."
    )


def _empty_linear(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    del scale, bias
    return x.new_empty((*x.shape[:-1], qdata.shape[0]))


def _empty_tiled_linear(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, tile_rows: int) -> Tensor:
    del tile_rows
    return _empty_linear(x, qdata, scale, bias)


def _find_compiled(qdata: Tensor, scale: Tensor, dtype: torch.dtype) -> compiled.Product | None:
    N, K = len(qdata), qdata.shape[1] * CODES_PER_WORD
    return compiled.find(N, K, K // max(1, scale.shape[1]), 4, dtype, scale.dtype, False)


def _linear_cpu(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    product = _find_compiled(qdata, scale, x.dtype)
    if product is not None and 0 < x.numel() // x.shape[-1] <= compiled.most_rows(x.dtype):
        return product.of_any_strides(x, qdata, scale, bias)
    (N, K), G = (qdata.shape[0], x.shape[-1]), scale.shape[1]
    # Even columns, then odd ones, as the nibbles of a block are laid out.
    rows = x.reshape(-1, K // 2, 2).transpose(1, 2).reshape(-1, K)
    dtype = product_dtype(x.dtype, len(rows))
    rows, scale = rows.to(dtype), _sixteenth(scale, dtype).view(N, 1, G, 1)
    out = rows.new_empty(len(rows), N)
    block = max(BLOCK_ROWS, BLOCK_ELEMENTS // K)
    for start in range(0, N, block):
        words = qdata[start : start + block]
        n = len(words)
        weight = _weight(_codes(words).view(n, 2, G, -1), scale[start : start + n], dtype)
        out[:, start : start + n] = torch.mm(rows, weight.view(n, K).t())
    return _add(out, bias).to(x.dtype).view(*x.shape[:-1], N)


def _tiled_linear_cpu(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, tile_rows: int) -> Tensor:
    (N, K), G, half = (qdata.shape[0], x.shape[-1]), scale.shape[0], tile_rows // 2
    rows = x.reshape(-1, K)
    # A program that was exported on another CPU brings the tiles of that one.
    if len(rows) <= TILED_ROWS and tile_rows == int4_tiles.tile_rows():
        return _add(multiply_tiles(rows.contiguous(), qdata, scale), bias).view(*x.shape[:-1], N)
    tiles = qdata.view(-1).view(torch.int64).view(-1, K, half // 8)
    dtype = product_dtype(x.dtype, len(rows))
    scales = _sixteenth(scale[..., 0], dtype).view(G, 1, -1, 2, half).transpose(2, 3)
    offsets = _offsets(scale, dtype)
    offsets = None if offsets is None else offsets.view(G, 1, -1, 2, half).transpose(2, 3)
    rows = rows.to(dtype)
    out = rows.new_empty(len(rows), len(tiles), 2, half)
    block = max(BLOCK_ROWS, BLOCK_ELEMENTS // K) // tile_rows
    for start in range(0, len(tiles), block):
        words = tiles[start : start + block].transpose(0, 1)
        n = words.shape[1]
        # Columns of the block: the first half of every tile, then the second, as the nibbles of a byte are laid out.
        factors = scales[:, :, :, start : start + n].reshape(G, 1, -1)
        added = None if offsets is None else offsets[:, :, :, start : start + n].reshape(G, 1, -1)
        weight = _weight(_codes(words).view(G, K // G, -1), factors, dtype, added)
        product = torch.mm(rows, weight.view(K, -1))
        out[:, start : start + n] = product.view(-1, 2, n, half).transpose(1, 2)
    return _add(out.view(-1, N), bias).to(x.dtype).view(*x.shape[:-1], N)


def _codes(words: Tensor) -> Tensor:
    """Return 16 * code of the low and of the high nibble of every byte.

    Args:
        words: Nibbles of code + 8, `[n, *]`, int32 or int64, any strides.

    Returns:
        int8 `[n, 2, bytes]` in scratch memory.
    """
    sign_bits, high_nibbles = _MASKS[words.dtype]
    # A nibble of code + 8 with its highest bit flipped is the code in two's complement.
    flipped = torch.bitwise_xor(words, sign_bits, out=SCRATCH.take("flipped", words.shape, words.dtype)).flatten(1)
    codes = SCRATCH.take("codes", (len(words), 2, flipped.shape[1]), words.dtype)
    torch.bitwise_and(flipped, high_nibbles, out=codes[:, 1])
    torch.bitwise_and(flipped.bitwise_left_shift_(4), high_nibbles, out=codes[:, 0])
    return codes.view(torch.int8)


def _sixteenth(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scale / 16 in the dtype in which `_weight` multiplies; exact but for bfloat16 scales below 2**-122."""
    return scale.to(_wide(dtype)) / 16


def _offsets(scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return 16 times what is added to the codes of each group, a whole number: of uint4, while int4 adds nothing."""
    scales, zeros = scale.float().unbind(-1)
    if not zeros.any():
        return None
    return (zeros / scales).nan_to_num_(0).round_().mul_(16).to(_wide(dtype))


def _weight(codes: Tensor, sixteenth: Tensor, dtype: torch.dtype, offsets: Tensor | None = None) -> Tensor:
    """Return codes, and what is added to them, times scales in scratch memory, each product rounded once."""
    wide = SCRATCH.take("wide", codes.shape, _wide(dtype)).copy_(codes)
    wide = (wide if offsets is None else wide.add_(offsets)).mul_(sixteenth)
    return wide if wide.dtype == dtype else SCRATCH.take("weight", codes.shape, dtype).copy_(wide)


def _wide(dtype: torch.dtype) -> torch.dtype:
    # PyTorch converts int8 to float16 one by one: .77 ns, and .15 ns by way of float32.
    return torch.float32 if dtype == torch.float16 else dtype


def _add(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out.add_(bias)


_guard = guarded(
    "hf_trainweights::int4_linear",
    Needs("x", ("*", "K"), any_strides=True),
    Needs("qdata", ("N", "words"), (torch.int32,)),
    Needs("scale", ("N", "G")),
    Needs("bias", ("N",), any_strides=True),
    rules={
        "K to be eight times the words": lambda sizes: sizes["K"] == 8 * sizes["words"],
        "G to divide K": lambda sizes: sizes["G"] > 0 and sizes["K"] % sizes["G"] == 0,
    },
)
_tiled_guard = guarded(
    "hf_trainweights::int4_tiled_linear",
    Needs("x", ("*", "K"), any_strides=True),
    Needs("qdata", ("N", "half"), (torch.uint8,)),
    Needs("scale", ("G", "N", 2)),
    Needs("bias", ("N",), any_strides=True),
    rules={"K to be twice the bytes of a row": lambda sizes: sizes["K"] == 2 * sizes["half"]},
)

LINEAR = define(
    "int4_linear(Tensor x, Tensor qdata, Tensor scale, Tensor? bias) -> Tensor",
    _empty_linear,
    CPU=_guard(_linear_cpu),
    CUDA=_guard(cuda.linear_int4),
)
TILED_LINEAR = define(
    "int4_tiled_linear(Tensor x, Tensor qdata, Tensor scale, Tensor? bias, int tile_rows) -> Tensor",
    _empty_tiled_linear,
    CPU=_tiled_guard(_tiled_linear_cpu),
)
