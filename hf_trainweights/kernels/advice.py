"""What users are told of formats whose products on this CPU take longer than those of float weights."""

from __future__ import annotations

import torch

from hf_trainweights.formats.base import Format
from hf_trainweights.formats.codebook4 import Codebook4
from hf_trainweights.formats.column_scale import ColumnScaled
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.uint import UInt
from hf_trainweights.kernels import compiled
from hf_trainweights.kernels.cpu_features import product_dtype
from hf_trainweights.kernels.thresholds import is_rounding, most_rows

_FORMATS = (Int8, Int4, UInt, Float8E4M3, Codebook4)
# What counts as many, of a weight of so many elements.
_MANY_ROWS, _WEIGHTS = 64, 1 << 20


def slowness(form: Format, dtype: torch.dtype) -> str | None:
    """Return what is slow about weights of a format that show a dtype, and what is fast; None where nothing is."""
    if isinstance(form, ColumnScaled):
        return slowness(form.inner, dtype)
    text = _slowness if compiled.is_available() else _slowness_uncompiled
    return text(form, dtype)


def _slowness(form: Format, dtype: torch.dtype) -> str | None:
    if is_rounding(form) or not isinstance(form, _FORMATS) or _is_fast(form, dtype):
        return None
    fast = "int8" if _is_fast(Int8(), dtype) else 'int8 with activations="int8"'
    return (
        f"{form.name} weights in {str(dtype).removeprefix('torch.')}: on this CPU a product of many tokens takes "
        f"longer than one with float weights. {fast} is fast."
    )


def _is_fast(form: Format, dtype: torch.dtype) -> bool:
    """Return whether many tokens take a compiled product, or one that is faster than that of PyTorch in this dtype."""
    if product_dtype(dtype, _MANY_ROWS) != dtype:
        return True
    return most_rows(form, dtype, _WEIGHTS, compiled.instructions() or "") >= _MANY_ROWS


def _slowness_uncompiled(form: Format, dtype: torch.dtype) -> str | None:
    if isinstance(form, Int8) and form.group_size is None and dtype != torch.float32:
        return None
    if not isinstance(form, _FORMATS):
        return None
    return (
        f"{form.name} weights: no C compiler was there at installation, or none for this CPU, so each product "
        "dequantizes them first and takes longer than one with float weights. int8 without group_size with "
        "dtype=torch.bfloat16 is fast."
    )
