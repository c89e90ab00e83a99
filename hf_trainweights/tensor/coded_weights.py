"""Weights as one entropy-coded tensor in a file, where that is how their format lies there or where it is smaller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.coded_tensors import CODED_DTYPES, CodedTensors, encode_tensors
from hf_trainweights.formats.base import Format

CODED_SUFFIX = "coded"
"""The suffix of the one tensor that holds all stored tensors of a quantized weight."""
CODED_FLOAT_SUFFIX = "float_coded"
"""The suffix of the tensor that holds a weight which is not quantized."""

_FLOAT_NAME = "values"
# What is saved must be worth the time to decode it, and the header of a small tensor is as large as what it saves.
_LEAST_GAIN, _LEAST_BYTES = 0.02, 1 << 14


def encode_stored(tensors: Mapping[str, Tensor], form: Format, compress: bool) -> Tensor | None:
    """Return the stored tensors of a weight as one, if its format is so in files or `compress` saves 2 %; else None."""
    if form.is_coded_in_files:
        return encode_tensors(tensors)
    return _encode_where_smaller(tensors) if compress else None


def encode_float(tensor: object) -> Tensor | None:
    """Return a float weight as a coded tensor; None where that does not save 2 %, or it is no such weight."""
    if type(tensor) is not Tensor or not tensor.is_floating_point() or tensor.dtype not in CODED_DTYPES:
        return None
    return _encode_where_smaller({_FLOAT_NAME: tensor})


def _encode_where_smaller(tensors: Mapping[str, Tensor]) -> Tensor | None:
    plain_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if plain_bytes < _LEAST_BYTES or not all(tensor.dtype in CODED_DTYPES for tensor in tensors.values()):
        return None
    coded = encode_tensors(tensors)
    return coded if coded.nbytes <= (1 - _LEAST_GAIN) * plain_bytes else None


def decode_stored(
    name: str, coded: Tensor, form: Format, shape: Sequence[int] | None, values: bool
) -> dict[str, Tensor]:
    """Undo `encode_stored`, on the device of `coded`; without `values` the tensors are on the meta device.

    A weight of another format or `shape` (None for any) is a CorruptFileError before anything is decoded.
    """
    reader = CodedTensors(coded, name)
    found = {key: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for key, spec in reader.specs.items()}
    if found.keys() != set(form.tensor_names):
        raise _other(name, ", ".join(form.tensor_names), ", ".join(found))
    stored_shape = form.shape_of(found["qdata"])
    if shape is not None and tuple(shape) != stored_shape:
        raise _other(name, f"a weight of shape {tuple(shape)}", f"{stored_shape}")
    form.check(found, stored_shape, name)
    return {key: reader.read(key).to(coded.device) for key in reader.specs} if values else found


def decode_float(name: str, coded: Tensor, shape: Sequence[int] | None = None, values: bool = True) -> Tensor:
    """Undo `encode_float` of a weight of that shape, None for any; without `values` it is on the meta device."""
    reader = CodedTensors(coded, name)
    spec = reader.specs.get(_FLOAT_NAME)
    if spec is None or len(reader.specs) != 1 or not spec.dtype.is_floating_point:
        raise _other(name, f"{_FLOAT_NAME} of a float dtype", ", ".join(reader.specs))
    if shape is not None and tuple(shape) != spec.shape:
        raise _other(name, f"shape {tuple(shape)}", f"{spec.shape}")
    return (
        reader.read(_FLOAT_NAME).to(coded.device)
        if values
        else torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    )


def _other(name: str, expected: str, found: str) -> CorruptFileError:
    next_step = "The file is damaged or belongs to another model; save it again from the source."
    return CorruptFileError(f"{name}, coded", expected, found, next_step)
