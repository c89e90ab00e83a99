"""Products of few rows of x with stored weights on NVIDIA GPUs, by `cuda_native/few_rows.cu`.

The kernel reads the codes and the scales of most formats as they are stored. One launch multiplies all rows of x with
their experts, too, and the CPU need not know how many rows each expert has.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hf_trainweights.formats.affine import Affine
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.table4 import Table4
from hf_trainweights.kernels import cuda_driver
from hf_trainweights.native_library import address_of

MOST_ROWS = 16
"""The most rows of x that one pass over a weight multiplies."""

# Tensor cores of GPUs that the kernel is for take both.
_DTYPES = (torch.bfloat16, torch.float16)
# The values of macros, as in weights.cuh.
_INTEGERS, _FLOAT8, _TABLE = range(3)
_PLAIN, _FLOAT32 = range(2)
_CODINGS = {"e8m0": 2, "e4m3": 3, "e4m3_divided": 4, "nested": 5, "k4": 6, "iq4_xs": 7}
_OFFSETS = {"zero_point": 1, "zero_point_minus_1": 2, "float_zero_point": 4, "bias": 5}
_ROW_ZERO_POINT, _MINIMUM = 3, 6
_NO_OFFSET = 0
# The kernel reads groups of this many columns or more, for codes of 4 and of 8 bits.
_LEAST_GROUP = 8

# Bytes of a row that a lane loads at once; rows of codes and x begin at multiples of it.
_ALIGNMENT = 16
# Rows of the weight and of x that one product of tensor cores has, and lanes of a warp.
_TILE_ROWS, _TILE_COLUMNS, _LANES = 16, 8, 32
_FLOAT32_BYTES, _EXPERTS_DIM = 4, 3
# A grid has at most 65,535 blocks in its second dimension. The first one, for rows of x, has any number.
_MOST_N = 65535 * _TILE_ROWS

# Names, shapes, strides and sizes of elements in bytes.
Layout = tuple[tuple[str, Sequence[int], Sequence[int], int], ...]
Tile = tuple[tuple[str, int], ...]


class _Stored(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("matrix_bytes", ctypes.c_longlong), ("row_bytes", ctypes.c_int))


# As `Weight` in weights.cuh.
_NAMES = (
    *("qdata", "scale", "group_scale", "global_scale", "zero_point", "bias", "table", "nested_values", "outer_scale"),
    *("phase", "nested_offset"),
)
_SIZES = ("N", "K", "groups", "outer_count")


class Weight(ctypes.Structure):
    """The addresses of a weight's stored tensors, as the kernel takes them."""

    _fields_ = (*((name, _Stored) for name in _NAMES), *((size, ctypes.c_int) for size in _SIZES))


