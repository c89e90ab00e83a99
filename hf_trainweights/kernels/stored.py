"""Products with weights as they are stored: compiled for so many rows as that takes least time, else dequantized.

Every op here has the same implementation. What is not finite in a row of x makes the whole row of the result NaN where
codes are integers: by compiled products since no integer stands for it, by the other ways to be the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.codebook4 import Codebook4
from hf_trainweights.formats.coded import Coded
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.planes import COLUMNS
from hf_trainweights.formats.uint import UInt, UInt2, UInt3, UInt4, UInt5, UInt6
from hf_trainweights.kernels import compiled, cuda, int8_pack
from hf_trainweights.kernels.arguments import MultiplyFew, check_allocated, only_fitting
from hf_trainweights.kernels.dequantized import multiply_dequantized
from hf_trainweights.kernels.guards import Needs, guarded
from hf_trainweights.kernels.registration import define

# A smaller largest magnitude of a row counts as this one, as in native/product.h.
_SMALLEST_TOP = 2.0**-103

# By the bits of a code.
_UINTS: dict[int, type[UInt]] = {form.grid.bits: form for form in (UInt2, UInt3, UInt4, UInt5, UInt6)}


def linear(x: Tensor, held: Mapping[str, Tensor], form: Format, bias: Tensor | None) -> Tensor | None:
    """As `hf_trainweights.kernels.linear`, of the stored tensors; None for other formats, dtypes and devices."""
    qdata, scale = held["qdata"], held["scale"]
    if x.dtype not in FLOAT_DTYPES or x.device != qdata.device or not _is_served(x, qdata, scale, form):
        return None
    if isinstance(form, UInt):
        return UINT_LINEAR(x, qdata, scale, held["group_scale"], held["zero_point"], bias, form.group_size)
    if isinstance(form, Codebook4):
        return CODEBOOK4_LINEAR(x, qdata, scale, held["group_scale"], bias)
    if isinstance(form, Int4):
        return INT4_LINEAR(x, qdata, scale, bias)
    if isinstance(form, Float8E4M3):
        return FLOAT8_LINEAR(x, qdata, scale, bias)
    return INT8_LINEAR(x, qdata, scale, bias, isinstance(form, Int8) and form.activations is not None)


def _is_served(x: Tensor, qdata: Tensor, scale: Tensor, form: Format) -> bool:
    if x.device.type == "cpu":
        return isinstance(form, compiled.FORMATS)
    is_exact = torch.promote_types(scale.dtype, x.dtype) == x.dtype
    return isinstance(form, (Int8, Coded, Int4)) and is_exact and cuda.serves(x, qdata, form.group_size)


def prepare_few_rows(held: Mapping[str, Tensor], form: Format, dtype: torch.dtype) -> MultiplyFew | None:
    """As `hf_trainweights.kernels.prepare_few_rows`, of the stored tensors: the compiled product, if there is one."""
    if not isinstance(form, compiled.FORMATS):
        return None
    qdata, scale, *others = (held[name] for name in form.tensor_names)
    if qdata.dim() != 2 or qdata.device.type != "cpu":
        return None
    N, K = form.shape_of(qdata)
    # In memory the tensors of coded are those of int8.
    product = compiled.find(Int8() if isinstance(form, Coded) else form, N, K, dtype, scale.dtype)
    if product is None:
        return None
    return only_fitting(functools.partial(product, qdata, scale, tuple(others)), N, K, dtype, product.most_rows)


def _multiply(x: Tensor, form: Format, tensors: tuple[Tensor, ...], bias: Tensor | None) -> Tensor:
    qdata, scale, *groups = tensors
    N, K = form.shape_of(qdata)
    if x.device.type == "cuda" and isinstance(form, (Int8, Int4)):
        out = cuda.linear(x, qdata, scale, bias, form)
        return multiply_dequantized(x, {"qdata": qdata, "scale": scale}, form, (N, K), bias) if out is None else out
    product = compiled.find(form, N, K, x.dtype, scale.dtype)
    if product is not None and 0 < x.numel() <= product.most_rows * K:
        return product.of_any_strides(qdata, scale, tuple(groups), x, bias)
    check_allocated(x, *tensors, bias)
    x = _as_integers_hold_it(x, form)
    if not compiled.is_available() and int8_pack.serves(x, qdata, form):
        return int8_pack.multiply(x, qdata, scale, bias)
    return multiply_dequantized(x, dict(zip(form.tensor_names, tensors, strict=True)), form, (N, K), bias)


def _as_integers_hold_it(x: Tensor, form: Format) -> Tensor:
    """Return x as a compiled product would take it: rounded if the format says so, and NaN for what is not finite."""
    if isinstance(form, Float8E4M3) or x.numel() == 0:
        return x
    if not (isinstance(form, Int8) and form.activations):
        return x.nan_to_num(math.nan, math.nan, math.nan)
    worth = x.abs().amax(-1, keepdim=True).float().clamp_min_(_SMALLEST_TOP).mul_(1 / 127)
    # A row with infinity has 0 * infinity in each place.
    return x.div(worth).round_().mul_(worth).to(x.dtype)


@functools.cache
def _int8(group_size: int | None, quantize_x: bool) -> Int8:
    return Int8(group_size, "int8" if quantize_x else None)


def _int8_linear(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None, quantize_x: bool) -> Tensor:
    G = scale.shape[1]
    return _multiply(x, _int8(None if G == 1 else qdata.shape[1] // max(1, G), quantize_x), (qdata, scale), bias)


def _int4_linear(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return _multiply(x, Int4(x.shape[-1] // scale.shape[1]), (qdata, scale), bias)


def _float8_cpu(x: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return _multiply(x, Float8E4M3(), (qdata, scale), bias)


def _codebook4_cpu(x: Tensor, qdata: Tensor, scale: Tensor, group_scale: Tensor, bias: Tensor | None) -> Tensor:
    return _multiply(x, Codebook4(), (qdata, scale, group_scale), bias)


def _uint_cpu(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    group_scale: Tensor,
    zero_point: Tensor,
    bias: Tensor | None,
    group_size: int,
) -> Tensor:
    form = _UINTS[qdata.shape[1] * COLUMNS // x.shape[-1]](group_size)
    return _multiply(x, form, (qdata, scale, group_scale, zero_point), bias)


def _empty_linear(x: Tensor, qdata: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], qdata.shape[0]))


_X, _SCALES, _BIAS = (
    Needs("x", ("*", "K"), any_strides=True),
    Needs("scale", ("N", "G")),
    Needs("bias", ("N",), any_strides=True),
)
_guard_int8 = guarded(
    "hf_trainweights::int8_linear",
    _X,
    Needs("qdata", ("N", "K"), (torch.int8,)),
    _SCALES,
    _BIAS,
    rules={"G to divide K": lambda sizes: sizes["G"] == 1 or (sizes["G"] > 0 and sizes["K"] % sizes["G"] == 0)},
)
_guard_int4 = guarded(
    "hf_trainweights::int4_linear",
    _X,
    Needs("qdata", ("N", "words"), (torch.int32,)),
    _SCALES,
    _BIAS,
    rules={
        "K to be eight times the words": lambda sizes: sizes["K"] == 8 * sizes["words"],
        "G to divide K": lambda sizes: sizes["G"] > 0 and sizes["K"] % sizes["G"] == 0,
    },
)
_guard_float8 = guarded(
    "hf_trainweights::float8_linear",
    _X,
    Needs("qdata", ("N", "K"), (torch.float8_e4m3fn,)),
    Needs("scale", ("N", 1)),
    _BIAS,
)
_guard_codebook4 = guarded(
    "hf_trainweights::codebook4_linear",
    _X,
    Needs("qdata", ("N", "words"), (torch.int32,)),
    Needs("scale", ("N", 1)),
    Needs("group_scale", ("N", "bytes"), (torch.uint8,)),
    _BIAS,
    rules={"K to be eight times the words": lambda sizes: sizes["K"] == 8 * sizes["words"]},
)
_guard_uint = guarded(
    "hf_trainweights::uint_linear",
    _X,
    Needs("qdata", ("N", "words"), (torch.int32,)),
    Needs("scale", ("N", 1)),
    Needs("group_scale", ("N", "pairs"), (torch.uint8,)),
    Needs("zero_point", ("N", "pairs"), (torch.uint8,)),
    _BIAS,
)

INT8_LINEAR = define(
    "int8_linear(Tensor x, Tensor qdata, Tensor scale, Tensor? bias, bool quantize_x) -> Tensor",
    _empty_linear,
    CPU=_guard_int8(_int8_linear),
    CUDA=_guard_int8(_int8_linear),
)
INT4_LINEAR = define(
    "int4_linear(Tensor x, Tensor qdata, Tensor scale, Tensor? bias) -> Tensor",
    _empty_linear,
    CPU=_guard_int4(_int4_linear),
    CUDA=_guard_int4(_int4_linear),
)
FLOAT8_LINEAR = define(
    "float8_linear(Tensor x, Tensor qdata, Tensor scale, Tensor? bias) -> Tensor",
    _empty_linear,
    CPU=_guard_float8(_float8_cpu),
)
CODEBOOK4_LINEAR = define(
    "codebook4_linear(Tensor x, Tensor qdata, Tensor scale, Tensor group_scale, Tensor? bias) -> Tensor",
    _empty_linear,
    CPU=_guard_codebook4(_codebook4_cpu),
)
UINT_LINEAR = define(
    "uint_linear(Tensor x, Tensor qdata, Tensor scale, Tensor group_scale, Tensor zero_point, Tensor? bias, "
    "int group_size) -> Tensor",
    _empty_linear,
    CPU=_guard_uint(_uint_cpu),
)
