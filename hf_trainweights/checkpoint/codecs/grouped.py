"""`grouped`: stores a weight in one of the package's own quantized formats, e.g. int8 or int4 with a scale per group.

This is plain quantization: each element is off by at most half a code of its group, however much it has changed since
the anchor. For small checkpoints to resume from, `delta-uniform` is both smaller and closer.

The tensor is viewed as a weight [N, K], N its first dimension (1 for a vector). If a format cannot hold this shape,
the format that it falls back to replaces it.

| payload | content |
|---|---|
| i | the format's i-th stored tensor, coded by `planes` |

| parameter | content |
|---|---|
| format | object, the format's configuration, e.g. `{"format": "int4", "group_size": 128}` |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES, Codec, EncodedTensor, Params, References
from hf_trainweights.checkpoint.codecs.coding.blocks import chunk_ranges
from hf_trainweights.checkpoint.codecs.exact import Planes
from hf_trainweights.errors import ConfigError
from hf_trainweights.formats import get_format


@dataclass(frozen=True)
class Grouped(Codec):
    """Stores a quantized weight; the bound is the largest absolute error, in the unit of the weights.

    Encoding NaN or infinities is a `QuantizationError`, because these cannot be quantized.

    Args:
        config: The format, as `hf_trainweights.formats.get_format` takes it.

    Examples:
        >>> import torch
        >>> weight = torch.linspace(-1, 1, 64 * 64).view(64, 64)
        >>> encoded = Grouped({"format": "int8"}).encode(weight)
        >>> encoded.bound < 1 / 127
        True
    """

    config: Mapping[str, Any] = field(default_factory=lambda: {"format": "int8"})

    codec_id: ClassVar[str] = "grouped"
    lossless: ClassVar[bool] = False
    roles: ClassVar[tuple[str, ...]] = ("weight", "exp_avg", "momentum")
    dtypes: ClassVar[frozenset[torch.dtype]] = LOSSY_DTYPES

    def __post_init__(self) -> None:
        if refusal := get_format(self.config).import_only_refusal():
            raise ConfigError("format", *refusal)

    def _encode(self, tensor: Tensor, references: References) -> EncodedTensor:
        weight = tensor.view(_weight_shape(tensor.shape))
        chosen = get_format(self.config).fallback(weight.shape)
        stored = chosen.quantize(weight)
        decoded = chosen.dequantize(stored, weight.shape, weight.dtype).view(-1)
        original = tensor.view(-1)
        bound = 0.0
        for chunk in chunk_ranges(len(original)):
            errors = decoded[chunk].to(torch.float32).sub(original[chunk].to(torch.float32))
            bound = max(bound, errors.abs_().amax().item())
        payloads = [Planes().encode(stored[name]).payloads[0] for name in chosen.tensor_names]
        # `bound` is a difference that float32 may have rounded down.
        return EncodedTensor(payloads, {"format": chosen.get_config()}, bound * (1 + 2**-23))

    @classmethod
    def _decode(
        cls, payloads: Sequence[Tensor], params: Params, shape: torch.Size, dtype: torch.dtype, references: References
    ) -> Tensor:
        config = cls.param(params, "format", dict)
        try:
            chosen = get_format(config)
        except (ConfigError, TypeError) as error:
            raise cls.corrupt("parameter format", "a known format", repr(config)[:80]) from error
        weight_shape = _weight_shape(shape)
        if chosen.fallback(weight_shape) != chosen:
            raise cls.corrupt("parameter format", f"one for shape {list(weight_shape)}", repr(config)[:80])
        cls.check_count(payloads, len(chosen.tensor_names))
        specs = chosen.tensor_specs(weight_shape, dtype)
        stored = {
            name: Planes.decode([payload], {}, *specs[name])
            for name, payload in zip(chosen.tensor_names, payloads, strict=True)
        }
        return chosen.dequantize(stored, weight_shape, dtype).view(shape)


def _weight_shape(shape: torch.Size) -> torch.Size:
    rows = shape[0] if len(shape) > 1 else 1
    return torch.Size([rows, shape.numel() // rows if rows else 0])
