"""Measures a weight for a report: its error against a reference, and histograms of its values and its codes.

It dequantizes a weight in blocks of rows, so a float copy of all rows never exists. A weight `[*, N, K]` has N outputs
and K inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_trainweights.formats.arithmetic import BLOCK_ELEMENTS
from hf_trainweights.inspection.difference import Difference, difference_of, plain_values
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# Rows of noise that stand for the inputs of a layer, and the seed that makes them the same in every report.
_INPUTS = 32
_SEED = 0
_BINS = 64


@dataclass(frozen=True)
class Error:
    """The error of a weight a against a reference b.

    Args:
        snr_db: Signal to noise in dB, as `Difference.snr_db` defines it; infinite if both are equal, minus infinity if
            only one of them has a NaN at some position.
        output_error: |x a - x b| / |x b| of the dequantized weights, where x is the inputs of the layer or 32 fixed
            rows of Gaussian noise; None for a tensor of one dimension, or if the inputs have another length.
    """

    snr_db: float
    output_error: float | None


@dataclass(frozen=True)
class Histogram:
    """The counts of equally wide bins; `low` and `high` are the outer edges of the first and the last bin."""

    counts: tuple[int, ...]
    low: float
    high: float


def measure_error(weight: Tensor, reference: Tensor, inputs: Tensor | None = None) -> Error | None:
    """Measure the error of a weight against a reference; None if their shapes differ or one is not of floats.

    `inputs` are rows `[n, K]` that the weight's layer multiplies; None stands for Gaussian noise.
    """
    weight, reference = plain_values(weight), plain_values(reference)
    if weight.shape != reference.shape or not (weight.is_floating_point() and reference.is_floating_point()):
        return None
    if not weight.numel():
        return Error(math.inf, 0.0 if weight.dim() > 1 else None)
    transposed = isinstance(weight, QuantizedTensor) and weight.transposed
    error, output, difference = Difference(""), 0.0, 0.0
    K = _as_stored(weight, transposed).shape[-1]
    generator = torch.Generator().manual_seed(_SEED)
    x = torch.randn(_INPUTS, K, dtype=torch.float32, generator=generator) if inputs is None else inputs
    has_output = weight.dim() > 1 and x.shape[-1] == K
    for a, b in zip(_float_blocks(weight, transposed), _float_blocks(reference, transposed), strict=True):
        error += difference_of(b, a)
        if has_output:
            output, difference = output + _squares(x @ b.T), difference + _squares(x @ (a - b).T)
    ratio = math.sqrt(difference / output) if output else math.inf if difference else 0.0
    return Error(-math.inf if math.isnan(error.snr_db) else error.snr_db, ratio if has_output else None)


def weight_histogram(weight: Tensor) -> Histogram | None:
    """Count the dequantized values of a weight in 64 bins; None if it is empty, or contains NaN or infinities."""
    values = plain_values(weight)
    return _histogram(lambda: _float_blocks(values, transposed=False))


def code_histogram(weight: Tensor) -> Histogram | None:
    """Count the codes of a weight in at most 64 bins; None if it is not quantized or its format cannot unpack codes."""
    if not isinstance(weight, QuantizedTensor):
        return None
    return _histogram(lambda: _code_blocks(weight), integers=True)


def _code_blocks(weight: QuantizedTensor) -> Iterator[Tensor]:
    for block in _blocks(_as_stored(weight, weight.transposed)):
        assert isinstance(block, QuantizedTensor)
        unpacked = block.format.unpack(block.tensors)
        if unpacked is None:
            return
        yield unpacked.codes.float()


def _histogram(blocks: Callable[[], Iterator[Tensor]], *, integers: bool = False) -> Histogram | None:
    ranges = [block.aminmax() for block in blocks() if block.numel()]
    if not ranges:
        return None
    low, high = min(block.min.item() for block in ranges), max(block.max.item() for block in ranges)
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    bins = _BINS
    if integers:
        low, high = round(low) - 0.5, round(high) + 0.5
        bins = int(min(bins, high - low))
    elif low == high:
        low, high = low - 0.5, high + 0.5
    counts = sum(torch.histc(block.double(), bins, low, high) for block in blocks())
    assert isinstance(counts, Tensor)
    return Histogram(tuple(int(count) for count in counts), low, high)


def _as_stored(weight: Tensor, transposed: bool) -> Tensor:
    """Return a weight as `[*, N, K]`: one of shape `[*, K, N]` is `transposed`, and a vector becomes one row."""
    weight = weight.transpose(-1, -2) if transposed else weight
    return weight if weight.dim() > 1 else weight.reshape(1, -1)


def _float_blocks(weight: Tensor, transposed: bool) -> Iterator[Tensor]:
    for block in _blocks(_as_stored(weight, transposed)):
        yield (block.dequantize() if isinstance(block, QuantizedTensor) else block).detach().float().cpu()


def _blocks(weight: Tensor) -> Iterator[Tensor]:
    """Yield the rows of a weight `[*, N, K]` in order, in blocks `[n, K]`; an empty weight has no blocks."""
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
