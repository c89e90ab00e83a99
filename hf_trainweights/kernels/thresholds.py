"""Up to how many rows of x a compiled product takes less time than PyTorch's with the dequantized weight.

The numbers are measured: docs/performance.md, "Thresholds".
"""

from __future__ import annotations

import sys

import torch

from hf_trainweights.formats.base import Format
from hf_trainweights.formats.codebook4 import Codebook4
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.uint import UInt
from hf_trainweights.kernels.cpu_features import has_amx, product_dtype

ALL = sys.maxsize

# Integer codes in a 16-bit dtype that the CPU multiplies fast, without AMX; the scales of codebook4 take longer.
_SHORT_ROWS = 256
_CODEBOOK_ROWS = 64
# Integer codes in float32, and float8, with AVX2; integer codes with NEON, where nothing was measured.
_WIDENED_ROWS = 16
# Float8 with more than AVX2, and uint, where products of many rows do not serve.
_FLOAT8_ROWS, _UINT_ROWS = 8, 16

# bfloat16 on a CPU with AMX, by products without tiles: by the kind of codes, for most weights and for those from so
# many elements on.
_LARGE_WEIGHTS = 1 << 23
_AMX_ROWS = {
    "float8": (16, 8),
    "uint": (_UINT_ROWS, _UINT_ROWS),
    "int4": (256, 256),
    "codebook4": (_CODEBOOK_ROWS, _CODEBOOK_ROWS),
    "int8": (128, 64),
    "int8 in groups": (128, 128),
    "int8 with int8 activations": (256, 256),
}


def most_rows(form: Format, dtype: torch.dtype, weights: int, library: str) -> int:
    """Return up to how many rows of x the functions of a library serve a weight of so many elements; `ALL` for any."""
    if library == "amx" and _takes_tiles(form, dtype):
        return ALL
    if dtype == torch.bfloat16 and has_amx():
        return _AMX_ROWS[_kind(form)][weights >= _LARGE_WEIGHTS]
    is_fast = product_dtype(dtype, _SHORT_ROWS + 1) == dtype
    is_widened = library == "avx512_bf16" and dtype == torch.bfloat16
    if isinstance(form, (UInt, Float8E4M3)):
        if is_widened or (library in ("avx512", "avx512_bf16", "amx") and (dtype == torch.float32 or not is_fast)):
            return ALL
        return _UINT_ROWS if isinstance(form, UInt) else _WIDENED_ROWS if library == "avx2" else _FLOAT8_ROWS
    if library == "neon":
        return ALL if dtype == torch.float32 and is_rounding(form) else _WIDENED_ROWS
    if not is_fast or is_rounding(form) or (is_widened and _group_size(form) % 32 == 0):
        return ALL
    if dtype == torch.float32:
        return _WIDENED_ROWS if library == "avx2" else ALL
    return _CODEBOOK_ROWS if isinstance(form, Codebook4) else _SHORT_ROWS


def is_rounding(form: Format) -> bool:
    """Return whether x is rounded to 8 bits, so that a product takes the fewest instructions."""
    return isinstance(form, Int8) and form.activations is not None


def _takes_tiles(form: Format, dtype: torch.dtype) -> bool:
    """Return whether products of many rows take tiles: `way_of` in native/tiles/ways.c."""
    if isinstance(form, Int4) and dtype == torch.bfloat16:
        return True
    return isinstance(form, (Int8, Int4)) and _group_size(form) % 64 == 0


def _group_size(form: Format) -> int:
    """Return how many columns share a scale, 0 for all."""
    return getattr(form, "group_size", None) or 0


def _kind(form: Format) -> str:
    if isinstance(form, Float8E4M3):
        return "float8"
    if isinstance(form, UInt):
        return "uint"
    if isinstance(form, (Int4, Codebook4)):
        return form.name
    assert isinstance(form, Int8)
    return "int8 with int8 activations" if form.activations else "int8 in groups" if form.group_size else "int8"
