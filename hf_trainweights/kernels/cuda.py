"""int8 and int4 products on NVIDIA GPUs: Triton kernels for few rows of x, a dequantized weight for many.

No GPU has run the kernels yet. They were run by Triton's interpreter and compiled for compute capability 8.0 and 9.0,
so before a kernel is used for the first time on a device it multiplies a small matrix there, and a product with the
dequantized weight is the judge. Where it fails, a warning says so and the dequantized weight serves from then on.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_trainweights.formats.base import Format
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels.guards import Needs, guarded

_logger = logging.getLogger(__name__)

# The largest M for the kernels; beyond it dequantizing once and a product by cuBLAS should be faster. Not measured.
# float32 stays float32 (no TF32), without tensor cores, where a larger tile does not fit the registers.
_KERNEL_ROWS = {torch.bfloat16: 512, torch.float16: 512, torch.float32: 16}

# The least M for a product of integers, as torch._int_mm wants it, and what divides N and K there.
_INTEGER_ROWS, _INTEGER_ALIGNMENT = 17, 8
# About so many rows are rounded and multiplied at a time: their float32 values and sums take twice as much as x.
_INTEGER_BLOCK_ROWS = 2048

# A product for one row: rows of the weight and columns that a program takes at a time. 32 codes a thread, 16 bytes or
# more a load.
_ROW_BLOCK = {"BLOCK_N": 4, "BLOCK_K": 1024, "num_warps": 4}

# Columns are divided among programs until there are so many, two for each processor of a large GPU, but a program
# takes no fewer than so many blocks of columns. Not measured.
_PROGRAMS, _LEAST_BLOCKS = 256, 4

# Weights dequantized at a time: 128 MB of bfloat16.
_DEQUANTIZED_ELEMENTS = 1 << 26

# What a product in float32 may differ by, as a part of its norm; products of 16 bits may by the unit of their dtype.
_FLOAT32_ERROR = 1e-6

# Below it 127 / top would overflow.
_SMALLEST_TOP = 2.0**-119


class Tile(NamedTuple):
    """What a program takes of products with several rows; none spills a register where K is a multiple of 16."""

    M: int
    N: int
    K: int
    warps: int
    stages: int


# By ascending M; the last one serves all larger M.
_TILES = [Tile(16, 64, 128, 4, 3), Tile(64, 64, 128, 8, 3), Tile(128, 128, 64, 8, 3)]
_FLOAT32_TILE = Tile(16, 64, 64, 4, 3)

# Whether a kernel gives right products: by device, format, dtype of x and of the scales, and tile.
_CHECKED: dict[tuple[object, ...], bool] = {}


def serves(x: Tensor, qdata: Tensor, group_size: int | None) -> bool:
    """Return whether the ops are to be used for these tensors: on a GPU for which Triton compiles the kernels."""
    fits = group_size is None or (group_size >= 8 and group_size.bit_count() == 1)
    return fits and x.device == qdata.device and x.device.type == "cuda" and _compiles(x.device.index)


@functools.cache
def _compiles(index: int | None) -> bool:
    # Looked for, not imported: that takes a second and is left to the first product.
    found = importlib.util.find_spec("triton") is not None and torch.version.cuda is not None
    return found and torch.cuda.is_available() and torch.cuda.get_device_capability(index) >= (8, 0)


def linear_int8(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, quantize_x: bool) -> Tensor:
    """Return `F.linear(x, weight, bias)`, the implementation of `hf_trainweights::int8_linear` for CUDA."""
    K, G = qdata.shape[1], scale.shape[1]
    rows = x.reshape(x.shape[:-1].numel(), K)
    with torch.cuda.device_of(x):
        if quantize_x and len(rows) >= _INTEGER_ROWS and not any(size % _INTEGER_ALIGNMENT for size in qdata.shape):
            out = multiply_integers(rows, qdata, scale, bias)
        else:
            out = _multiply(rows, qdata, scale, bias, Int8(None if G == 1 else K // G))
    return out.view(*x.shape[:-1], len(qdata))


def linear_int4(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear(x, weight, bias)`, the implementation of `hf_trainweights::int4_linear` for CUDA."""
    K = x.shape[-1]
    with torch.cuda.device_of(x):
        out = _multiply(x.reshape(x.shape[:-1].numel(), K), qdata, scale, bias, Int4(K // scale.shape[1]))
    return out.view(*x.shape[:-1], len(qdata))


def _multiply(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, form: Int8 | Int4) -> Tensor:
    fits = 0 < len(x) <= _KERNEL_ROWS.get(x.dtype, 0) and qdata.numel() > 0
    if fits and _gives_right_products(x, scale.dtype, form):
        return multiply(x, qdata, scale, bias)
    return multiply_dequantized(x, qdata, scale, bias, form)


@guarded(
    "the Triton kernels",
    Needs("x", ("M", "K"), any_strides=True),
    Needs("qdata", ("N", "columns"), (torch.int8, torch.int32), any_strides=True),
    Needs("scale", ("N", "G"), any_strides=True),
    Needs("bias", ("N",), any_strides=True),
    rules={"codes of K columns": lambda s: s["K"] in (s["columns"], 8 * s["columns"]) and s["K"] % s["G"] == 0},
)
def multiply(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear(x, weight, bias)` of x `[M, K]`, not empty, by a kernel for int8 codes or words of int4.

    Scales are of a dtype no wider than that of x.
    """
    (M, K), (N, G) = x.shape, scale.shape
    # Rows may lie apart, as those of a slice do; the codes of one may not.
    x, qdata, scale = x.contiguous(), qdata if qdata.stride(1) == 1 else qdata.contiguous(), scale.contiguous()
    bias = None if bias is None else bias.contiguous()
    sizes = (N, K, qdata.stride(0), G)
    kind = {"BITS": 4 if qdata.dtype == torch.int32 else 8, "GROUP": 0 if G == 1 else K // G}
    out = x.new_empty(M, N)
    if M == 1:
        grid = (-(-N // _ROW_BLOCK["BLOCK_N"]),)
        _kernels().multiply_row[grid](x, qdata, scale, bias, out, *sizes, **kind, **_ROW_BLOCK)
        return out
    tile = _tile(M, x.dtype)
    programs, blocks = -(-M // tile.M) * -(-N // tile.N), -(-K // tile.K)
    blocks_of_part = -(-blocks // max(1, min(_PROGRAMS // programs, blocks // _LEAST_BLOCKS)))
    parts = -(-blocks // blocks_of_part)
    sums = out if parts == 1 else x.new_empty(parts, M, N, dtype=torch.float32)
    _kernels().multiply_tiles[-(-M // tile.M), -(-N // tile.N), parts](
        *(x, qdata, scale, bias if parts == 1 else None, sums, M, *sizes, blocks_of_part),
        **kind,
        BLOCK_M=tile.M,
        BLOCK_N=tile.N,
        BLOCK_K=tile.K,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if parts == 1:
        return out
    total = sums.sum(0)
    return (total if bias is None else total.add_(bias)).to(x.dtype)


@functools.cache
def _kernels() -> Any:
    # By name, because what types Triton gives its functions depends on whether it is installed.
    return importlib.import_module("hf_trainweights.kernels.triton_products")


def _tile(M: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return _FLOAT32_TILE
    return next((tile for tile in _TILES if M <= tile.M), _TILES[-1])


_int_mm = guarded(
    "torch._int_mm",
    Needs("first", ("M", "K"), (torch.int8,)),
    Needs("second", ("K", "N"), (torch.int8,), any_strides=True),
    rules={"M >= 17, 8 to divide K and N": lambda s: s["M"] >= _INTEGER_ROWS and s["K"] % 8 == s["N"] % 8 == 0},
)(torch.ops.aten._int_mm.default)


def multiply_integers(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear(x, weight, bias)` with each row of x `[M, K]` rounded to int8, one scale a row.

    M is at least 17; K and N are multiples of 8.
    """
    codes, factors, out = qdata.contiguous().t(), scale.view(-1), x.new_empty(len(x), len(qdata))
    count = -(-len(x) // _INTEGER_BLOCK_ROWS)
    for rows, block in zip(x.tensor_split(count), out.tensor_split(count), strict=True):
        values = rows.float()
        top = values.abs().amax(-1, keepdim=True).clamp_min_(_SMALLEST_TOP).mul_(1 / 127)
        rounded = (values / top).round_().to(torch.int8)
        product = _int_mm(rounded, codes).float().mul_(top).mul_(factors)
        block.copy_(product if bias is None else product.add_(bias))
    return out


def multiply_dequantized(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, form: Format) -> Tensor:
    """Return `F.linear(x, weight, bias)` of x `[M, K]` and the dequantized weight, a block of it at a time."""
    K, N = x.shape[1], len(qdata)
    step = max(1, _DEQUANTIZED_ELEMENTS // max(1, K))
    out = []
    for part in (slice(start, start + step) for start in range(0, max(1, N), step)):
        weight = form.dequantize_rows({"qdata": qdata[part], "scale": scale[part]}, K, x.dtype)
        out.append(F.linear(x, weight, None if bias is None else bias[part]))
    return out[0] if len(out) == 1 else torch.cat(out, dim=1)


def _gives_right_products(x: Tensor, scale_dtype: torch.dtype, form: Int8 | Int4) -> bool:
    """Return whether the kernel for x is right on its device; while a CUDA graph is captured only if that is known."""
    M = 1 if len(x) == 1 else _tile(len(x), x.dtype).M
    key = (x.device, form, x.dtype, scale_dtype, M)
    if key not in _CHECKED:
        if torch.cuda.is_current_stream_capturing():
            return False
        _CHECKED[key] = _check(M, x.dtype, scale_dtype, x.device, form)
    return _CHECKED[key]


def _check(M: int, dtype: torch.dtype, scale_dtype: torch.dtype, device: torch.device, form: Int8 | Int4) -> bool:
    """Return whether a kernel multiplies small weights as it should, in one part of K and in several."""
    span = form.group_size or 16
    try:
        # A sum, because it is NaN where one of them is.
        difference = sum(_difference(M, 80, K, dtype, scale_dtype, device, form) for K in (2 * span, 1024 + 2 * span))
    # Whatever goes wrong inside Triton, its compiler or its driver: the weight can still be dequantized.
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    else:
        if difference <= max(torch.finfo(dtype).eps, _FLOAT32_ERROR):
            return True
        reason = f"its products differ by {difference:.2g} of their norm"
    _logger.warning(
        "The Triton kernel for %s, %s and %d rows fails on %s (%s). Weights are dequantized instead, which is slower.",
        *(form, dtype, M, device, reason),
    )
    return False


def _difference(
    M: int, N: int, K: int, dtype: torch.dtype, scale_dtype: torch.dtype, device: torch.device, form: Int8 | Int4
) -> float:
    # The sines of squares are as good as random here, and leave the state of torch's generators alone.
    numbers = torch.arange(max(M, N) * K, dtype=torch.float64, device=device).square_()
    tensors = form.quantize(numbers.mul(0.7).sin_()[: N * K].view(N, K).to(scale_dtype))
    x = numbers.mul(0.3).cos_()[: M * K].view(M, K).to(dtype)
    exact = x.double() @ form.dequantize_rows(tensors, K, torch.float64).t() + 1
    result = multiply(x, tensors["qdata"], tensors["scale"], x.new_ones(N))
    return ((result.double() - exact).norm() / exact.norm()).item()
