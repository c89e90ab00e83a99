"""int4 words as weights, eight codes at a time: they become bytes of 16 * code.

One conversion and one product with scale / 16 then make weights of them. The low nibbles of a word come before the
high ones, so that x needs its columns in that order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_trainweights.kernels.scratch import SCRATCH

# The highest bit of each nibble, and the high nibble of each byte.
_SIGN_BITS, _HIGH_NIBBLES = (int.from_bytes(bytes([byte]) * 4, "little", signed=True) for byte in (0x88, 0xF0))


def split_columns(x: Tensor) -> Tensor:
    """Return x `[M, K]` with its even columns before the odd ones, as `words_to_weight` has those of the weight."""
    M, K = x.shape
    return x.view(M, K // 2, 2).transpose(1, 2).reshape(M, K)


def words_to_weight(qdata: Tensor, scale: Tensor, dtype: torch.dtype) -> Callable[[slice], Tensor]:
    """Return a function from a slice of rows to these rows of an int4 weight, in scratch memory.

    `qdata` is `[N, K // 8]`, `scale` `[N, G]`. Each product is rounded once.
    """
    # PyTorch converts int8 to float16 one by one: .77 ns, and .15 ns by way of float32.
    wide_dtype = torch.float32 if dtype == torch.float16 else dtype
    # Exact but for bfloat16 scales below 2**-122.
    factors = scale.to(wide_dtype) / 16

    def rows(part: slice) -> Tensor:
        words, groups = qdata[part], factors[part]
        n, G = groups.shape
        codes = _codes_of(words).view(n, 2, G, -1)
        wide = SCRATCH.take("wide", codes.shape, wide_dtype).copy_(codes).mul_(groups.view(n, 1, G, 1))
        weight = wide if wide_dtype == dtype else SCRATCH.take("weight", codes.shape, dtype).copy_(wide)
        return weight.view(n, -1)

    return rows


def _codes_of(words: Tensor) -> Tensor:
    """Return 16 * code of the low and the high nibbles of words `[n, *]`: int8 `[n, 2, bytes]` in scratch memory."""
    # A nibble of code + 8 with its highest bit flipped is the code in two's complement.
    flipped = torch.bitwise_xor(words, _SIGN_BITS, out=SCRATCH.take("flipped", words.shape, words.dtype))
    codes = SCRATCH.take("codes", (len(words), 2, words.shape[1]), words.dtype)
    torch.bitwise_and(flipped, _HIGH_NIBBLES, out=codes[:, 1])
    torch.bitwise_and(flipped.bitwise_left_shift_(4), _HIGH_NIBBLES, out=codes[:, 0])
    return codes.view(torch.int8)
