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

from hf_trainweights.formats.arithmetic import (
    FLOAT_DTYPES,
    cache_blocks,
    float32_blocks,
    reciprocal,
    round_scale,
    scale_codes,
)
from hf_trainweights.formats.base import Format, Specs
from hf_trainweights.formats.unpacked import Unpacked

_LARGEST = 448
# The sign bit and the seven bits of exponent and mantissa at their positions in float16. Read as float16, whose
# exponents have a larger bias, they are 1/256 of the code's value.
_SIGN_AND_CODE = 0xBF80 - (1 << 16)
_FLOAT16_OF_CODE = 256

# The value of each byte.
_VALUES = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()


@dataclass(frozen=True)
class Float8E4M3(Format):
    """Float8 e4m3 with one scale per row."""

    name: ClassVar[str] = "float8_e4m3"

    def tensor_specs(self, shape: Sequence[int], scale_dtype: torch.dtype) -> Specs:
        """Return `qdata` as `[*, N, K]` float8_e4m3fn and `scale` as `[*, N, 1]`."""
        *lead, K = shape
        return {"qdata": ((*lead, K), torch.float8_e4m3fn), "scale": ((*lead, 1), scale_dtype)}

    def quantize_rows(self, rows: Tensor, amax: Tensor, out: Mapping[str, Tensor]) -> None:
        """Fill codes `float8(w * (1 / scale))`, the scale rounded to its dtype first."""
        inverse = reciprocal(out["scale"].copy_(round_scale(amax / _LARGEST, _LARGEST, rows.dtype)))
        for block, values in float32_blocks(rows):
            # The rounded scale may be a little small, and not every release of torch casts values beyond 448 to 448.
            out["qdata"][block].copy_(values.mul_(inverse[block]).clamp_(-_LARGEST, _LARGEST))

    def unpack(self, tensors: Mapping[str, Tensor]) -> Unpacked:
        """Return the stored codes and scales, and for codes given as bytes a table of their values."""
        qdata = tensors["qdata"]
        return Unpacked(qdata, tensors["scale"], None, table=_VALUES if qdata.dtype == torch.uint8 else None)

    def dequantize_rows(self, tensors: Mapping[str, Tensor], K: int, dtype: torch.dtype) -> Tensor:
        """Return `qdata * scale`, each value rounded once."""
        qdata, scale = tensors["qdata"], tensors["scale"]
        plain = type(qdata) is Tensor and qdata.device.type == "cpu" and qdata.numel() > 0
        if not plain or dtype not in FLOAT_DTYPES:
            return scale_codes(qdata, scale, dtype)
        rows, factors = qdata.reshape(-1, K), scale.reshape(-1, 1).float() * _FLOAT16_OF_CODE
        out = torch.empty(rows.shape, dtype=dtype, device=rows.device)
        for block in cache_blocks(rows):
            out[block] = _float16(rows[block]).float().mul_(factors[block])
        return out.view(qdata.shape)


def _float16(codes: Tensor) -> Tensor:
    """Return codes / 256 as float16, exactly, by moving bits: float16 has one exponent bit more and a larger bias.

    PyTorch converts float8 one by one, 6 ns a weight on a CPU. Moving bits in vectors takes .3 ns, but loses NaN,
    which no weight holds.
    """
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(_SIGN_AND_CODE)
    return bits.view(torch.float16)
