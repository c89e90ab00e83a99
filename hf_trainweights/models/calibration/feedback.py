"""Codes with error feedback: what rounding one column loses, the columns after it make up for as far as they can.

The method is GPTQ (Frantar et al., 2022, arXiv 2210.17323), with the scales of a group chosen when its first column is
reached, by squared errors that count as much as the later columns cannot make up for them. The second moments of what a
layer gets tell how, and move the weight to where its products come nearest to the float model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_trainweights.errors import ConfigError
from hf_trainweights.files.coded_tensors import encode_tensors
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.columns import ColumnCodes

# Columns whose errors reach the columns behind the block by one product. A multiple of every group size.
_BLOCK_COLUMNS = 128
# Added to the diagonal of the moments, in parts of its mean: an estimate from n tokens is off by about K / n, and
# feedback would fit that noise. `benchmarks.calibration` has what these are worth.
_LEAST_DAMPING, _MOST_DAMPING = 0.01, 0.1
# How far a weight follows the inputs that the quantized layers before it have changed: half of the way is better than
# none of it or all of it (GPTAQ, arXiv 2504.02692, goes all of it).
_CORRECTION = 0.5


class Moments:
    """Sums over tokens of the products of a layer's K inputs; `name` is what errors call the layer's weight."""

    def __init__(self, K: int, device: torch.device, name: str = "weight"):
        self._name = name
        self._own = torch.zeros(K, K, dtype=torch.float32, device=device)
        self._cross = torch.zeros_like(self._own)
        self.tokens = 0

    def add(self, own: Tensor, reference: Tensor) -> None:
        """Add tokens `[n, K]`: inputs in the model whose earlier layers are quantized, and those in the float model.

        ConfigError: they hold NaN or Inf.
        """
        own, reference = own.float(), reference.float()
        self._own.addmm_(own.t(), own)
        self._cross.addmm_(reference.t(), own)
        self.tokens += len(own)
        # Each input stands in one number of the diagonal, and makes it NaN or Inf if it is that itself.
        if not (self._own.diagonal() + self._cross.diagonal()).isfinite().all():
            expected = f"finite inputs of the layer of {self._name}, whose squares float32 holds"
            next_step = "Leave the batch out in which they arise, or this weight with modules_to_not_convert."
            raise ConfigError("calibration", expected, "NaN, Inf or larger numbers", next_step)

    def blend(self, mean: Tensor, tokens: int) -> None:
        """Add other inputs, of which one token has the moments `[K, K]`, as if they were so many tokens."""
        self._own.add_(mean, alpha=tokens)
        self._cross.add_(mean, alpha=tokens)
        self.tokens += tokens

    @property
    def mean(self) -> Tensor:
        """The moments of one token, `[K, K]`."""
        return self._own / max(1, self.tokens)

    def damped(self) -> Tensor:
        """Return the moments of one token `[K, K]`, with so much on the diagonal that noise counts little."""
        moments = self.mean
        usual = moments.diagonal().mean()
        damping = min(_MOST_DAMPING, max(_LEAST_DAMPING, 0.1 * len(moments) / max(1, self.tokens)))
        # Inputs that are all zero tell nothing; any number keeps the matrix regular.
        moments.diagonal().add_(damping * usual if usual > 0 else 1.0)
        return moments

    def factor(self) -> Tensor:
        """Return U, float32 upper triangular `[K, K]`, with U'U the inverse of the damped moments."""
        moments = self.damped()
        # With rows and columns in reverse order the lower factor of the matrix is an upper one whose inverse is U.
        lower, failed = torch.linalg.cholesky_ex(moments.flip(0, 1))
        if failed:
            lower = torch.linalg.cholesky(moments.flip(0, 1).double()).float()
        ones = torch.eye(len(lower), dtype=torch.float32, device=lower.device)
        return torch.linalg.solve_triangular(lower.flip(0, 1), ones, upper=True)

    def corrected(self, weight: Tensor, factor: Tensor) -> Tensor:
        """Return a new weight `[N, K]` that gives, for changed inputs, more nearly what the float model has."""
        difference = (self._cross - self._own) / max(1, self.tokens)
        return weight.addmm(weight @ (difference @ factor.t()), factor, alpha=_CORRECTION)


def quantize_with_feedback(weight: Tensor, form: Format, moments: Moments, factor: Tensor) -> dict[str, Tensor] | None:
    """Quantize a finite weight `[N, K]` so that its products with inputs of such moments change least.

    The weight has the dtype its scales will have; `factor` is `moments.factor()`. None for a format that gains nothing.
    """
    codes = form.columns(weight, _importance(factor))
    if codes is None:
        return None
    target = moments.corrected(weight.float(), factor).t().contiguous()
    while True:
        _choose(target.clone(), factor, codes)
        if not codes.again(_file_bits):
            return codes.tensors()


def quantize_experts_with_feedback(
    weight: Tensor, form: Format, rows: Sequence[Sequence[Tensor]], name: str = "weight"
) -> dict[str, Tensor]:
    """Quantize finite experts `[E, N, K]`, each so that its products with its rows `[n, K]` change least."""
    E, _, K = weight.shape
    usual = Moments(K, weight.device, name)
    for parts in rows:
        for part in parts:
            usual.add(part, part)
    found = form.empty(weight.shape, weight.dtype, weight.device)
    for expert in range(E):
        moments = Moments(K, weight.device, name)
        for part in rows[expert]:
            moments.add(part, part)
        # What all experts get tells something of one that few tokens come to: as much as one token for each input.
        moments.blend(usual.mean, K)
        tensors = quantize_with_feedback(weight[expert], form, moments, moments.factor())
        assert tensors is not None
        for name, tensor in tensors.items():
            found[name][expert].copy_(tensor)
    return found


def _file_bits(tensors: Mapping[str, Tensor]) -> float:
    """Return how many bits the entropy-coded tensors of a weight take in a file."""
    return 8 * encode_tensors(tensors).numel()


def _importance(factor: Tensor) -> Tensor:
    """Return what a squared error in each column costs once the columns behind it have made up for what they can."""
    importance = factor.diagonal().pow(-2)
    return importance / importance.mean()


def _choose(columns: Tensor, factor: Tensor, codes: ColumnCodes) -> None:
    """Choose codes for columns `[K, N]`, which are overwritten: a column is contiguous, and groups lie one by one."""
    K, diagonal = len(columns), factor.diagonal().tolist()
    for start in range(0, K, _BLOCK_COLUMNS):
        block = columns[start : start + _BLOCK_COLUMNS]
        end = start + len(block)
        errors = torch.empty_like(block)
        for place, column in enumerate(range(start, end)):
            if codes.group_size and column % codes.group_size == 0:
                codes.begin_group(column // codes.group_size, block[place : place + codes.group_size])
            values = block[place]
            torch.sub(values, codes.encode(column, values), out=errors[place]).div_(diagonal[column])
            block[place + 1 :].addr_(factor[column, column + 1 : end], errors[place], alpha=-1)
        columns[end:].addmm_(factor[start:end, end:].t(), errors, alpha=-1)