@functools.lru_cache(maxsize=1024)
def macros_of(form: Format, K: int, dtype: torch.dtype, scale_dtype: torch.dtype) -> dict[str, int] | None:
    """Return the macros of the kernel for weights of a format, not to be changed; None if it does not read them."""
    if dtype not in _DTYPES or not isinstance(form, (Int4, Int8, Float8E4M3, Table4, Affine)):
        return None
    scales, bits = getattr(form, "scales", "plain"), 8 if isinstance(form, (Int8, Float8E4M3)) else 4
    offset = _offset_of(form)
    scale = _plain_coding(dtype, scale_dtype) if scales == "plain" else _CODINGS.get(scales)
    if scale is None or offset is None or getattr(form, "bits", bits) != bits or K == 0 or K % (128 // bits):
        return None
    group = form.group_size or 0
    codes = _FLOAT8 if isinstance(form, Float8E4M3) else _TABLE if isinstance(form, Table4) else _INTEGERS
    macros = {"BITS": bits, "CODES": codes, "SCALE": scale, "OFFSET": offset, "GROUP": group}
    macros["HALF"] = int(dtype == torch.float16)
    # Columns whose codes a lane has. Shorter groups have scales that multiply codes in 16 bits.
    of_lane = 128 // bits
    fits = group % of_lane == 0 or (group >= _LEAST_GROUP and of_lane % group == 0 and _is_in_16_bits(macros))
    return macros if fits else None


def _plain_coding(dtype: torch.dtype, scale_dtype: torch.dtype) -> int | None:
    return {dtype: _PLAIN, torch.float32: _FLOAT32}.get(scale_dtype)


def _offset_of(form: Format) -> int | None:
    """Return the number of a format's offsets in weights.cuh; None if the kernel does not add them."""
    if not isinstance(form, Affine):
        return _NO_OFFSET
    if form.offset == "none":
        return _MINIMUM if form.coding.has_minima else _NO_OFFSET
    offset = _OFFSETS[form.offset]
    if form.group_size is None:
        return _ROW_ZERO_POINT if form.offset == "zero_point" else None
    return offset


def _is_in_16_bits(macros: Mapping[str, int]) -> bool:
    """Return whether 16 bits hold scales and offsets, and the weight is rounded once: IN_16_BITS of weights.cuh."""
    scale, offset = macros["SCALE"], macros["OFFSET"]
    if offset > _ROW_ZERO_POINT:
        return offset == _OFFSETS["bias"] and scale == _PLAIN
    if scale == _PLAIN:
        return macros["CODES"] != _TABLE
    return scale in (_CODINGS["e4m3"], _CODINGS["e4m3_divided"]) or (scale == _CODINGS["e8m0"] and not macros["HALF"])


def reads(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether rows of codes begin where a lane can load them, rows lie side by side, and a grid has them all."""
    qdata = tensors["qdata"]
    if qdata.shape[-2] > _MOST_N:
        return False
    steps = [stride * qdata.itemsize for stride in qdata.stride()[:-1]]
    if any(step % _ALIGNMENT for step in (qdata.data_ptr(), *steps)):
        return False
    return all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in tensors.values())


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """Return names, shapes, strides and sizes of elements: all that a launch depends on but the addresses."""
    return tuple([(name, tensor.shape, tensor.stride(), tensor.itemsize) for name, tensor in tensors.items()])


def _step(shape: Sequence[int], stride: Sequence[int], dim: int) -> int:
    """Return the elements from one row or matrix to the next; 0 if all share it, or there is one alone."""
    return 0 if len(shape) < -dim or shape[dim] == 1 else stride[dim]


class _Arguments(threading.local):
    """The arguments of a launch, which lie ready: from call to call addresses and a number change.

    Each thread has its own, because another one may run between the lines that change and launch.
    """

    def __init__(self, form: Format, K: int, layout: Layout, index: int) -> None:
        cuda_driver.make_current(index)
        shapes, group_size = {name: shape for name, shape, *_ in layout}, getattr(form, "group_size", None)
        self._weight = Weight(N=shapes["qdata"][-2], K=K, groups=-(-K // group_size) if group_size else 1)
        self._weight.outer_count = shapes.get("outer_scale", (1,))[-1]
        self.fields = [getattr(self._weight, name) for name in shapes]
        for field, (_, shape, stride, itemsize) in zip(self.fields, layout, strict=True):
            field.row_bytes, field.matrix_bytes = (_step(shape, stride, dim) * itemsize for dim in (-2, -3))
        self.x, self.bias, self.out, self.ends = (ctypes.c_void_p() for _ in range(4))
        self.rows, self._experts = ctypes.c_int(), ctypes.c_int(shapes["qdata"][0])
        values = (self._weight, self.x, self.bias, self.out, self.ends, self.rows, self._experts)
        self.addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))


class _Plan:
    """The launch for weights of one layout. It holds no tensor, so weights of the same layout share it."""

    def __init__(self, form: Format, K: int, dtype: torch.dtype, layout: Layout, tile: Tile, index: int) -> None:
        shapes = {name: shape for name, shape, *_ in layout}
        scale_bytes = next(itemsize for name, _, _, itemsize in layout if name == "scale")
        macros = macros_of(form, K, dtype, torch.float32 if scale_bytes == _FLOAT32_BYTES else dtype)
        assert macros is not None
        constants, self.N, self.K, self.index = dict(tile), shapes["qdata"][-2], K, index
        self.is_grouped = len(shapes["qdata"]) == _EXPERTS_DIM
        self.function = cuda_driver.load("few_rows", macros | constants | {"GROUPED": int(self.is_grouped)}, index)
        self.arguments = _Arguments(form, K, layout, index)
        self.blocks = -(-self.N // (_TILE_ROWS * constants["ROW_TILES"]))
        self.columns, self.threads = constants["COLUMN_TILES"] * _TILE_COLUMNS, constants["WARPS"] * _LANES
        self.stream_of = torch._C._cuda_getCurrentRawStream

    def run(self, tensors: Sequence[Tensor], x: Tensor, bias: Tensor | None, ends: Tensor | None = None) -> Tensor:
        """Return the product; the arguments after `tensors` are those of the function that `multiply` returns."""
        M, own, shape = x.numel() // self.K, self.arguments, (*x.shape[:-1], self.N)
        out = x.new_zeros(shape) if self.is_grouped else x.new_empty(shape)
        if x.data_ptr() % _ALIGNMENT:
            x = x.clone()
        # Whoever frees the memory of a weight and gathers it again may put it elsewhere.
        for field, tensor in zip(own.fields, tensors, strict=True):
            field.data = tensor.data_ptr()
        own.x.value, own.out.value, own.rows.value = x.data_ptr(), out.data_ptr(), M
        own.bias.value, own.ends.value = address_of(bias), address_of(ends)
        grid = M if self.is_grouped else -(-M // self.columns), self.blocks
        cuda_driver.launch(self.function, grid, self.threads, self.stream_of(self.index), own.addresses)
        return out


_plan = functools.lru_cache(maxsize=1024)(_Plan)


def multiply(
    tensors: Mapping[str, Tensor], form: Format, K: int, dtype: torch.dtype, tile: Mapping[str, int]
) -> Callable[..., Tensor]:
    """Return the product of a weight.

    Args:
        tensors: Stored tensors of a weight `[N, K]` that `reads`, or of experts `[E, N, K]`; the function that is
            returned keeps them.
        form: Their format, for which there are `macros_of`.
        K: Columns.
        dtype: Dtype of x.
        tile: The macros ROW_TILES, COLUMN_TILES, WARPS, STAGES and BLOCKS of few_rows.cu.

    Returns:
        A function from contiguous x `[*, K]` and a bias `[N]` or None to the product `[*, N]`. If there are experts, it
        has a third argument, int32 `[E]`: expert e multiplies the rows of x before `ends[e]`. Rows behind the last one
        become 0.

    Raises:
        UnsupportedError: The kernel cannot be compiled or loaded.
    """
    constants, index = tuple(sorted(tile.items())), tensors["qdata"].device.index or 0
    return functools.partial(_plan(form, K, dtype, layout_of(tensors), constants, index).run, tuple(tensors.values()))
