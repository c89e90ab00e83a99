"""Products on a CPU by the C functions of `native/`, which the installation compiled if it could.

They serve float32, bfloat16 and float16 activations with the codes of int8, int4 and float8 weights as they are stored.
There is one library for CPUs with AVX512_VNNI, one for AVX-VNNI and one for AVX2. The package needs none: without
a C compiler at installation, or on another CPU, `find` returns None and every product takes another way.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hf_trainweights.files.native_library import load_library
from hf_trainweights.kernels.cpu_features import capabilities, has_amx, product_dtype
from hf_trainweights.kernels.guards import ENABLED, Needs, check
from hf_trainweights.kernels.scratch import SCRATCH

_NATIVE = Path(__file__).parent / "native"
_FUNCTIONS = {"product_bytes": "lpli", "product": "-pppppplippp", "dequantize": "-ppppi"}
# As in native/product.h.
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# The instructions that each library needs, the faster library first.
_LIBRARIES = {
    "avx512": ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_vnni"),
    "avx_vnni": ("avx2", "fma3", "f16c", "avx_vnni"),
    "avx2": ("avx2", "fma3", "f16c"),
}

# As in native/product.h: up to so many rows, each row of the weight is read once for all of them.
FEW_ROWS = 4
# Rows up to which digits take less time than a product in a 16-bit dtype that the CPU multiplies fast.
_SHORT_ROWS = 48
# Rows up to which products with float8 codes, and in float32 those with AVX2, take less time than PyTorch's with the
# dequantized weight: twice as fast at 8 rows, as fast at 32.
_WIDENED_ROWS = 16
# Sums of products of two bytes fit 32 bits up to this K.
_MOST_COLUMNS = 1 << 16
# Multiplications from which on a second thread pays: it takes some microseconds to wake.
_THREADED = 1 << 19

# Numbers of rows and threads for which the size of scratch memory is remembered.
_SIZES = 256

# From x `[*, K]` and a bias `[N]` or None to the product `[*, N]`; None for an x that is left to `kernels.linear`.
MultiplyFew = Callable[[Tensor, Tensor | None], Tensor | None]

# Group scales and zero points of a uint weight; nothing for other weights.
Groups = tuple[Tensor, ...]

# Bits of a float8 weight in `Weight`: it has no integer codes.
FLOAT8 = 0


class Weight(ctypes.Structure):
    """`Weight` of native/product.h: what a product knows of a weight before it gets one."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("N", "K", "group_size")),
        *((name, ctypes.c_int32) for name in ("dtype", "scale_dtype", "digits", "bits", "code_units", "zero_units")),
    )


def instructions() -> str | None:
    """Return the fastest library of this installation that the CPU runs: "avx512", "avx_vnni", "avx2" or None."""
    found = capabilities()
    fitting = (name for name, needed in _LIBRARIES.items() if all(map(found.get, needed)))
    return next((name for name in fitting if _path(name).exists()), None)


def _path(name: str) -> Path:
    return _NATIVE / f"{name}.so"


@functools.cache
def _load() -> ctypes.CDLL | None:
    """Return the library, or None where there is none for this CPU."""
    name = instructions()
    return None if name is None else load_library(_path(name), _FUNCTIONS)


def is_available() -> bool:
    """Return whether the functions are compiled and this CPU runs them."""
    return _load() is not None


@functools.cache
def most_rows(dtype: torch.dtype, quantize_x: bool = False) -> int:
    """Return up to how many rows of x a product with integer codes takes less time here than by PyTorch's ops.

    Args:
        dtype: Dtype of x.
        quantize_x: Whether x is rounded to one digit.
    """
    if not is_available():
        return 0
    if has_amx():
        return FEW_ROWS
    if dtype == torch.float32 and not quantize_x:
        return _WIDENED_ROWS if leaves_many_rows(dtype) else sys.maxsize
    return sys.maxsize if quantize_x or product_dtype(dtype, _SHORT_ROWS + 1) != dtype else _SHORT_ROWS


def leaves_many_rows(dtype: torch.dtype) -> bool:
    """Return whether products of many rows take longer here than those with float weights, and those of few do not.

    Args:
        dtype: Dtype of x, which is not rounded.
    """
    return is_available() and dtype == torch.float32 and instructions() == "avx2"


def most_widened_rows(dtype: torch.dtype) -> int:
    """Return the same as `most_rows` for the codes of float8.

    Args:
        dtype: Dtype of x.
    """
    return FEW_ROWS if dtype == torch.bfloat16 and has_amx() else _WIDENED_ROWS


