"""Products with int8 and int4 weights on NVIDIA GPUs: Triton kernels multiply few rows of x, and dequantize for many.

Before a kernel is used for the first time on a device, its results with small weights there are compared with those of
PyTorch's operations. If they differ, a warning says so and PyTorch's operations serve from then on.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_trainweights.formats.base import Format
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels.arguments import MultiplyFew
from hf_trainweights.kernels.cpu_features import is_rounding

_logger = logging.getLogger(__name__)

# The largest M for the kernels; beyond it a dequantized weight is multiplied faster. All sizes here were measured on an
# H200. float32 has no product by tensor cores.
_MOST_ROWS = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 1}

# torch._int_mm multiplies integers of at least so many rows, and this number has to divide N and K.
_INTEGER_ROWS, _INTEGER_ALIGNMENT = 17, 8

# Weights of so many elements are dequantized at a time, 128 MB of bfloat16; memory is the only bound.
DEQUANTIZED_ELEMENTS = 1 << 26

# For products of one row, by the bits of a code: rows of the weight and columns that a program takes at a time.
_ROW_BLOCK = {
    8: {"BLOCK_N": 2, "BLOCK_K": 2048, "num_warps": 4},
    4: {"BLOCK_N": 8, "BLOCK_K": 1024, "num_warps": 4},
}

# Columns are divided among programs until there are 256 programs, two for each processor of a large GPU, but a program
# takes at least two blocks of columns.
_PROGRAMS, _LEAST_BLOCKS = 256, 2

# The block of a weight that a program dequantizes, and the elements that a program takes if it handles each by itself.
_DEQUANTIZED_BLOCK = {"BLOCK_N": 16, "BLOCK_K": 256, "num_warps": 4}
_ELEMENTS = {"BLOCK": 1024, "num_warps": 4}

# The most that a product in float32 may be off, relative to its norm. In 16 bits it is the unit of the dtype.
_FLOAT32_ERROR = 1e-6

# N, K, the stride of a row of codes, and G.
Sizes = tuple[int, int, int, int]

# A smaller largest magnitude of a row counts as this one, or 127 / magnitude would overflow.
_SMALLEST_TOP = 2.0**-119

# For products of several rows, by ascending M: the tile that a program takes. It fits the 99 kB of shared memory of the
# smallest GPUs.
_TILES = [
    {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 256, "num_warps": 4, "num_stages": 3},
    {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3},
    {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4},
]

# From x `[*, K]`, contiguous, and a bias `[N]` or None to the product `[*, N]`.
Run = Callable[[Tensor, Tensor | None], Tensor]


class Case(NamedTuple):
    """A kernel, its device and its inputs: weights of a format and M rows of x. M is 0 for `dequantize`."""

    kernel: Callable[[Tensor, Tensor, int, int, torch.dtype], Any]
    M: int
    dtype: torch.dtype
    scale_dtype: torch.dtype
    device: torch.device
    form: Int8 | Int4


# The results of `_check`.
_CHECKED: dict[Case, bool] = {}


def serves(form: Format, qdata: Tensor, dtype: torch.dtype) -> TypeGuard[Int8 | Int4]:
    """Return whether a weight is on a GPU for which Triton compiles kernels that read it and compute in `dtype`."""
    if qdata.device.type != "cuda" or not isinstance(form, (Int8, Int4)) or dtype not in _MOST_ROWS:
        return False
    size = form.group_size
    return (size is None or (size >= 8 and size.bit_count() == 1)) and _compiles(qdata.device.index)


@functools.cache
def _compiles(index: int | None) -> bool:
    # Triton is not imported here: the import takes a second and is left to the first product.
    is_installed = importlib.util.find_spec("triton") is not None and torch.version.cuda is not None
    return is_installed and torch.cuda.is_available() and torch.cuda.get_device_capability(index) >= (8, 0)


def linear(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, form: Int8 | Int4) -> Tensor | None:
    """Return `F.linear(x, weight, bias)` of x `[*, K]` and a weight that `serves`; None if its kernel fails."""
    if x.numel() == 0 or len(scale) == 0:
        return None
    multiply_prepared = prepare(qdata, scale, form, x.shape[-1], x.dtype)
    return multiply_prepared(x.contiguous(), None if bias is None else bias.contiguous())


def prepare(qdata: Tensor, scale: Tensor, form: Int8 | Int4, K: int, dtype: torch.dtype) -> MultiplyFew:
    """Return `linear` of one weight, for contiguous x and bias of a dtype on its device: 20 us less of Python.

    The function remembers the kernel for each number of rows. From `last` rows on one kernel serves all numbers.
    """
    last = _INTEGER_ROWS if _meets_integers(form, len(scale), K) else _MOST_ROWS[dtype] + 1
    runs: dict[int, Run] = {}

    def multiply_prepared(x: Tensor, bias: Tensor | None) -> Tensor | None:
        M = x.numel() // K
        with torch.cuda.device_of(x):
            run = runs.get(min(M, last))
            if run is None:
                run = _find(qdata, scale, form, K, dtype, M)
                if run is None:
                    return None
                runs[min(M, last)] = run
            return run(x, bias)

    return multiply_prepared


def _meets_integers(form: Int8 | Int4, N: int, K: int) -> bool:
    """Return whether many rows of x are rounded to integers and multiplied as such."""
    return is_rounding(form) and N % _INTEGER_ALIGNMENT == K % _INTEGER_ALIGNMENT == 0


def _find(qdata: Tensor, scale: Tensor, form: Int8 | Int4, K: int, dtype: torch.dtype, M: int) -> Run | None:
    """Return the fastest function for M rows; None if its kernel failed its check or the weight is too large."""
    if M >= _INTEGER_ROWS and _meets_integers(form, len(scale), K):
        kernel, rows = multiply_integers, _INTEGER_ROWS
    elif M == 1 or (K % 4 == 0 and _MOST_ROWS[dtype] >= M):
        kernel, rows = multiply, M if M == 1 else _tile(M)["BLOCK_M"]
    else:
        make = _find_dequantize(qdata, scale, form, K, dtype) if len(scale) * K <= DEQUANTIZED_ELEMENTS else None
        return None if make is None else lambda x, bias: F.linear(x, make(), bias)
    is_right = _is_right(Case(kernel, rows, dtype, scale.dtype, qdata.device, form))
    return kernel(qdata, scale, K, M, dtype) if is_right else None


def _find_dequantize(
    qdata: Tensor, scale: Tensor, form: Int8 | Int4, K: int, dtype: torch.dtype
) -> Callable[[], Tensor] | None:
    """Return a function that dequantizes the weight; None if the kernel failed its check."""
    is_right = _is_right(Case(dequantize, 0, dtype, scale.dtype, qdata.device, form))
    return dequantize(qdata, scale, K, 0, dtype) if is_right else None


def dequantize_rows(tensors: Mapping[str, Tensor], form: Format, K: int, dtype: torch.dtype) -> Tensor | None:
    """Return the same bits as `form.dequantize_rows` for a matrix; None if no kernel computes them."""
    qdata, scale = tensors["qdata"], tensors["scale"]
    if qdata.dim() != 2 or qdata.numel() == 0 or not serves(form, qdata, dtype):
        return None
    with torch.cuda.device_of(qdata):
        make = _find_dequantize(qdata, scale, form, K, dtype)
        return None if make is None else make()


def multiply(qdata: Tensor, scale: Tensor, K: int, M: int, dtype: torch.dtype) -> Run:
    """Return the function for products of M rows of x, in `dtype`, with int8 codes or words of int4.

    Scales have the same dtype, or for M = 1 perhaps a narrower one. For M > 1 K is a multiple of 4.
    """
    qdata, scale, sizes, kind = _stored(qdata, scale, K)
    return _multiply_row(qdata, scale, sizes, kind) if M == 1 else _multiply_tiles(qdata, scale, sizes, kind, M)


def _multiply_row(qdata: Tensor, scale: Tensor, sizes: Sizes, kind: dict[str, int]) -> Run:
    N, block = len(scale), _ROW_BLOCK[kind["BITS"]]
    launch = _launcher("multiply_row", (-(-N // block["BLOCK_N"]), 1, 1), sizes, kind | block)

    def run(x: Tensor, bias: Tensor | None) -> Tensor:
        out = x.new_empty(*x.shape[:-1], N)
        launch(x, qdata, scale, bias, out)
        return out

    return run


def _multiply_tiles(qdata: Tensor, scale: Tensor, sizes: Sizes, kind: dict[str, int], M: int) -> Run:
    (N, K, _, G), words, tile = sizes, qdata.view(torch.int32), _tile(M)
    rows, columns, blocks = -(-M // tile["BLOCK_M"]), -(-N // tile["BLOCK_N"]), -(-K // tile["BLOCK_K"])
    # Each section of the columns has programs of its own, whose sums are added up at the end.
    section_blocks = -(-blocks // max(1, min(_PROGRAMS // (rows * columns), blocks // _LEAST_BLOCKS)))
    sections = -(-blocks // section_blocks)
    all_sizes = M, N, K, words.stride(0), G, section_blocks
    launch = _launcher("multiply_tiles", (rows, columns, sections), all_sizes, kind | tile)
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


def _stored(qdata: Tensor, scale: Tensor, K: int) -> tuple[Tensor, Tensor, Sizes, dict[str, int]]:
    """Return codes and scales that kernels can read, their sizes and the constants of their format."""
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

    From call to call only the addresses of the tensors may change. The compiled program is kept: to find it takes
    Triton 14 us of the time of an H100's CPU, the launch itself 8.
    """
    kernel = getattr(_kernels(), name)
    positional = [value for constant, value in constants.items() if constant.isupper()]
    compiled: dict[tuple[int, ...], Callable[..., None]] = {}

    def launch(*tensors: Tensor | None) -> None:
        # Triton compiles another program for addresses that are no multiples of 16 bytes, and for no bias.
        alignments = tuple([-1 if tensor is None else tensor.data_ptr() % 16 for tensor in tensors])
        if alignments in compiled:
            compiled[alignments](*tensors, *sizes, *positional)
        else:
            program = kernel[grid](*tensors, *sizes, **constants)
            if program is not None:  # as in Triton's interpreter
                compiled[alignments] = program[grid]

    return launch


