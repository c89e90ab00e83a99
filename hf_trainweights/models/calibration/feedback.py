"""GPTQ (Frantar et al., 2022, arXiv 2210.17323): columns of a weight are quantized one after the other.

The inputs of a layer are correlated, so a change of one column can cancel a part of another column's rounding error in
the layer's products. After each column, the columns behind it are therefore changed by that part. The second moments of
the inputs tell how much to change them. The scales of a group are chosen when its first column is reached, so that the
squared errors that cannot be cancelled are least.

The layers before this one are quantized as well, so it gets other inputs than in the float model. The moments of both
inputs first move the weight to where its products come nearer to those of the float model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_trainweights.errors import ConfigError
from hf_trainweights.files.coded_tensors import encode_tensors
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.columns import ColumnCodes

# Columns of a block. Their errors reach all columns behind the block by one product. A multiple of every group size.
_BLOCK_COLUMNS = 128
# The damping is added to the diagonal of the moments, as a share of its mean. Moments of n tokens are off by about
# K / n, and feedback would fit that noise. `benchmarks.calibration` measures the effect of these numbers.
_LEAST_DAMPING, _MOST_DAMPING = 0.01, 0.1
# How far a weight is moved to make up for inputs that the quantized layers before it have changed: half of the way is
# better than none of it or all of it (GPTAQ, arXiv 2504.02692, goes all of it).
_CORRECTION = 0.5


class Moments:
    """The second moments of a layer's K inputs, summed over tokens; errors name the layer's weight by `name`."""

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
        # The squares of each input are in one number of the diagonal, and make it NaN or Inf if they are.
        if not (self._own.diagonal() + self._cross.diagonal()).isfinite().all():
            expected = f"finite inputs of the layer of {self._name}, whose squares float32 holds"
            next_step = "Leave the batch out in which they arise, or this weight with modules_to_not_convert."
            raise ConfigError("calibration", expected, "NaN, Inf or larger numbers", next_step)

    def blend(self, mean: Tensor, tokens: int) -> None:
        """Add the moments `[K, K]` of one token, as if `tokens` tokens had them."""
        self._own.add_(mean, alpha=tokens)
        self._cross.add_(mean, alpha=tokens)
        self.tokens += tokens

    @property
    def mean(self) -> Tensor:
        """The moments of one token, `[K, K]`."""
        return self._own / max(1, self.tokens)

    def damped(self) -> Tensor:
        """Return the moments of one token `[K, K]`, with a larger diagonal, so that noise counts little."""
        moments = self.mean
        usual = moments.diagonal().mean()
        damping = min(_MOST_DAMPING, max(_LEAST_DAMPING, 0.1 * len(moments) / max(1, self.tokens)))
        # If all inputs are zero, any number on the diagonal keeps the matrix regular.
        moments.diagonal().add_(damping * usual if usual > 0 else 1.0)
        return moments

    def factor(self) -> Tensor:
        """Return U, float32 upper triangular `[K, K]`, with U'U the inverse of the damped moments."""
        moments = self.damped()
        # The lower factor of the reversed matrix, reversed itself, is an upper factor of the matrix. Its inverse is U.
        lower, failed = torch.linalg.cholesky_ex(moments.flip(0, 1))
        if failed:
            lower = torch.linalg.cholesky(moments.flip(0, 1).double()).float()
        ones = torch.eye(len(lower), dtype=torch.float32, device=lower.device)
        return torch.linalg.solve_triangular(lower.flip(0, 1), ones, upper=True)

    def corrected(self, weight: Tensor, factor: Tensor) -> Tensor:
        """Return a new weight `[N, K]` whose products with changed inputs are nearer to those of the float model."""
        difference = (self._cross - self._own) / max(1, self.tokens)
        return weight.addmm(weight @ (difference @ factor.t()), factor, alpha=_CORRECTION)


def quantize_with_feedback(weight: Tensor, form: Format, moments: Moments, factor: Tensor) -> dict[str, Tensor] | None:
    """Quantize a finite weight `[N, K]` so that its products with inputs of these moments change least.

    The weight has the dtype its scales will have; `factor` is `moments.factor()`. None if the
    format chooses no codes column by column.
    """
    codes = form.columns(weight, _importance(factor))
    if codes is None:
        return None
    target = moments.corrected(weight.float(), factor).t().contiguous()
    while True:
        _choose(target.clone(), factor, codes)
        # A format that is to have some size in a file changes its step and asks for all codes again, until it has it.
        if not codes.again(_file_bits):
            return codes.tensors()


def quantize_experts_with_feedback(
    weight: Tensor, form: Format, rows: Sequence[Sequence[Tensor]], name: str = "weight"
) -> dict[str, Tensor]:
    """Quantize finite experts `[E, N, K]`, each so that its products with its inputs `[n, K]` change least."""
    E, _, K = weight.shape
    usual = Moments(K, weight.device, name)
    for chunks in rows:
        for tokens in chunks:
            usual.add(tokens, tokens)
    stored = form.empty(weight.shape, weight.dtype, weight.device)
    for expert in range(E):
        moments = Moments(K, weight.device, name)
        for tokens in rows[expert]:
            moments.add(tokens, tokens)
        # The inputs of all experts tell something of an expert that gets few tokens. They count as K tokens, one for
        # each of its inputs.
        moments.blend(usual.mean, K)
        tensors = quantize_with_feedback(weight[expert], form, moments, moments.factor())
        assert tensors is not None  # calibration takes only formats with `columns`
        for key, tensor in tensors.items():
            stored[key][expert].copy_(tensor)
    return stored


def _file_bits(tensors: Mapping[str, Tensor]) -> float:
    """Return how many bits the entropy-coded tensors of a weight take in a file."""
    return 8 * encode_tensors(tensors).numel()


def _importance(factor: Tensor) -> Tensor:
    """Return how much of a squared error in each column stays when later columns have made up for it; mean 1."""
    importance = factor.diagonal().pow(-2)
    return importance / importance.mean()


def _choose(columns: Tensor, factor: Tensor, codes: ColumnCodes) -> None:
    """Choose codes for columns `[K, N]`, which are overwritten; in this order columns and groups are contiguous."""
    K, diagonal = len(columns), factor.diagonal().tolist()
    for start in range(0, K, _BLOCK_COLUMNS):
        block = columns[start : start + _BLOCK_COLUMNS]
        end = start + len(block)
        errors = torch.empty_like(block)
        for index, column in enumerate(range(start, end)):
            if codes.group_size and column % codes.group_size == 0:
                codes.begin_group(column // codes.group_size, block[index : index + codes.group_size])
            values = block[index]
            torch.sub(values, codes.encode(column, values), out=errors[index]).div_(diagonal[column])
            block[index + 1 :].addr_(factor[column, column + 1 : end], errors[index], alpha=-1)
        columns[end:].addmm_(factor[start:end, end:].t(), errors, alpha=-1)
