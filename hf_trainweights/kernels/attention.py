"""Attention of a few rows of queries to tokens that are stored as integers, without dequantizing them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hf_trainweights.kernels import compiled, cuda_attention
from hf_trainweights.kernels.compiled import DTYPES, SCRATCH
from hf_trainweights.kernels.thresholds import THRESHOLDS
from hf_trainweights.kernels.tokens import StoredTokens
from hf_trainweights.native_library import address_of

# From this many multiplications on a second thread saves time: waking it takes some microseconds.
_THREADED = THRESHOLDS["THREADED"]
# As in native/attention.c.
_NO_MASK, _BOOL_MASK, _FLOAT_MASK = range(3)
_NUMBERS = ("batch", "heads", "shared", "rows", "key_columns", "value_columns", "first", "end", "capacity")
_STRIDES = ("mask_batch", "mask_head", "mask_row")


class _Attention(ctypes.Structure):
    """`Attention` of native/attention.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in (*_NUMBERS, *_STRIDES)),
        ("scaling", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("key_bits", "value_bits", "mask", "dtype", "threads")),
    )


def attend(
    query: Tensor,
    keys: StoredTokens,
    values: StoredTokens,
    tokens: slice,
    scaling: float,
    mask: Tensor | None,
) -> Tensor | None:
    """Return the attention of query rows to some tokens, as `F.scaled_dot_product_attention` does.

    Args:
        query: `[batch, query heads, rows, key columns]`; the heads of the keys divide the query heads.
        keys: The keys of the layer.
        values: The values of the layer, of the same number of heads and blocks.
        tokens: The tokens that count, from `start` to `stop`.
        scaling: The factor of the scores.
        mask: None, or bools or floats that broadcast to `[batch, query heads, rows, tokens]`; as in PyTorch, True lets
            a row attend to a token, and floats are added to the scores.

    Returns:
        `[batch, query heads, rows, value columns]` in the dtype of the query; None if no function is compiled for it. A
        row that may attend to no token is 0.
    """
    if query.is_cuda:
        return cuda_attention.attend(query, keys, values, tokens, scaling, mask)
    library = compiled.loaded_library()
    if library is None or query.dtype not in DTYPES or not query.is_cpu:
        return None
    batch, query_heads, rows, columns = query.shape
    heads, count = keys.codes.shape[1], tokens.stop - tokens.start
    query, (mask, kind, strides) = query.contiguous(), _readable(mask, count)
    out = query.new_empty(batch, query_heads, rows, values.form.columns)
    threads = torch.get_num_threads() if query_heads * rows * count * columns * batch >= _THREADED else 1
    call = _Attention(
        *(batch, heads, query_heads // heads, rows, columns, values.form.columns, tokens.start, tokens.stop),
        *(keys.capacity, *strides, scaling, keys.form.bits, values.form.bits, kind, DTYPES[query.dtype], threads),
    )
    address = ctypes.addressof(call)
    scratch = SCRATCH.take("attention", library.attention_bytes(address))
    library.attend(
        *(address, query.data_ptr(), keys.codes.data_ptr(), keys.scale.data_ptr(), address_of(keys.channels)),
        *(values.codes.data_ptr(), values.scale.data_ptr(), address_of(mask)),
        *(out.data_ptr(), scratch.data_ptr()),
    )
    return out


def _readable(mask: Tensor | None, count: int) -> tuple[Tensor | None, int, tuple[int, ...]]:
    """Return a mask of bools or float32 whose tokens lie one after another, its kind, and its other strides."""
    if mask is None:
        return None, _NO_MASK, (0, 0, 0)
    mask = mask if mask.dtype in (torch.bool, torch.float32) else mask.float()
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.shape[-1] != count or (count > 1 and mask.stride(-1) != 1):
        mask = mask.expand(*mask.shape[:-1], count).contiguous()
    strides = tuple(0 if size == 1 else stride for size, stride in zip(mask.shape[:3], mask.stride()[:3], strict=True))
    return mask, _BOOL_MASK if mask.dtype == torch.bool else _FLOAT_MASK, strides
