"""Weights of this package's formats, made of codes and scales that another quantizer chose.

A weight keeps its values. The smallest format is chosen that holds all of them and the scales as they are: `int4` and
`int8` for symmetric codes in groups that these formats have, `affine` for other integers, `float8_e4m3`, and `table4`
for four bits that stand for other numbers than integers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.formats.affine import Affine, pack_codes, pack_zeros
from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.column_order import COLUMN_ORDER, ColumnOrdered
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import GROUP_SIZES, Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.table4 import Table4
from hf_trainweights.imports.layouts.base import AGAIN, unsupported
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# The values of the indices 0 to 15 in MXFP4 and NVFP4: a sign, two bits of exponent, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Groups of `affine` and `table4` consist of this many columns, or a multiple.
_GROUP_STEP = 8


def integer_weight(name: str, codes: Tensor, scale: Tensor, bits: int, zero: Tensor | None = None) -> QuantizedTensor:
    """Return a weight of the values `(code - zero) * scale`.

    Args:
        name: The name of the weight in errors.
        codes: uint8 `[N, K]`, 0 to `2**bits - 1`.
        scale: One number, `[N]`, or `[N, G]` for groups of K / G columns; float.
        bits: 2, 3, 4, 5, 6 or 8.
        zero: Integers of the scale's shape, 0 to `2**bits`. None for `2**(bits - 1)`.

    Raises:
        CorruptFileError: A scale is not finite, or there are too few.
        UnsupportedError: No format holds groups of this size.
    """
    N, K = codes.shape
    scale = by_row(name, scale, N)
    G, middle = scale.shape[1], 2 ** (bits - 1)
    if zero is not None:
        zero = zero.reshape(-1, 1).expand(N, 1) if zero.dim() < 2 else zero.expand(N, G)
        zero = None if bool((zero == middle).all()) else zero
    if zero is None and bits == 8:
        return make_weight(
            name, Int8(None if G == 1 else K // G), {"qdata": (codes ^ 128).view(torch.int8), "scale": scale}, (N, K)
        )
    if zero is None and bits == 4:
        # A group of 256 columns, or a row, becomes several groups of 128 columns that repeat its scale.
        sizes = [size for size in GROUP_SIZES if K // G % size == 0 and Int4(size).fallback((N, K)) == Int4(size)]
        if sizes:
            scale = scale.repeat_interleave(K // G // max(sizes), dim=1)
            return make_weight(name, Int4(max(sizes)), {"qdata": pack_codes(codes, 4), "scale": scale}, (N, K))
    return _affine_weight(name, codes, scale, bits, zero)


def _affine_weight(name: str, codes: Tensor, scale: Tensor, bits: int, zero: Tensor | None) -> QuantizedTensor:
    """Return a weight in the format affine, or in int8 if no group size of affine fits the columns."""
    N, K = codes.shape
    G, size = scale.shape[1], K // scale.shape[1]
    offset = "none" if zero is None else "zero_point"
    if zero is not None and int(zero.amax()) >= 2**bits:
        zero, offset = zero - 1, "zero_point_minus_1"
    if zero is not None and not 0 <= int(zero.amin()) <= int(zero.amax()) < 2**bits:
        expected = f"zero points of 0 to {2**bits - 1}, or of 1 to {2**bits}"
        raise unsupported(name, expected, f"{int(zero.amin())} to {int(zero.amax())}, or both ends")
    if size % _GROUP_STEP == 0 or G == 1:
        form = Affine(bits, None if G == 1 else size, offset=offset)
        if form.fallback((N, K)) == form:
            tensors = {"qdata": pack_codes(codes, bits), "scale": scale}
            if zero is not None:
                tensors["zero_point"] = pack_zeros(zero, form)
            return make_weight(name, form, tensors, (N, K))
    zero = torch.full_like(codes[:, :1], 2 ** (bits - 1)) if zero is None else zero
    differences = codes.to(torch.int16) - zero.to(torch.int16).repeat_interleave(K // zero.shape[1], dim=1)
    differences -= offset == "zero_point_minus_1"
    low, high = (int(end) for end in differences.aminmax())
    if low < -128 or high > 127:
        expected = f"groups of a multiple of {_GROUP_STEP} columns, of which {K} are a multiple"
        raise unsupported(name, expected, f"groups of {size}, codes that differ from their zero points by {low}")
    return make_weight(name, Int8(None if G == 1 else size), {"qdata": differences.char(), "scale": scale}, (N, K))


def offset_weight(
    name: str, codes: Tensor, scale: Tensor, bits: int, offset: str, offsets: Tensor, rounding: str
) -> QuantizedTensor:
    """Return a weight of codes with a float beside the scale of each group.

    Args:
        name: The name of the weight in errors.
        codes: uint8 `[N, K]`, 0 to `2**bits - 1`.
        scale: Float `[N, G]`.
        bits: 2, 3, 4, 5, 6 or 8.
        offset: "bias" for `code * scale + offset`, "float_zero_point" for `(code - offset) * scale`.
        offsets: Float `[N, G]`, of the scale's dtype.
        rounding: "each" if each operation is rounded to the scale's dtype, "once" if the result alone is.

    Raises:
        CorruptFileError: A scale or an offset is not finite.
        UnsupportedError: No format holds groups of this size.
    """
    N, K = codes.shape
    size = K // scale.shape[1]
    if size % _GROUP_STEP:
        raise unsupported(name, f"groups of a multiple of {_GROUP_STEP} columns", f"groups of {size}")
    form = Affine(bits, size, offset=offset, rounding=rounding)
    # A weight of one row is not quantized to these formats, but they hold it.
    if form.fallback((max(N, 2), K)) != form:
        raise unsupported(name, f"a shape that {form} can hold", f"{N} rows of {K} columns")
    key = "bias" if offset == "bias" else "zero_point"
    tensors = {"qdata": pack_codes(codes, bits), "scale": by_row(name, scale, N), key: by_row(name, offsets, N)}
    return make_weight(name, form, tensors, (N, K))


def ordered_weight(
    name: str, codes: Tensor, scale: Tensor, bits: int, zero: Tensor | None, g_idx: Tensor
) -> QuantizedTensor:
    """Return a weight as `integer_weight` does, whose columns belong to the groups that `g_idx` `[K]` names.

    CorruptFileError: there is no such group. UnsupportedError: the groups have different sizes.
    """
    K, G = codes.shape[1], scale.shape[1]
    groups = g_idx.to(torch.int64)
    if bool(((groups < 0) | (groups >= G)).any()):
        raise CorruptFileError(
            name, f"groups 0 to {G - 1} in g_idx", f"{int(groups.min())} to {int(groups.max())}", AGAIN
        )
    if torch.equal(groups, torch.arange(K, device=groups.device) // (K // G)):
        return integer_weight(name, codes, scale, bits, zero)
    if bool((torch.bincount(groups, minlength=G) != K // G).any()):
        raise unsupported(name, f"groups of {K // G} columns each", "groups of different sizes in g_idx")
    order = groups.argsort(stable=True)
    inner = integer_weight(name, codes[:, order], scale, bits, zero)
    stored = {**inner.tensors, COLUMN_ORDER: order.to(torch.int32).unsqueeze(0)}
    return make_weight(name, ColumnOrdered(inner.format), stored, tuple(codes.shape))


def float8_weight(
    name: str, codes: Tensor, scale: Tensor, block: tuple[int, int] = (1, 0), dtype: torch.dtype = torch.float32
) -> QuantizedTensor:
    """Return a weight of float8 codes `[*, N, K]` and its scales: one number, `[N]`, or `[*, R, C]` for R * C blocks.

    `block` has the rows and columns of a block, which count only if a row has several scales. Scales in uint8 or
    float8_e8m0fnu are exponents. Then `dtype` is the weight's, otherwise that of the scales is.

    Raises:
        CorruptFileError: A code or a scale is not finite.
        UnsupportedError: The number of a block's columns is no multiple of 8.
    """
    N = codes.shape[-2]
    if scale.dim() >= 2 and scale.shape[-2] == -(-N // block[0]):
        scale = scale.repeat_interleave(min(block[0], N), dim=-2)[..., :N, :]
    if bool(codes.view(torch.uint8).bitwise_and(0x7F).eq(0x7F).any()):
        raise CorruptFileError(name, "finite float8 codes", "NaN", AGAIN)
    are_exponents = scale.dtype in (torch.uint8, torch.float8_e8m0fnu)
    if are_exponents:
        scale = exponents(name, scale)
    scale = scale if scale.dim() > 2 else by_row(name, scale, N)
    if scale.shape[-1] == 1:
        scale = powers_of_two(scale) if are_exponents else scale
        return make_weight(name, Float8E4M3(), {"qdata": codes, "scale": scale}, tuple(codes.shape))
    if block[1] % _GROUP_STEP:
        raise unsupported(name, f"blocks of a multiple of {_GROUP_STEP} columns", f"blocks of {block}")
    form = Float8E4M3(block[1], "e8m0" if are_exponents else "plain")
    return make_weight(name, form, {"qdata": codes, "scale": scale}, tuple(codes.shape), dtype)


def table_weight(
    name: str,
    octets: Tensor,
    group_size: int,
    scales: str,
    tensors: Mapping[str, Tensor],
    table: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> QuantizedTensor:
    """Return a weight of the values `table[index] * scale`.

    Args:
        name: The name of the weight in errors.
        octets: uint8 `[*, N, K / 2]`, the even column in the low bits of each byte.
        group_size: Columns that share a scale.
        scales: The coding of the scales: an argument of `Table4`.
        tensors: The stored tensors of this coding.
        table: Sixteen float32 values; None for those of e2m1.
        dtype: The dtype of the weight, unless its scales are floats: then theirs.

    Raises:
        CorruptFileError: A number is not finite.
        UnsupportedError: No format holds groups of this size.
    """
    *lead, K = (*octets.shape[:-1], octets.shape[-1] * 2)
    if group_size % _GROUP_STEP or K % group_size:
        expected = f"groups of a multiple of {_GROUP_STEP} columns that divides {K}"
        raise unsupported(name, expected, f"groups of {group_size}")
    values = torch.tensor(E2M1, dtype=torch.float32) if table is None else table.float()
    for key, tensor in {**tensors, "table": values}.items():
        if tensor.is_floating_point() and not bool(tensor.float().isfinite().all()):
            raise CorruptFileError(name, f"finite numbers ({key})", "NaN or Inf", AGAIN)
    stored = {
        "qdata": octets.contiguous().view(torch.int32),
        **tensors,
        "table": values.view(1, 16).expand(*lead[:-1], 1, 16),
    }
    return make_weight(name, Table4(group_size, scales), stored, (*lead, K), dtype)


def exponents(name: str, scale: Tensor) -> Tensor:
    """Return scales in uint8 or float8_e8m0fnu as uint8; CorruptFileError: one is 255, which is NaN."""
    octets = scale.view(torch.uint8)
    if bool((octets == 255).any()):
        raise CorruptFileError(name, "scales that are powers of two", "NaN", AGAIN)
    return octets


def powers_of_two(octets: Tensor) -> Tensor:
    """Return the float32 scales of exponents, exact."""
    return octets.contiguous().view(torch.float8_e8m0fnu).float()


def unsigned(name: str, codes: Tensor, middle: int) -> Tensor:
    """Return int8 codes plus `middle` as uint8; CorruptFileError: one lies outside of `-middle` to `middle - 1`."""
    low, high = (int(end) for end in codes.aminmax())
    if low < -middle or high >= middle:
        raise CorruptFileError(name, f"codes of {-middle} to {middle - 1}", f"{low} to {high}", AGAIN)
    return (codes.to(torch.int16) + middle).to(torch.uint8)


def by_row(name: str, scale: Tensor, N: int) -> Tensor:
    """Return scales (one number, `[N]` or `[N, G]`) as a view `[N, G]`.

    CorruptFileError: the number of rows is not N, or a scale is not finite.
    """
    if scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(N, 1)
    elif scale.dim() == 1:
        scale = scale.unsqueeze(1)
    if len(scale) != N:
        raise CorruptFileError(name, f"scales for {N} rows", f"{len(scale)}", AGAIN)
    if scale.dtype in FLOAT_DTYPES and not bool(scale.isfinite().all()):
        raise CorruptFileError(name, "finite scales", "NaN or Inf", AGAIN)
    return scale


def make_weight(
    name: str,
    form: Format,
    tensors: Mapping[str, Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> QuantizedTensor:
    """Make a weight of stored tensors of any strides; CorruptFileError: they do not fit the format and the shape.

    The weight has the dtype of its scales if that is a float one, else `dtype`.
    """
    tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
    form.check(tensors, shape, name)
    scale_dtype = tensors["scale"].dtype
    return QuantizedTensor(tensors, form, shape, scale_dtype if scale_dtype in FLOAT_DTYPES else dtype)
