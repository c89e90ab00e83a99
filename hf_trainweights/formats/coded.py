"""coded: codes of a uniform grid whose step gives them a mean rate, for files that keep them entropy-coded.

| tensor | shape | dtype |
|---|---|---|
| `qdata` | `[*, N, K]` | int8, -128 to 127 |
| `scale` | `[*, N, 1]` | the weight's dtype, few different numbers |

`weight = qdata * scale`: in memory these are the tensors of int8 with a scale a row, and int8's kernels multiply them.
The scale of a row is its root mean square times a step that all rows of the matrix share, so that every row has about
the same distribution of codes. The rate is the mean number of bits that a code takes in a file. Rows that share the
scale itself have .1 dB more, but the embeddings of MiniLM at 2.5 and 3.5 bits come no nearer to the originals.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_trainweights.errors import ConfigError
from hf_trainweights.formats.arithmetic import (
    cache_blocks,
    largest_magnitude,
    reciprocal,
    round_scale,
    round_to_int8,
    scale_codes,
)
from hf_trainweights.formats.base import Format, Specs
from hf_trainweights.formats.columns import ColumnCodes, FileBits
from hf_trainweights.formats.unpacked import Unpacked

_LOWEST_BITS, _HIGHEST_BITS = 2.0, 8.0

# Significant bits of a row's root mean square. A scale this coarse takes 6 bits a row in a file in place of 16, which
# saves .03 bits a weight at K = 384 or .15 dB. The price is .01 dB, because rows are up to 6 % off the best step.
_ROW_BITS = 4
_SCALE_BITS = 6
# Significant bits of the step that all rows share: one bit more would change the rate by .003.
_STEP_BITS = 8
# Bits of a weight's headers and Huffman tables in a file, and the most of them that count for an element: the headers
# of a tiny weight take more than coarser codes could save.
_HEADER_BITS, _MOST_HEADER_BITS_PER_WEIGHT = 2400, 0.02
# A code of a Gaussian weight has log2(4.13 / step) bits, the step in standard deviations.
_GAUSSIAN_BITS = 2.047
# The rate is measured on a sample of 16 rows or more. That finds the rate of a matrix to .01 bits, without a bias.
_SAMPLE_ELEMENTS, _SAMPLE_ROWS = 1 << 15, 128
_ROUNDS = 6
# Columns chosen by error and length are chosen up to 4 times, or until the rate is within .006 bits of `bits`.
_COLUMN_ROUNDS, _CLOSE_BITS = 4, 0.006
# The squared error, in squared steps, that a saved bit may cost: a uniform quantizer's slope of error at a high rate.
_BIT_COST = 2 * math.log(2) / 12
_SMALLEST_STEP = 2.0**-12


@dataclass(frozen=True)
class Coded(Format):
    """Int8 codes with one scale a row that take a mean number of bits in a file, where they are entropy-coded.

    Args:
        bits: Bits of a weight in a file, scales included: a real number from 2 to 8. In memory a weight takes 8 bits.
            Codes fit a byte, so a row's step is never finer than its largest magnitude over 127. Weights with a normal
            distribution reach 7 bits; if more are asked for, the file is smaller than that.

    Raises:
        ConfigError: `bits` is no such number.
    """

    name: ClassVar[str] = "coded"
    is_coded_in_files: ClassVar[bool] = True
    has_independent_rows: ClassVar[bool] = False
    # Int8's kernels read these attributes. They have no annotation, so they are no parameters.
    group_size = None
    activations = None
    bits: float = 4.0

    def __post_init__(self) -> None:
        number = type(self.bits) in (int, float)
        if not number or not _LOWEST_BITS <= self.bits <= _HIGHEST_BITS:
            expected = f"a number from {_LOWEST_BITS:g} to {_HIGHEST_BITS:g} for coded"
            raise ConfigError("bits", expected, repr(self.bits), "3.5 to 5 are usual.")
        object.__setattr__(self, "bits", float(self.bits))

    def __str__(self) -> str:
        return f"{self.name} {self.bits:.15g} bits"

    def file_bytes(self, shape: Sequence[int], scale_dtype: torch.dtype) -> int:
        """Return the approximate number of bytes of a weight in a file: `bits` for each element."""
        del scale_dtype
        return math.ceil(math.prod(shape) * self.bits / 8)

    def tensor_specs(self, shape: Sequence[int], scale_dtype: torch.dtype) -> Specs:
        """Return `qdata` as `[*, N, K]` int8 and `scale` as `[*, N, 1]`."""
        *lead, K = shape
        return {"qdata": ((*lead, K), torch.int8), "scale": ((*lead, 1), scale_dtype)}

    def fit(self, matrix: Tensor) -> _WithStep:
        """Return the format with the step at which a sample of the matrix takes `bits` bits a weight."""
        K, overhead = matrix.shape[-1], _overhead(matrix)
        step = 2.0 ** (_GAUSSIAN_BITS - self.bits)
        rows = matrix[:: -(-len(matrix) // _SAMPLE_ROWS)].double()
        unit, amax = _root_mean_square(rows), rows.abs().amax(dim=-1, keepdim=True)
        # An even stride could sample only columns that lie a power of two apart.
        positions = torch.arange(0, rows.numel(), max(1, rows.numel() // _SAMPLE_ELEMENTS) | 1, device=rows.device)
        positions = positions[unit.flatten()[positions // K] > 0]
        sample = rows.flatten()[positions]
        # NaN and Inf have no rate; `quantize` refuses them later.
        rounds = _ROUNDS if len(sample) and bool(amax.isfinite().all()) else 0
        for _ in range(rounds):
            inverse = reciprocal(_row_scale(unit * step, amax, matrix.dtype)).flatten()
            codes = (sample * inverse[positions // K]).round_().clamp_(-128, 127)
            rate = _file_bits(huffman_bits(codes) / len(codes)) + overhead
            # The rate falls by one bit when the step doubles, except in rows whose largest magnitude bounds the step.
            step = max(step * 2.0 ** (rate - self.bits), _SMALLEST_STEP)
        fitted = torch.tensor(step, dtype=torch.float32, device="cpu")
        return _WithStep(self.bits, _significant(fitted, torch.round, _STEP_BITS).item())

    def quantize_rows(self, rows: Tensor, amax: Tensor, out: Mapping[str, Tensor]) -> None:
        """Quantize these rows as if they were the whole matrix."""
        self.fit(rows).quantize_rows(rows, amax, out)

    def columns(self, weight: Tensor, importance: Tensor) -> ColumnCodes:
        """Return an object that chooses codes column by column, weighing the error of a code against its length."""
        return _Columns(self, weight, importance)

    def unpack(self, tensors: Mapping[str, Tensor]) -> Unpacked:
        """Return codes and scales as they lie."""
        return Unpacked(tensors["qdata"], tensors["scale"], limits=(-128, 127))

    def dequantize_rows(self, tensors: Mapping[str, Tensor], K: int, dtype: torch.dtype) -> Tensor:
        """Return `qdata * scale`."""
        del K
        return scale_codes(tensors["qdata"], tensors["scale"], dtype)


@dataclass(frozen=True)
class _WithStep(Coded):
    """The format of one matrix, with its step as a multiple of a row's root mean square."""

    step: float = 1.0

    def quantize_rows(self, rows: Tensor, amax: Tensor, out: Mapping[str, Tensor]) -> None:
        """Fill codes `round(w * (1 / scale))`, the scale rounded first."""
        scale = _row_scale(_root_mean_square(rows) * self.step, amax.double(), rows.dtype)
        out["scale"].copy_(scale)
        round_to_int8(rows.unsqueeze(1), amax, scale, out["qdata"].unsqueeze(1))


