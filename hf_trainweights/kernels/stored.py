"""Products with quantized weights: `F.linear(x, weight, bias)` and the gradient of x.

A compiled function multiplies the codes as they are stored, up to the number of rows at which it is the fastest. For
other products the weight is dequantized block by block, which serves every format, dtype and device.

If an element of a row of x is not finite and the codes are integers, all results of the row are NaN: compiled products
have no integer for such an element, and the other products do the same.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_trainweights.formats import get_format
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.cutting import cut_rows
from hf_trainweights.formats.float8_e4m3 import LARGEST, Float8E4M3
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.wrapper import Wrapper
from hf_trainweights.kernels import compiled, cuda, product_op
from hf_trainweights.kernels.arguments import DEBUG, MultiplyFew, check_allocated, check_product, only_fitting
from hf_trainweights.kernels.cpu_features import ALL, is_rounding, most_rows, product_dtype
from hf_trainweights.kernels.thresholds import THRESHOLDS

# A smaller largest magnitude of a row counts as this one, as in native/product.h.
_SMALLEST_TOP = 2.0**-103

# Up to this many rows PyTorch's op for int8 is the fastest if no library is compiled.
_MOST_PACKED_ROWS = THRESHOLDS["MOST_PACKED_ROWS"]
# The advice of `slowness` is about products of this many tokens.
_MANY_ROWS = 64

# Texts of `slowness`.
_NO_PRODUCT = "no compiled product reads this format"
_DEQUANTIZED_FIRST = ", so each product dequantizes them first and takes longer than one with float weights."

# The elements of a block that is dequantized at a time, and its fewest rows. A block stays in a cache. Memory for a
# float weight of 32 MB would be mapped, page by page, and given back at every product.
_BLOCK_ELEMENTS = 1 << 20
_BLOCK_ROWS = THRESHOLDS["DEQUANTIZED_ROWS"]
# If x has at least this many columns for each of its rows, the weight is the left matrix: PyTorch first copies the
# right one into another order.
_COLUMNS_OF_ROW = THRESHOLDS["COLUMNS_OF_ROW"]


def linear(x: Tensor, held: Mapping[str, Tensor], form: Format, bias: Tensor | None = None) -> Tensor | None:
    """Return `F.linear(x, weight, bias)` of a quantized weight by the op `LINEAR`.

    Args:
        x: Float `[*, K]`, of the dtype of the weight; any strides.
        held: The stored tensors of a weight `[N, K]`; any strides.
        form: Its format.
        bias: `[N]`, of the dtype of `x`, or None.

    Returns:
        A new tensor `[*, N]` of the dtype of `x`; None if the op does not serve the device, format or dtype.
    """
    if isinstance(form, Wrapper):  # it changes x, then its inner format multiplies
        return linear(form.inputs(x, held[form.added_name]), held, form.inner, bias)
    form = compiled.in_memory(form)
    if _rounds_to_float8(form) and x.device.type == "cpu":  # a format that rounds has one plain scale a row
        return linear(round_to_float8(x), held, Float8E4M3(), bias)
    qdata = held["qdata"]
    on_cpu = x.device.type == "cpu" and x.dtype in FLOAT_DTYPES and isinstance(form, compiled.FORMATS)
    if x.device != qdata.device or not (on_cpu or cuda.serves(form, held, x.dtype)):
        return None
    # A slice of every other row is not contiguous, and PyTorch's ops read some tensors by their address alone.
    tensors = [held[name].contiguous() for name in form.tensor_names]
    if on_cpu and type(x) is not Tensor and not torch.compiler.is_exporting():  # a compiler traces with x
        out = product_op.multiply(x, tensors, form, bias)
        if out is not None:
            return out
    return LINEAR(x, tensors, bias, config_of(form))


def prepare_few_rows(held: Mapping[str, Tensor], form: Format, dtype: torch.dtype) -> MultiplyFew | None:
    """Return a function that multiplies the few rows of a decoding step with one weight.

    Everything that depends on the weight alone is decided here, once. A weight that streams through the caches evicts
    Python's own code from them: code that takes 15 us when it is repeated takes 100 us between two weights.

    Args:
        held: The stored tensors of a weight `[N, K]`; any strides.
        form: Its format.
        dtype: Dtype of the weight.

    Returns:
        A function from any plain x and bias, without gradients, to the same bits as `linear`, or to None if it leaves
        them to `linear`. None if there is no such function for the weight.
    """
    if isinstance(form, Wrapper):
        multiply_few, inputs, added = prepare_few_rows(held, form.inner, dtype), form.inputs, held[form.added_name]
        if multiply_few is None:
            return None
        return only_fitting(lambda x, bias: multiply_few(inputs(x, added), bias), held, form, dtype, ALL)
    form = compiled.in_memory(form)
    if _rounds_to_float8(form) and held["qdata"].device.type == "cpu":
        plain = prepare_few_rows(held, Float8E4M3(), dtype)
        return plain and only_fitting(lambda x, bias: plain(round_to_float8(x), bias), held, form, dtype, ALL)
    qdata, scale, *others = (held[name] for name in form.tensor_names)
    N, K = form.shape_of(qdata)
    if not all(tensor.is_contiguous() and tensor.device == qdata.device for tensor in held.values()):
        return None
    if cuda.serves(form, held, dtype):
        # For each product `linear` copies codes that do not begin at a multiple of 4 bytes. A copy that was made here
        # would not follow later changes of the codes.
        if qdata.data_ptr() % 4:
            return None
        return only_fitting(cuda.prepare(held, form, K, dtype), held, form, dtype, ALL)
    product = compiled.find(form, N, K, dtype, scale.dtype) if qdata.device.type == "cpu" else None
    if product is None:
        return None
    multiply_few = None if DEBUG else product_op.prepare(product, qdata, scale, others)
    if multiply_few is not None:
        return multiply_few
    multiply_few = functools.partial(product, qdata, scale, tuple(others))
    return only_fitting(multiply_few, held, form, dtype, product.most_rows)


@functools.lru_cache
def config_of(form: Format) -> str:
    """Return the description of a format that an op takes."""
    return json.dumps(form.get_config())


@functools.lru_cache
def format_of(config: str) -> Format:
    """Return the format of such a description."""
    return get_format(json.loads(config))


def _multiply(x: Tensor, stored: Sequence[Tensor], bias: Tensor | None, config: str) -> Tensor:
    form, (qdata, scale, *groups) = format_of(config), stored
    tensors, shape = dict(zip(form.tensor_names, stored, strict=True)), form.shape_of(qdata)
    if DEBUG:
        check_product("hf_trainweights::linear", x, tensors, form, bias, any_strides=True)
    if x.device.type == "cuda":
        out = cuda.linear(x, tensors, bias, form)
        return multiply_dequantized(x, tensors, form, shape, bias) if out is None else out
    product = compiled.find(form, *shape, x.dtype, scale.dtype)
    if product is not None and 0 < x.numel() <= product.most_rows * shape[-1]:
        return product(qdata, scale, tuple(groups), x.contiguous(), None if bias is None else bias.contiguous())
    check_allocated(x, *stored, bias)
    x = _as_compiled_products_see_it(x, form)
    if not compiled.is_available() and _packs(x, qdata, form):
        return _multiply_packed(x, qdata, scale, bias)
    return multiply_dequantized(x, tensors, form, shape, bias)


def _packs(x: Tensor, qdata: Tensor, form: Format) -> bool:
    """Return whether PyTorch's op for int8 takes less time than a product with a dequantized weight.

    The op reads full vectors of 16 columns, and its float32 path is scalar.
    """
    K = x.shape[-1]
    fits = isinstance(form, Int8) and form.group_size is None and qdata.numel() > 0 and K % 16 == 0
    return fits and x.dtype != torch.float32 and 0 < x.numel() // K <= _MOST_PACKED_ROWS


def _multiply_packed(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    N, K = qdata.shape
    # The op crashes if vectors do not begin at multiples of their size, as in a mapped file. Memory of torch does.
    rows = x.reshape(-1, K).clone(memory_format=torch.contiguous_format)
    codes = qdata.clone() if qdata.data_ptr() % 16 else qdata
    out = torch.ops.aten._weight_int8pack_mm(rows, codes, scale.to(x.dtype).view(-1))
    return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], N)


def _as_compiled_products_see_it(x: Tensor, form: Format) -> Tensor:
    """Return x with the values that a compiled product computes with.

    They are rounded if the format rounds activations, and NaN stands for an element that is not finite.
    """
    if isinstance(form, Float8E4M3) or x.numel() == 0:
        return x
    if not (isinstance(form, Int8) and form.activations):
        return x.nan_to_num(math.nan, math.nan, math.nan)
    unit = x.abs().amax(-1, keepdim=True).float().clamp_min_(_SMALLEST_TOP).mul_(1 / 127)
    # In a row with infinity each element becomes 0 * infinity, which is NaN.
    return x.div(unit).round_().mul_(unit).to(x.dtype)


def _rounds_to_float8(form: Format) -> bool:
    return isinstance(form, Float8E4M3) and form.activations is not None


def round_to_float8(x: Tensor) -> Tensor:
    """Return x with each row rounded to multiples of float8 codes; NaN for a row that is not finite."""
    unit = x.abs().amax(-1, keepdim=True).float().clamp_min(_SMALLEST_TOP).mul(1 / LARGEST)
    return ((x.float() / unit).to(torch.float8_e4m3fn).float() * unit).to(x.dtype)


def multiply_dequantized(
    x: Tensor, tensors: Mapping[str, Tensor], form: Format, shape: Sequence[int], bias: Tensor | None
) -> Tensor:
    """Return `F.linear(x, weight, bias)` of x `[*, K]` and the stored tensors of a weight `[N, K]`."""
    N, K = shape
    M = x.shape[:-1].numel()
    if x.device.type != "cpu":
        rows, blocks = _rows_of(tensors, form, shape, x.dtype), _blocks(N, K, cuda.DEQUANTIZED_ELEMENTS)
        outs = [F.linear(x, rows(block), None if bias is None else bias[block]) for block in blocks]
        return outs[0] if len(outs) == 1 else torch.cat(outs or [x.new_empty(*x.shape[:-1], 0)], dim=-1)
    dtype = product_dtype(x.dtype, M)
    tokens = x.reshape(M, K).contiguous().to(dtype)
    is_left = dtype == torch.bfloat16 and M * _COLUMNS_OF_ROW <= K
    out = tokens.new_empty(N, M).t() if is_left else tokens.new_empty(M, N)
    if x.numel() == 0:
        out.zero_()
    else:
        rows = _rows_of(tensors, form, shape, dtype)
        for block in _blocks(N, K, _BLOCK_ELEMENTS):
            torch.mm(tokens, rows(block).t(), out=out[:, block])
    if bias is not None:
        out.add_(bias)
    return out.to(x.dtype).contiguous().view(*x.shape[:-1], N)


def multiply_transpose(x: Tensor, tensors: Mapping[str, Tensor], form: Format, shape: Sequence[int]) -> Tensor:
    """Return `x @ weight` of x `[M, N]` and the stored tensors of a weight `[N, K]`, for the gradient of `x`."""
    check_allocated(x, *tensors.values())
    N, K = shape
    # PyTorch multiplies one row of 16 bits fast if the weights that it sums up lie side by side. Here they do not.
    dtype = product_dtype(x.dtype, max(2, len(x))) if x.device.type == "cpu" else x.dtype
    gradients, out = x.to(dtype), x.new_zeros(len(x), K, dtype=dtype)
    rows = _rows_of(tensors, form, shape, dtype)
    # In 16 bits the sums would be rounded after each block, so the weight is one block.
    for block in _blocks(N, K, _BLOCK_ELEMENTS) if dtype == torch.float32 else [slice(0, N)]:
        out.addmm_(gradients[:, block], rows(block))
    return out.to(x.dtype)


def _blocks(N: int, K: int, elements: int) -> list[slice]:
    """Cut N rows into slices of about equal size, of about `elements` elements but at least `_BLOCK_ROWS` rows."""
    blocks = max(1, -(-N * K // elements))
    step = max(_BLOCK_ROWS, -(-N // (64 * blocks)) * 64)
    return [slice(start, start + step) for start in range(0, N, step)]


def _rows_of(
    tensors: Mapping[str, Tensor], form: Format, shape: Sequence[int], dtype: torch.dtype
) -> Callable[[slice], Tensor]:
    """Return a function from a slice of rows to these rows of the float weight, perhaps in scratch memory."""
    form = compiled.in_memory(form)
    qdata, scale, *groups = (tensors[name] for name in form.tensor_names)
    product = compiled.find(form, *shape, dtype, scale.dtype) if qdata.device.type == "cpu" else None
    if product is None:
        return lambda block: _dequantize(cut_rows(form, tensors, lambda whole: whole[block]), form, shape[-1], dtype)
    contiguous = qdata.contiguous(), scale.contiguous(), tuple(tensor.contiguous() for tensor in groups)
    return lambda block: product.dequantize(*contiguous, block)


def _dequantize(tensors: Mapping[str, Tensor], form: Format, K: int, dtype: torch.dtype) -> Tensor:
    weight = cuda.dequantize_rows(tensors, form, K, dtype)
    return form.dequantize_rows(tensors, K, dtype) if weight is None else weight


def slowness(form: Format, dtype: torch.dtype) -> str | None:
    """Explain why weights of a format are slow with a dtype, and name a fast choice; None if they are fast."""
    if isinstance(form, Wrapper):
        return slowness(form.inner, dtype)
    held = compiled.in_memory(form)
    has_product = compiled.serves(held)
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
    """Return whether a product of many tokens is compiled, or is faster in float32 than PyTorch's is in this dtype."""
    if product_dtype(dtype, _MANY_ROWS) != dtype:
        return True
    return most_rows(form, dtype, compiled.instructions() or "") >= _MANY_ROWS


# Not torch.library.custom_op: it wraps every call in Python, which takes longer than a product of one token.
_LIBRARY = torch.library.Library("hf_trainweights", "FRAGMENT")
_LIBRARY.define(
    "linear(Tensor x, Tensor[] stored, Tensor? bias, str config) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("linear", _multiply, _key)
# `config` is the JSON description of a format, and `stored` are its tensors in the order of `tensor_names`.
LINEAR = torch.ops.hf_trainweights.linear.default


@torch.library.register_fake("hf_trainweights::linear", lib=_LIBRARY)
def _empty_linear(x: Tensor, stored: Sequence[Tensor], *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], stored[0].shape[0]))
