"""`delta-uniform`: weights as whole multiples of one step away from the anchor, within a stated bound.

With element x at row-major position i, its anchor a (0 without one) and dither d = DITHER[(i + shift) mod 4093], all
float32, each operation rounded once, no fused multiply-add:

| | |
|---|---|
| encode | level q = round((x - a) / step + d); x equal to a has its own symbol |
| decode | a + (q - d) * step, then rounded to the tensor's dtype; a for the own symbol, where -0.0 may become 0.0 |

An element that would miss the bound, is not finite or too far away is stored as it is (see `levels`).

Why dither: plain rounding moves every small change to the same side, towards the anchor, which undoes training and
biases the loss upwards; with dither the error is uniform in +-step/2 and independent of the change. The table is a
fixed permutation, so it costs nothing and decodes the same on every machine. An unchanged element is not dithered. An
element whose `exp_avg_sq` is 0 never had a gradient: within half a step of its anchor it differs only because the
anchor was rounded, so it counts as equal. Training that resumes starts on exact levels, and with the same dither small
changes would round back to these: the next checkpoint would undo them. So each checkpoint shifts the table, by the sum
of the tensor's bit patterns.

The payloads are those of `levels`.

| parameter | content |
|---|---|
| step | float, exact in float32 |
| anchor | bool, whether the difference is to the reference `anchor` |
| shift | int from 0 to 4092; 0 if it is missing |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES, Codec, EncodedTensor, Json, References
from hf_trainweights.checkpoint.codecs.coding import compiled
from hf_trainweights.checkpoint.codecs.coding.entropy import chunk_ranges
from hf_trainweights.checkpoint.codecs.coding.levels import LevelWriter, clip_, put, read_levels, work_tiles
from hf_trainweights.checkpoint.codecs.coding.tiles import (
    TILE,
    Tile,
    empty,
    matrix_shape,
    moved_from,
    round_to_,
    scratch,
    split_misfits,
    to_float32,
    work_in,
    zeros_in,
)
from hf_trainweights.errors import ConfigError

_PRIME = 4093
# Beyond these the step or its inverse leaves the range of float32.
_SMALLEST_STEP, _LARGEST_STEP = 2.0**-120, 2.0**120


@dataclass(frozen=True)
class DeltaUniform(Codec):
    """Codes the difference to the anchor with one uniform step.

    Args:
        step: Distance of two levels, > 0, in the unit of the weights; used as the nearest float32.
        limit: An element whose decoded value would be further off is stored exactly; None for one step, which
            only numbers close to their dtype's resolution ever miss. The usual error is at most step / 2.

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
        for name in ("step", "limit"):
            value = getattr(self, name)
            if value is not None and not _SMALLEST_STEP <= value <= _LARGEST_STEP:
                allowed = f"a number from {_SMALLEST_STEP} to {_LARGEST_STEP}"
                next_step = "Store a tensor that does not change with planes-delta."
                raise ConfigError(f"delta-uniform, {name}", allowed, repr(value), next_step)

    @classmethod
    def within(cls, bound: float) -> DeltaUniform:
        """Return the codec whose decoded elements are off by at most `bound` > 0, in the unit of the weights."""
        # A little below 2 * bound, or the last rounding would push every hundredth element out of bounds.
        return cls(step=bound * (2 - 2**-5), limit=bound)

    @np.errstate(all="ignore")
    def _encode(self, tensor: Tensor, references: References) -> EncodedTensor:
        step = float(np.float32(self.step))
        # Errors are compared in float32, which may round them down.
        limit = (step if self.limit is None else self.limit) * (1 - 2**-22)
        shape = matrix_shape(tensor.shape)
        original = tensor.view(shape)
        names = "anchor", "exp_avg_sq"
        anchor, moment = (references[name].view(shape) if name in references else None for name in names)
        shift = _shift(tensor)
        writer = LevelWriter(*shape)
        bound = 0.0
        for tile in work_tiles(*shape):
            elements, near, squares = original[tile], _tile_of(anchor, tile, "anchor"), None
            if anchor is not None:
                squares = _tile_of(moment, tile, "moment")
            numbers = near, squares, _dither_start(tile, shape[1], shift), step, limit
            bound = max(bound, _write_levels(writer, tile, elements, *numbers))
        params: dict[str, Json] = {"step": step, "anchor": anchor is not None, "shift": shift}
        return EncodedTensor(writer.payloads(tensor.dtype), params, bound * (1 + 2**-23))

    @classmethod
    @np.errstate(all="ignore")
    def _decode(
        cls,
        payloads: Sequence[Tensor],
        params: Mapping[str, Json],
        shape: torch.Size,
        dtype: torch.dtype,
        references: References,
    ) -> Tensor:
        step = cls.param(params, "step", float)
        if not _SMALLEST_STEP <= step <= _LARGEST_STEP:
            raise cls.corrupt("parameter step", f"{_SMALLEST_STEP} to {_LARGEST_STEP}", repr(step))
        has_anchor = cls.param(params, "anchor", bool)
        shift = cls.param(params, "shift", int) if "shift" in params else 0
        if not 0 <= shift < _PRIME:
            raise cls.corrupt("parameter shift", f"0 to {_PRIME - 1}", repr(shift))
        matrix = matrix_shape(shape)
        anchor = cls.needed(references, "anchor").view(matrix) if has_anchor else None
        cls.check_count(payloads, 2)
        tile_levels = read_levels(cls, payloads, shape, dtype)
        out = empty(matrix, dtype)
        for tile, levels in tile_levels:
            near, start = _tile_of(anchor, tile, "anchor"), _dither_start(tile, matrix[1], shift)
            decoded = work_in(out[tile], "decoded")
            if compiled.is_available():
                compiled.delta_decode(levels.stored, near, (_dither_table(), start), step, decoded)
            else:
                levels.write_to(decoded)
                _reconstruct(decoded, levels.same, near, _dither(start, decoded.shape), step, decoded)
            put(decoded, out[tile], levels.exact, levels.elements)
        return out.view(shape)


