"""`norm-space`: rounds a first moment to steps of a norm, such as the largest gradient of late that Adamax divides by.

It is `update-space` (see `moments`) with n * n in the place of v. n is the DECODED norm, the reference `exp_avg_sq`,
and the product is rounded to float32. Then sqrt(n * n) is n, and the distance of two levels is t = n * step.

Payloads and parameters are those of `update-space`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.coding.blocks import Placed, Rows, dense, rows_of, scratch
from hf_trainweights.checkpoint.codecs.moments import UpdateSpace


@dataclass(frozen=True)
class NormSpace(UpdateSpace):
    """Rounds exp_avg / norm to a uniform step.

    The bound is the largest |decoded - original| / norm. If the norm is zero, the element is exact.

    Args:
        step: Distance of two levels in units of the norm, between 2**-10 and 2**10.

    Examples:
        >>> import torch
        >>> exp_avg, exp_inf = torch.randn(64, 64) * 1e-3, torch.full([64, 64], 1e-3)
        >>> encoded = NormSpace(step=0.125).encode(exp_avg, {"exp_avg_sq": exp_inf})
        >>> 0.06 < encoded.bound < 0.063
        True
    """

    codec_id: ClassVar[str] = "norm-space"

    @staticmethod
    def _squares(elements: Tensor) -> Tensor:
        return elements.to(torch.float32).square()

    @classmethod
    def _squares_of(cls, reference: Tensor, rows: Rows, columns: slice) -> Placed:
        norms = dense(rows_of(reference, rows, columns, "v"))
        return np.multiply(norms, norms, out=scratch("squares", norms.shape)), None
