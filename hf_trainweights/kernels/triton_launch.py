"""Launches of the Triton kernels: each function returns the product of one weight, or the weight itself."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_trainweights.formats.base import Format
from hf_trainweights.formats.float8_e4m3 import LARGEST

# Triton calls one instance of a kernel, which computes one tile, a program.
# Columns are divided among programs until there are 256 programs, two for each processor of a large GPU, but a program
# takes at least two blocks of columns.
_PROGRAMS, _LEAST_BLOCKS = 256, 2

# The block of a weight that a program dequantizes, and the elements that a program of other kernels takes.
_DEQUANTIZED_BLOCK = {"BLOCK_N": 16, "BLOCK_K": 256, "num_warps": 4}
_ELEMENTS = {"BLOCK": 1024, "num_warps": 4}

# N, K, the stride of a row of codes, and G.
Sizes = tuple[int, int, int, int]

# Rows whose largest magnitude is below this one use this one: 127 or 448 divided by a smaller number could be infinite.
_SMALLEST_TOP = 2.0**-119
_LARGEST_INTEGER = 127

# From x `[*, K]`, contiguous, and a bias `[N]` or None to the product `[*, N]`.
Run = Callable[[Tensor, Tensor | None], Tensor]


class Stored(NamedTuple):
    """The stored tensors of a weight `[N, K]`, their format, and K."""

    tensors: Mapping[str, Tensor]
    form: Format
    K: int

    @property
    def N(self) -> int:  # noqa: N802  (the field's name)
        """The number of rows."""
        return self.tensors["qdata"].shape[-2]


def multiply_row(weight: Stored, M: int, dtype: torch.dtype, tile: Mapping[str, int]) -> Run:
    """Return the function for products of one row of x, in `dtype`, with int8 codes or words of int4.

    Scales have the same dtype, or perhaps a narrower one.
    """
    del M, dtype
    qdata, scale, sizes, kind = _stored(weight)
    N = len(scale)
    launch = _launcher("multiply_row", (-(-N // tile["BLOCK_N"]), 1, 1), sizes, {**kind, **tile})

    def run(x: Tensor, bias: Tensor | None) -> Tensor:
        out = x.new_empty(*x.shape[:-1], N)
        launch(x, qdata, scale, bias, out)
        return out

    return run


def multiply_tiles(weight: Stored, M: int, dtype: torch.dtype, tile: Mapping[str, int]) -> Run:
    """Return the function for products of M rows of 16-bit x; scales have the same dtype, K is a multiple of 4."""
    del dtype
    qdata, scale, (N, K, _, G), kind = _stored(weight)
    words = qdata.view(torch.int32)
    rows, columns, blocks = -(-M // tile["BLOCK_M"]), -(-N // tile["BLOCK_N"]), -(-K // tile["BLOCK_K"])
    # Each section of the columns has programs of its own, whose sums are added up at the end.
    section_blocks = -(-blocks // max(1, min(_PROGRAMS // (rows * columns), blocks // _LEAST_BLOCKS)))
    sections = -(-blocks // section_blocks)
    all_sizes = M, N, K, words.stride(0), G, section_blocks
    launch = _launcher("multiply_tiles", (rows, columns, sections), all_sizes, {**kind, **tile})
    add = _launcher("add_sections", _programs(M * N), (sections, M * N, N), _ELEMENTS)

    def run(x: Tensor, bias: Tensor | None) -> Tensor:
        out = x.new_empty(*x.shape[:-1], N)
        if sections == 1:
            launch(x, words, scale, bias, out)
        else:
            sums = x.new_empty(sections, M, N, dtype=torch.float32)
            launch(x, words, scale, None, sums)
            add(sums, bias, out)
        return out

    return run


def _stored(weight: Stored) -> tuple[Tensor, Tensor, Sizes, dict[str, int]]:
    """Return codes and scales that kernels can read, their sizes and the constants of their format."""
    qdata, scale, K = weight.tensors["qdata"], weight.tensors["scale"], weight.K
    # Rows may lie apart, as in a slice. The codes of a row have to lie side by side, and words of four begin aligned.
    if qdata.stride(1) != 1 or (K % 4 == 0 and (qdata.stride(0) * qdata.itemsize | qdata.data_ptr()) % 4):
        qdata = qdata.clone(memory_format=torch.contiguous_format)
    N, G = scale.shape
    kind = {"BITS": 4 if qdata.dtype == torch.int32 else 8, "GROUP": 0 if G == 1 else K // G}
    return qdata, scale.contiguous(), (N, K, qdata.stride(0), G), kind


def _launcher(
    name: str, grid: tuple[int, int, int], sizes: tuple[float, ...], constants: Mapping[str, int]
) -> Callable[..., None]:
    """Return a function that launches a kernel on tensors; None stands for no bias.

    From call to call only the addresses of the tensors may change. The compiled kernel is kept: to find it takes
    Triton 14 us of the time of an H100's CPU, the launch itself 8.
    """
    kernel = getattr(kernels("triton_products"), name)
    positional = [value for constant, value in constants.items() if constant.isupper()]
    compiled: dict[tuple[int, ...], Callable[..., None]] = {}

    def launch(*tensors: Tensor | None) -> None:
        # Triton compiles another kernel for addresses that are no multiples of 16 bytes, and for no bias.
        alignments = tuple([-1 if tensor is None else tensor.data_ptr() % 16 for tensor in tensors])
        if alignments in compiled:
            compiled[alignments](*tensors, *sizes, *positional)
        else:
            program = kernel[grid](*tensors, *sizes, **constants)
            if program is not None:  # as in Triton's interpreter
                compiled[alignments] = program[grid]

    return launch


@functools.cache
def kernels(module: str) -> Any:
    """Return the module of kernels with this name, which imports Triton."""
    # Imported as Any, so that type checkers judge this module alike whether Triton is installed or not.
    return importlib.import_module(f"hf_trainweights.kernels.{module}")


def _programs(elements: int) -> tuple[int, int, int]:
    return -(-elements // _ELEMENTS["BLOCK"]), 1, 1


def multiply_integers(weight: Stored, M: int, dtype: torch.dtype, tile: Mapping[str, int]) -> Run:
    """Return the function for products of rows of x, each rounded to int8 with one scale, with int8 codes."""
    del M, dtype
    qdata, scale, sizes, _ = _stored(weight)
    (N, K, row_stride, _), products = sizes, kernels("triton_products")

    def run(x: Tensor, bias: Tensor | None) -> Tensor:
        M, out = x.numel() // K, x.new_empty(*x.shape[:-1], N)
        codes, row_factors = x.new_empty(M, K, dtype=torch.int8), x.new_empty(M, dtype=torch.float32)
        products.round_rows[(M,)](x, codes, row_factors, K, _SMALLEST_TOP, _LARGEST_INTEGER, **_ELEMENTS)
        programs = -(-M // tile["BLOCK_M"]) * -(-N // tile["BLOCK_N"])
        products.multiply_codes[(programs,)](codes, row_factors, qdata, scale, bias, out, M, N, K, row_stride, **tile)
        return out

    return run


def multiply_float8(weight: Stored, M: int, dtype: torch.dtype, tile: Mapping[str, int]) -> Run:
    """Return the function for products of rows of x, each rounded to float8 with one scale, with float8 codes.

    PyTorch's product scales the sums. 16 divides N and K.
    """
    del M, tile
    codes_of_weight, products = weight.tensors["qdata"].contiguous().t(), kernels("triton_products")
    scale = weight.tensors["scale"].to(torch.float32).t().contiguous()

    def run(x: Tensor, bias: Tensor | None) -> Tensor:
        M, K = x.numel() // x.shape[-1], x.shape[-1]
        codes, row_factors = x.new_empty(M, K, dtype=torch.float8_e4m3fn), x.new_empty(M, 1, dtype=torch.float32)
        products.round_rows[(M,)](x, codes, row_factors, K, _SMALLEST_TOP, LARGEST, **_ELEMENTS)
        product = torch.ops.aten._scaled_mm(codes, codes_of_weight, row_factors, scale, bias, out_dtype=dtype)
        return product.view(*x.shape[:-1], -1)

    return run


def dequantize(weight: Stored, M: int, dtype: torch.dtype, tile: Mapping[str, int]) -> Callable[[], Tensor]:
    """Return a function that returns the float weight `[N, K]`, not empty, each element rounded once to `dtype`."""
    del M, tile
    qdata, scale, sizes, kind = _stored(weight)
    N, K, block = len(scale), weight.K, _DEQUANTIZED_BLOCK
    launch = _launcher(
        "dequantize_tiles", (-(-N // block["BLOCK_N"]), -(-K // block["BLOCK_K"]), 1), sizes, kind | block
    )

    def run() -> Tensor:
        out = scale.new_empty(N, K, dtype=dtype)
        launch(qdata, scale, out)
        return out

    return run
