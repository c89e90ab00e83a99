"""coded: codes of a uniform grid whose step gives them a mean rate, for files that keep them entropy-coded.

| tensor | shape | dtype |
|---|---|---|
| `qdata` | `[*, N, K]` | int8, -128 to 127 |
| `scale` | `[*, N, 1]` | the weight's dtype, few different numbers |

`weight = qdata * scale`: in memory these are the tensors of int8 with a scale a row, and int8's kernels multiply them.
The scale of a row is its root mean square times a step that all rows of the matrix share, so that every row has about
the same distribution of codes. Sharing the scale itself gives .1 dB more, but on MiniLM at 2.5 and 3.5 bits embeddings
that are no nearer.
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

# Significant bits of a row's root mean square. So coarse it costs 6 bits a row in a file in place of 16, which is .03
# bits a weight at K = 384 or .15 dB; that rows are up to 6 % off the best step loses .01 dB.
_ROW_BITS = 4
_SCALE_BITS = 6
# Those of the step that all rows share: one bit more would change the rate by .003.
_STEP_BITS = 8
# What the headers and Huffman tables of a weight take in a file; not more than a share, for the sake of tiny ones.
_HEADER_BITS, _MOST_HEADER_BITS_PER_WEIGHT = 2400, 0.02
# A code of a Gaussian weight has log2(4.13 / step) bits, the step in standard deviations.
_GAUSSIAN_BITS = 2.047
# The sample that the rate is measured on, 16 rows or more: enough for .01 bits a matrix, and without a bias for all.
_SAMPLE_ELEMENTS, _SAMPLE_ROWS = 1 << 15, 128
_ROUNDS = 6
# Of columns that are chosen by error and length: so many times over, or until the rate is met as nearly. What a bit
# is worth is the slope of error over rate of a uniform quantizer at a high rate, 2 ln 2 / 12, in squared steps.
_COLUMN_ROUNDS, _CLOSE_BITS = 4, 0.006
_BIT_WORTH = 2 * math.log(2) / 12
_SMALLEST_STEP = 2.0**-12


@dataclass(frozen=True)
class Coded(Format):
    """Int8 codes with one scale a row that take a mean number of bits in a file, where they are entropy-coded.

    Args:
        bits: Bits of a weight in a file, scales included: a real number from 2 to 8. In memory it takes 8. Codes fit a
            byte, so a row's step is never finer than its largest magnitude over 127: weights with a normal distribution
            reach 7 bits, and more bits than that leave the file smaller than asked.

    Raises:
        ConfigError: `bits` is no such number.
    """

    name: ClassVar[str] = "coded"
    is_coded_in_files: ClassVar[bool] = True
    has_independent_rows: ClassVar[bool] = False
    # What int8's kernels ask their format for; no fields, and no parameters.
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
        """Return about how many bytes a weight of this shape takes in a file: `bits` for each element."""
        del scale_dtype
        return math.ceil(math.prod(shape) * self.bits / 8)

    def tensor_specs(self, shape: Sequence[int], scale_dtype: torch.dtype) -> Specs:
        """Return `qdata` as `[*, N, K]` int8 and `scale` as `[*, N, 1]`."""
        *lead, K = shape
        return {"qdata": ((*lead, K), torch.int8), "scale": ((*lead, 1), scale_dtype)}

    def fit(self, matrix: Tensor) -> _WithStep:
        """Return the format with the step at which a sample of the matrix has the rate."""
        K, overhead = matrix.shape[-1], _overhead(matrix)
        step = 2.0 ** (_GAUSSIAN_BITS - self.bits)
        rows = matrix[:: -(-len(matrix) // _SAMPLE_ROWS)].double()
        unit, amax = _root_mean_square(rows), rows.abs().amax(dim=-1, keepdim=True)
        # An odd stride, so that columns which lie a power of two apart are not sampled alone.
        places = torch.arange(0, rows.numel(), max(1, rows.numel() // _SAMPLE_ELEMENTS) | 1, device=rows.device)
        places = places[unit.flatten()[places // K] > 0]
        sample = rows.flatten()[places]
        # The caller finds NaN and Inf, of which there is no rate.
        rounds = _ROUNDS if len(sample) and bool(amax.isfinite().all()) else 0
        for _ in range(rounds):
            inverse = reciprocal(_row_scale(unit * step, amax, matrix.dtype)).flatten()
            codes = (sample * inverse[places // K]).round_().clamp_(-128, 127)
            rate = _file_bits(huffman_bits(codes) / len(codes)) + overhead
            # The rate falls by one bit where the step doubles, but for rows whose largest magnitude stops it.
            step = max(step * 2.0 ** (rate - self.bits), _SMALLEST_STEP)
        fitted = torch.tensor(step, dtype=torch.float32, device="cpu")
        return _WithStep(self.bits, _significant(fitted, torch.round, _STEP_BITS).item())

    def quantize_rows(self, rows: Tensor, amax: Tensor, out: Mapping[str, Tensor]) -> None:
        """Fill the codes of these rows as of a matrix by themselves."""
        self.fit(rows).quantize_rows(rows, amax, out)

    def columns(self, weight: Tensor, importance: Tensor) -> ColumnCodes:
        """Return what chooses codes column by column, those of the least error and length together."""
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
    """The format of one matrix, whose step, in root mean squares of a row, is known."""

    step: float = 1.0

    def quantize_rows(self, rows: Tensor, amax: Tensor, out: Mapping[str, Tensor]) -> None:
        """Fill codes `round(w * (1 / scale))`, the scale rounded first."""
        scale = _row_scale(_root_mean_square(rows) * self.step, amax.double(), rows.dtype)
        out["scale"].copy_(scale)
        round_to_int8(rows.unsqueeze(1), amax, scale, out["qdata"].unsqueeze(1))


class _Columns(ColumnCodes):
    """The codes of one weight: of the three nearest to a value the one whose error and length cost least.

    In the first round all lengths are alike. Each later one has the lengths that the codes of the round before give,
    and the step by which the rate should become what is wanted.
    """

    def __init__(self, form: Coded, weight: Tensor, importance: Tensor):
        self._bits, self._overhead, self._dtype = form.bits, _overhead(weight), weight.dtype
        self._step = form.fit(weight).step
        self._unit = _root_mean_square(weight)
        self._amax = largest_magnitude(weight.contiguous()).double().unsqueeze(-1)
        # An error in a column that matters little may be larger for the same bit.
        self._worth = (_BIT_WORTH * importance.mean() / importance).tolist()
        self._lengths = importance.new_zeros(256)
        self._codes = weight.new_empty(weight.shape[::-1], dtype=torch.int8)
        self._best: tuple[float, dict[str, Tensor]] | None = None
        self._round = 0
        self._take_step()

    def _take_step(self) -> None:
        self._scale = _row_scale(self._unit * self._step, self._amax, self._dtype)
        self._factor, self._inverse = self._scale.float().flatten(), reciprocal(self._scale).flatten()

    def encode(self, column: int, values: Tensor) -> Tensor:
        """Choose the codes of the least cost; the nearest where lengths are alike."""
        exact = values * self._inverse
        nearest = exact.round().clamp_(-128, 127)
        tried = torch.stack((nearest, (nearest - 1).clamp_(-128), (nearest + 1).clamp_(max=127)))
        lengths = self._lengths.index_select(0, (tried + 128).to(torch.int32).flatten()).view_as(tried)
        costs = (tried - exact).square_().add_(lengths, alpha=self._worth[column])
        codes = tried.gather(0, costs.argmin(dim=0, keepdim=True))[0]
        self._codes[column] = codes
        return codes.mul_(self._factor)

    def again(self, file_bits: FileBits) -> bool:
        """Take the lengths and the step that these codes suggest; after a few rounds, keep the nearest rate."""
        codes, tensors = self._codes.flatten(), {"qdata": self._codes.t().contiguous(), "scale": self._scale}
        # The header of a tiny weight takes more than its codes could make up for.
        most = _file_bits(huffman_bits(codes) / len(codes)) + self._overhead
        rate = min(file_bits(tensors) / len(codes), most)
        off = abs(rate - self._bits)
        self._round += 1
        if self._round > 1 and (self._best is None or off < self._best[0]):
            self._best = off, tensors
        if self._round >= _COLUMN_ROUNDS or (self._round > 2 and off < _CLOSE_BITS):
            return False
        chances = torch.bincount(codes.to(torch.int16).add_(128), minlength=256).float().add_(0.5)
        self._lengths = (chances / chances.sum()).log2_().neg_()
        self._step = max(self._step * 2.0 ** (rate - self._bits), _SMALLEST_STEP)
        self._take_step()
        return True

    def tensors(self) -> dict[str, Tensor]:
        """Return the codes and scales of the round whose rate was nearest."""
        assert self._best is not None
        return self._best[1]


def _overhead(matrix: Tensor) -> float:
    """Return about how many bits a weight takes in a file beside its code."""
    header = min(_HEADER_BITS / matrix.numel(), _MOST_HEADER_BITS_PER_WEIGHT)
    return header + _SCALE_BITS / matrix.shape[-1]


def _root_mean_square(rows: Tensor) -> Tensor:
    """Return float64 `[n, 1]` of few significant bits, so that the order in which the squares are added is the same."""
    squares = rows.new_empty((len(rows), 1), dtype=torch.float64)
    for block in cache_blocks(rows):
        squares[block] = rows[block].to(torch.float64, copy=True).square_().mean(dim=-1, keepdim=True)
    return _significant(squares.sqrt_(), torch.round, _ROW_BITS)


def _row_scale(wanted: Tensor, amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scales of rows `[n, 1]`: as wanted, but such that the largest code of a row is from 2 to 127."""
    scale = torch.minimum(wanted, _significant(amax / 2, torch.floor, _ROW_BITS))
    scale = torch.where(amax > 127.5 * scale, _significant(amax / 127, torch.ceil, _ROW_BITS), scale)
    if dtype == torch.float16:
        # Scales this small have fewer bits, and 2**-24 codes such rows exactly.
        scale = scale.masked_fill((amax > 0) & (amax <= 127 * 2.0**-24), 2.0**-24)
    return round_scale(scale.float(), 128, dtype)


def _file_bits(rate: float) -> float:
    """Return how many bits a code takes in zstd's frames, from what it takes in a Huffman code."""
    # Frames have tables; and where codes have few bits, seven in a row repeat now and then, which zstd codes worse.
    return 1.004 * rate + 0.33 * max(0.0, 2.6 - rate) ** 2


def _significant(values: Tensor, rounding: Callable[[Tensor], Tensor], bits: int) -> Tensor:
    """Return numbers rounded to so many significant bits, in float64."""
    mantissa, exponent = torch.frexp(values.double())
    return torch.ldexp(rounding(mantissa * 2.0**bits) / 2.0**bits, exponent.double())


def huffman_bits(codes: Tensor) -> int:
    """Return how many bits a Huffman code of its own takes for int8 codes, held as floats, without its table.

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
