"""Weights of a model from the tensors of a GGUF file, a few rows at a time.

A slot is a parameter of the model. Several tensors of a file may fill one slot, such as q, k and v of a joined
projection: the place of each says which rows of the slot it holds (places.py). A file stores rows as blocks of one
kind, such as Q4_K, and `Blocks` is a way to decode a kind to the stored tensors of a format (blocks.py). If one format
serves all places of a slot, the weight is quantized; otherwise it is float.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.errors import CorruptFileError, UnsupportedError
from hf_trainweights.exports.gguf.rows import Origin
from hf_trainweights.files.spill import Spill
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.column_order import COLUMN_ORDER, ColumnOrdered
from hf_trainweights.imports.gguf.blocks import ALTERNATIVES, FLOATS, Blocks
from hf_trainweights.imports.gguf.places import Place, Slot
from hf_trainweights.imports.layouts.base import AGAIN
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# Rows are read in groups of about this many weights, so that they stay in the processor's cache while they are
# unpacked.
_WEIGHTS_AT_ONCE = 1 << 18
# The dtypes of 16 bits that a model's float weights may get.
_NARROW = (torch.bfloat16, torch.float16)
_OTHER_FILE = "Take a file that holds these in one kind, such as one of Q8_0 or Q6_K."
_GLOBAL_SCALE = "global_scale"


def common_format(name: str, slot: Slot, places: Sequence[Place]) -> Format | None:
    """Return the first format to which the blocks of all places of a slot can be decoded.

    None if the slot takes no codes, a place has floats, or the format cannot hold the slot's shape. UnsupportedError:
    the places have kinds that no one format serves.
    """
    formats = [[way.format for way in _ways(place)] for place in places]
    if not slot.takes_codes or not formats or not all(formats):
        return None
    form = next((form for form in formats[0] if all(form in others for others in formats[1:])), None)
    if form is None:
        found = ", ".join(f"{place.name} in {place.tensor.kind.name}" for place in places)
        raise UnsupportedError(name, "parts of one weight in kinds that one format holds", found, _OTHER_FILE)
    if form.fallback(slot.shape) != form:
        return None
    return form if places[0].origin.columns is None else ColumnOrdered(form)


def quantized_weight(name: str, slot: Slot, places: Sequence[Place], form: Format, spill: Spill) -> QuantizedTensor:
    """Decode the blocks of all places of a slot to one quantized weight in their `common_format`.

    UnsupportedError: its parts have different tensors that all rows share. CorruptFileError: a scale is not finite.
    """
    ways = [_way(place, form.inner if isinstance(form, ColumnOrdered) else form) for place in places]
    stored = {key: spill.empty(*spec) for key, spec in form.tensor_specs(slot.shape, torch.float16).items()}
    if sum(place.rows.numel() for place in places) < math.prod(slot.shape[:-1]):
        for tensor in stored.values():  # rows that the file leaves out are zero, as in `float_weight`
            tensor.view(torch.uint8).zero_()
    _fill_shared(name, stored, ways, places)
    if (columns := places[0].origin.columns) is not None:
        stored[COLUMN_ORDER].copy_(columns.expand(stored[COLUMN_ORDER].shape))
    by_rows = {key: tensor.flatten(0, -2) for key, tensor in stored.items() if key not in form.shared_names}
    for place, way in zip(places, ways, strict=True):
        for _, rows, data in _pieces(place):
            for key, tensor in way.decode(data.view(len(data), -1, place.tensor.kind.block_bytes)).items():
                _check_finite(name, place, key, tensor)
                by_rows[key][rows] = tensor
        if _GLOBAL_SCALE in by_rows:
            by_rows[_GLOBAL_SCALE][place.rows.flatten()] = place.factors.unsqueeze(1)
    form.check(stored, slot.shape, name)
    return QuantizedTensor(stored, form, slot.shape, torch.float16, slot.transposed)


def float_weight(name: str, slot: Slot, places: Sequence[Place], spill: Spill) -> Tensor:
    """Return the values of a weight in float32, which holds those of blocks exactly.

    Values that the file leaves out are zero: positions that the model never uses, and biases. CorruptFileError: a value
    is not finite.
    """
    weight = spill.empty(slot.shape, torch.float32).zero_()
    by_rows = weight.view(-1, slot.columns)
    for place in places:
        for start, rows, data in _pieces(place):
            values = _undo(place.origin, _values(place, data, start))
            _check_finite(name, place, "values", values)
            columns = slice(None) if place.origin.columns is None else place.origin.columns
            by_rows[rows, columns] = values.view(-1, slot.columns)
    return spill.keep(weight.mT.contiguous()) if slot.transposed else weight


def _undo(origin: Origin, values: Tensor) -> Tensor:
    """Return the values that a model has where the file has others, made of them as `origin` says."""
    if origin.negative_exponential:
        # By numpy, whose logarithm Transformers' own reader takes: PyTorch's differs in the last digit.
        with np.errstate(invalid="ignore", divide="ignore"):
            return torch.from_numpy(np.log(-values.numpy()))
    return values - origin.offset if origin.offset else values


def narrowest_dtype(tensors: Sequence[Tensor], preferred: torch.dtype | None) -> torch.dtype:
    """Return the preferred dtype, or one of 16 bits, that holds all values of float32 tensors exactly; else float32."""
    candidates = dict.fromkeys(dtype for dtype in (preferred, *_NARROW) if dtype is not None)
    exact = (dtype for dtype in candidates if all(_holds(dtype, tensor) for tensor in tensors))
    return next(exact, torch.float32)


def _holds(dtype: torch.dtype, tensor: Tensor) -> bool:
    pieces = tensor.flatten().split(_WEIGHTS_AT_ONCE)
    return dtype is torch.float32 or all(torch.equal(piece.to(dtype).float(), piece) for piece in pieces)


def _ways(place: Place) -> tuple[Blocks, ...]:
    return ALTERNATIVES.get(place.tensor.kind.name, ())


def _way(place: Place, form: Format) -> Blocks:
    return next(way for way in _ways(place) if way.format == form)


def _fill_shared(name: str, stored: dict[str, Tensor], ways: Sequence[Blocks], places: Sequence[Place]) -> None:
    """Fill the stored tensors that all rows of a matrix share; UnsupportedError: its parts have different ones."""
    for index, (way, place) in enumerate(zip(ways, places, strict=True)):
        for key, tensor in way.shared.items():
            wide = tensor.expand(stored[key].shape)
            if index and not torch.equal(stored[key], wide):
                found = f"another one for {place.name} than for {places[0].name}"
                raise UnsupportedError(name, f"one {key} for all parts of a weight", found, _OTHER_FILE)
            stored[key].copy_(wide)


def _check_finite(name: str, place: Place, key: str, tensor: Tensor) -> None:
    """Check the numbers of a stored tensor: floats, and the exponents of scales, of which 255 is NaN."""
    is_exponent = key == "scale" and tensor.dtype == torch.uint8
    numbers = tensor.view(torch.float8_e8m0fnu) if is_exponent else tensor
    if numbers.is_floating_point() and not bool(numbers.float().isfinite().all()):
        raise CorruptFileError(f"{name} ({place.name} in the file)", f"finite numbers as {key}", "NaN or Inf", AGAIN)


def _values(place: Place, data: Tensor, start: int) -> Tensor:
    """Return the float32 values of some rows of a file's tensor, from row `start` on."""
    kind = place.tensor.kind
    if kind.name in FLOATS:
        return data.contiguous().view(FLOATS[kind.name]).float()
    way = _ways(place)[0]
    stored = {**way.decode(data.view(len(data), -1, kind.block_bytes)), **way.shared}
    if _GLOBAL_SCALE in way.format.tensor_names:
        stored[_GLOBAL_SCALE] = place.factors[start : start + len(data)].unsqueeze(1)
    return way.format.dequantize(stored, (len(data), place.tensor.shape[-1]), torch.float32)


def _pieces(place: Place) -> Iterator[tuple[int, Tensor | slice, Tensor]]:
    """Yield the first of some rows of a file, the rows of the model's tensor that they make up, and their bytes."""
    count = max(1, _WEIGHTS_AT_ONCE // place.tensor.shape[-1])
    data = place.tensor.data.view(len(place.rows), -1)
    for start in range(0, len(data), count):
        rows = place.rows[start : start + count].flatten()
        first, last = int(rows[0]), int(rows[-1])
        neighbours = torch.equal(rows, torch.arange(first, last + 1))
        yield start, slice(first, last + 1) if neighbours else rows, data[start : start + count]
