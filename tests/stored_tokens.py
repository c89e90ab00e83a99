"""Queries, keys and values of attention, stored as integers, and the attention that tests expect of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_trainweights.kernels.tokens import StoredTokens, TokenFormat

# The rounding of the result, and of queries and probabilities to 16 bits.
LIMITS = {torch.float32: 2e-4, torch.bfloat16: 3e-3, torch.float16: 5e-4}


class Sizes(NamedTuple):
    batch: int
    heads: int
    shared: int
    rows: int
    key_columns: int
    value_columns: int
    tokens: int
    first: int = 0


# One token; odd numbers of blocks, rows and heads; more than a chunk of 256 tokens; a window that begins in a block;
# keys and values of other sizes.
SIZES = [
    Sizes(1, 1, 1, 1, 64, 64, 1),
    Sizes(1, 2, 7, 1, 64, 64, 300),
    Sizes(2, 3, 1, 5, 40, 40, 70),
    Sizes(1, 1, 4, 3, 96, 64, 530, 37),
    Sizes(2, 2, 2, 1, 128, 128, 17, 3),
    Sizes(1, 4, 2, 1, 4, 36, 16),
]


def filled(x: Tensor, bits: int, is_key: bool) -> StoredTokens:
    batch, heads, count, columns = x.shape
    stored = StoredTokens.empty(TokenFormat(bits, is_key, columns), batch, heads, -(-count // 16) + 1)
    if is_key:
        stored.channels = torch.stack([x.float().mean(2), x.float().abs().mean(2) + 0.1], 2).contiguous()
    stored.store(x, 0)
    return stored


def operands(
    sizes: Sizes, dtype: torch.dtype, bits: tuple[int, int] = (8, 8)
) -> tuple[Tensor, StoredTokens, StoredTokens]:
    generator = torch.Generator().manual_seed(sizes.tokens)
    shape = (sizes.batch, sizes.heads, sizes.tokens)
    keys, values, query = (
        torch.randn(*lead, columns, generator=generator).to(dtype)
        for lead, columns in (
            (shape, sizes.key_columns),
            (shape, sizes.value_columns),
            ((sizes.batch, sizes.heads * sizes.shared, sizes.rows), sizes.key_columns),
        )
    )
    return query, filled(keys, bits[0], True), filled(values, bits[1], False)


def expected(query: Tensor, keys: StoredTokens, values: StoredTokens, tokens: slice, mask: Tensor | None) -> Tensor:
    shared, count = query.shape[1] // keys.codes.shape[1], tokens.stop - tokens.start
    key, value = (x.load(tokens.start, count, torch.float32).repeat_interleave(shared, 1) for x in (keys, values))
    mask = mask if mask is None or mask.dtype == torch.bool else mask.float()
    return F.scaled_dot_product_attention(query.float(), key, value, mask, scale=0.2)


MASKS = ["none", "bool", "float", "bool of a row"]


def attention_mask(kind: str, sizes: Sizes, dtype: torch.dtype) -> Tensor | None:
    count = sizes.tokens - sizes.first
    masks = {
        "bool": torch.rand(sizes.batch, 1, sizes.rows, count) > 0.3,
        "float": torch.randn(1, sizes.heads * sizes.shared, 1, count, dtype=dtype),
        "bool of a row": torch.rand(1, 1, 1, count) > 0.5,
    }
    mask = masks.get(kind)
    if mask is not None and mask.dtype == torch.bool:
        mask[..., 0] = True
    return mask
