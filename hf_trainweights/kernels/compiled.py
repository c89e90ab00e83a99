"""Products on a CPU by the C functions of `native/`, which the installation compiled if it could.

They multiply float32, bfloat16 and float16 activations with the codes of weights as they are stored. The same sources
are compiled for several instruction sets. A library is the result for one of them: there is one for CPUs with AMX, one
for AVX512_VNNI with AVX512_BF16 and one without, one for AVX-VNNI, one for AVX2, and one for ARM CPUs whose NEON
multiplies bytes. The package works without them: if there was no C compiler at installation, or no library fits the
CPU, `find` returns None and PyTorch's ops compute every product.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from pathlib import Path

import torch
from torch import Tensor

from hf_trainweights.formats.affine import Affine
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.codebook4 import Codebook4
from hf_trainweights.formats.coded import Coded
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.scale_codings import outer_count
from hf_trainweights.formats.table4 import Table4
from hf_trainweights.formats.uint import UInt
from hf_trainweights.kernels.arguments import addresses_of
from hf_trainweights.kernels.cpu_features import capabilities, is_rounding, most_rows
from hf_trainweights.kernels.thresholds import THRESHOLDS
from hf_trainweights.native_library import load_library

_logger = logging.getLogger(__name__)
_NATIVE = Path(__file__).parent / "native"
# The version of `Weight` and the functions' arguments, as in native/product.h; only a library of this version is used.
ABI = 5
# The types of each function's result and arguments, in the letters of `load_library`.
_FUNCTIONS = {
    "product_bytes": "lpli",
    "product": "-pppppplipppppp",
    "dequantized_bytes": "lpi",
    "dequantize": "-ppppllipppppp",
    "store_tokens": "-pillliippplli",
    "load_tokens": "-pplllliiplpii",
    "attention_bytes": "lp",
    "attend": "-pppppppppp",
}
# As in native/product.h.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_AVX512 = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_vnni")
# The instructions that each library needs, the faster library first.
_LIBRARIES = {
    "amx": (*_AVX512, "avx512_bf16", "amx_int8", "amx_bf16"),
    "avx512_bf16": (*_AVX512, "fast_avx512_bf16"),
    "avx512": _AVX512,
    "avx_vnni": ("avx2", "fma3", "f16c", "avx_vnni"),
    "avx2": ("avx2", "fma3", "f16c"),
    "neon": ("dot",),
}

# The formats that the libraries read.
FORMATS = (Int8, Int4, Float8E4M3, UInt, Codebook4, Affine, Table4)

# Sums of products of two bytes fit 32 bits up to this K.
_MOST_COLUMNS = 1 << 16
# From this many multiplications on a second thread saves time: waking it takes some microseconds.
_THREADED = THRESHOLDS["THREADED"]

# For this many pairs of a number of rows and a number of threads a product remembers the size of its scratch memory.
_SIZES = 256

# The stored tensors beside codes and scales, in the order of `tensor_names`: group scales and zero points of a uint
# weight, for example, and () for int8. There are at most `OTHERS`, as in native/product.h.
Groups = tuple[Tensor, ...]
OTHERS = 5
_NONE = (None,) * OTHERS

# The last fields of `Weight`, which native/product.h explains. These describe the codes; 0 if a format does not need
# the field.
_CODES = ("bits", "code_units", "zero_units", "codebook")
# These follow for formats that native/imported.c reads: those of other programs, and float8 in groups.
_NUMBERS = ("family", "coding", "offset", "zero_bits", "rounds_each", "outer_count")
# The values of `family`.
_AFFINE, _TABLE4, _FLOAT8_GROUPS = 1, 2, 3
_CODINGS = ("plain", "e8m0", "e4m3", "e4m3_divided", "nested", "k4", "k2", "k3", "k6", "iq4_xs")
_OFFSETS = ("none", "zero_point", "zero_point_minus_1", "float_zero_point", "bias")
# The offset of codings that store minima, which is no option of the format.
_MINIMA = len(_OFFSETS)


class _Scratch(threading.local):
    """One buffer for each use and thread, kept from call to call.

    The system maps fresh memory page by page, which took a quarter of a prefill of 256 tokens with int4 weights.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, use: str, size_bytes: int) -> Tensor:
        """Return `size_bytes` or more, uninitialised, valid until this thread's next `take` for this use."""
        buffer = self._buffers.get(use)
        if buffer is None or buffer.numel() < size_bytes:
            # A tensor that is made in inference mode can never be written to outside it.
            with torch.inference_mode(False):
                buffer = self._buffers[use] = torch.empty(size_bytes, dtype=torch.uint8)
        return buffer


