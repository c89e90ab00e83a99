"""Small quantized weights: every format, each in every layout that a layer may keep its weight in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar
from unittest.mock import patch

import torch
from torch import Tensor

from hf_trainweights import QuantizedTensor
from hf_trainweights.formats import FORMATS, get_format, parameters_of
from hf_trainweights.formats.base import Format, Specs
from hf_trainweights.formats.column_order import COLUMN_ORDER

# K = 128, so that the groups of every format divide it.
LAYOUTS = {
    "matrix": ((6, 128), False),
    "matrix_transposed": ((128, 6), True),
    "experts": ((3, 6, 128), False),
    "experts_transposed": ((3, 128, 6), True),
}

# Formats to which this package quantizes floats.
QUANTIZABLE = [name for name in FORMATS if not get_format({"format": name}).is_import_only]

# Each format as it is by default, and those with groups in a second size.
FORMS: dict[str, Format] = {name: get_format({"format": name}) for name in FORMATS}
FORMS |= {
    f"{name}_g32": get_format({"format": name, "group_size": 32})
    for name in FORMATS
    if "group_size" in parameters_of(name)
}
FORMS |= {
    f"{name}_column_scale": get_format({**FORMS[name].get_config(), "column_scale": True})
    for name in ("int8", "int4_g32", "codebook4")
}
# Formats of weights that other programs quantized: one for each set of stored tensors that K = 128 columns can have.
FORMS |= {
    name: get_format(config)
    for name, config in {
        "affine_bias": {"format": "affine", "bits": 3, "group_size": 64, "offset": "bias", "rounding": "each"},
        "affine_symmetric": {"format": "affine", "bits": 5, "group_size": 16, "offset": "none"},
        "table4_e4m3": {"format": "table4", "group_size": 16, "scales": "e4m3"},
        "table4_nested": {"format": "table4", "group_size": 64, "scales": "nested"},
        "float8_e8m0": {"format": "float8_e4m3", "group_size": 32, "scales": "e8m0"},
        "int4_column_order": {"format": "int4", "group_size": 32, "column_order": True},
    }.items()
}

# One of each kind: by what tensors it has, whether these are coded in files, and whether they have groups.
KINDS = list(
    {(form.tensor_names, form.is_coded_in_files, form.column_step > 1): name for name, form in FORMS.items()}.values()
)


def random_weight(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return the same normally distributed float weight at every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantized_weight(
    form: str = "int8", layout: str = "matrix", dtype: torch.dtype = torch.float32, seed: int = 0
) -> QuantizedTensor:
    """Return a new quantized weight of one of `FORMS` in one of `LAYOUTS`."""
    shape, transposed = LAYOUTS[layout]
    return weight_of(FORMS[form], shape, dtype, transposed, seed)


def weight_of(
    form: Format,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    transposed: bool = False,
    seed: int = 0,
    rows: Tensor | float = 1.0,
) -> QuantizedTensor:
    """Return a new weight of a shown shape: random floats quantized, or random stored tensors if none are quantized.

    `rows` is how many times as large as usual floats are, for each row or all.
    """
    if not form.is_import_only:
        values = random_weight(*shape, seed=seed) * rows
        return QuantizedTensor.quantize(values.to(dtype), form, transposed)
    *lead, N, K = shape
    stored_shape = (*lead, K, N) if transposed else tuple(shape)
    return QuantizedTensor(stored_tensors(form, stored_shape, dtype, seed), form, stored_shape, dtype, transposed)


def stored_tensors(form: Format, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Return stored tensors with any codes, and scales of the usual size; `shape` is that of the stored weight."""
    generator = torch.Generator().manual_seed(seed)
    tensors = form.empty(shape, dtype, "cpu")
    for name, tensor in tensors.items():
        if name == COLUMN_ORDER:
            tensor.copy_(torch.rand(tensor.shape, generator=generator).argsort(dim=-1))
        elif tensor.dtype == torch.float8_e4m3fn:
            tensor.copy_(torch.empty(tensor.shape).uniform_(0.1, 2, generator=generator))
        elif tensor.is_floating_point():
            # Integers of up to 63 or 127 multiply the float scale of a superblock.
            largest = 0.0005 if "group_scale" in tensors and name != "table" else 0.1
            tensor.uniform_(-largest, largest, generator=generator)
        elif name == "scale" and getattr(form, "scales", "") == "e8m0":
            tensor.random_(100, 127, generator=generator)
        else:
            tensor.view(torch.uint8).random_(0, 256, generator=generator)
    return tensors


@contextlib.contextmanager
def random_codes(form: Format) -> Iterator[None]:
    """Let floats get random stored tensors in place of codes within the context, if a format holds no others."""
    if not form.is_import_only:
        yield
        return

    def make(form: Format, weight: Tensor, *_: object) -> dict[str, Tensor]:
        return stored_tensors(form, weight.shape, weight.dtype)

    cls = type(form)
    with patch.object(cls, "is_import_only", False), patch.object(cls, "quantize", make):
        yield


def same_stored(first: QuantizedTensor, second: QuantizedTensor) -> bool:
    """Return whether two quantized weights agree in all they hold and show."""
    return (
        (first.format, first.stored_shape, first.dtype, first.transposed)
        == (second.format, second.stored_shape, second.dtype, second.transposed)
        and (first.shape, first.stride(), first.device) == (second.shape, second.stride(), second.device)
        and all(same_bytes(stored, second.tensors[name]) for name, stored in first.tensors.items())
    )


def same_bytes(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors agree in dtype, shape and every bit; torch.equal does not know float8."""
    kinds = (first.dtype, first.shape) == (second.dtype, second.shape)
    return kinds and torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


@dataclass(frozen=True)
class Packed(Format):
    """Signs, `count` to a word, by a program that does not say which columns can be cut off."""

    name: ClassVar[str] = "packed"
    count: ClassVar[int] = 16
    word: ClassVar[torch.dtype] = torch.int32

    def tensor_specs(self, shape: Sequence[int], scale_dtype: torch.dtype) -> Specs:
        *lead, K = shape
        return {"qdata": ((*lead, -(-K // self.count)), self.word), "scale": ((*lead, 1), scale_dtype)}

    def shape_of(self, qdata: Tensor) -> tuple[int, ...]:
        return (*qdata.shape[:-1], qdata.shape[-1] * self.count)

    def place(self, K: int) -> tuple[Tensor, Tensor]:
        """Return in which word each column lies, and at which bit of it."""
        columns = torch.arange(K)
        return columns // self.count, columns % self.count

    def quantize_rows(self, rows: Tensor, amax: Tensor, out: Mapping[str, Tensor]) -> None:
        words, bits = self.place(rows.shape[1])
        codes = (rows > 0).to(self.word) << bits.to(self.word)
        out["qdata"].zero_().index_add_(1, words, codes)
        out["scale"].copy_(amax)

    def dequantize_rows(self, tensors: Mapping[str, Tensor], K: int, dtype: torch.dtype) -> Tensor:
        words, bits = self.place(K)
        signs = (tensors["qdata"][..., words] >> bits.to(self.word) & 1) * 2 - 1
        return (signs * tensors["scale"].float()).to(dtype)
