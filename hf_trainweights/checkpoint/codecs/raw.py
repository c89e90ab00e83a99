"""`raw`: the tensor's bytes as they lie in memory.

| payload | content |
|---|---|
| 0 | the elements in row-major order, little-endian, nothing else |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import ROLES, Codec, EncodedTensor, Params, References
from hf_trainweights.checkpoint.codecs.coding.blocks import empty


@dataclass(frozen=True)
class Raw(Codec):
    """Stores bytes unchanged, for small tensors and for those that no codec makes smaller.

    Examples:
        >>> import torch
        >>> encoded = Raw().encode(torch.tensor([1.0, -0.0]))
        >>> Raw.decode(encoded.payloads, encoded.params, [2], torch.float32)
        tensor([1., -0.])
    """

    codec_id: ClassVar[str] = "raw"
    lossless: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = ROLES

    def _encode(self, tensor: Tensor, references: References) -> EncodedTensor:
        return EncodedTensor([tensor.reshape(-1).view(torch.uint8).clone()], {})

    @classmethod
    def _decode(
        cls, payloads: Sequence[Tensor], params: Params, shape: torch.Size, dtype: torch.dtype, references: References
    ) -> Tensor:
        cls.check_count(payloads, 1)
        payload = payloads[0]
        expected_bytes = shape.numel() * dtype.itemsize
        if payload.numel() != expected_bytes:
            raise cls.corrupt("payload 0", f"{expected_bytes} bytes", f"{payload.numel()} bytes")
        decoded = empty(shape, dtype)
        decoded.view(-1).view(torch.uint8).copy_(payload)
        return decoded
