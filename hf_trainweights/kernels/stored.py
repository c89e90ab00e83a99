"""Products with weights as they are stored: compiled for so many rows as that takes least time, else dequantized.

Block by block a weight can be dequantized in every format and dtype and on every device.

What is not finite in a row of x makes the whole row of the result NaN where codes are integers: by compiled products
since no integer stands for it, by the other ways to be the same.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_trainweights.formats import get_format
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.column_scale import COLUMN_SCALE, ColumnScaled
from hf_trainweights.formats.cutting import cut_rows
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels import compiled, cuda
from hf_trainweights.kernels.arguments import DEBUG, MultiplyFew, check_allocated, check_product, only_fitting
from hf_trainweights.kernels.cpu_features import ALL, is_rounding, most_rows, product_dtype

# A smaller largest magnitude of a row counts as this one, as in native/product.h.
_SMALLEST_TOP = 2.0**-103

# Up to so many rows PyTorch's op for int8 takes least time where nothing is compiled.
_MOST_PACKED_ROWS = 4
# What counts as many.
_MANY_ROWS = 64

# Why weights are slow, for `slowness`.
_NO_PRODUCT = "no compiled product reads this format"
_DEQUANTIZED_FIRST = ", so each product dequantizes them first and takes longer than one with float weights."

# Weights that are dequantized at a time, and the least rows of them: a block stays in a cache, where a whole float
# weight of 32 MB is mapped, page by page, and given back at every product.
_BLOCK_ELEMENTS = 1 << 20
_BLOCK_ROWS = 256
# The weight is the left matrix where x has so many more columns than rows: it is not reordered then.
_COLUMNS_OF_ROW = 10


def linear(x: Tensor, held: Mapping[str, Tensor], form: Format, bias: Tensor | None = None) -> Tensor | None:
    """Return `F.linear(x, weight, bias)` of a quantized weight by an op.

    Args:
        x: Float `[*, K]`, of the dtype that the weight shows; any strides.
        held: The tensors that hold a weight `[N, K]`; any strides.
        form: Its format.
        bias: `[N]`, of the dtype of `x`, or None.

    Returns:
        A new tensor `[*, N]` of the dtype of `x`; None where there is no op for it.
    """
    if isinstance(form, ColumnScaled):
        return linear(_scale_columns(x, held), held, form.inner, bias)
    form = compiled.in_memory(form)
    qdata, scale = held["qdata"], held["scale"]
    on_cpu = x.device.type == "cpu" and x.dtype in FLOAT_DTYPES and isinstance(form, compiled.FORMATS)
    if x.device != qdata.device or not (on_cpu or _has_gpu_kernels(form, qdata, scale, x.dtype)):
        return None
    # Every other row of a weight lies apart, and ops of PyTorch read some tensors by their address alone.
    return LINEAR(x, [held[name].contiguous() for name in form.tensor_names], bias, _config_of(form))


def _has_gpu_kernels(form: Format, qdata: Tensor, scale: Tensor, dtype: torch.dtype) -> TypeGuard[Int8 | Int4]:
    return cuda.serves(form, qdata, dtype) and torch.promote_types(scale.dtype, dtype) == dtype


def prepare_few_rows(held: Mapping[str, Tensor], form: Format, dtype: torch.dtype) -> MultiplyFew | None:
    """Return a function that multiplies the few rows of a decoding step, and settle now all that the weight settles.

    A weight that streams through the caches evicts Python's own code from them: steps that take 15 us when they are
    repeated take 100 us between two weights.

    Args:
        held: The tensors that hold a weight `[N, K]`; any strides.
        form: Its format.
        dtype: Dtype that the weight shows.

    Returns:
        A function that takes any plain x and bias, without gradients, and gives the same bits as `linear`, or None
        for those that it leaves to `linear`; None where there is no such function.
    """
    if isinstance(form, ColumnScaled):
        multiply_few = prepare_few_rows(held, form.inner, dtype)
        if multiply_few is None:
            return None
        return only_fitting(lambda x, bias: multiply_few(_scale_columns(x, held), bias), held, form, dtype, ALL)
    form = compiled.in_memory(form)
    qdata, scale, *others = (held[name] for name in form.tensor_names)
    N, K = form.shape_of(qdata)
    if not all(each.is_contiguous() and each.device == qdata.device for each in held.values()):
        return None
    if _has_gpu_kernels(form, qdata, scale, dtype):
        # What kernels cannot read where it lies is copied for each product; a copy that is kept would grow stale.
        if qdata.data_ptr() % 4:
            return None
        return only_fitting(cuda.prepare(qdata, scale, form, K, dtype), held, form, dtype, ALL)
    product = compiled.find(form, N, K, dtype, scale.dtype) if qdata.device.type == "cpu" else None
    if product is None:
        return None
    multiply_few = functools.partial(product, qdata, scale, tuple(others))
    return only_fitting(multiply_few, held, form, dtype, product.most_rows)


def _scale_columns(x: Tensor, held: Mapping[str, Tensor]) -> Tensor:
    """Return an input `[*, K]` times the column scales of a weight, rounded once.

    In a 16-bit dtype that is one rounding of the input. Beside the roundings of the inner product it keeps the error
    below 1.5 times that of the dequantized product, whose weights are rounded likewise, and half a step of the digits
    of x (tests/kernels).
    """
    return (x * held[COLUMN_SCALE].view(-1)).to(x.dtype)


@functools.lru_cache
def _config_of(form: Format) -> str:
    return json.dumps(form.get_config())


@functools.lru_cache
def _format_of(config: str) -> Format:
    return get_format(json.loads(config))


def _multiply(x: Tensor, stored: Sequence[Tensor], bias: Tensor | None, config: str) -> Tensor:
    form, (qdata, scale, *groups) = _format_of(config), stored
    tensors, shape = dict(zip(form.tensor_names, stored, strict=True)), form.shape_of(qdata)
    if DEBUG:
        check_product("hf_trainweights::linear", x, tensors, form, bias, any_strides=True)
    if x.device.type == "cuda":
        assert isinstance(form, (Int8, Int4))
        out = cuda.linear(x, qdata, scale, bias, form)
        return multiply_dequantized(x, tensors, form, shape, bias) if out is None else out
    product = compiled.find(form, *shape, x.dtype, scale.dtype)
    if product is not None and 0 < x.numel() <= product.most_rows * shape[-1]:
        return product(qdata, scale, tuple(groups), x.contiguous(), None if bias is None else bias.contiguous())
    check_allocated(x, *stored, bias)
    x = _as_integers_hold_it(x, form)
    if not compiled.is_available() and _packs(x, qdata, form):
        return _multiply_packed(x, qdata, scale, bias)
    return multiply_dequantized(x, tensors, form, shape, bias)


def _packs(x: Tensor, qdata: Tensor, form: Format) -> bool:
    """Return whether PyTorch's op for int8 takes less time than a product with a dequantized weight.

    It reads whole vectors of columns, and its float32 path is scalar.
    """
    K = x.shape[-1]
    fits = isinstance(form, Int8) and form.group_size is None and qdata.numel() > 0 and K % 16 == 0
    return fits and x.dtype != torch.float32 and 0 < x.numel() // K <= _MOST_PACKED_ROWS


def _multiply_packed(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    N, K = qdata.shape
    # It crashes where vectors do not begin at multiples of their size, as in a mapped file; what torch allocates does.
    rows = x.reshape(-1, K).clone(memory_format=torch.contiguous_format)
    codes = qdata.clone() if qdata.data_ptr() % 16 else qdata
    out = torch.ops.aten._weight_int8pack_mm(rows, codes, scale.to(x.dtype).view(-1))
    return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], N)


def _as_integers_hold_it(x: Tensor, form: Format) -> Tensor:
    """Return x as a compiled product would take it: rounded if the format says so, and NaN for what is not finite."""
    if isinstance(form, Float8E4M3) or x.numel() == 0:
        return x
    if not (isinstance(form, Int8) and form.activations):
        return x.nan_to_num(math.nan, math.nan, math.nan)
    worth = x.abs().amax(-1, keepdim=True).float().clamp_min_(_SMALLEST_TOP).mul_(1 / 127)
    # A row with infinity has 0 * infinity in each place.
    return x.div(worth).round_().mul_(worth).to(x.dtype)


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
        for part in _blocks(N, K, _BLOCK_ELEMENTS):
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
    for part in _blocks(N, K, _BLOCK_ELEMENTS) if dtype == torch.float32 else [slice(0, N)]:
        out.addmm_(given[:, part], rows(part))
    return out.to(x.dtype)


def _blocks(N: int, K: int, elements: int) -> list[slice]:
    """Return slices of about one size, of so many elements or of the fewest rows, that make up N rows."""
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


def slowness(form: Format, dtype: torch.dtype) -> str | None:
    """Return what is slow about weights of a format that show a dtype, and what is fast; None where nothing is."""
    if isinstance(form, ColumnScaled):
        return slowness(form.inner, dtype)
    held = compiled.in_memory(form)
    has_product = isinstance(held, compiled.FORMATS)
    if not compiled.is_available():
        if isinstance(held, Int8) and held.group_size is None and dtype != torch.float32:
            return None
        why = "no C compiler was there at installation, or none for this CPU" if has_product else _NO_PRODUCT
        return (
            f"{form.name} weights: {why}{_DEQUANTIZED_FIRST} int8 without group_size with dtype=torch.bfloat16 is fast."
        )
    if has_product and (is_rounding(held) or _is_fast(held, dtype)):
        return None
    fast = "int8" if _is_fast(Int8(), dtype) else 'int8 with activations="int8"'
    if not has_product:
        return f"{form.name} weights: {_NO_PRODUCT}{_DEQUANTIZED_FIRST} {fast} is fast."
    return (
        f"{form.name} weights in {str(dtype).removeprefix('torch.')}: on this CPU a product of many tokens takes "
        f"longer than one with float weights. {fast} is fast."
    )


def _is_fast(form: Format, dtype: torch.dtype) -> bool:
    """Return whether many tokens take a compiled product, or one that is faster than that of PyTorch in this dtype."""
    if product_dtype(dtype, _MANY_ROWS) != dtype:
        return True
    return most_rows(form, dtype, compiled.instructions() or "") >= _MANY_ROWS


# The bare library: torch.library.custom_op wraps every call in Python, which at one token costs more than the product.
_LIBRARY = torch.library.Library("hf_trainweights", "FRAGMENT")
_LIBRARY.define(
    "linear(Tensor x, Tensor[] stored, Tensor? bias, str config) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("linear", _multiply, _key)
# `config` is the JSON description of a format, and `stored` its tensors in the order of `tensor_names`.
LINEAR = torch.ops.hf_trainweights.linear.default


@torch.library.register_fake("hf_trainweights::linear", lib=_LIBRARY)
def _empty_linear(x: Tensor, stored: Sequence[Tensor], *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], stored[0].shape[0]))