class Product:
    """Products with weights of one shape and format.

    Args:
        library: The compiled functions.
        weight: The shape and format.
    """

    def __init__(self, library: ctypes.CDLL, weight: Weight) -> None:
        self._library, self._weight = library, weight
        self._address = ctypes.addressof(weight)
        self._N, self.columns = weight.N, weight.K
        self._sizes: dict[tuple[int, int], int] = {}
        dtypes = {number: dtype for dtype, number in _DTYPES.items()}
        is_uint = weight.code_units > 0
        codes = self.columns * weight.bits // 32 if weight.bits == 4 or is_uint else self.columns
        G = self.columns // weight.group_size if weight.group_size and not is_uint else 1
        self._needs = (
            Needs("x", ("*", self.columns), (dtypes[weight.dtype],)),
            Needs("qdata", (self._N, codes), (torch.int8, torch.int32, torch.float8_e4m3fn)),
            Needs("scale", (self._N, G), (dtypes[weight.scale_dtype],)),
            Needs("bias", (self._N,), (dtypes[weight.dtype],)),
        )

    def __call__(self, x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, groups: Groups = ()) -> Tensor:
        """Return `F.linear(x, weight, bias)`; all tensors are on the CPU and contiguous.

        Args:
            x: `[*, K]`, at least one row, of the dtype that `find` was asked for.
            qdata: The codes, as `find` was told.
            scale: `[N, G]`, likewise.
            bias: `[N]` of the dtype of x, or None.
            groups: Of uint weights.

        Returns:
            A new tensor `[*, N]` of the dtype of x.

        Raises:
            UnsupportedError: A tensor is not what it should be; told only where guards are on.
        """
        if ENABLED:
            check("a compiled product", self._needs, (x, qdata, scale, bias), {})
        M = x.numel() // self.columns
        threads = torch.get_num_threads() if M * self._N * self.columns >= _THREADED else 1
        scratch = SCRATCH.take("compiled", (self._sizes.get((M, threads)) or self._size(M, threads),), torch.uint8)
        out = torch.empty((*x.shape[:-1], self._N), dtype=x.dtype)
        shift = None if bias is None else bias.data_ptr()
        pointers = (x.data_ptr(), qdata.data_ptr(), scale.data_ptr(), shift, out.data_ptr())
        numbers = [tensor.data_ptr() for tensor in groups] or (None, None)
        self._library.product(self._address, *pointers, M, threads, scratch.data_ptr(), *numbers)
        return out

    def of_any_strides(
        self, x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, groups: Groups = ()
    ) -> Tensor:
        """Return the same for tensors of any strides, and a bias of any dtype.

        Args:
            x: As above.
            qdata: As above.
            scale: As above.
            bias: `[N]` or None.
            groups: As above.
        """
        bias = None if bias is None else bias.to(x.dtype).contiguous()
        whole = tuple(tensor.contiguous() for tensor in groups)
        return self(x.contiguous(), qdata.contiguous(), scale.contiguous(), bias, whole)

    def dequantize(self, qdata: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        """Fill and return `out` `[N, K]`, of the dtype that `find` was asked for, with a float8 weight.

        Args:
            qdata: The codes `[N, K]`, contiguous.
            scale: `[N, 1]`, contiguous.
            out: Contiguous.
        """
        pointers = (qdata.data_ptr(), scale.data_ptr(), out.data_ptr())
        self._library.dequantize(self._address, *pointers, torch.get_num_threads())
        return out

    def _size(self, M: int, threads: int) -> int:
        """Return the scratch bytes of M rows, a power of two: few sizes of memory are kept."""
        if len(self._sizes) == _SIZES:
            self._sizes.clear()
        needed = self._library.product_bytes(self._address, M, threads)
        size = self._sizes[M, threads] = 1 << (needed - 1).bit_length()
        return size


def serves(group_size: int | None, dtype: torch.dtype, scale_dtype: torch.dtype) -> bool:
    """Return whether there are products with weights of one kind, of every size but the largest.

    A compiler that traces with sizes it does not know may ask this, and not `find`.

    Args:
        group_size: Columns that share a scale; None where a row shares one.
        dtype: Dtype of the activations.
        scale_dtype: Dtype of the scales.
    """
    size = group_size or 0
    fits = size in (0, 4, 8, 16, 32) or size % 64 == 0
    return is_available() and fits and dtype in _DTYPES and scale_dtype in _DTYPES


@functools.lru_cache(maxsize=4096)
def find(
    N: int,
    K: int,
    group_size: int | None,
    bits: int,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    quantize_x: bool,
    units: tuple[int, int] = (0, 0),
) -> Product | None:
    """Return the products with weights `[N, K]` of one kind; None where the compiled functions do not serve them.

    Args:
        N: Rows of the weight.
        K: Its columns.
        group_size: Columns that share a scale; None where a row shares one.
        bits: 8 or 4 of an integer code, 2 to 6 of uint, or `FLOAT8`.
        dtype: Dtype of the activations.
        scale_dtype: Dtype of the scales.
        quantize_x: Whether activations are rounded to one digit.
        units: Of uint, the units of its codes and of its zero points.
    """
    library, size = _load(), group_size or 0
    if library is None or not serves(group_size, dtype, scale_dtype) or not 0 < K <= _MOST_COLUMNS or N == 0:
        return None
    digits = 1 if quantize_x else 3 if dtype == torch.float32 else 2
    return Product(library, Weight(N, K, size, _DTYPES[dtype], _DTYPES[scale_dtype], digits, bits, *units))


def settle(
    product: Product, qdata: Tensor, scale: Tensor, dtype: torch.dtype, rows: int, groups: Groups = ()
) -> MultiplyFew:
    """Return a function that multiplies with one weight.

    Args:
        product: What `find` returned for the weight.
        qdata: Its codes, contiguous.
        scale: Its scales, contiguous.
        dtype: Dtype of the activations.
        rows: The most rows of x that it takes.
        groups: Of a uint weight.
    """
    most_elements = min(sys.maxsize, rows * product.columns)

    def multiply(x: Tensor, bias: Tensor | None) -> Tensor | None:
        if not (0 < x.numel() <= most_elements and x.is_cpu and x.is_contiguous()):
            return None
        if bias is not None and not (bias.is_cpu and bias.dtype == dtype and bias.is_contiguous()):
            return None
        return product(x, qdata, scale, bias, groups)

    return multiply
