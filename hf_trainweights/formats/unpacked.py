"""The result of `Format.unpack`: a weight's codes, scales and zeros, by ops that every exporter of PyTorch writes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Unpacked:
    """A weight as `(numbers - zeros) * factors * scale + offset`: one number for each code, the rest for each group.

    Args:
        codes: The unpacked codes, one for each weight, `[*, N, K]`, any dtype.
        scale: `[*, N, G]`, or `[*, N, 1]` for one scale a row.
        limits: Bounds (low, high) of all numbers and zeros; None if some are no integers, or need more than 8 bits.
        unit: The number that code 1 stands for, if there is no table.
        table: The number that each code stands for, float32 `[n]`, or `[*, 1, n]` for each matrix; None if that is the
            code times `unit`.
        zeros: `[*, N, G]`, any dtype, or None. If there are zeros, they and the numbers are at least 0.
        factors: Float32 `[*, N, G]`, or None. A factor times a number is exact.
        offset: `[*, N, G]`, or None. The sum is rounded to float32 once more.
    """

    codes: Tensor
    scale: Tensor
    limits: tuple[int, int] | None
    unit: int = 1
    table: Tensor | None = None
    zeros: Tensor | None = None
    factors: Tensor | None = None
    offset: Tensor | None = None

    @property
    def is_codes_times_scale(self) -> bool:
        """Whether the weight is its codes times `scale`."""
        others = (self.table, self.zeros, self.factors, self.offset)
        return self.unit == 1 and all(tensor is None for tensor in others)

    @property
    def group_scale(self) -> Tensor:
        """`factors * scale` in float32, `[*, N, G]`; some codings have a stored tensor of this name, another one."""
        scale = self.scale.to(torch.float32)
        return scale if self.factors is None else self.factors * scale

    def numbers(self) -> Tensor:
        """Return the numbers that codes stand for, float32 `[*, N, K]`."""
        if self.table is not None:
            return look_up_by_matrix(self.table, self.codes)
        numbers = self.codes.to(torch.float32)
        return numbers if self.unit == 1 else numbers * self.unit

    def weight(self) -> Tensor:
        """Return the weight in float32 `[*, N, K]`, each value rounded as `Format.dequantize_rows` does."""
        numbers, scale = self.numbers(), self.scale.to(torch.float32).unsqueeze(-1)
        groups = next(tensor for tensor in (self.factors, self.zeros, self.scale) if tensor is not None).size(-1)
        values = numbers.unflatten(-1, [groups, numbers.size(-1) // groups])
        if self.zeros is not None:
            values = values - self.zeros.to(torch.float32).unsqueeze(-1)
        if self.factors is not None:
            values = values * self.factors.unsqueeze(-1)
        values = values * scale
        if self.offset is not None:
            values = values + self.offset.to(torch.float32).unsqueeze(-1)
        return torch.flatten(values, -2)


def look_up(table: Tensor, codes: Tensor) -> Tensor:
    """Return the entries of a table `[n]` for codes of any dtype and shape."""
    return F.embedding(codes.to(torch.int32), table.to(codes.device).unsqueeze(-1)).squeeze(-1)


def look_up_by_matrix(table: Tensor, codes: Tensor) -> Tensor:
    """Return the entries of a table of each matrix, `[*, 1, n]`, or `[n]` for all, for codes `[*, N, k]`."""
    if table.dim() > 2:
        count = table.shape[-1]
        matrices = torch.arange(table.numel() // count, device=codes.device) * count
        codes = codes.to(torch.int32) + matrices.to(torch.int32).view(*table.shape[:-2], 1, 1)
    return look_up(table.flatten(), codes)


def constant(size: int) -> int:
    """Return the size of a stored tensor as a number that is no part of a traced graph: no input changes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # pyright: ignore[reportPrivateImportUsage]
        return int(size)


def octets_of(words: Tensor) -> Tensor:
    """Return int32 words `[*, n]` as bytes `[*, 4 * n]` of the same memory; bytes are returned unchanged."""
    if words.dtype == torch.uint8:
        return words
    # Flat, because a contiguous tensor without columns cannot be viewed as bytes.
    return words.flatten().view(torch.uint8).view(*words.shape[:-1], 4 * words.shape[-1])


def fields_of(numbers: Tensor, start: int, bits: int, width: int = 8) -> Tensor:
    """Return `bits` bits from bit `start` on of float32 integers that have `width` bits.

    It divides, because ONNX's exporter changes the dtypes of shifts.
    """
    fields = torch.floor(numbers * 2.0**-start) if start else numbers
    return fields if start + bits == width else fields - 2.0**bits * torch.floor(fields * 2.0**-bits)


def nibbles_of(octets: Tensor) -> Tensor:
    """Return the two numbers of each byte `[*, n]`, the one in the low bits first, as float32 `[*, 2 * n]`."""
    numbers = octets.to(torch.float32)
    return torch.flatten(torch.stack([fields_of(numbers, 0, 4), fields_of(numbers, 4, 4)], -1), -2)
