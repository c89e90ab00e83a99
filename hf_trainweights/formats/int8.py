"""int8: one signed byte a weight, symmetric, one scale a row or a group of a row.

| tensor | shape | dtype |
|---|---|---|
| `qdata` | `[*, N, K]` | int8, -128 to 127 |
| `scale` | `[*, N, G]`, G = 1 or K // group_size | the weight's dtype |

`weight = qdata * scale`. The scale is the largest magnitude over 127: a search for smaller ones gains less than 0.1 dB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_trainweights.errors import ConfigError
from hf_trainweights.formats.arithmetic import round_scale, round_to_int8, scale_codes
from hf_trainweights.formats.base import Format, Specs, TargetGroups
from hf_trainweights.formats.unpacked import Unpacked


@dataclass(frozen=True)
class Int8(Format):
    """Symmetric int8 with one scale per row, or per group of `group_size` weights along K.

    Args:
        group_size: Weights that share a scale. None means one scale a row, as does any K that it does not divide.
        activations: "int8" to round the input of `F.linear` to int8 too, with one scale a token; None to leave the
            input as it is. It cannot be combined with groups, and changes nothing that is stored.

    Raises:
        ConfigError: `group_size` is not a positive integer, or `activations` is not one of these.
    """

    name: ClassVar[str] = "int8"
    groups_for_targets: ClassVar[TargetGroups] = {"gguf": (None,), "compressed-tensors": (None,)}
    group_size: int | None = None
    activations: str | None = None

    def __str__(self) -> str:
        return f"{super().__str__()} with {self.activations} activations" if self.activations else super().__str__()

    def get_config(self) -> dict[str, Any]:
        """Return the JSON description; `activations` only if it is set, because earlier versions do not read it."""
        config = super().get_config()
        return config if self.activations else {key: config[key] for key in config if key != "activations"}

    def __post_init__(self) -> None:
        if self.group_size is not None and (type(self.group_size) is not int or self.group_size < 1):
            raise ConfigError(
                "group_size", "a positive integer or None for int8", repr(self.group_size), "32 to 256 are usual."
            )
        if self.activations not in (None, "int8") or (self.activations and self.group_size):
            raise ConfigError(
                "activations",
                '"int8" or None, and None with a group_size',
                f"{self.activations!r} with group_size {self.group_size}",
                "Leave out one of the two.",
            )

    def fallback(self, shape: Sequence[int]) -> Format:
        """Return this format, or int8 with one scale a row if the groups do not divide K."""
        fits = self.group_size is None or (shape[-1] > 0 and shape[-1] % self.group_size == 0)
        return self if fits else Int8()

    def tensor_specs(self, shape: Sequence[int], scale_dtype: torch.dtype) -> Specs:
        """Return `qdata` as `[*, N, K]` int8 and `scale` as `[*, N, G]`."""
        *lead, K = shape
        G = 1 if self.group_size is None else K // self.group_size
        return {"qdata": ((*lead, K), torch.int8), "scale": ((*lead, G), scale_dtype)}

    def quantize_rows(self, rows: Tensor, amax: Tensor, out: Mapping[str, Tensor]) -> None:
        """Fill codes `round(w * (1 / scale))`, the scale rounded to its dtype first."""
        groups = rows.view(*amax.shape, -1)
        scale = out["scale"].copy_(round_scale(amax / 127, largest_code=128, dtype=rows.dtype))
        round_to_int8(groups, amax, scale, out["qdata"].view(groups.shape))

    def unpack(self, tensors: Mapping[str, Tensor]) -> Unpacked:
        """Return the stored codes and scales."""
        return Unpacked(tensors["qdata"], tensors["scale"], limits=(-128, 127))

    def dequantize_rows(self, tensors: Mapping[str, Tensor], K: int, dtype: torch.dtype) -> Tensor:
        """Return `qdata * scale`."""
        qdata, scale = tensors["qdata"], tensors["scale"]
        G = scale.shape[-1]
        groups = qdata.unflatten(-1, (G, K // G))
        return scale_codes(groups, scale.unsqueeze(-1), dtype).view(qdata.shape)