SCRATCH = _Scratch()


class Weight(ctypes.Structure):
    """`Weight` of native/product.h: the sizes, dtypes and kind of codes of a weight, without its tensors."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("N", "K", "group_size")),
        *((name, ctypes.c_int32) for name in ("dtype", "scale_dtype", "digits", *_CODES, *_NUMBERS)),
    )


@functools.cache
def instructions() -> str | None:
    """Return the fastest library of this installation that the CPU runs: a name of `_LIBRARIES` or None."""
    features = capabilities()
    fitting = (name for name, needed in _LIBRARIES.items() if all(map(features.get, needed)) and _path(name).exists())
    return next((name for name in fitting if name != "amx" or _open(_path(name)) is not None), None)


def _path(name: str) -> Path:
    return _NATIVE / f"{name}.so"


@functools.cache
def _open(path: Path) -> ctypes.CDLL | None:
    """Return a library; None if its ABI is another, if the system refuses AMX, or if AMX gives wrong results."""
    if path.stem != "amx":
        return load_library(path, _FUNCTIONS, ABI)
    library = load_library(path, _FUNCTIONS | {"prepare": "i"}, ABI)
    outcome = None if library is None else library.prepare()
    if outcome == -1:  # OTHERWISE of native/tiles/prepare.c
        _logger.warning(
            "Products by AMX differ from the same products without it, so they are not used. Please report it."
        )
    return library if outcome == 0 else None


@functools.cache
def loaded_library() -> ctypes.CDLL | None:
    """Return the library that serves this CPU, or None."""
    name = instructions()
    return None if name is None else _open(_path(name))


def in_memory(form: Format) -> Format:
    """Return the format of the tensors that a weight holds in memory: `coded` holds int8 codes there."""
    return Int8() if isinstance(form, Coded) else form


def describe() -> str:
    """Name the library that multiplies on this machine, for people."""
    return f"products compiled for {instructions()}" if is_available() else "no compiled products"


def is_available() -> bool:
    """Return whether the functions are compiled and this CPU runs them."""
    return loaded_library() is not None


def serves(form: Format) -> bool:
    """Return whether the libraries read this format."""
    return isinstance(form, FORMATS)


class Product:
    """The function that multiplies x with weights of one shape and format.

    Up to `most_rows` rows of x it takes less time than PyTorch's ops.
    """

    def __init__(self, library: ctypes.CDLL, weight: Weight, dtype: torch.dtype, most_rows: int) -> None:
        self.library, self._weight, self._dtype, self.most_rows = library, weight, dtype, most_rows
        self._address = ctypes.addressof(weight)
        self._N, self.columns = weight.N, weight.K
        self._size = functools.lru_cache(_SIZES)(functools.partial(library.product_bytes, self._address))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The fields of `Weight` but for N."""
        return tuple(getattr(self._weight, name) for name, *_ in Weight._fields_[1:])

    def __call__(self, qdata: Tensor, scale: Tensor, groups: Groups, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return `F.linear(x, weight, bias)` of contiguous tensors on the CPU, with the dtypes that `find` was given.

        x `[*, K]` has at least one row. UnsupportedError: the storage of a tensor was freed.
        """
        x_at, codes_at, scales_at, bias_at, *groups_at = addresses_of(x, qdata, scale, bias, *groups)
        M = x.numel() // self.columns
        threads = torch.get_num_threads() if M * self._N * self.columns >= _THREADED else 1
        scratch = SCRATCH.take("compiled", self._size(M, threads))
        out = x.new_empty(*x.shape[:-1], self._N)
        pointers = (x_at, codes_at, scales_at, bias_at, out.data_ptr())
        self.library.product(self._address, *pointers, M, threads, scratch.data_ptr(), *[*groups_at, *_NONE][:OTHERS])
        return out

    def dequantize(self, qdata: Tensor, scale: Tensor, groups: Groups, rows: slice) -> Tensor:
        """Return some rows of the float weight in scratch memory, valid until the next call of this thread."""
        first, count, threads = rows.start, min(rows.stop, self._N) - rows.start, torch.get_num_threads()
        size_bytes = count * self.columns * self._dtype.itemsize
        out = SCRATCH.take("weight", size_bytes)[:size_bytes].view(self._dtype).view(count, self.columns)
        memory = SCRATCH.take("compiled", self.library.dequantized_bytes(self._address, threads)).data_ptr()
        codes_at, scales_at, *groups_at = addresses_of(qdata, scale, *groups)
        pointers = (codes_at, scales_at, out.data_ptr())
        self.library.dequantize(self._address, *pointers, first, count, threads, memory, *[*groups_at, *_NONE][:OTHERS])
        return out


@functools.lru_cache(maxsize=4096)
def find(form: Format, N: int, K: int, dtype: torch.dtype, scale_dtype: torch.dtype) -> Product | None:
    """Return the function for products with weights `[N, K]` of a format; None if the library has none."""
    library, size = loaded_library(), getattr(form, "group_size", None) or 0
    numbers = _numbers(form, K) if serves(form) else ()
    # The libraries have loops for these group sizes, and native/imported.c has loops for any.
    fits = serves(form) and (bool(numbers) or size in (0, 4, 8, 16, 32) or size % 64 == 0)
    if library is None or not fits or dtype not in DTYPES:
        return None
    # Only plain scales have several dtypes: a coding fixes the dtype of its scales.
    if scale_dtype not in DTYPES and getattr(form, "scales", "plain") == "plain":
        return None
    if not 0 < K <= _MOST_COLUMNS or N == 0 or (numbers and K % form.column_step):
        return None
    # The bytes of the integer that stands for an element of x (product.h).
    digits = 1 if is_rounding(form) else 3 if dtype == torch.float32 else 2
    described = *_codes(form), *numbers
    weight = Weight(N, K, size, DTYPES[dtype], DTYPES.get(scale_dtype, 0), digits, *described)
    return Product(library, weight, dtype, most_rows(form, dtype, instructions() or ""))


def _codes(form: Format) -> tuple[int, int, int, int]:
    """Return the values of the fields `_CODES` for a format."""
    if isinstance(form, UInt):
        return form.grid.bits, form.grid.code_units, form.grid.zero_units, 0
    if isinstance(form, Float8E4M3):
        return 0, 0, 0, 0
    bits = form.bits if isinstance(form, Affine) else 4 if isinstance(form, (Int4, Codebook4, Table4)) else 8
    return bits, 0, 0, int(isinstance(form, Codebook4))


def _numbers(form: Format, K: int) -> tuple[int, ...]:
    """Return the values of the fields `_NUMBERS` for a format that native/imported.c reads, and () for others."""
    if isinstance(form, Affine):
        offset = _MINIMA if form.coding.has_minima else _OFFSETS.index(form.offset)
        zero_bits = form.bits if form.bit_packed else 8
        return _AFFINE, _CODINGS.index(form.scales), offset, zero_bits, int(form.rounding == "each"), 0
    if isinstance(form, Table4):
        return _TABLE4, _CODINGS.index(form.scales), 0, 0, 0, outer_count(K // form.group_size)
    if isinstance(form, Float8E4M3) and (form.group_size or form.scales != "plain"):
        return _FLOAT8_GROUPS, _CODINGS.index(form.scales), 0, 0, 0, 0
    return ()
