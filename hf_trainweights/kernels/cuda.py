"""What int8 and int4 weights do on NVIDIA GPUs: Triton kernels multiply few rows of x, and dequantize for many.

Before a kernel is used for the first time on a device it computes something small there, and the plain operations of
PyTorch are the judge. Where it fails, a warning says so and these serve from then on.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_trainweights.formats.base import Format
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8

_logger = logging.getLogger(__name__)

# The largest M for the kernels; beyond it a dequantized weight is multiplied faster. All sizes here were measured on an
# H200. float32 has no product by tensor cores.
_MOST_ROWS = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 1}

# The least M for a product of integers, as torch._int_mm wants it, and what divides N and K there.
_INTEGER_ROWS, _INTEGER_ALIGNMENT = 17, 8

# A product for one row, by the bits of a code: rows of the weight and columns that a program takes at a time.
_ROW_BLOCK = {
    8: {"BLOCK_N": 2, "BLOCK_K": 2048, "num_warps": 4},
    4: {"BLOCK_N": 8, "BLOCK_K": 1024, "num_warps": 4},
}

# Columns are divided among programs until there are so many, two for each processor of a large GPU, but a program
# takes no fewer than so many blocks of columns.
_PROGRAMS, _LEAST_BLOCKS = 256, 2

# What a program dequantizes, and how many elements it takes where it goes through them one by one.
_DEQUANTIZED_BLOCK = {"BLOCK_N": 16, "BLOCK_K": 256, "num_warps": 4}
_ELEMENTS = {"BLOCK": 1024, "num_warps": 4}

# What a product in float32 may differ by, as a part of its norm; products of 16 bits may by the unit of their dtype.
_FLOAT32_ERROR = 1e-6

# Below it 127 / top would overflow.
_SMALLEST_TOP = 2.0**-119


# What a program takes of products with several rows, by ascending M; it fits the 99 kB of shared memory of the smallest
# GPUs.
_TILES = [
    {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 256, "num_warps": 4, "num_stages": 3},
    {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3},
    {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4},
]


class Case(NamedTuple):
    """A kernel on a device, and what it computes: with so many rows of x, 0 for no product."""

    kernel: Callable[..., Tensor]
    M: int
    dtype: torch.dtype
    scale_dtype: torch.dtype
    device: torch.device
    form: Int8 | Int4


# Whether a kernel is right.
_CHECKED: dict[Case, bool] = {}


def serves(x: Tensor, qdata: Tensor, group_size: int | None) -> bool:
    """Return whether the ops are to be used for these tensors: on a GPU for which Triton compiles the kernels."""
    return _fits(group_size) and x.device == qdata.device and x.device.type == "cuda" and _compiles(x.device.index)


def _fits(group_size: int | None) -> bool:
    return group_size is None or (group_size >= 8 and group_size.bit_count() == 1)


@functools.cache
def _compiles(index: int | None) -> bool:
    # Looked for, not imported: that takes a second and is left to the first product.
    found = importlib.util.find_spec("triton") is not None and torch.version.cuda is not None
    return found and torch.cuda.is_available() and torch.cuda.get_device_capability(index) >= (8, 0)


def linear(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, form: Int8 | Int4) -> Tensor | None:
    """Return `F.linear(x, weight, bias)` of x `[*, K]` and a weight that `serves`.

    None: a dequantized weight is faster, or no kernel is right.
    """
    M, N, K = x.shape[:-1].numel(), len(qdata), x.shape[-1]
    arguments = x.reshape(M, K), qdata, scale, bias
    if min(M, N, K) == 0:
        return None
    with torch.cuda.device_of(x):
        by_integers = isinstance(form, Int8) and form.activations is not None and M >= _INTEGER_ROWS
        if by_integers and N % _INTEGER_ALIGNMENT == K % _INTEGER_ALIGNMENT == 0:
            kernel, rows = multiply_integers, _INTEGER_ROWS
        elif M == 1 or (K % 4 == 0 and 1 < M <= _MOST_ROWS[x.dtype]):
            kernel, rows = multiply, M if M == 1 else _tile(M)["BLOCK_M"]
        else:
            return None
        if not _is_right(Case(kernel, rows, x.dtype, scale.dtype, x.device, form)):
            return None
        return kernel(*arguments).view(*x.shape[:-1], N)


def dequantize_rows(tensors: Mapping[str, Tensor], form: Format, K: int, dtype: torch.dtype) -> Tensor | None:
    """Return what `form.dequantize_rows` returns of matrices, bit for bit; None where no kernel does it."""
    if not isinstance(form, (Int8, Int4)) or dtype not in _MOST_ROWS or not _fits(form.group_size):
        return None
    qdata, scale = tensors["qdata"], tensors["scale"]
    if qdata.dim() != 2 or qdata.numel() == 0 or not _compiles(qdata.device.index):
        return None
    with torch.cuda.device_of(qdata):
        is_right = _is_right(Case(dequantize, 0, dtype, scale.dtype, qdata.device, form))
        return dequantize(qdata, scale, K, dtype) if is_right else None


def multiply(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear(x, weight, bias)` of x `[M, K]`, not empty, by a kernel for int8 codes or words of int4.

    Scales are of the dtype of x, or narrower ones where M is 1. Four codes of int8 must divide K where it is not.
    """
    (M, K), N = x.shape, len(scale)
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    qdata, scale, sizes, kind = _stored(qdata, scale, K)
    out = x.new_empty(M, N)
    if M == 1:
        block = _ROW_BLOCK[kind["BITS"]]
        grid = (-(-N // block["BLOCK_N"]),)
        _kernels().multiply_row[grid](x, qdata, scale, bias, out, *sizes, **kind, **block)
        return out
    words = qdata.view(torch.int32)
    tile = _tile(M)
    rows, columns, blocks = -(-M // tile["BLOCK_M"]), -(-N // tile["BLOCK_N"]), -(-K // tile["BLOCK_K"])
    blocks_of_part = -(-blocks // max(1, min(_PROGRAMS // (rows * columns), blocks // _LEAST_BLOCKS)))
    parts = -(-blocks // blocks_of_part)
    sums = out if parts == 1 else x.new_empty(parts, M, N, dtype=torch.float32)
    arguments = x, words, scale, bias if parts == 1 else None, sums, M, N, K, words.stride(0), sizes[-1], blocks_of_part
    _kernels().multiply_tiles[rows, columns, parts](*arguments, **kind, **tile)
    if parts > 1:
        _kernels().add_parts[_programs(out)](sums, bias, out, parts, out.numel(), N, **_ELEMENTS)
    return out


def _stored(qdata: Tensor, scale: Tensor, K: int) -> tuple[Tensor, Tensor, tuple[int, int, int, int], dict[str, int]]:
    """Return tensors that kernels read, their sizes and the constants of their format."""
    # Rows may lie apart, as those of a slice do; the codes of one may not, and they begin at whole words.
    if qdata.stride(1) != 1 or (K % 4 == 0 and (qdata.stride(0) * qdata.itemsize | qdata.data_ptr()) % 4):
        qdata = qdata.clone(memory_format=torch.contiguous_format)
    N, G = scale.shape
    kind = {"BITS": 4 if qdata.dtype == torch.int32 else 8, "GROUP": 0 if G == 1 else K // G}
    return qdata, scale.contiguous(), (N, K, qdata.stride(0), G), kind


@functools.cache
def _kernels() -> Any:
    # By name, because what types Triton gives its functions depends on whether it is installed.
    return importlib.import_module("hf_trainweights.kernels.triton_products")


def _tile(M: int) -> dict[str, int]:
    return next((tile for tile in _TILES if tile["BLOCK_M"] >= M), _TILES[-1])


def _programs(out: Tensor) -> tuple[int]:
    return (-(-out.numel() // _ELEMENTS["BLOCK"]),)


def multiply_integers(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear(x, weight, bias)` with each row of x `[M, K]` rounded to int8, one scale a row.

    M is at least 17; K and N are multiples of 8.
    """
    (M, K), N = x.shape, len(qdata)
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    codes, tops = x.new_empty(M, K, dtype=torch.int8), x.new_empty(M, dtype=torch.float32)
    _kernels().round_rows[(M,)](x, codes, tops, K, _SMALLEST_TOP, **_ELEMENTS)
    products, out = torch.ops.aten._int_mm(codes, qdata.contiguous().t()), x.new_empty(M, N)
    _kernels().scale_products[_programs(out)](
        products, tops, scale.contiguous(), bias, out, out.numel(), N, **_ELEMENTS
    )
    return out


def dequantize(qdata: Tensor, scale: Tensor, K: int, dtype: torch.dtype) -> Tensor:
    """Return the weight `[N, K]`, not empty, each element rounded once to `dtype`."""
    qdata, scale, sizes, kind = _stored(qdata, scale, K)
    out, block = scale.new_empty(len(scale), K, dtype=dtype), _DEQUANTIZED_BLOCK
    grid = -(-len(scale) // block["BLOCK_N"]), -(-K // block["BLOCK_K"])
    _kernels().dequantize_tiles[grid](qdata, scale, out, *sizes, **kind, **block)
    return out


def _is_right(case: Case) -> bool:
    """Return whether a kernel is right on a device; while a CUDA graph is captured only if that is known."""
    if case not in _CHECKED:
        if torch.cuda.is_current_stream_capturing():
            return False
        _CHECKED[case] = _check(case)
    return _CHECKED[case]


def _check(case: Case) -> bool:
    """Return whether a kernel computes as it should with small weights, with one block of K and with several."""
    span = case.form.group_size or 16
    try:
        # A sum, because it is NaN where one of them is.
        difference = sum(_difference(case, 80, K) for K in (2 * span, 1024 + 2 * span))
    # Whatever goes wrong inside Triton, its compiler or its driver: the weight can still be dequantized.
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    else:
        if difference <= max(torch.finfo(case.dtype).eps, _FLOAT32_ERROR):
            return True
        reason = f"its results differ by {difference:.2g} of their norm"
    _logger.warning(
        "The Triton kernel `%s` for %s, %s and %d rows fails on %s (%s). PyTorch's operations serve, which are slower.",
        *(case.kernel.__name__, case.form, case.dtype, case.M, case.device, reason),
    )
    return False


def _difference(case: Case, N: int, K: int) -> float:
    # The sines of squares are as good as random here, and leave the state of torch's generators alone.
    numbers = torch.arange(max(case.M, N) * K, dtype=torch.float64, device=case.device).square_()
    tensors = case.form.quantize(numbers.mul(0.7).sin_()[: N * K].view(N, K).to(case.scale_dtype))
    qdata, scale, exact = tensors["qdata"], tensors["scale"], case.form.dequantize_rows(tensors, K, torch.float64)
    if case.kernel is dequantize:
        result = dequantize(qdata, scale, K, case.dtype)
    else:
        x = numbers.mul(0.3).cos_()[: case.M * K].view(case.M, K)
        if case.kernel is multiply_integers:  # whole multiples of a power of two, and one largest: no rounding
            x = x.mul_(126).round_().div_(64)
            x[:, 0] = 127 / 64
        x = x.to(case.dtype)
        exact = x.double() @ exact.t() + 1
        result = case.kernel(x, qdata, scale, x.new_ones(N))
    return ((result.double() - exact).norm() / exact.norm()).item()