@functools.cache
def _kernels() -> Any:
    # Imported by name, because the types of Triton's functions depend on whether it is installed.
    return importlib.import_module("hf_trainweights.kernels.triton_products")


def _tile(M: int) -> dict[str, int]:
    return next((tile for tile in _TILES if tile["BLOCK_M"] >= M), _TILES[-1])


def _programs(elements: int) -> tuple[int, int, int]:
    return -(-elements // _ELEMENTS["BLOCK"]), 1, 1


def multiply_integers(qdata: Tensor, scale: Tensor, K: int, M: int, dtype: torch.dtype) -> Run:
    """Return the function for products of 17 rows of x or more, each of which is rounded to int8 with one scale.

    K and N are multiples of 8.
    """
    del M, dtype
    codes_of_weight, scale, N, kernels = qdata.contiguous().t(), scale.contiguous(), len(scale), _kernels()

    def run(x: Tensor, bias: Tensor | None) -> Tensor:
        M, out = x.numel() // K, x.new_empty(*x.shape[:-1], N)
        codes, tops = x.new_empty(M, K, dtype=torch.int8), x.new_empty(M, dtype=torch.float32)
        kernels.round_rows[(M,)](x, codes, tops, K, _SMALLEST_TOP, **_ELEMENTS)
        products = torch.ops.aten._int_mm(codes, codes_of_weight)
        kernels.scale_products[_programs(M * N)](products, tops, scale, bias, out, M * N, N, **_ELEMENTS)
        return out

    return run


def dequantize(qdata: Tensor, scale: Tensor, K: int, M: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return a function that returns the float weight `[N, K]`, not empty, each element rounded once to `dtype`."""
    del M
    qdata, scale, sizes, kind = _stored(qdata, scale, K)
    N, block = len(scale), _DEQUANTIZED_BLOCK
    launch = _launcher(
        "dequantize_tiles", (-(-N // block["BLOCK_N"]), -(-K // block["BLOCK_K"]), 1), sizes, kind | block
    )

    def run() -> Tensor:
        out = scale.new_empty(N, K, dtype=dtype)
        launch(qdata, scale, out)
        return out

    return run


def _is_right(case: Case) -> bool:
    """Return whether a kernel passes its check. While a CUDA graph is captured a new check is impossible: False."""
    if case not in _CHECKED:
        if torch.cuda.is_current_stream_capturing():
            return False
        _CHECKED[case] = _check(case)
    return _CHECKED[case]


def _check(case: Case) -> bool:
    """Compare a kernel's results with exact ones, for small weights of one block of K and of several."""
    span = case.form.group_size or 16
    try:
        # A sum and not the larger one, because a sum is NaN if one of them is.
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
    # The sines of squares are as good as random here, and do not change the state of torch's generators.
    numbers = torch.arange(max(case.M, N) * K, dtype=torch.float64, device=case.device).square_()
    tensors = case.form.quantize(numbers.mul(0.7).sin_()[: N * K].view(N, K).to(case.scale_dtype))
    qdata, scale, exact = tensors["qdata"], tensors["scale"], case.form.dequantize_rows(tensors, K, torch.float64)
    run = case.kernel(qdata, scale, K, case.M, case.dtype)
    if case.kernel is dequantize:
        arguments: tuple[Tensor, ...] = ()
    else:
        x = numbers.mul(0.3).cos_()[: case.M * K].view(case.M, K)
        if case.kernel is multiply_integers:  # multiples of a power of two, and one largest element: no rounding
            x = x.mul_(126).round_().div_(64)
            x[:, 0] = 127 / 64
        x = x.to(case.dtype)
        exact = x.double() @ exact.t() + 1
        arguments = x, x.new_ones(N)
    run(*arguments)
    # From the second call on `_launcher` launches the compiled program in another way.
    result = run(*arguments)
    return ((result.double() - exact).norm() / exact.norm()).item()
