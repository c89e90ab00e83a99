"""Products with a weight that is dequantized block by block: the one way that every format, dtype and device has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_trainweights.formats.base import Format
from hf_trainweights.formats.cutting import cut_rows
from hf_trainweights.kernels import compiled, cuda
from hf_trainweights.kernels.arguments import check_allocated
from hf_trainweights.kernels.cpu_features import product_dtype

# Weights that are dequantized at a time, and the least rows of them: a block stays in a cache, where a whole float
# weight of 32 MB is mapped, page by page, and given back at every product.
_BLOCK_ELEMENTS = 1 << 20
_BLOCK_ROWS = 256
# The weight is the left matrix where x has so many more columns than rows: it is not reordered then.
_COLUMNS_OF_ROW = 10


def multiply_dequantized(
    x: Tensor, tensors: Mapping[str, Tensor], form: Format, shape: Sequence[int], bias: Tensor | None
) -> Tensor:
    """Return `F.linear(x, weight, bias)` of x `[*, K]` and the stored tensors of a weight `[N, K]`."""
    N, K = shape
    M = x.shape[:-1].numel()
    if x.device.type != "cpu":
        rows, parts = _rows_of(tensors, form, shape, x.dtype), _blocks(N, K, cuda.DEQUANTIZED_ELEMENTS)
        made = [F.linear(x, rows(part), None if bias is None else bias[part]) for part in parts]
        return made[0] if len(made) == 1 else torch.cat(made or [x.new_empty(*x.shape[:-1], 0)], dim=-1)
    dtype = product_dtype(x.dtype, M)
    given = x.reshape(M, K).contiguous().to(dtype)
    is_left = dtype == torch.bfloat16 and M * _COLUMNS_OF_ROW <= K
    out = given.new_empty(N, M).t() if is_left else given.new_empty(M, N)
    if x.numel() == 0:
        out.zero_()
    else:
        rows = _rows_of(tensors, form, shape, dtype)
        for part in _blocks(N, K):
            torch.mm(given, rows(part).t(), out=out[:, part])
    if bias is not None:
        out.add_(bias)
    return out.to(x.dtype).contiguous().view(*x.shape[:-1], N)


def multiply_transpose(x: Tensor, tensors: Mapping[str, Tensor], form: Format, shape: Sequence[int]) -> Tensor:
    """Return `x @ weight` of x `[M, N]` and the stored tensors of a weight `[N, K]`, as gradients of `x` want it."""
    check_allocated(x, *tensors.values())
    N, K = shape
    # One row of 16 bits is multiplied fast where numbers of the weight that are summed up lie side by side: not here.
    dtype = product_dtype(x.dtype, max(2, len(x))) if x.device.type == "cpu" else x.dtype
    given, out = x.to(dtype), x.new_zeros(len(x), K, dtype=dtype)
    rows = _rows_of(tensors, form, shape, dtype)
    # Sums over blocks would be rounded to 16 bits after each of them.
    for part in _blocks(N, K) if dtype == torch.float32 else [slice(0, N)]:
        out.addmm_(given[:, part], rows(part))
    return out.to(x.dtype)


def _blocks(N: int, K: int, elements: int = _BLOCK_ELEMENTS) -> list[slice]:
    """Return slices of about one size that make up N rows."""
    blocks = max(1, -(-N * K // elements))
    step = max(_BLOCK_ROWS, -(-N // (64 * blocks)) * 64)
    return [slice(start, start + step) for start in range(0, N, step)]


def _rows_of(
    tensors: Mapping[str, Tensor], form: Format, shape: Sequence[int], dtype: torch.dtype
) -> Callable[[slice], Tensor]:
    """Return a function from a slice of rows to these rows of the weight, perhaps in scratch memory."""
    form = compiled.in_memory(form)
    qdata, scale, *groups = (tensors[name] for name in form.tensor_names)
    product = compiled.find(form, *shape, dtype, scale.dtype) if qdata.device.type == "cpu" else None
    if product is None:
        return lambda part: _dequantize(cut_rows(form, tensors, lambda stored: stored[part]), form, shape[-1], dtype)
    whole = qdata.contiguous(), scale.contiguous(), tuple(tensor.contiguous() for tensor in groups)
    return lambda part: product.dequantize(*whole, part)


def _dequantize(tensors: Mapping[str, Tensor], form: Format, K: int, dtype: torch.dtype) -> Tensor:
    made = cuda.dequantize_rows(tensors, form, K, dtype)
    return form.dequantize_rows(tensors, K, dtype) if made is None else made
