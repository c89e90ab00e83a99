"""int8 weights with one scale a row, resident as the plain `[N, K]` bytes that are on disk: no second copy.

Three ways, by the number of rows M of x and the instructions of the CPU:

- `torch._weight_int8pack_mm` for the few rows of a decoding step, 16-bit x only: its float32 path is scalar. With
  `activations="int8"` too, except for one row without AMX.
- Integer products. Each row of x is written as `top / 127 * (d0 + d1 / 256 + d2 / 256**2)`, where the digits d are the
  signed bytes of one integer, and one `torch._int_mm` multiplies all of them with the codes, exactly. Two digits hold a
  16-bit x below its own rounding, three a float32 x to 6e-8 of the largest value of the row; one digit is
  `activations="int8"`.
- Blocks of codes cast to the dtype of x and multiplied there, for many rows of bfloat16 where the CPU multiplies those
  fast, for small weights and for CPUs without VNNI.

A row of x can therefore give a result that differs in its rounding when it comes alone and when it comes among others.
NaN or infinity in a row of x makes its whole result NaN where the product is one of integers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES, largest_magnitude
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels import cuda
from hf_trainweights.kernels.cpu_features import capabilities, has_amx, product_dtype
from hf_trainweights.kernels.registration import define
from hf_trainweights.kernels.scratch import SCRATCH

_int_mm = torch.ops.aten._int_mm
_weight_int8pack_mm = torch.ops.aten._weight_int8pack_mm.default

# Thresholds in rows of x, measured on one core of a Xeon with AMX, 896x896 and 4864x896, as speed over bfloat16
# F.linear. _weight_int8pack_mm against digits: 1.5 and 1.3 against 1.0 and 1.3 at 4 rows, 1.1 and .7 against 1.0 and
# 1.2 at 6.
_PACK_ROWS = 4
# It reads whole vectors of 16 columns: past the end of a matrix with another K, where it returns garbage or crashes.
_PACK_COLUMNS = 16
# It crashes where vectors of codes or of x do not begin at a multiple of these addresses, as in a memory-mapped file.
_CODES_ALIGNMENT, _X_ALIGNMENT = 16, 32
# Digits against cast blocks, in bfloat16: .7 and .7 against .6 and .7 at 48 rows, .6 and .7 against .6 and .8 at 64.
_DIGIT_ROWS = 48
# In float32 digits lead there too (1.1 and 1.7 against .9 and .9), but for short rows: 1536x384 .8 against .9.
_DIGIT_COLUMNS = 512
# One digit alone, at 256 rows: 1.3 against .8 with 4096x4096 weights, .8 against .7 with 4864x896, but no faster there
# in a whole model. Without AMX one digit leads always: 3.1 and 4.1 against .9 and .9.
_ONE_DIGIT_WEIGHTS = 1 << 23
# The calls that write digits take longer than such a weight's product: at 4 rows of float32 .5 against .9 with 384x384
# weights, .9 against 1.1 with 512x512, 1.2 against 1.1 with 640x640.
_CAST_WEIGHTS = 1 << 18
# The codes as the left matrix (no copy of them is reordered) against x as the left one: 1.2 and 1.4 against 1.1 and 1.1
# at 6 rows, .6 and .8 against .6 and .7 at 32, .6 and .7 against .7 and .7 at 48: the result has to be transposed.
_LEFT_ROWS = 32
# One row in three digits, without AMX. oneDNN multiplies one column as fast as codes come from memory, two of them at
# half that speed: so from this many weights each digit has a product of its own, with so many codes a thread that they
# stay in its second-level cache for the next digit. Speed over F.linear: 4096x4096 1.6, in one product with the digits
# as the left matrix 1.2; 4864x896 1.3 against 1.4.
_COLUMN_WEIGHTS = 1 << 23
_COLUMN_CODES = 1 << 20
# Rows of x whose digits are held at a time.
_ROW_BLOCK = 512
# A cast weight is the left matrix where x has so many more columns than rows, for the same reason. Speed over F.linear,
# 4096x4096: .9 against .8 at 256 rows, .8 against .8 at 512; 4864x896, 256 rows: .7 against .8.
_COLUMNS_OF_ROW = 10
# Elements of x that a thread writes as digits, and of a result that it scales, at a time: 512 kB of float32, within the
# second-level cache.
_STAGE_ELEMENTS = 1 << 17
# Integer results held at a time, 16 MB of int32.
_RESULT_ELEMENTS = 1 << 22
# Codes cast at a time at most, in blocks of one size: 16 MB of bfloat16. Speed over F.linear at 256 rows, 4864x896: .71
# at once, .68 in 2 blocks, .61 in 4; with two threads .67, .61 and .53.
_CAST_ELEMENTS = 1 << 23

# What bytes are worth, the lowest first; and what those of a float64 are, of which so many are digits.
_POWERS = torch.tensor([1.0, 256.0, 65536.0]).view(3, 1, 1)
_PLACES = {count: torch.nn.functional.pad(_POWERS.view(-1)[:count], (0, 8 - count)) for count in (1, 2, 3)}
# 128 in each byte that is a digit; and a float64 so large that what is added to it is rounded to an integer, which the
# lowest bytes of the sum then hold, each digit 128 too large.
_MIDDLES = {count: sum(128 << 8 * index for index in range(count)) for count in (1, 2, 3)}
_INTEGERS = {count: torch.tensor(1.5 * 2.0**52 + _MIDDLES[count], dtype=torch.float64) for count in (2, 3)}

# A row of x below it, where the last of three digits would be worth a subnormal number, loses relative precision.
_SMALLEST_TOP = 2.0**-103


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
    served = (form.group_size is None and qdata.device.type == "cpu") or cuda.serves(x, qdata, form.group_size)
    if dtype not in FLOAT_DTYPES or not exact or not served:
        return None
    return LINEAR(x, qdata, scale, bias, form.activations is not None)


def prepare_few_rows(
    held: Mapping[str, Tensor], form: Int8, layout: None, dtype: torch.dtype
) -> Callable[[Tensor, Tensor | None], Tensor | None] | None:
    """As `hf_trainweights.kernels.prepare_few_rows`: by the op that reads the codes as they are, in float32 by digits.

    Args:
        held: `qdata` `[N, K]` and `scale` `[N, 1]`.
        form: The format.
        layout: None: the codes are read as they are stored.
        dtype: Dtype of x.
    """
    del layout
    qdata, scale = held["qdata"], held["scale"]
    on_cpu = form.group_size is None and qdata.dim() == 2 and qdata.device.type == "cpu"
    if not on_cpu or scale.dtype != dtype or qdata.numel() == 0 or not qdata.is_contiguous():
        return None
    (N, K), factors, quantize_x = qdata.shape, scale.view(-1), form.activations is not None
    aligned = qdata.data_ptr() % _CODES_ALIGNMENT == 0
    pack_rows = _PACK_ROWS if aligned and _prefers_pack(_PACK_ROWS, N, K, dtype, quantize_x) else 0
    digit_rows = 0
    if not _prefers_pack(1, N, K, dtype, quantize_x) and _prefers_digits(1, N, K, dtype, quantize_x):
        digit_rows = 1 if pack_rows else _LEFT_ROWS

    def multiply_few(x: Tensor, bias: Tensor | None) -> Tensor | None:
        M = x.numel() // K
        if not 0 < M <= max(pack_rows, digit_rows) or not x.is_contiguous():
            return None
        if digit_rows >= M:
            out = _multiply_digits(x.view(M, K), qdata, scale, bias, quantize_x)
        elif x.data_ptr() % _X_ALIGNMENT == 0:
            out = _weight_int8pack_mm(x.view(M, K), qdata, factors)
            out = out if bias is None else out.add_(bias)
        else:
            return None
        return out.view(*x.shape[:-1], N)

    return multiply_few if pack_rows or digit_rows else None


def _empty_linear(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, quantize_x: bool) -> Tensor:
    del scale, bias, quantize_x
    return x.new_empty((*x.shape[:-1], qdata.shape[0]))


def _linear_cpu(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, quantize_x: bool) -> Tensor:
    if x.numel() == 0 or qdata.numel() == 0:
        return torch.nn.functional.linear(x, qdata.to(x.dtype), bias)
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
        out = _multiply_digits(rows, qdata, scale, bias, quantize_x)
    else:
        out = _multiply_cast(rows, qdata, scale, bias)
    return out if is_matrix else out.view(*x.shape[:-1], N)


def _prefers_pack(M: int, N: int, K: int, dtype: torch.dtype, quantize_x: bool) -> bool:
    if M > _PACK_ROWS or K % _PACK_COLUMNS or dtype == torch.float32:
        return False
    # One digit against the op, with 896x896 and 4864x896: 3.0 and 2.2 against 1.9 and 1.7 without AMX; with it the op
    # takes .5 to .9 of the time.
    return not (quantize_x and M == 1 and _prefers_digits(M, N, K, dtype, quantize_x) and not has_amx())


def _prefers_digits(M: int, N: int, K: int, dtype: torch.dtype, quantize_x: bool) -> bool:
    # With one column PyTorch takes the transpose's strides for those of a plain matrix, and its result is wrong.
    if N * K <= _CAST_WEIGHTS or K == 1 or not _has_integer_products():
        return False
    if M <= _DIGIT_ROWS:
        return True
    if quantize_x:
        return dtype != torch.bfloat16 or N * K >= _ONE_DIGIT_WEIGHTS or not has_amx()
    # Cast weights against digits at 256 rows, as speed over F.linear in bfloat16: Xeon with AMX .7 against .6; AMD
    # Genoa .9 against .8; the Xeon without AMX .9 against 2.3, without instructions for bfloat16 1.0 against 6.6.
    return K >= _DIGIT_COLUMNS and (dtype != torch.bfloat16 or product_dtype(dtype, M) != dtype)


@functools.cache
def _has_integer_products() -> bool:
    """Return whether this CPU multiplies int8 fast and exactly; without VNNI pairs of products saturate at 16 bits."""
    if not any(capabilities().get(name) for name in ("avx512_vnni", "avx_vnni", "amx_int8")):
        return False
    x, codes = torch.full((3, 64), 127, dtype=torch.int8), torch.full((32, 64), -128, dtype=torch.int8)
    return bool((_int_mm.default(codes, x.t()) == -128 * 127 * 64).all())


def _digits(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the digits of x, int8 `[count, M, K]` in scratch memory, and what the first one is worth, `[M, 1]`."""
    digits = SCRATCH.take("digits", (count, *x.shape), torch.int8)
    worth = largest_magnitude(x.contiguous()).clamp_min_(_SMALLEST_TOP).mul_(1 / 127).unsqueeze(1)
    step = max(1, _STAGE_ELEMENTS * torch.get_num_threads() // x.shape[1])
    for rows, first, part in zip(x.split(step), worth.split(step), digits.split(step, 1), strict=True):
        rest = SCRATCH.take("rest", rows.shape, torch.float32).copy_(rows).div_(first * 256.0 ** (1 - count)).round_()
        if count == 1:
            part[0].copy_(rest)
            continue
        words = SCRATCH.take("words", rows.shape, torch.int32).copy_(rest)
        for index in reversed(range(count)):
            # The low byte, as a signed number; what is left is a multiple of 256.
            part[index].copy_(words)
            if index:
                words.add_(128).bitwise_right_shift_(8)
    return digits, worth


def _multiply_packed(x: Tensor, qdata: Tensor, scale: Tensor) -> Tensor:
    # What torch allocates is aligned.
    x = x.clone() if x.data_ptr() % _X_ALIGNMENT else x
    if qdata.data_ptr() % _CODES_ALIGNMENT == 0:
        return _weight_int8pack_mm(x, qdata, scale)
    # Four codes take the place of one float32.
    rows = max(1, 4 * _STAGE_ELEMENTS // qdata.shape[1])
    buffer = torch.empty_like(qdata[:rows])
    parts = [
        _weight_int8pack_mm(x, buffer[: codes.shape[0]].copy_(codes), factors)
        for codes, factors in zip(qdata.split(rows), scale.split(rows), strict=True)
    ]
    return torch.cat(parts, dim=1)


def _multiply_digits(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, quantize_x: bool) -> Tensor:
    scale, bias = scale.float(), None if bias is None else bias.float()
    count = 1 if quantize_x else 3 if x.dtype == torch.float32 else 2
    if x.shape[0] == 1:
        return _multiply_row(x, qdata, scale.view(-1), bias, count)
    if x.shape[0] <= _LEFT_ROWS and has_amx():
        return _multiply_few_rows(x, qdata, scale, bias, count)
    out = x.new_empty(x.shape[0], qdata.shape[0])
    for rows, block in zip(x.split(_ROW_BLOCK), out.split(_ROW_BLOCK), strict=True):
        _multiply_many_rows(rows, qdata, scale.view(-1), bias, count, block)
    return out


def _multiply_row(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, count: int) -> Tensor:
    """Multiply one row in as few calls as possible: between two weights each call takes longer than what it does."""
    top = x.abs().max().item()
    worth = max(top, _SMALLEST_TOP) * 256.0 ** (1 - count) / 127 if top < math.inf else math.nan
    column = x.reshape(-1, 1)
    if count == 1:
        products = _int_mm.default(qdata, column.float().mul(1 / worth).round_().to(torch.int8))
    else:
        # One sum rounds and converts.
        numbers = torch.add(_INTEGERS[count], column.double(), alpha=1 / worth)
        digits = numbers.view(torch.int64).bitwise_xor_(_MIDDLES[count]).view(torch.int8)
        if has_amx():
            products = _int_mm.default(qdata, digits)
        elif qdata.numel() < _COLUMN_WEIGHTS:
            products = _int_mm.default(digits.t(), qdata.t())[:count].t()
        else:
            products = _multiply_columns(qdata, digits[:, :count])
    places = _PLACES[count][: products.shape[1]]
    result = torch.addmv(scale, products.float(), places, beta=0, alpha=worth).mul_(scale)
    return (result if bias is None else result.add_(bias)).to(x.dtype).view(1, -1)


def _multiply_columns(qdata: Tensor, digits: Tensor) -> Tensor:
    """Return the products of codes `[N, K]` and digits `[K, count]`, each column by itself; int32 `[N, count]`."""
    columns = digits.t().contiguous().unsqueeze(-1).unbind()
    step = max(1, _COLUMN_CODES * torch.get_num_threads() // (64 * qdata.shape[1])) * 64
    blocks = qdata.split(step)
    return torch.cat([torch.cat([_int_mm.default(codes, column) for column in columns], 1) for codes in blocks])


def _signed_bytes(numbers: Tensor, count: int) -> Tensor:
    """Return the digits of numbers, which are rounded in place: int8 `[*, count]`, the lowest first, four bytes apart.

    The signed bytes of a number are its bytes after 128 was added to each, with the highest bit of each flipped.
    """
    words = numbers.round_().to(torch.int32).add_(_MIDDLES[count]).bitwise_xor_(_MIDDLES[count])
    return words.view(torch.int8).view(*numbers.shape, 4)[..., :count]


def _multiply_few_rows(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, count: int) -> Tensor:
    """Multiply with the codes as the left matrix, in as few calls as possible: they take longer than what they do."""
    M, K = x.shape
    rest = x.contiguous().float()
    worth = rest.abs().amax(-1, keepdim=True).clamp_min_(_SMALLEST_TOP).mul_(256.0 ** (1 - count) / 127)
    digits = _signed_bytes(rest / worth, count).permute(2, 0, 1).contiguous().view(count * M, K)
    products = _int_mm.default(qdata, digits.t()).float()
    # One product adds the digits of each row up and multiplies them with what they are worth.
    worths = (_POWERS[:count] * torch.diag(worth.view(-1))).view(count * M, M)
    result = torch.mm(products, worths).mul_(scale)
    return x.new_empty(M, len(qdata)).copy_((result if bias is None else result.add_(bias.unsqueeze(1))).t())


def _multiply_many_rows(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, count: int, out: Tensor) -> None:
    digits, top = _digits(x, count)
    digits = digits.flatten(0, 1)
    columns = max(64, _RESULT_ELEMENTS // len(digits) // 64 * 64)
    for start in range(0, len(qdata), columns):
        part = slice(start, start + columns)
        codes = qdata[part].t()
        products = SCRATCH.take("products", (len(digits), codes.shape[1]), torch.int32)
        _int_mm.out(digits, codes, out=products)
        shift = None if bias is None else bias[part]
        _combine(products.unflatten(0, (count, -1)), top, scale[part], shift, out[:, part])


def _combine(products: Tensor, top: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Fill `out` `[M, N]` from the products of digits, int32 `[count, M, N]`, in parts that stay in the caches."""
    step = max(1, _STAGE_ELEMENTS * torch.get_num_threads() // out.shape[1])
    for digits, worth, part in zip(products.split(step, 1), top.split(step), out.split(step), strict=True):
        *others, last = digits.unbind(0)
        sums = SCRATCH.take("sums", last.shape, torch.float32).copy_(last)
        for digit in reversed(others):
            torch.add(SCRATCH.take("digit", last.shape, torch.float32).copy_(digit), sums, alpha=1 / 256, out=sums)
        sums.mul_(worth).mul_(scale)
        part.copy_(sums if bias is None else sums.add_(bias))


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


LINEAR = define(
    "int8_linear(Tensor x, Tensor qdata, Tensor scale, Tensor? bias, bool quantize_x) -> Tensor",
    _empty_linear,
    CPU=_linear_cpu,
    CUDA=cuda.linear_int8,
)