class _Columns(ColumnCodes):
    """Chooses the codes of one weight: for each value the cheapest of the three nearest codes, by error and length.

    The length of a code is the number of bits that it takes in a file. In the first round all lengths are equal. Later
    rounds take them from the frequencies of the last round's codes, and take the step that should meet the rate.
    """

    def __init__(self, form: Coded, weight: Tensor, importance: Tensor):
        self._bits, self._overhead, self._dtype = form.bits, _overhead(weight), weight.dtype
        self._step = form.fit(weight).step
        self._unit = _root_mean_square(weight)
        self._amax = largest_magnitude(weight.contiguous()).double().unsqueeze(-1)
        # The squared error that a saved bit may cost is larger in columns that matter little.
        self._bit_costs = (_BIT_COST * importance.mean() / importance).tolist()
        self._lengths = importance.new_zeros(256)
        self._codes = weight.new_empty(weight.shape[::-1], dtype=torch.int8)
        self._best: tuple[float, dict[str, Tensor]] | None = None
        self._round = 0
        self._take_step()

    def _take_step(self) -> None:
        self._scale = _row_scale(self._unit * self._step, self._amax, self._dtype)
        self._factor, self._inverse = self._scale.float().flatten(), reciprocal(self._scale).flatten()

    def encode(self, column: int, values: Tensor) -> Tensor:
        """Choose the codes of the least cost, which are the nearest codes while all lengths are equal."""
        exact = values * self._inverse
        nearest = exact.round().clamp_(-128, 127)
        tried = torch.stack((nearest, (nearest - 1).clamp_(-128), (nearest + 1).clamp_(max=127)))
        lengths = self._lengths.index_select(0, (tried + 128).to(torch.int32).flatten()).view_as(tried)
        costs = (tried - exact).square_().add_(lengths, alpha=self._bit_costs[column])
        codes = tried.gather(0, costs.argmin(dim=0, keepdim=True))[0]
        self._codes[column] = codes
        return codes.mul_(self._factor)

    def again(self, file_bits: FileBits) -> bool:
        """Take lengths and step from these codes and return True; end after a few rounds or when the rate is met."""
        codes, tensors = self._codes.flatten(), {"qdata": self._codes.t().contiguous(), "scale": self._scale}
        # The estimate counts the header of a tiny weight only in part, see `_MOST_HEADER_BITS_PER_WEIGHT`.
        estimate = _file_bits(huffman_bits(codes) / len(codes)) + self._overhead
        rate = min(file_bits(tensors) / len(codes), estimate)
        distance = abs(rate - self._bits)
        self._round += 1
        if self._round > 1 and (self._best is None or distance < self._best[0]):
            self._best = distance, tensors
        if self._round >= _COLUMN_ROUNDS or (self._round > 2 and distance < _CLOSE_BITS):
            return False
        counts = torch.bincount(codes.to(torch.int16).add_(128), minlength=256).float().add_(0.5)
        self._lengths = (counts / counts.sum()).log2_().neg_()
        self._step = max(self._step * 2.0 ** (rate - self._bits), _SMALLEST_STEP)
        self._take_step()
        return True

    def tensors(self) -> dict[str, Tensor]:
        """Return the codes and scales of the round whose rate came nearest to `bits`, the first round excepted."""
        assert self._best is not None
        return self._best[1]


