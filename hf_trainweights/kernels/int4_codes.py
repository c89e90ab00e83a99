"""Nibbles of code + 8 as weights, in whole words: eight nibbles at a time become bytes of 16 * code.

One conversion and one product with scale / 16 then make weights of them. The low nibbles of a block come before the
high ones, so that x needs its columns in that order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_trainweights.kernels.scratch import SCRATCH

# The highest bit of each nibble, and the high nibble of each byte.
_MASKS = {
    dtype: tuple(int.from_bytes(bytes([byte]) * dtype.itemsize, "little", signed=True) for byte in (0x88, 0xF0))
    for dtype in (torch.int32, torch.int64)
}


def split_columns(x: Tensor) -> Tensor:
    """Return x `[M, K]` with its even columns before the odd ones, as `words_to_weight` has those of the weight."""
    M, K = x.shape
    return x.view(M, K // 2, 2).transpose(1, 2).reshape(M, K)


def words_to_weight(qdata: Tensor, scale: Tensor, dtype: torch.dtype) -> Callable[[slice], Tensor]:
    """Return a function from a slice of rows to these rows of an int4 weight, in scratch memory.

    `qdata` is `[N, K // 8]`, `scale` `[N, G]`.
    """
    factors = sixteenth(scale, dtype)

    def rows(part: slice) -> Tensor:
        words, groups = qdata[part], factors[part]
        n, G = groups.shape
        return weight_of(codes_of(words).view(n, 2, G, -1), groups.view(n, 1, G, 1), dtype).view(n, -1)

    return rows


def codes_of(words: Tensor) -> Tensor:
    """Return 16 * code of the low and the high nibbles of words `[n, *]`: int8 `[n, 2, bytes]` in scratch memory."""
    sign_bits, high_nibbles = _MASKS[words.dtype]
    # A nibble of code + 8 with its highest bit flipped is the code in two's complement.
    flipped = torch.bitwise_xor(words, sign_bits, out=SCRATCH.take("flipped", words.shape, words.dtype)).flatten(1)
    codes = SCRATCH.take("codes", (len(words), 2, flipped.shape[1]), words.dtype)
    torch.bitwise_and(flipped, high_nibbles, out=codes[:, 1])
    torch.bitwise_and(flipped.bitwise_left_shift_(4), high_nibbles, out=codes[:, 0])
    return codes.view(torch.int8)


def sixteenth(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scale / 16 in the dtype in which `weight_of` multiplies; exact but for bfloat16 scales below 2**-122."""
    return scale.to(_wide(dtype)) / 16


def offsets_of(scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return 16 times what is added to the codes of each group, a whole number: of uint4, while int4 adds nothing."""
    scales, zeros = scale.float().unbind(-1)
    if not zeros.any():
        return None
    return (zeros / scales).nan_to_num_(0).round_().mul_(16).to(_wide(dtype))


def weight_of(codes: Tensor, sixteenth: Tensor, dtype: torch.dtype, offsets: Tensor | None = None) -> Tensor:
    """Return codes, and what is added to them, times scales in scratch memory, each product rounded once."""
    wide = SCRATCH.take("wide", codes.shape, _wide(dtype)).copy_(codes)
    wide = (wide if offsets is None else wide.add_(offsets)).mul_(sixteenth)
    return wide if wide.dtype == dtype else SCRATCH.take("weight", codes.shape, dtype).copy_(wide)


def _wide(dtype: torch.dtype) -> torch.dtype:
    # PyTorch converts int8 to float16 one by one: .77 ns, and .15 ns by way of float32.
    return torch.float32 if dtype == torch.float16 else dtype
