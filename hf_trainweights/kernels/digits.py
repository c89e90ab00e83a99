"""Products of floats with int8 codes as products of integers.

Each row of x is written as `top / 127 * (d0 + d1 / 256 + d2 / 256**2)`, where the digits d are the signed bytes of one
integer, and one `torch._int_mm` multiplies all of them with the codes, exactly. Two digits hold a 16-bit x below its
own rounding, three a float32 x to 6e-8 of the largest value of the row; one digit is `activations="int8"`. NaN or
infinity in a row of x makes its whole result NaN.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import torch
from torch import Tensor

from hf_trainweights.formats.arithmetic import largest_magnitude
from hf_trainweights.kernels.cpu_features import capabilities, has_amx
from hf_trainweights.kernels.guards import Needs, guarded
from hf_trainweights.kernels.scratch import SCRATCH

_guard = guarded(
    "torch._int_mm",
    Needs("first", ("M", "K"), (torch.int8,), any_strides=True),
    Needs("second", ("K", "N"), (torch.int8,), any_strides=True),
    # With one column PyTorch takes the transpose's strides for those of a plain matrix, and its result is wrong.
    rules={"K to be at least 2": lambda sizes: sizes["K"] > 1},
)
_int_mm = SimpleNamespace(default=_guard(torch.ops.aten._int_mm.default), out=_guard(torch.ops.aten._int_mm.out))

# The thresholds are measured: docs/performance.md, "Thresholds".

# Up to this many rows the codes are the left matrix: they are not reordered then, but the result is transposed.
LEFT_ROWS = 32
# From this many weights on, each digit of one row has a product of its own where there is no AMX, with so many codes a
# thread that they stay in its second-level cache for the next digit.
_COLUMN_WEIGHTS, _COLUMN_CODES = 1 << 23, 1 << 20
# Rows of x whose digits are held at a time.
_ROW_BLOCK = 512
# Elements of x that a thread writes as digits, and of a result that it scales, at a time: 512 kB of float32, within the
# second-level cache.
_STAGE_ELEMENTS = 1 << 17
# Integer results held at a time, 16 MB of int32.
_RESULT_ELEMENTS = 1 << 22

# Place values of the digits, 256**i, the lowest first; `_PLACES` pads them to the 8 bytes of a float64.
_POWERS = torch.tensor([1.0, 256.0, 65536.0]).view(3, 1, 1)
_PLACES = {count: torch.nn.functional.pad(_POWERS.view(-1)[:count], (0, 8 - count)) for count in (1, 2, 3)}
# 128 in each byte that is a digit. And a float64 so large that a number added to it is rounded to an integer, which the
# lowest bytes of the sum then hold, each digit 128 too large.
_MIDDLES = {count: sum(128 << 8 * index for index in range(count)) for count in (1, 2, 3)}
_INTEGERS = {count: torch.tensor(1.5 * 2.0**52 + _MIDDLES[count], dtype=torch.float64) for count in (2, 3)}

# A row of x below it, where the last of three digits would be worth a subnormal number, loses relative precision.
_SMALLEST_TOP = 2.0**-103


@functools.cache
def has_integer_products() -> bool:
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


def multiply_digits(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, quantize_x: bool) -> Tensor:
    """Return `F.linear(x, weight, bias)` by products of integers.

    Args:
        x: Float `[M, K]`, M and K at least 1.
        qdata: int8 `[N, K]`.
        scale: `[N, 1]`.
        bias: `[N]` or None.
        quantize_x: Whether to round each row of x to one digit.

    Returns:
        A new tensor `[M, N]` of the dtype of `x`.
    """
    scale, bias = scale.float(), None if bias is None else bias.float()
    count = 1 if quantize_x else 3 if x.dtype == torch.float32 else 2
    if x.shape[0] == 1:
        return _multiply_row(x, qdata, scale.view(-1), bias, count)
    if x.shape[0] <= LEFT_ROWS and has_amx():
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
