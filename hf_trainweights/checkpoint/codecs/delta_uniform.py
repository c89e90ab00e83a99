"""`delta-uniform`: rounds the difference of a weight to its anchor to multiples of one step, within a stated bound.

*Dither* is a number d in +-1/2, taken from a table, that is added before rounding to a level and subtracted again at
decoding. Let element x be at row-major position i, let a be its anchor (0 if there is no anchor), and
d = DITHER[(i + shift) mod 4093]. All numbers are float32, each operation is rounded once, and no multiply-add is fused:

| | |
|---|---|
| encode | level q = round((x - a) / step + d); an x equal to a is "same" in the terms of `levels` |
| decode | a + (q - d) * step, then rounded to the tensor's dtype; for "same" a, but 0.0 for an a of -0.0 if d < 0 |

The 0.0 is the sum of -0.0 and the change, (0 - d) * 0 = 0.0.

DITHER[k] = (k**-1 mod 4093 - 2046) / 4096, the inverse modulo that prime, with 0**-1 = 0: it begins -2046, -2045, 1
(over 4096). An element that would miss the bound, is not finite or too far away is stored as it is (see `levels`).

Why dither: plain rounding moves every small change to the same side, towards the anchor, which undoes training and
biases the loss upwards. After dither the error is uniform in +-step/2 and independent of the change. The table is a
fixed permutation, so it takes no bytes in a file and decodes the same on every machine. An unchanged element is not
dithered. An element whose `exp_avg_sq` is 0 never had a gradient. If it is within half a step of its anchor, it differs
only because the anchor was rounded, so it counts as equal. Training that resumes starts on exact levels. If the next
checkpoint had the same dither, small changes would round back to these levels and be undone. So each checkpoint shifts
the table, by the sum of the tensor's bit patterns.

The payloads are those of `levels`.

| parameter | content |
|---|---|
| step | float, exact in float32 |
| anchor | bool, whether the difference is to the reference `anchor` |
| shift | int from 0 to 4092; 0 if it is missing |
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES, Codec, EncodedTensor, Json, Params, References
from hf_trainweights.checkpoint.codecs.coding import compiled
from hf_trainweights.checkpoint.codecs.coding.blocks import (
    Placed,
    Rows,
    chunk_ranges,
    dense,
    fill,
    matrix_shape,
    rounded_to,
    rows_of,
    tiles,
    to_float32,
)
from hf_trainweights.checkpoint.codecs.coding.levels import SAME, LevelWriter, decode_tiles, place_levels, to_levels
from hf_trainweights.errors import ConfigError

# The length of the table of dither: a prime, because the table is made of inverses modulo it.
_PRIME = 4093
# native/levels.c reads up to this many numbers from any start in the first period of the table.
_COMPILED_DITHER = 1 << 16
# Beyond these the step or its inverse leaves the range of float32.
_SMALLEST_STEP, _LARGEST_STEP = 2.0**-120, 2.0**120


@dataclass(frozen=True)
class DeltaUniform(Codec):
    """Rounds the difference to the anchor to a uniform step. The bound is the largest absolute error.

    Args:
        step: Distance of two levels, > 0, in the unit of the weights; used as the nearest float32.
        limit: An element that would be off by more when decoded is stored exactly. None stands for one step, which only
            numbers close to their dtype's resolution ever exceed: the usual error is at most step / 2.

    Examples:
        >>> import torch
        >>> anchor = torch.randn(64, 64)
        >>> weight = anchor + torch.randn(64, 64) * 1e-3
        >>> encoded = DeltaUniform.within(1e-4).encode(weight, {"anchor": anchor})
        >>> encoded.bound <= 1e-4
        True
    """

    step: float
    limit: float | None = None

    codec_id: ClassVar[str] = "delta-uniform"
    lossless: ClassVar[bool] = False
    roles: ClassVar[tuple[str, ...]] = ("weight",)
    references: ClassVar[tuple[str, ...]] = ("anchor",)
    hints: ClassVar[tuple[str, ...]] = ("exp_avg_sq",)
    dtypes: ClassVar[frozenset[torch.dtype]] = LOSSY_DTYPES

    def __post_init__(self) -> None:
        _require_step("step", self.step)
        if self.limit is not None:
            _require_step("limit", self.limit)

    @classmethod
    def within(cls, bound: float) -> DeltaUniform:
        """Return the codec whose decoded elements are off by at most `bound` > 0, in the unit of the weights."""
        _require_step("bound", bound)
        # A little below 2 * bound, or the rounding to the tensor's dtype would push every hundredth element beyond it.
        return cls(step=bound * (2 - 2**-5), limit=bound)

    @np.errstate(all="ignore")
    def _encode(self, tensor: Tensor, references: References) -> EncodedTensor:
        step = float(np.float32(self.step))
        # Errors are compared in float32, which may round them down.
        limit = (step if self.limit is None else self.limit) * (1 - 2**-22)
        shape = matrix_shape(tensor.shape)
        # exp_avg_sq helps only beside an anchor.
        usable = {name: reference.view(shape) for name, reference in references.items() if "anchor" in references}
        shift, writer = _shift(tensor), LevelWriter(tensor)
        for tile in tiles(*shape):
            anchor, moment = (
                to_float32(usable[name][tile], name) if name in usable else None for name in ("anchor", "exp_avg_sq")
            )
            starts = _dither_starts(*tile, shape[1], shift)
            writer.write(tile, partial(_encode_tile, anchor, moment, starts, step, limit))
        params: dict[str, Json] = {"step": step, "anchor": "anchor" in usable, "shift": shift}
        return EncodedTensor(writer.payloads(), params, writer.bound * (1 + 2**-23))

    @classmethod
    @np.errstate(all="ignore")
    def _decode(
        cls, payloads: Sequence[Tensor], params: Params, shape: torch.Size, dtype: torch.dtype, references: References
    ) -> Tensor:
        step = cls.param(params, "step", float, _SMALLEST_STEP, _LARGEST_STEP)
        has_anchor = cls.param(params, "anchor", bool)
        shift = cls.param(params, "shift", int, 0, _PRIME - 1) if "shift" in params else 0
        matrix = matrix_shape(shape)
        anchor = cls.needed(references, "anchor").view(matrix) if has_anchor else None
        cls.check_count(payloads, 2)

        def decode(rows: Rows, columns: slice, levels: np.ndarray, out: Placed) -> None:
            tile_anchor = None if anchor is None else rows_of(anchor, rows, columns, "anchor")
            _decode_tile(levels, tile_anchor, _dither_starts(rows, columns, matrix[1], shift), step, out)

        return decode_tiles(cls, payloads, shape, dtype, decode, cls.spare_memory(references))


def _require_step(name: str, value: float) -> None:
    if not _SMALLEST_STEP <= value <= _LARGEST_STEP:
        allowed = f"a number from {_SMALLEST_STEP} to {_LARGEST_STEP}"
        next_step = "Take a small part of what the weights change by; planes-delta stores exactly."
        raise ConfigError(f"delta-uniform, {name}", allowed, repr(value), next_step)


def rms_difference(tensor: Tensor, anchor: Tensor | None = None) -> float:
    """Return the root mean square of `tensor - anchor`: the natural unit for the steps of a weight.

    It is NaN or infinity if the difference is not finite. RuntimeError: the shapes differ.
    """
    total = 0.0
    flat = tensor.detach().reshape(-1)
    flat_anchor = None if anchor is None else anchor.detach().reshape(-1)
    for chunk in chunk_ranges(len(flat)):
        delta = flat[chunk].to(torch.float32)
        if flat_anchor is not None:
            delta = delta - flat_anchor[chunk].to(torch.float32)
        total += torch.linalg.vector_norm(delta, dtype=torch.float64).item() ** 2
    return math.sqrt(total / len(flat)) if total else 0.0


def _encode_tile(
    anchor: np.ndarray | None,
    moment: np.ndarray | None,
    starts: np.ndarray,
    step: float,
    limit: float,
    elements: Tensor,
    levels: np.ndarray,
    row_sizes: np.ndarray,
) -> tuple[int, float]:
    """Encode a tile, given its dither. `moment` is exp_avg_sq, and errors are absolute.

    `LevelWriter.write` describes `levels`, `row_sizes` and the result.
    """
    x, inverse = to_float32(elements, "x"), float(np.float32(1 / step))
    if library := compiled.library():
        largest_error, dtype = ctypes.c_float(), compiled.DTYPES[elements.dtype]
        inputs = x, anchor, moment, _dither_table(), starts
        results = levels, row_sizes, ctypes.addressof(largest_error)
        return library.delta_levels(*inputs, step, inverse, limit, dtype, *x.shape, *results), largest_error.value
    prediction = np.zeros_like(x) if anchor is None else anchor
    change, dither = x - prediction, _dither(starts, x.shape[1])
    if moment is not None:
        change[(moment == 0) & (np.abs(change) <= step / 2)] = 0
    same, numbers = change == 0, to_levels(change * np.float32(inverse) + dither)
    decoded = rounded_to(elements.dtype, (numbers - dither) * np.float32(step) * ~same + prediction)
    return place_levels(numbers, same, np.abs(decoded - x), limit, levels, row_sizes)


def _decode_tile(levels: np.ndarray, anchor: Placed | None, starts: np.ndarray, step: float, out: Placed) -> None:
    """Decode levels to `out`. The arithmetic and its order are part of the file format."""
    if library := compiled.library():
        anchor_or_null = anchor or (None, None)
        library.delta_decode(levels, *anchor_or_null, _dither_table(), starts, step, *levels.shape, *out)
        return
    moved = np.float32(1) * (levels != SAME)
    change = (levels * moved - _dither(starts, levels.shape[1])) * np.float32(step) * moved
    fill(out, change + (np.float32(0) if anchor is None else dense(anchor)))


def _shift(tensor: Tensor) -> int:
    """Return the shift of the table of dither: equal for equal tensors, and as a rule different for different ones."""
    bits = tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    return int(bits.numpy().sum(dtype=np.int64)) % _PRIME


def _dither_starts(rows: Rows, columns: slice, C: int, shift: int) -> np.ndarray:
    """Return the table index at which the dither of each row of a tile begins, int64 [r]; C is the matrix's width."""
    row_numbers = np.arange(rows.start, rows.stop, dtype=np.int64) if isinstance(rows, slice) else rows
    return (row_numbers * C + (columns.start + shift)) % _PRIME


def _dither(starts: np.ndarray, C: int) -> np.ndarray:
    """Return the dither of a tile with C columns, float32 [r, C]."""
    return _dither_table()[(starts[:, None] + np.arange(C)) % _PRIME]


@cache
def _dither_table() -> np.ndarray:
    """Return DITHER repeated: float32, multiples of 1/4096 within +-1/2, each once in a period of 4093.

    DITHER[k] = (k**-1 mod 4093 - 2046) / 4096, with 0**-1 = 0: the inverse modulo a prime is a permutation
    without visible order (Eichenauer and Lehn 1986), exact on every machine.
    """
    inverses = [pow(k, _PRIME - 2, _PRIME) for k in range(_PRIME)]
    period = (np.array(inverses, np.float32) - np.float32(_PRIME // 2)) / np.float32(4096)
    return np.tile(period, _COMPILED_DITHER // _PRIME + 2)
