"""Compares two checkpoints or models tensor by tensor, to measure rounding errors or the progress of training."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.inspection.stored_tensors import StoredTensor, find_parts, read_part
from hf_trainweights.models.choosing.summary import Calibrated
from hf_trainweights.models.loading.saved_models import load_saved
from hf_trainweights.notebook import html_table
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# Tensors are compared in pieces of this many elements, which take 32 MB in float64.
_PIECE_ELEMENTS = 1 << 22
# The value of each 4-bit code; the highest bit is the sign.
_FLOAT4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Difference:
    """The difference of two tensors a and b. It holds sums over elements, so differences of several tensors add up.

    Args:
        name: The weight's name; for a tensor of the optimizer, `optimizer: ` and its key path.
        squares_a: Sum of the squares of a.
        squares_error: Sum of the squares of a - b.
        largest: Largest |a - b|.
        bytes_a: Bytes of a on disk; None if they are unknown.
        bytes_b: Bytes of b on disk; None if they are unknown.
        comparable: True if both have the same shape, and both or neither are complex; otherwise the sums are 0.
    """

    name: str
    squares_a: float = 0.0
    squares_error: float = 0.0
    largest: float = 0.0
    bytes_a: int | None = 0
    bytes_b: int | None = 0
    comparable: bool = True

    @property
    def relative_l2(self) -> float:
        """|a - b| / |a| in the L2 norm; 0 if nothing differs."""
        if self.squares_error == 0:
            return 0.0
        return math.sqrt(self.squares_error) / math.sqrt(self.squares_a) if self.squares_a else math.inf

    @property
    def snr_db(self) -> float:
        """The ratio of signal to noise, |a| / |a - b|, in decibels; infinite if nothing differs."""
        error = self.relative_l2
        return -20 * math.log10(error) if error else math.inf

    @property
    def is_equal(self) -> bool:
        """True if both have the same shape and equal elements."""
        return self.comparable and self.largest == 0

    def __add__(self, other: Difference) -> Difference:
        names = ("squares_a", "squares_error", "bytes_a", "bytes_b")
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        sums: dict[str, Any] = {name: None if None in pair else sum(pair) for name, pair in pairs.items()}
        largest = math.nan if math.isnan(self.largest + other.largest) else max(self.largest, other.largest)
        return replace(self, **sums, largest=largest)

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as a dict for JSON, NaN and infinities as floats; errors are None if not comparable."""
        errors = {"relative_l2": self.relative_l2, "snr_db": self.snr_db, "largest": self.largest}
        shown = errors if self.comparable else dict.fromkeys(errors)
        return {"name": self.name, **shown, "bytes_a": self.bytes_a, "bytes_b": self.bytes_b}


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two checkpoints.

    Args:
        tensors: A difference for each name that both have, weights first.
        totals: The sum over all weights, and the sum over the optimizer's state.
        problems: Sentences about names that only one of them has, and about shapes and dtypes that differ.
        calibrated: Output errors of b, or of a, without and with calibration; they tell more than errors of weights.
    """

    tensors: tuple[Difference, ...]
    totals: tuple[Difference, ...]
    problems: tuple[str, ...]
    calibrated: Calibrated | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as a dict for JSON, with NaN and infinities as floats."""
        tensors, totals = ([difference.to_dict() for difference in group] for group in (self.tensors, self.totals))
        outputs = {} if self.calibrated is None else {"calibrated": asdict(self.calibrated)}
        return {"tensors": tensors, "totals": totals, "problems": list(self.problems), **outputs}

    def _repr_html_(self) -> str:
        head = ("tensor", "|a - b| / |a|", "largest |a - b|", "bytes of a", "bytes of b")
        tables = [
            html_table(f"{len(rows)} {title}", head, map(_cells, rows), folded=title == "tensors")
            for rows, title in ((self.totals, "totals"), (self.tensors, "tensors"))
        ]
        return "".join([*tables, html_table("problems", (), ([text] for text in self.problems)) * bool(self.problems)])


def compare_checkpoints(a: str | Path, b: str | Path) -> Comparison:
    """Compare the weights and optimizer states of two checkpoints: plain or encoded, in whole files or sharded.

    Args:
        a: A checkpoint directory, or one file of it.
        b: The checkpoint or file to compare it with.

    Returns:
        The differences.

    Raises:
        ConfigError: A directory holds neither weights nor an optimizer.pt.
        CorruptFileError: A file is damaged, or holds more than data.
        MissingAnchorError: A checkpoint was moved without the anchor it needs.
        OSError: A file cannot be read.

    Examples:
        >>> compare_checkpoints("runs/a/checkpoint-100", "runs/b/checkpoint-100").totals  # doctest: +SKIP
    """
    files = find_parts(Path(a)), find_parts(Path(b))
    # A generator keeps either the weights or the optimizer's state in memory, never both.
    parts = (
        (name, read_part(files[0].get(name, []), name), read_part(files[1].get(name, []), name))
        for name in dict.fromkeys([*files[0], *files[1]])
    )
    return compare_tensors(parts, (str(a), str(b)))


