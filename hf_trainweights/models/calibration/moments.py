"""Second moments of what a layer gets, and the weight whose products with it come nearest to the float model's."""

from __future__ import annotations

import torch
from torch import Tensor

# Added to the diagonal of the moments, in parts of its mean: an estimate from n tokens is off by about K / n, and
# feedback would fit that noise. `benchmarks.calibration` has what these are worth.
_LEAST_DAMPING, _MOST_DAMPING = 0.01, 0.1
# How far a weight follows the inputs that the quantized layers before it have changed: half of the way is better than
# none of it or all of it (GPTAQ, arXiv 2504.02692, goes all of it).
_CORRECTION = 0.5


class Moments:
    """Sums over tokens of the products of a layer's K inputs."""

    def __init__(self, K: int, device: torch.device):
        self._own = torch.zeros(K, K, dtype=torch.float32, device=device)
        self._cross = torch.zeros_like(self._own)
        self.tokens = 0

    def add(self, own: Tensor, reference: Tensor) -> None:
        """Add tokens `[n, K]`: inputs in the model whose earlier layers are quantized, and those in the float model."""
        own, reference = own.float(), reference.float()
        self._own.addmm_(own.t(), own)
        self._cross.addmm_(reference.t(), own)
        self.tokens += len(own)

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
