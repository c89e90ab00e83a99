"""Attention to stored tokens: as exact as attention to the dequantized ones, with any mask, on every library."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from cpus import use_library
from torch import Tensor
from torch.nn import functional as F

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.kernels import attention
from hf_trainweights.kernels.attention import attend
from hf_trainweights.kernels.tokens import StoredTokens, TokenFormat

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("library")]

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
    dense = (x.load(tokens.start, count, torch.float32).repeat_interleave(shared, 1) for x in (keys, values))
    mask = mask if mask is None or mask.dtype == torch.bool else mask.float()
    return F.scaled_dot_product_attention(query.float(), *dense, mask, scale=0.2)


@pytest.mark.covering(2)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 8), (4, 4)], ids=str)
@pytest.mark.parametrize("kind", ["none", "bool", "float", "bool of a row"])
def test_attention_is_that_to_dequantized_tokens(
    sizes: Sizes, dtype: torch.dtype, bits: tuple[int, int], kind: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_THREADED", 0)
    query, keys, values = operands(sizes, dtype, bits)
    count = sizes.tokens - sizes.first
    masks = {
        "bool": torch.rand(sizes.batch, 1, sizes.rows, count) > 0.3,
        "float": torch.randn(1, sizes.heads * sizes.shared, 1, count, dtype=dtype),
        "bool of a row": torch.rand(1, 1, 1, count) > 0.5,
    }
    mask = masks.get(kind)
    if mask is not None and mask.dtype == torch.bool:
        mask[..., 0] = True
    tokens = slice(sizes.first, sizes.tokens)
    out = attend(query, keys, values, tokens, 0.2, mask)
    assert out is not None
    assert out.dtype == dtype
    reference = expected(query, keys, values, tokens, mask)
    assert (out.float() - reference).norm() <= LIMITS[dtype] * reference.norm()


def test_threads_that_share_the_tokens_of_a_head_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_THREADED", 0)
    query, keys, values = operands(Sizes(1, 1, 3, 2, 64, 64, 1500), torch.float32)
    before, outs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            outs.append(attend(query, keys, values, slice(0, 1500), 0.2, None))
    finally:
        torch.set_num_threads(before)
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-4, atol=1e-5)


def test_a_row_without_tokens_is_zero_and_changes_no_other() -> None:
    query, keys, values = operands(Sizes(1, 2, 2, 3, 64, 64, 40), torch.float32)
    mask = torch.ones(1, 1, 3, 40, dtype=torch.bool)
    mask[:, :, 1] = False
    out = attend(query, keys, values, slice(0, 40), 0.2, mask)
    assert out is not None
    assert not out[:, :, 1].any()
    reference = expected(query, keys, values, slice(0, 40), None)
    torch.testing.assert_close(out[:, :, [0, 2]], reference[:, :, [0, 2]], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_query_that_is_not_finite_makes_its_own_row_nan(value: float) -> None:
    query, keys, values = operands(Sizes(1, 2, 2, 3, 64, 64, 40), torch.float32)
    query[0, 1, 2, 3] = value
    out = attend(query, keys, values, slice(0, 40), 0.2, None)
    assert out is not None
    assert out[0, 1, 2].isnan().all()
    out[0, 1, 2] = 0
    assert out.isfinite().all()


def test_a_value_that_is_not_finite_is_not_lost() -> None:
    query, keys, values = operands(Sizes(1, 1, 2, 1, 64, 64, 40), torch.float32)
    broken = torch.randn(1, 1, 1, 64)
    broken[..., 0] = math.nan
    values.store(broken, 7)
    out = attend(query, keys, values, slice(0, 40), 0.2, None)
    assert out is not None
    assert out.isnan().any()


def test_large_scores_do_not_overflow() -> None:
    query, keys, values = operands(Sizes(1, 1, 1, 2, 64, 64, 600), torch.float32)
    out = attend(query * 1e4, keys, values, slice(0, 600), 0.2, None)
    assert out is not None
    assert out.isfinite().all()
    # One token gets all the weight, so the row is that token's value.
    dense = values.load(0, 600, torch.float32)[0, 0]
    nearest = (out[0, 0, 0] - dense).abs().amax(-1).min()
    assert nearest < 1e-2


def test_nothing_is_attended_to_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    query, keys, values = operands(SIZES[0], torch.float32)
    use_library(None, monkeypatch)
    assert attend(query, keys, values, slice(0, 1), 1.0, None) is None
