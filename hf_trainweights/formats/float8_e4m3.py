"""float8_e4m3: one 8-bit float a weight (4 exponent, 3 mantissa bits, no infinity), one scale a row or group.

| tensor | shape | dtype |
|---|---|---|
| `qdata` | `[*, N, K]` | float8_e4m3fn, -448 to 448 |
| `scale` | `[*, N, G]`, G = 1 or K / group_size, rounded up | the weight's dtype, or uint8 if they are powers of two |

`weight = qdata * scale`. Files of other programs may have a scale for each block of rows and columns; here each row of
the block has it, so that rows stay independent. Format: "FP8 Formats for Deep Learning", arXiv 2209.05433.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_trainweights.errors import ConfigError
from hf_trainweights.formats.arithmetic import (
    FLOAT_DTYPES,
    cache_blocks,
    float32_blocks,
    reciprocal,
    round_scale,
    scale_codes,
)
from hf_trainweights.formats.base import Format, Specs
from hf_trainweights.formats.scale_codings import E4M3, SCALE_CODINGS, check_group_size
from hf_trainweights.formats.unpacked import Unpacked, constant

LARGEST = 448
# The mask of a code's sign and of its seven bits of exponent and mantissa, where `_float16` puts them. Read as float16,
# whose exponents have a larger bias, these bits are 1/256 of the code's value.
_SIGN_AND_CODE = 0xBF80 - (1 << 16)
_FLOAT16_OF_CODE = 256

CODINGS = ("plain", "e8m0")


@dataclass(frozen=True)
class Float8E4M3(Format):
    """Float8 e4m3 with one scale per row, or per group of `group_size` weights along K.

    Args:
        group_size: Weights that share a scale: a multiple of 8; the last group of a row may have fewer. None means one
            scale a row.
        scales: "plain", or "e8m0" for powers of two, to which this package does not quantize.
        activations: "float8" to round the input of `F.linear` to float8 too, with one scale a token; None to leave the
            input as it is. It cannot be combined with groups or other scales, and changes nothing that is stored.

    Raises:
        ConfigError: A parameter is none of these, or two exclude each other.
    """

    name: ClassVar[str] = "float8_e4m3"
    group_size: int | None = None
    scales: str = "plain"
    activations: str | None = None

    def __post_init__(self) -> None:
        self.check_choice("scales", CODINGS)
        check_group_size(self, self.scales, or_none=True)
        is_alone = self.group_size is None and self.scales == "plain"
        if self.activations not in (None, "float8") or (self.activations and not is_alone):
            raise ConfigError(
                "activations",
                '"float8" or None, and None with a group_size or other scales',
                f"{self.activations!r} with group_size {self.group_size} and {self.scales} scales",
                "Leave out one of these.",
            )

    def __str__(self) -> str:
        text = super().__str__() if self.scales == "plain" else f"{super().__str__()} {self.scales}"
        return f"{text} with {self.activations} activations" if self.activations else text

    def get_config(self) -> dict[str, Any]:
        """Return the JSON description; only parameters that are set, because earlier versions do not read them."""
        defaults = {"group_size": None, "scales": "plain", "activations": None}
        return {key: value for key, value in super().get_config().items() if (key, value) not in defaults.items()}

    @property
    def is_import_only(self) -> bool:  # type: ignore[override]  (an attribute of the class in Format)
        """Whether scales are powers of two."""
        return self.scales != "plain"

    def for_new_values(self) -> Format:
        """Return the format with plain scales."""
        return Float8E4M3(self.group_size, activations=self.activations)

    def _groups(self, K: int) -> int:
        return 1 if self.group_size is None else -(-K // self.group_size)

    def tensor_specs(self, shape: Sequence[int], scale_dtype: torch.dtype) -> Specs:
        """Return `qdata` as `[*, N, K]` float8_e4m3fn and `scale` as `[*, N, G]`."""
        *lead, K = shape
        scales = SCALE_CODINGS[self.scales].columns(self._groups(K), scale_dtype)["scale"]
        return {"qdata": ((*lead, K), torch.float8_e4m3fn), "scale": ((*lead, scales[0]), scales[1])}

    def group_magnitudes(self, rows: Tensor, groups: int) -> Tensor:
        """Return the largest magnitude of each group, of which the last may have fewer columns."""
        missing = 0 if self.group_size is None else groups * self.group_size - rows.shape[-1]
        return super().group_magnitudes(F.pad(rows, (0, missing)) if missing else rows, groups)

    def quantize_rows(self, rows: Tensor, amax: Tensor, out: Mapping[str, Tensor]) -> None:
        """Fill codes `float8(w * (1 / scale))`, the scale rounded to its dtype first."""
        scale = out["scale"].copy_(round_scale(amax / LARGEST, LARGEST, rows.dtype))
        inverse = reciprocal(scale)
        for block, values in float32_blocks(rows):
            # The rounded scale may be a little small, and not every release of torch casts values beyond 448 to 448.
            out["qdata"][block].copy_(self._multiply_(values, inverse[block]).clamp_(-LARGEST, LARGEST))

    def _multiply_(self, values: Tensor, factors: Tensor) -> Tensor:
        """Multiply values `[*, K]` by the factors of their groups `[*, G]`, in place."""
        groups, size = factors.shape[-1], self.group_size or values.shape[-1]
        if values.shape[-1] % size:
            # The last group of a row has fewer columns.
            groups -= 1
            values[..., groups * size :].mul_(factors[..., groups:])
        values[..., : groups * size].unflatten(-1, (groups, size)).mul_(factors[..., :groups].unsqueeze(-1))
        return values

    def unpack(self, tensors: Mapping[str, Tensor]) -> Unpacked:
        """Return the stored codes and scales, and for codes given as bytes a table of their values."""
        qdata, scale = tensors["qdata"], tensors["scale"]
        K, size = constant(qdata.size(-1)), self.group_size
        if self.scales != "plain":
            scale, _ = SCALE_CODINGS[self.scales].decode(tensors, self._groups(K))
        if size is not None and K % size:
            # Groups of one column each, because the last group has fewer columns than the others.
            scale = scale.repeat_interleave(size, dim=-1)[..., :K]
        return Unpacked(qdata, scale, None, table=E4M3 if qdata.dtype == torch.uint8 else None)

    def dequantize_rows(self, tensors: Mapping[str, Tensor], K: int, dtype: torch.dtype) -> Tensor:
        """Return `qdata * scale`, each value rounded once."""
        qdata, scale = tensors["qdata"], tensors["scale"]
        if self.scales != "plain":
            scale, _ = SCALE_CODINGS[self.scales].decode(tensors, self._groups(K))
        plain = type(qdata) is Tensor and qdata.device.type == "cpu" and qdata.numel() > 0
        # A scale above 2**120 would overflow as a factor.
        if not plain or dtype not in FLOAT_DTYPES or not (scale.float() * _FLOAT16_OF_CODE).isfinite().all():
            if self.group_size is not None:
                scale = scale.repeat_interleave(self.group_size, dim=-1)[..., :K]
            return scale_codes(qdata, scale, dtype)
        rows, factors = qdata.reshape(-1, K), scale.reshape(-1, scale.shape[-1]).float() * _FLOAT16_OF_CODE
        out = torch.empty(rows.shape, dtype=dtype, device=rows.device)
        for block in cache_blocks(rows):
            out[block] = self._multiply_(_float16(rows[block]).float(), factors[block])
        return out.view(qdata.shape)


def _float16(codes: Tensor) -> Tensor:
    """Return codes / 256 as float16, exactly, by moving bits: float16 has one exponent bit more and a larger bias.

    PyTorch converts float8 one by one, 6 ns a weight on a CPU. Moving bits in vectors takes .3 ns, but loses NaN,
    which no weight holds.
    """
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(_SIGN_AND_CODE)
    return bits.view(torch.float16)
