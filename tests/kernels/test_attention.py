"""Attention to stored tokens: as exact as attention to the dequantized ones, with any mask, on every library."""

from __future__ import annotations

import math

import pytest
import torch
from cpus import use_library
from stored_tokens import LIMITS, MASKS, SIZES, Sizes, attention_mask, expected, operands

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.kernels import attention
from hf_trainweights.kernels.attention import attend

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("library")]


@pytest.mark.covering(2)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 8), (4, 4)], ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_attention_is_that_to_dequantized_tokens(
    sizes: Sizes, dtype: torch.dtype, bits: tuple[int, int], kind: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_THREADED", 0)
    query, keys, values = operands(sizes, dtype, bits)
    mask = attention_mask(kind, sizes, dtype)
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


@pytest.mark.parametrize("bits", [8, 4])
def test_a_token_before_the_first_is_not_read(bits: int) -> None:
    query, keys, values = operands(Sizes(1, 1, 2, 1, 64, 64, 40), torch.float32, (bits, bits))
    reference = expected(query, keys, values, slice(9, 40), None)
    for stored in (keys, values):
        stored.store(torch.full((1, 1, 1, 64), math.nan), 7)
    out = attend(query, keys, values, slice(9, 40), 0.2, None)
    assert out is not None
    torch.testing.assert_close(out, reference, rtol=1e-3, atol=1e-3)


def test_scores_that_are_not_finite_are_not_lost_beside_a_mask() -> None:
    query, keys, values = operands(Sizes(1, 1, 1, 1, 64, 64, 600), torch.float32)
    keys.store(torch.full((1, 1, 1, 64), math.nan), 300)
    mask = torch.full((1, 1, 1, 600), -math.inf)
    mask[..., 300] = 0
    out = attend(query, keys, values, slice(0, 600), 0.2, mask)
    assert out is not None
    assert out.isnan().all()


def test_no_sequence_at_all_gives_none() -> None:
    query, keys, values = operands(Sizes(0, 2, 2, 1, 64, 64, 20), torch.float32)
    out = attend(query, keys, values, slice(0, 20), 0.2, None)
    assert out is not None
    assert out.shape == (0, 4, 1, 64)


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
