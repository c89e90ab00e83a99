"""Weights from the tensors of a GGUF file, a few rows at a time: quantized ones of blocks, and float ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_trainweights.errors import CorruptFileError, UnsupportedError
from hf_trainweights.files.spill import Spill
from hf_trainweights.imports.gguf.blocks import BLOCKS, FLOATS, Blocks
from hf_trainweights.imports.gguf.places import Place, Slot
from hf_trainweights.imports.layouts.base import AGAIN
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# Rows are read in groups of about so many weights, so that what they are unpacked to stays in the processor's cache.
_WEIGHTS_AT_ONCE = 1 << 18

# The dtypes that a float weight may get, and in which order: the first that holds all values of a file exactly.
_NARROW = (torch.bfloat16, torch.float16)


def quantized_weight(
    name: str, slot: Slot, places: Sequence[Place], dtype: torch.dtype, spill: Spill
) -> QuantizedTensor:
    """Return the weight that blocks stand for; UnsupportedError: its parts are of kinds that no format holds alike."""
    kinds = [BLOCKS[place.tensor.kind.name] for place in places]
    form = kinds[0].format
    if any(kind.format != form for kind in kinds):
        found = ", ".join(f"{place.name} in {place.tensor.kind.name}" for place in places)
        next_step = "Take a file that holds both in one kind."
        raise UnsupportedError(name, "parts of one kind, because they are one weight here", found, next_step)
    specs = form.tensor_specs(slot.shape, torch.float16)
    stored = {key: spill.empty(*spec) for key, spec in specs.items()}
    by_rows = {key: tensor.flatten(0, -2) for key, tensor in stored.items() if key not in form.shared_names}
    for kind, place in zip(kinds, places, strict=True):
        for key, tensor in kind.shared.items():
            stored[key].copy_(tensor)
        for rows, data in _pieces(place, slot.columns):
            blocks = data.view(len(data), -1, place.tensor.kind.block_bytes)
            for key, tensor in kind.decode(blocks).items():
                by_rows[key][rows] = tensor
    form.check(stored, slot.shape, name)
    return QuantizedTensor(stored, form, slot.shape, dtype, slot.transposed)


def float_weight(name: str, slot: Slot, places: Sequence[Place], spill: Spill) -> Tensor:
    """Return the values of a weight as float32; blocks are multiplied with their scales, which float32 holds exactly.

    Rows that the file leaves out, which the model never uses, are zero.
    """
    weight = spill.empty(slot.shape, torch.float32).zero_()
    by_rows = weight.view(-1, slot.columns)
    for place in places:
        for rows, data in _pieces(place, slot.columns):
            values = _values(place, data, slot.columns)
            if not bool(values.isfinite().all()):
                raise CorruptFileError(f"{name} ({place.name})", "finite values", "NaN or Inf", AGAIN)
            by_rows[rows] = values - place.offset if place.offset else values
    return spill.keep(weight.mT.contiguous()) if slot.transposed else weight


def narrowest_dtype(tensors: Sequence[Tensor], preferred: torch.dtype | None) -> torch.dtype:
    """Return the first dtype that holds all values of float32 tensors exactly: the preferred one, or 16 bits, or 32."""
    candidates = dict.fromkeys(dtype for dtype in (preferred, *_NARROW) if dtype is not None)
    exact = (dtype for dtype in candidates if all(_holds(dtype, tensor) for tensor in tensors))
    return next(exact, torch.float32)


def _holds(dtype: torch.dtype, tensor: Tensor) -> bool:
    blocks = tensor.flatten().split(_WEIGHTS_AT_ONCE)
    return dtype is torch.float32 or all(torch.equal(block.to(dtype).float(), block) for block in blocks)


def _values(place: Place, data: Tensor, columns: int) -> Tensor:
    """Return the float32 values of some rows of a file's tensor."""
    kind = place.tensor.kind
    if kind.name in FLOATS:
        return data.contiguous().view(FLOATS[kind.name]).float()
    blocks = BLOCKS[kind.name]
    stored = blocks.decode(data.view(len(data), -1, kind.block_bytes))
    return blocks.format.dequantize({**stored, **blocks.shared}, (len(data), columns), torch.float32)


def _pieces(place: Place, columns: int) -> Iterator[tuple[Tensor | slice, Tensor]]:
    """Yield the bytes of some rows of a file's tensor, and the rows of the model's tensor that they make up."""
    count = max(1, _WEIGHTS_AT_ONCE // columns)
    data = place.tensor.data.view(len(place.rows), -1)
    for start in range(0, len(data), count):
        rows = place.rows[start : start + count]
        first, last = int(rows[0]), int(rows[-1])
        neighbours = last - first == len(rows) - 1 and torch.equal(rows, torch.arange(first, last + 1))
        yield slice(first, last + 1) if neighbours else rows, data[start : start + count]


__all__ = ["Blocks", "float_weight", "narrowest_dtype", "quantized_weight"]
