"""Asymmetric codes of any origin: the same weights as symmetric codes, or with the zero point of each row.

`(code - zero_point) * scale` is a difference of integers times a scale. Of codes of 4 bits it is one of -15 to 15,
which `int8` holds, in the groups of the source. Where a whole row shares scale and zero point, `uint4` holds both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_trainweights.errors import CorruptFileError, UnsupportedError
from hf_trainweights.formats.planes import pack_planes
from hf_trainweights.formats.uint import UInt4
from hf_trainweights.imports.weights import AGAIN, FROM_FLOAT, by_row, held, integer_weight
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor


def asymmetric_weight(name: str, codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> QuantizedTensor:
    """Return a weight of integer codes and zero points of the scale's shape, None for symmetric codes.

    It is as `integer_weight` where the differences fit into as many bits; else uint4 for rows of one group, and int8
    for others. UnsupportedError: a code and its zero point differ by more than int8 holds.
    """
    if zero is None or not bool(zero.any()):
        return integer_weight(name, codes, scale, bits)
    if zero.shape != scale.shape:
        found = f"{tuple(zero.shape)} for scales of shape {tuple(scale.shape)}"
        raise CorruptFileError(name, "as many zero points as scales", found, AGAIN)
    N, K = codes.shape
    scale, zero = by_row(name, scale, N), zero.reshape(-1, 1).expand(N, 1) if zero.dim() < 2 else zero.expand(N, -1)
    if K % scale.shape[1]:
        raise CorruptFileError(name, f"groups that divide {K} columns", f"{scale.shape[1]}", AGAIN)
    differences = codes.int() - zero.int().repeat_interleave(K // zero.shape[1], dim=1)
    low, high = (int(end) for end in differences.aminmax())
    if low < -128 or high > 127:
        expected = "codes that differ from their zero points by -128 to 127"
        raise UnsupportedError(name, expected, f"{low} to {high}", FROM_FLOAT)
    if bits == 4 and not -8 <= low <= high <= 7:
        form = UInt4(32).fallback((N, K))
        if isinstance(form, UInt4) and scale.shape[1] == 1:
            return _uint4(name, codes, scale, zero, form)
        bits = 8
    return integer_weight(name, differences.to(torch.int8), scale, bits)


def _uint4(name: str, codes: Tensor, scale: Tensor, zero: Tensor, form: UInt4) -> QuantizedTensor:
    """Return a weight whose groups all have the scale and the zero point of their row."""
    pairs = codes.shape[1] // form.group_size // 2
    zero = (zero + 8).to(torch.uint8)
    tensors = {
        "qdata": pack_planes((codes + 8).to(torch.uint8), bits=4),
        "scale": scale,
        # 0 stands for a factor of 1.
        "group_scale": torch.zeros(len(codes), pairs, dtype=torch.uint8, device=codes.device),
        "zero_point": (zero | zero << 4).expand(-1, pairs),
    }
    return held(name, form, tensors, tuple(codes.shape))
