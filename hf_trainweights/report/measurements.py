"""What a report measures of a weight: its error against another one, and how its values and codes are spread.

A weight is read in blocks of rows, so no float copy of it is made. N, K and G are as in `formats/base.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_trainweights.formats.arithmetic import BLOCK_ELEMENTS
from hf_trainweights.inspection.difference import Difference, difference_of, in_single_values
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

_INPUTS = 32
_SEED = 0
_BINS = 64


@dataclass(frozen=True)
class Error:
    """How far a weight is from another one.

    Args:
        snr_db: Signal to noise in dB, as `Difference.snr_db` defines it; infinite if both are equal, minus infinity if
            one has a NaN that the other has not.
        output_error: |x a - x b| / |x b| of the dequantized weights for given rows x, or for 32 of Gaussian noise,
            always the same; None for a tensor of one dimension, or where rows of another length are given.
    """

    snr_db: float
    output_error: float | None


@dataclass(frozen=True)
class Histogram:
    """How values are spread: the counts of equally wide bins, between the outer edges `low` and `high`."""

    counts: tuple[int, ...]
    low: float
    high: float


def measure_error(weight: Tensor, reference: Tensor, inputs: Tensor | None = None) -> Error | None:
    """Measure how far a weight is from a reference; None if shapes differ, or if one holds no floats.

    `inputs` are rows `[n, K]` that its layer multiplies; None stands for Gaussian noise.
    """
    weight, reference = in_single_values(weight), in_single_values(reference)
    if weight.shape != reference.shape or not (weight.is_floating_point() and reference.is_floating_point()):
        return None
    if not weight.numel():
        return Error(math.inf, 0.0 if weight.dim() > 1 else None)
    turned = isinstance(weight, QuantizedTensor) and weight.transposed
    error, output, difference = Difference(""), 0.0, 0.0
    K = _rows_last(weight, turned).shape[-1]
    generator = torch.Generator().manual_seed(_SEED)
    x = torch.randn(_INPUTS, K, dtype=torch.float32, generator=generator) if inputs is None else inputs
    has_output = weight.dim() > 1 and x.shape[-1] == K
    for a, b in zip(_float_blocks(weight, turned), _float_blocks(reference, turned), strict=True):
        error += difference_of(b, a)
        if has_output:
            output, difference = output + _squares(x @ b.T), difference + _squares(x @ (a - b).T)
    ratio = math.sqrt(difference / output) if output else math.inf if difference else 0.0
    return Error(-math.inf if math.isnan(error.snr_db) else error.snr_db, ratio if has_output else None)


def weight_histogram(weight: Tensor) -> Histogram | None:
    """Return how the dequantized values of a weight are spread, in 64 bins; None if empty, or with NaN or Inf."""
    values = in_single_values(weight)
    return _histogram(lambda: _float_blocks(values, turned=False))


def code_histogram(weight: Tensor) -> Histogram | None:
    """Return how the codes of a weight are spread, in at most 64 bins; None where its format does not tell them."""
    if not isinstance(weight, QuantizedTensor):
        return None
    return _histogram(lambda: _code_blocks(weight), whole=True)


def _code_blocks(weight: QuantizedTensor) -> Iterator[Tensor]:
    for block in _blocks(_rows_last(weight, weight.transposed)):
        assert isinstance(block, QuantizedTensor)
        unpacked = block.format.unpack(block.tensors)
        if unpacked is None:
            return
        yield unpacked.codes.float()


def _histogram(blocks: Callable[[], Iterator[Tensor]], *, whole: bool = False) -> Histogram | None:
    ranges = [block.aminmax() for block in blocks() if block.numel()]
    if not ranges:
        return None
    low, high = min(each.min.item() for each in ranges), max(each.max.item() for each in ranges)
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    bins = _BINS
    if whole:
        low, high = round(low) - 0.5, round(high) + 0.5
        bins = int(min(bins, high - low))
    elif low == high:
        low, high = low - 0.5, high + 0.5
    counts = sum(torch.histc(block.double(), bins, low, high) for block in blocks())
    assert isinstance(counts, Tensor)
    return Histogram(tuple(int(count) for count in counts), low, high)


def _rows_last(weight: Tensor, turned: bool) -> Tensor:
    """Return a weight whose last dimension is K, as `[*, N, K]`."""
    weight = weight.transpose(-1, -2) if turned else weight
    return weight if weight.dim() > 1 else weight.reshape(1, -1)


def _float_blocks(weight: Tensor, turned: bool) -> Iterator[Tensor]:
    for block in _blocks(_rows_last(weight, turned)):
        yield (block.dequantize() if isinstance(block, QuantizedTensor) else block).detach().float().cpu()


def _blocks(weight: Tensor) -> Iterator[Tensor]:
    """Yield the rows of a weight `[*, N, K]` in order, some `[n, K]` at a time; none of one without elements."""
    if not weight.numel():
        return
    if weight.dim() > 2:
        for index in range(weight.shape[0]):
            yield from _blocks(weight[index])
        return
    rows = max(1, BLOCK_ELEMENTS // max(1, weight.shape[-1]))
    for start in range(0, weight.shape[0], rows):
        yield weight[start : start + rows]


def _squares(block: Tensor) -> float:
    return block.double().square().sum().item()
