"""float8_e4m3: one 8-bit float a weight (4 exponent, 3 mantissa bits, no infinity), one scale a row.

| tensor | shape | dtype |
|---|---|---|
| `qdata` | `[*, N, K]` | float8_e4m3fn, -448 to 448 |
| `scale` | `[*, N, 1]` | the weight's dtype |

`weight = qdata * scale`. Format: "FP8 Formats for Deep Learning", arXiv 2209.05433.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_trainweights.formats.base import Format, float32_tiles, multiply, reciprocal, round_scale

_LARGEST = 448


@dataclass(frozen=True)
class Float8E4M3(Format):
    """Float8 e4m3 with one scale per row."""

    name: ClassVar[str] = "float8_e4m3"

    def tensor_specs(
        self, shape: Sequence[int], scale_dtype: torch.dtype
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return `qdata` as `[*, N, K]` float8_e4m3fn and `scale` as `[*, N, 1]`."""
        *lead, K = shape
        return {"qdata": ((*lead, K), torch.float8_e4m3fn), "scale": ((*lead, 1), scale_dtype)}

    def quantize_rows(self, rows: Tensor, amax: Tensor, out: Mapping[str, Tensor]) -> None:
        """Fill codes `float8(w * (1 / scale))`, the scale rounded to its dtype first."""
        inverse = reciprocal(out["scale"].copy_(round_scale(amax / _LARGEST, _LARGEST, rows.dtype)))
        for tile, values in float32_tiles(rows):
            # The rounded scale may be a little small, and not every release of torch casts what is beyond 448 to 448.
            out["qdata"][tile].copy_(values.mul_(inverse[tile]).clamp_(-_LARGEST, _LARGEST))

    def dequantize_rows(self, tensors: Mapping[str, Tensor], K: int, dtype: torch.dtype) -> Tensor:
        """Return `qdata * scale`."""
        del K
        return multiply(tensors["qdata"], tensors["scale"], dtype)