def rms_difference(tensor: Tensor, anchor: Tensor | None = None) -> float:
    """Return the root mean square of `tensor - anchor`: the natural unit for the step of its checkpoints.

    NaN or infinity if the difference is not finite; RuntimeError: the shapes differ.

    Examples:
        >>> import torch
        >>> rms_difference(torch.full([8], 3.0), torch.ones(8))
        2.0
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


def _tile_of(tensor: Tensor | None, tile: Tile, use: str) -> np.ndarray | None:
    return None if tensor is None else to_float32(tensor[tile], use)


def _write_levels(
    writer: LevelWriter,
    tile: Tile,
    elements: Tensor,
    anchor: np.ndarray | None,
    moment: np.ndarray | None,
    dither_start: int,
    step: float,
    limit: float,
) -> float:
    """Encode a tile, and return the largest error of an element that has a level."""
    x = to_float32(elements, "x")
    if compiled.is_available():
        numbers = (_dither_table(), dither_start), step, limit, elements.dtype
        missed, worst = compiled.delta_levels(x, anchor, moment, *numbers, writer.place(tile))
        if missed:
            writer.keep_exact(tile, elements)
        return worst
    dither = _dither(dither_start, x.shape)
    levels, decoded = scratch("levels", x.shape), scratch("decoded", x.shape)
    np.subtract(x, np.float32(0) if anchor is None else anchor, out=levels)
    if moment is not None:
        levels[(moment == 0) & (np.abs(levels) <= step / 2)] = 0
    same = zeros_in(levels)
    levels *= np.float32(1 / step)
    levels += dither
    clip_(np.rint(levels, out=levels))
    _reconstruct(levels, same, anchor, dither, step, decoded)
    round_to_(decoded, elements.dtype)
    decoded -= x
    misfit, worst = split_misfits(decoded, limit)
    writer.write(tile, levels, elements, misfit, same)
    return worst


def _reconstruct(
    levels: np.ndarray,
    same: np.ndarray | None,
    anchor: np.ndarray | None,
    dither: np.ndarray,
    step: float,
    out: np.ndarray,
) -> None:
    """Decode a tile; the arithmetic and its order are part of the format."""
    np.subtract(levels, dither, out=out)
    out *= np.float32(step)
    if same is not None:
        out *= moved_from(same)
    out += np.float32(0) if anchor is None else anchor


def _shift(tensor: Tensor) -> int:
    """Return where the table of dither begins: another place for every other tensor, the same for an equal one."""
    bits = tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    return int(bits.numpy().sum(dtype=np.int64)) % _PRIME


def _dither_start(tile: Tile, C: int, shift: int) -> int:
    """Return where in the table the dither of a tile begins, given the columns of its matrix."""
    rows, columns = tile
    return (rows.start * C + columns.start + shift) % _PRIME


def _dither(start: int, shape: Sequence[int]) -> np.ndarray:
    """Return the dither of a tile of that shape."""
    return _dither_table()[start : start + math.prod(shape)].reshape(shape)


@cache
def _dither_table() -> np.ndarray:
    """Return DITHER repeated: float32, multiples of 1/4096 within +-1/2, each once in 4093.

    DITHER[k] = (k**-1 mod 4093 - 2046) / 4096, with 0**-1 = 0: the inverse modulo a prime is a permutation
    without visible order (Eichenauer and Lehn 1986), exact on every machine.
    """
    inverses = [pow(k, _PRIME - 2, _PRIME) for k in range(_PRIME)]
    period = (np.array(inverses, np.float32) - np.float32(_PRIME // 2)) / np.float32(4096)
    return np.tile(period, TILE // _PRIME + 2)
