"""int8 weights, resident as the plain `[N, K]` bytes that are on disk: no second copy.

Four ways, by the number of rows M of x and the instructions of the CPU:

- The compiled products (`compiled`), which alone serve groups. The others serve where those are not there, and many
  rows on CPUs that have faster instructions for them.
- `torch._weight_int8pack_mm` for the few rows of a decoding step, 16-bit x only: its float32 path is scalar. With
  `activations="int8"` too, except for one row without AMX.
- Integer products of digits of x (`digits`).
- Blocks of codes cast to the dtype of x and multiplied there, for many rows of bfloat16 where the CPU multiplies those
  fast, for small weights and for CPUs without VNNI.

A row of x can therefore give a result that differs in its rounding when it comes alone and when it comes among others.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels import compiled, cuda
from hf_trainweights.kernels.cpu_features import has_amx, product_dtype
from hf_trainweights.kernels.digits import LEFT_ROWS, has_integer_products, multiply_digits
from hf_trainweights.kernels.guards import Needs, guarded
from hf_trainweights.kernels.registration import define
from hf_trainweights.kernels.scratch import SCRATCH

# The thresholds are measured: docs/performance.md, "Thresholds".

# The largest M for torch._weight_int8pack_mm.
_PACK_ROWS = 4
# It reads whole vectors of 16 columns: past the end of a matrix with another K, where it returns garbage or crashes.
_PACK_COLUMNS = 16
# It crashes where vectors of codes or of x do not begin at a multiple of these addresses, as in a memory-mapped file.
_CODES_ALIGNMENT, _X_ALIGNMENT = 16, 32
# The largest M for digits where cast weights are multiplied fast.
_DIGIT_ROWS = 48
# The least K for digits of more rows: the calls that write them take as long for short rows.
_DIGIT_COLUMNS = 512
# The least weights for one digit of many rows on a CPU with AMX.
_ONE_DIGIT_WEIGHTS = 1 << 23
# The calls that write digits take longer than the product of a weight of up to so many elements.
_CAST_WEIGHTS = 1 << 18
# A cast weight is the left matrix where x has so many more columns than rows: its codes are not reordered then.
_COLUMNS_OF_ROW = 10
# Codes copied to aligned memory at a time.
_COPIED_CODES = 1 << 19
# Codes cast at a time at most, in blocks of one size: 16 MB of bfloat16.
_CAST_ELEMENTS = 1 << 23

_weight_int8pack_mm = guarded(
    "torch._weight_int8pack_mm",
    Needs("x", ("M", "K"), alignment_bytes=_X_ALIGNMENT),
    Needs("qdata", ("N", "K"), (torch.int8,), alignment_bytes=_CODES_ALIGNMENT),
    Needs("scale", ("N",)),
    rules={f"K to be a multiple of {_PACK_COLUMNS}": lambda sizes: sizes["K"] % _PACK_COLUMNS == 0},
)(torch.ops.aten._weight_int8pack_mm.default)


def linear(x: Tensor, held: Mapping[str, Tensor], form: Int8, layout: None, bias: Tensor | None) -> Tensor | None:
    """Return the product, or None for other devices, groups on a CPU, and a scale that does not fit the dtype of x.

    Args:
        x: `[*, K]`.
        held: `qdata` `[N, K]` and `scale` `[N, 1]`.
        form: The format.
        layout: None: the codes are read as they are stored.
        bias: `[N]` or None.
    """
    del layout
    qdata, scale = held["qdata"], held["scale"]
    dtype = x.dtype
    exact = scale.dtype == dtype or torch.promote_types(scale.dtype, dtype) == dtype
    if dtype not in FLOAT_DTYPES or not exact:
        return None
    quantize_x = form.activations is not None
    if qdata.device.type != "cpu":
        served = cuda.serves(x, qdata, form.group_size)
    else:
        served = form.group_size is None or compiled.serves(form.group_size, dtype, scale.dtype)
    return LINEAR(x, qdata, scale, bias, quantize_x) if served else None


def prepare_few_rows(
    held: Mapping[str, Tensor], form: Int8, layout: None, dtype: torch.dtype
) -> compiled.MultiplyFew | None:
    """As `hf_trainweights.kernels.prepare_few_rows`: by the op that reads the codes as they are, in float32 by digits.

    Args:
        held: `qdata` `[N, K]` and `scale` `[N, 1]`.
        form: The format.
        layout: None: the codes are read as they are stored.
        dtype: Dtype of x.
    """
    del layout
    qdata, scale = held["qdata"], held["scale"]
    quantize_x = form.activations is not None
    if qdata.dim() != 2 or qdata.device.type != "cpu" or scale.dtype != dtype or qdata.numel() == 0:
        return None
    product = _find_compiled(qdata, scale, dtype, quantize_x)
    if product is not None:
        return compiled.settle(product, qdata, scale, dtype, compiled.most_rows(dtype, quantize_x))
    if form.group_size is not None:
        return None
    (N, K), factors = qdata.shape, scale.view(-1)
    aligned = qdata.data_ptr() % _CODES_ALIGNMENT == 0
    pack_rows = _PACK_ROWS if aligned and _prefers_pack(_PACK_ROWS, N, K, dtype, quantize_x) else 0
    digit_rows = 0
    if not _prefers_pack(1, N, K, dtype, quantize_x) and _prefers_digits(1, N, K, dtype, quantize_x):
        digit_rows = 1 if pack_rows else LEFT_ROWS

    def multiply_few(x: Tensor, bias: Tensor | None) -> Tensor | None:
        M = x.numel() // K
        if not 0 < M <= max(pack_rows, digit_rows) or not x.is_contiguous():
            return None
        if digit_rows >= M:
            out = multiply_digits(x.view(M, K), qdata, scale, bias, quantize_x)
        elif x.data_ptr() % _X_ALIGNMENT == 0:
            out = _weight_int8pack_mm(x.view(M, K), qdata, factors)
            out = out if bias is None else out.add_(bias)
        else:
            return None
        return out.view(*x.shape[:-1], N)

    return multiply_few if pack_rows or digit_rows else None


def slowness(form: Int8, dtype: torch.dtype) -> str | None:
    """As `hf_trainweights.kernels.slowness`: only compiled products multiply groups without dequantizing them.

    Args:
        form: The format of the weights.
        dtype: Dtype that they show.
    """
    if form.activations is None and compiled.leaves_many_rows(dtype):
        return (
            "int8 weights in float32: on this CPU a product of many tokens takes longer than one with float weights. "
            'With activations="int8" it does not.'
        )
    if form.group_size is None or compiled.is_available():
        return None
    return (
        "int8 weights in groups: on this CPU each product dequantizes them first and takes longer than one with float "
        "weights. int8 without group_size is fast."
    )


def _empty_linear(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, quantize_x: bool) -> Tensor:
    del scale, bias, quantize_x
    return x.new_empty((*x.shape[:-1], qdata.shape[0]))


def _linear_cpu(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, quantize_x: bool) -> Tensor:
    if x.numel() == 0 or qdata.numel() == 0:
        return torch.nn.functional.linear(x, qdata.to(x.dtype), bias)
    product = _find_compiled(qdata, scale, x.dtype, quantize_x)
    if product is not None and x.numel() // qdata.shape[1] <= compiled.most_rows(x.dtype, quantize_x):
        return product.of_any_strides(x, qdata, scale, bias)
    if scale.shape[1] > 1:
        return _multiply_groups(x, qdata, scale, bias)
    rows, dtype, is_matrix = x, x.dtype, x.dim() == 2
    N, K = qdata.shape
    if not is_matrix:
        rows = x.reshape(-1, K)
    M = rows.shape[0]
    if _prefers_pack(M, N, K, dtype, quantize_x):
        factors = scale if scale.dtype == dtype else scale.to(dtype)
        out = _multiply_packed(rows.contiguous(), qdata.contiguous(), factors.view(-1).contiguous())
        out = out if bias is None else out.add_(bias)
    elif _prefers_digits(M, N, K, dtype, quantize_x):
        out = multiply_digits(rows, qdata, scale, bias, quantize_x)
    else:
        out = _multiply_cast(rows, qdata, scale, bias)
    return out if is_matrix else out.view(*x.shape[:-1], N)


def _find_compiled(qdata: Tensor, scale: Tensor, dtype: torch.dtype, quantize_x: bool) -> compiled.Product | None:
    (N, K), G = qdata.shape, scale.shape[1]
    return compiled.find(N, K, None if G == 1 else K // max(1, G), 8, dtype, scale.dtype, quantize_x)


def _multiply_groups(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply with blocks of rows that are dequantized first."""
    K = qdata.shape[1]
    form, rows = Int8(K // scale.shape[1]), max(1, _CAST_ELEMENTS // K)
    blocks = zip(qdata.split(rows), scale.split(rows), strict=True)
    weights = (form.dequantize_rows({"qdata": codes, "scale": each}, K, x.dtype) for codes, each in blocks)
    out = torch.cat([torch.nn.functional.linear(x, weight) for weight in weights], dim=-1)
    return out if bias is None else out.add_(bias)


def _prefers_pack(M: int, N: int, K: int, dtype: torch.dtype, quantize_x: bool) -> bool:
    if M > _PACK_ROWS or K % _PACK_COLUMNS or dtype == torch.float32:
        return False
    # One digit is faster than the op without AMX, and slower with it.
    return not (quantize_x and M == 1 and _prefers_digits(M, N, K, dtype, quantize_x) and not has_amx())


def _prefers_digits(M: int, N: int, K: int, dtype: torch.dtype, quantize_x: bool) -> bool:
    # With one column PyTorch takes the transpose's strides for those of a plain matrix, and its result is wrong.
    if N * K <= _CAST_WEIGHTS or K == 1 or not has_integer_products():
        return False
    if M <= _DIGIT_ROWS:
        return True
    if quantize_x:
        return dtype != torch.bfloat16 or N * K >= _ONE_DIGIT_WEIGHTS or not has_amx()
    # Cast weights are faster where the CPU multiplies bfloat16 fast.
    return K >= _DIGIT_COLUMNS and (dtype != torch.bfloat16 or product_dtype(dtype, M) != dtype)


def _multiply_packed(x: Tensor, qdata: Tensor, scale: Tensor) -> Tensor:
    # What torch allocates is aligned.
    x = x.clone() if x.data_ptr() % _X_ALIGNMENT else x
    if qdata.data_ptr() % _CODES_ALIGNMENT == 0:
        return _weight_int8pack_mm(x, qdata, scale)
    rows = max(1, _COPIED_CODES // qdata.shape[1])
    buffer = torch.empty_like(qdata[:rows])
    parts = [
        _weight_int8pack_mm(x, buffer[: codes.shape[0]].copy_(codes), factors)
        for codes, factors in zip(qdata.split(rows), scale.split(rows), strict=True)
    ]
    return torch.cat(parts, dim=1)


def _multiply_cast(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    (M, K), N = x.shape, len(qdata)
    wide = product_dtype(x.dtype, M)
    if wide != x.dtype:
        return _multiply_cast(x.to(wide), qdata, scale, None if bias is None else bias.to(wide)).to(x.dtype)
    x, scale = x.contiguous(), scale.to(x.dtype)
    # Sums of codes can overflow in float16, so there the weight is scaled and not the result. To scale a small weight
    # takes little, and saves the sums of bfloat16 a rounding.
    first = x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and N * K <= _CAST_WEIGHTS)
    left = x.dtype == torch.bfloat16 and M * _COLUMNS_OF_ROW <= K
    out = x.new_empty(N, M).t() if left else x.new_empty(M, N)
    blocks = -(-N * K // _CAST_ELEMENTS)
    step = -(-N // (64 * blocks)) * 64
    buffer = SCRATCH.take("cast", (min(step, N), K), x.dtype)
    for codes, factors, part in zip(qdata.split(step), scale.split(step), out.split(step, dim=1), strict=True):
        weight = buffer[: len(codes)].copy_(codes)
        torch.mm(x, (weight.mul_(factors) if first else weight).t(), out=part)
    if first:
        out = out if bias is None else out.add_(bias)
    else:
        scale = scale.view(-1)
        out = out.mul_(scale) if bias is None else torch.addcmul(bias, out, scale)
    return out.contiguous()


_guard = guarded(
    "hf_trainweights::int8_linear",
    Needs("x", ("*", "K"), any_strides=True),
    Needs("qdata", ("N", "K"), (torch.int8,)),
    Needs("scale", ("N", "G")),
    Needs("bias", ("N",), any_strides=True),
    rules={"G to divide K": lambda sizes: sizes["G"] == 1 or (sizes["G"] > 0 and sizes["K"] % sizes["G"] == 0)},
)

LINEAR = define(
    "int8_linear(Tensor x, Tensor qdata, Tensor scale, Tensor? bias, bool quantize_x) -> Tensor",
    _empty_linear,
    CPU=_guard(_linear_cpu),
    CUDA=_guard(cuda.linear_int8),
)