def _overhead(matrix: Tensor) -> float:
    """Return the approximate number of bits that each element takes in a file beside its code: header and scale."""
    header = min(_HEADER_BITS / matrix.numel(), _MOST_HEADER_BITS_PER_WEIGHT)
    return header + _SCALE_BITS / matrix.shape[-1]


def _root_mean_square(rows: Tensor) -> Tensor:
    """Return the root mean square of each row, float64 `[n, 1]`, so coarse that the order of adding does not show."""
    squares = rows.new_empty((len(rows), 1), dtype=torch.float64)
    for block in cache_blocks(rows):
        squares[block] = rows[block].to(torch.float64, copy=True).square_().mean(dim=-1, keepdim=True)
    return _significant(squares.sqrt_(), torch.round, _ROW_BITS)


def _row_scale(wanted: Tensor, amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scales of rows `[n, 1]`: those wanted, changed where a row's largest code would not be 2 to 127."""
    scale = torch.minimum(wanted, _significant(amax / 2, torch.floor, _ROW_BITS))
    scale = torch.where(amax > 127.5 * scale, _significant(amax / 127, torch.ceil, _ROW_BITS), scale)
    if dtype == torch.float16:
        # Float16 has few bits for scales this small, and a scale of 2**-24 codes such rows exactly.
        scale = scale.masked_fill((amax > 0) & (amax <= 127 * 2.0**-24), 2.0**-24)
    return round_scale(scale.float(), 128, dtype)


def _file_bits(rate: float) -> float:
    """Return the bits that a code takes in zstd's frames, estimated from its bits in a Huffman code."""
    # Frames have tables. If codes have few bits, runs of seven codes repeat now and then, and zstd codes repeats worse.
    return 1.004 * rate + 0.33 * max(0.0, 2.6 - rate) ** 2


def _significant(values: Tensor, rounding: Callable[[Tensor], Tensor], bits: int) -> Tensor:
    """Round numbers to `bits` significant bits, in float64."""
    mantissa, exponent = torch.frexp(values.double())
    return torch.ldexp(rounding(mantissa * 2.0**bits) / 2.0**bits, exponent.double())


def huffman_bits(codes: Tensor) -> int:
    """Return the bits of int8 codes, held as floats, in the Huffman code of their frequencies, without its table.

    Examples:
        >>> huffman_bits(torch.tensor([0.0, 0.0, 1.0, -1.0]))
        6
    """
    counts = torch.bincount(codes.flatten().to(torch.int16).add_(128), minlength=256)
    heap = sorted(counts[counts > 0].tolist())
    total = 0
    while len(heap) > 1:
        pair = heapq.heappop(heap) + heapq.heappop(heap)
        total += pair
        heapq.heappush(heap, pair)
    return total
