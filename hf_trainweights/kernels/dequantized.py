"""Products with a weight that is dequantized block by block: the one way that every format, dtype and device has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.cutting import cut_rows
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels import compiled
from hf_trainweights.kernels.cpu_features import product_dtype
from hf_trainweights.kernels.int4_codes import split_columns, words_to_weight
from hf_trainweights.kernels.scratch import SCRATCH

# Weights that are dequantized at a time, and the least rows of them. 4 MB of float32 stay near the last-level cache,
# where a whole float weight of 32 MB is mapped, page by page, and given back at every product. Codes that are cast
# alone take so little time that fewer blocks pay: 16 MB of bfloat16.
_BLOCK_ELEMENTS, _CAST_ELEMENTS = 1 << 20, 1 << 23
_BLOCK_ROWS = 256
# In bfloat16 a small weight is scaled before the product: that takes little, and saves the sums a rounding.
_SMALL_WEIGHT = 1 << 18
# The weight is the left matrix where x has so many more columns than rows: it is not reordered then.
_COLUMNS_OF_ROW = 10

# From a slice of rows to these rows of the weight, perhaps in scratch memory.
_Rows = Callable[[slice], Tensor]


def multiply_dequantized(
    x: Tensor, tensors: Mapping[str, Tensor], form: Format, shape: Sequence[int], bias: Tensor | None
) -> Tensor:
    """Return `F.linear(x, weight, bias)` of x `[*, K]` and the stored tensors of a weight `[N, K]`."""
    N, K = shape
    M = x.shape[:-1].numel()
    given = x.reshape(M, K).contiguous()
    on_cpu, scale_dtype = x.device.type == "cpu", tensors["scale"].dtype
    dtype = product_dtype(x.dtype, M) if on_cpu else x.dtype
    # The scales lose nothing in the dtype of the product.
    is_simple = on_cpu and dtype in FLOAT_DTYPES and torch.promote_types(scale_dtype, dtype) == dtype
    given, factors, block_elements = given.to(dtype), None, _BLOCK_ELEMENTS
    rows = _dequantized_rows(tensors, form, K, dtype)
    if isinstance(form, Int4) and is_simple:
        given, rows = split_columns(given), words_to_weight(tensors["qdata"], tensors["scale"], dtype)
    elif isinstance(form, Int8) and form.group_size is None and is_simple:
        # Sums of codes can overflow in float16, so there the weight is scaled and not the result.
        is_scaled = dtype == torch.float16 or (dtype == torch.bfloat16 and N * K <= _SMALL_WEIGHT)
        factors = tensors["scale"].to(dtype)
        rows, block_elements = _cast_rows(tensors["qdata"], factors if is_scaled else None, dtype), _CAST_ELEMENTS
        factors = None if is_scaled else factors.view(-1)
    is_left = dtype == torch.bfloat16 and M * _COLUMNS_OF_ROW <= K
    out = given.new_empty(N, M).t() if is_left else given.new_empty(M, N)
    _fill(out, given, rows, block_elements)
    if factors is not None:
        out = out.mul_(factors) if bias is None else torch.addcmul(bias.to(dtype), out, factors)
    elif bias is not None:
        out.add_(bias)
    return out.to(x.dtype).contiguous().view(*x.shape[:-1], N)


def _fill(out: Tensor, x: Tensor, rows: _Rows, block_elements: int) -> None:
    """Fill `out` `[M, N]` with the product, in blocks of about one size."""
    N, K = out.shape[1], x.shape[1]
    if x.numel() == 0:
        out.zero_()
        return
    blocks = max(1, -(-N * K // block_elements))
    step = max(_BLOCK_ROWS, -(-N // (64 * blocks)) * 64)
    for start in range(0, N, step):
        part = slice(start, start + step)
        torch.mm(x, rows(part).t(), out=out[:, part])


def _dequantized_rows(tensors: Mapping[str, Tensor], form: Format, K: int, dtype: torch.dtype) -> _Rows:
    qdata, scale = tensors["qdata"], tensors["scale"]
    product = None
    if isinstance(form, Float8E4M3) and qdata.device.type == "cpu":
        product = compiled.find(form, len(qdata), K, dtype, scale.dtype)
    if product is None:
        return lambda part: form.dequantize_rows(cut_rows(form, tensors, lambda stored: stored[part]), K, dtype)
    return lambda part: _dequantized_float8(qdata[part], scale[part], dtype)


def _dequantized_float8(qdata: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    product = compiled.find(Float8E4M3(), *qdata.shape, dtype, scale.dtype)
    assert product is not None  # there is one for the whole weight
    return product.dequantize(qdata.contiguous(), scale.contiguous(), SCRATCH.take("weight", tuple(qdata.shape), dtype))


def _cast_rows(qdata: Tensor, factors: Tensor | None, dtype: torch.dtype) -> _Rows:
    """Return the codes of int8 in another dtype, times their scales if these are given."""

    def rows(part: slice) -> Tensor:
        codes = qdata[part]
        weight = SCRATCH.take("cast", tuple(codes.shape), dtype).copy_(codes)
        return weight if factors is None else weight.mul_(factors[part])

    return rows