def compare_models(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Comparison:
    """Compare the weights of two saved models after Transformers has loaded them.

    So weights have the names of their modules, experts are merged in both models, and tied weights count once.

    Args:
        a: Directory or Hub id of a model, float or quantized.
        b: The model to compare it with.

    Returns:
        The differences, with the bytes of the stored tensors, and the errors without and with calibration.

    Raises:
        ConfigError: Transformers has no class for a model, or weights are missing.
        CorruptFileError: A file is damaged.

    Examples:
        >>> comparison = compare_models("llama", "llama-int8")
        >>> comparison.totals[0].is_equal
        False
    """
    comparison = compare_tensors([("weights", _weights(a), _weights(b))], (str(a), str(b)))
    return replace(comparison, calibrated=Calibrated.beside(Path(b)) or Calibrated.beside(Path(a)))


def _weights(source: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    unique: dict[int, StoredTensor] = {}
    for name, tensor in load_saved(source).state_dict(keep_vars=True).items():
        # A tied weight is one object under several names.
        unique.setdefault(id(tensor), StoredTensor.of(name, tensor))
    return {stored.name: stored for stored in unique.values()}


def compare_tensors(
    parts: Iterable[tuple[str, Mapping[str, StoredTensor], Mapping[str, StoredTensor]]], names: tuple[str, str]
) -> Comparison:
    """Compare the tensors of a and b that have the same key, after dequantizing quantized ones.

    Each of `parts` is a name with the tensors of a and of b, and gets a total. Problems call a and b by `names`.
    """
    tensors: list[Difference] = []
    totals: list[Difference] = []
    problems: list[str] = []
    for part_name, of_a, of_b in parts:
        problems += [f"{key} is only in {names[0]}" for key in of_a if key not in of_b]
        problems += [f"{key} is only in {names[1]}" for key in of_b if key not in of_a]
        differences = []
        for key in (key for key in of_a if key in of_b):
            stored_a, stored_b = of_a[key], of_b[key]  # once: a sharded checkpoint reads a tensor at each access
            differences.append(_difference(key, stored_a, stored_b))
            misfit = _misfit(stored_a, stored_b)
            problems += [f"{key} {misfit}"] if misfit else []
        tensors += differences
        totals.append(sum(differences, Difference(f"all of {part_name}")))
    return Comparison(tuple(tensors), tuple(totals), tuple(problems))


def _cells(row: Difference) -> tuple[object, ...]:
    errors = (f"{row.relative_l2:.2g}", f"{row.largest:.2g}") if row.comparable else ("", "")
    return row.name, *errors, row.bytes_a, row.bytes_b


def _difference(key: str, a: StoredTensor, b: StoredTensor) -> Difference:
    total = Difference(key, bytes_a=a.stored_bytes, bytes_b=b.stored_bytes)
    values_a, values_b = plain_values(a.tensor), plain_values(b.tensor)
    if values_a.shape != values_b.shape or values_a.is_complex() != values_b.is_complex():
        return replace(total, comparable=False)
    pieces = (_dense(values).detach().reshape(-1).split(_PIECE_ELEMENTS) for values in (values_a, values_b))
    for piece_a, piece_b in zip(*pieces, strict=True):
        if piece_a.numel():
            total += difference_of(piece_a, piece_b)
    return total


def _misfit(a: StoredTensor, b: StoredTensor) -> str | None:
    if a.tensor.shape != b.tensor.shape:
        return "has another shape"
    return "has another dtype" if a.tensor.dtype != b.tensor.dtype else None


def _dense(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


def plain_values(tensor: Tensor) -> Tensor:
    """Make a sparse tensor dense, unpack float4 stored in pairs to float32, and return any other tensor as it is."""
    if tensor.layout is not torch.strided:
        return tensor.to_dense()
    if tensor.dtype != torch.float4_e2m1fn_x2:
        return tensor
    octets = tensor.view(torch.uint8).long()
    values = torch.tensor(_FLOAT4_VALUES, dtype=torch.float32, device=tensor.device)
    pairs = values[torch.stack([octets & 15, octets >> 4], -1)]
    return pairs.flatten(-2) if tensor.dim() else pairs  # a tensor without dimensions holds two values, too


def difference_of(a: Tensor, b: Tensor) -> Difference:
    """Return the difference of two tensors of the same shape, which must not be empty.

    For a quantized weight, pass the values of its `dequantize()`. A large weight is compared in pieces, and its
    difference is the sum of theirs.
    """
    a, b = _as_float64(a), _as_float64(b)
    # Infinities and NaN at the same position are no difference, but subtracting them would give NaN.
    same = (a == b) | (a.isnan() & b.isnan())
    error = torch.where(same, 0.0, a - b)
    return Difference(
        "",
        squares_a=a.square().sum().item(),
        squares_error=error.square().sum().item(),
        largest=error.abs().max().item(),
    )


def _as_float64(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.to(torch.float64)
