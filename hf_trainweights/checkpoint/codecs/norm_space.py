"""`norm-space`: rounds a first moment to steps of a norm, such as the largest gradient of late that Adamax divides by.

It is `update-space` (see `moments`) with n * n in the place of v. n is the DECODED norm, the reference `exp_avg_sq`,
and the product is rounded to float32. Then sqrt(n * n) is n, and the distance of two levels is t = n * step.

Payloads and parameters are those of `update-space`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import EncodedTensor, Params, References
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

    def _encode(self, tensor: Tensor, references: References) -> EncodedTensor:
        return super()._encode(tensor, _squared(references))

    @classmethod
    def _decode(
        cls, payloads: Sequence[Tensor], params: Params, shape: torch.Size, dtype: torch.dtype, references: References
    ) -> Tensor:
        return super()._decode(payloads, params, shape, dtype, _squared(references))


def _squared(references: References) -> References:
    return {name: norm.to(torch.float32).square() for name, norm in references.items()}
