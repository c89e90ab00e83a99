"""Stored tokens: compiled functions and ops of PyTorch give the same codes, near the tokens, and touch no others."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from cpus import use_library
from torch import Tensor
from torch.nn import functional as F

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.kernels.tokens import BLOCK_TOKENS, StoredTokens, TokenFormat, pack, unpack

BATCH, HEADS = 2, 3
FORMS = [TokenFormat(bits, is_key, D) for bits in (8, 4) for is_key in (True, False) for D in (40, 128)]
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def random_tokens(form: TokenFormat, count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, HEADS, count, form.columns, generator=generator).to(dtype)


def channels_of(form: TokenFormat) -> Tensor | None:
    if not form.is_key:
        return None
    mean, magnitude = random_tokens(form, 2, seed=7).unbind(2)
    return torch.stack([mean, magnitude.abs() + 0.5], 2)


def empty(form: TokenFormat, blocks: int) -> StoredTokens:
    stored = StoredTokens.empty(form, BATCH, HEADS, blocks)
    stored.codes.fill_(0x5A)
    stored.channels = channels_of(form)
    return stored


@every_form
def test_blocks_hold_each_code(form: TokenFormat) -> None:
    smallest, largest = (-127, 128) if form.bits == 8 else (-8, 8)
    codes = torch.randint(smallest, largest, (BATCH, HEADS, 2 * BLOCK_TOKENS, form.stored_columns), dtype=torch.int8)
    packed = pack(codes, form)
    assert packed.shape == (BATCH, HEADS, 2, form.block_bytes)
    assert torch.equal(unpack(packed, form), codes)


@pytest.mark.slow
@pytest.mark.covering(2)
@pytest.mark.usefixtures("library")
@every_form
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(("at", "count"), [(0, 37), (5, 1), (14, 40), (16, 16)])
def test_libraries_store_the_codes_that_ops_store(
    form: TokenFormat, dtype: torch.dtype, at: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = random_tokens(form, count, dtype)
    compiled, by_ops = empty(form, 4), empty(form, 4)
    compiled.store(tokens, at)
    loaded = compiled.load(at, count, torch.float32)
    use_library(None, monkeypatch)
    by_ops.store(tokens, at)
    assert torch.equal(compiled.scale, by_ops.scale)
    assert torch.equal(compiled.codes, by_ops.codes)
    # A mean is added with one rounding or with two.
    torch.testing.assert_close(by_ops.load(at, count, torch.float32), loaded, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.usefixtures("library")
@every_form
def test_a_token_is_near_what_was_stored(form: TokenFormat) -> None:
    tokens, stored = random_tokens(form, 70), empty(form, 5)
    stored.store(tokens, 3)
    mean, magnitude = (0, 1) if stored.channels is None else stored.channels.split(1, 2)
    error = ((stored.load(3, 70, torch.float32) - tokens) / magnitude).abs()
    size = F.pad(((tokens - mean) / magnitude).abs(), (0, form.stored_columns - form.columns))
    groups = size.unflatten(-1, (form.groups, -1))
    largest = groups.amax(-1, keepdim=True).expand_as(groups).flatten(-2)[..., : form.columns]
    # Half a step of 127 or 7.5, and what a scale of 8 bits moves the longest number by: 7.5 / 256 of a step.
    assert (error <= largest * (0.5 / 127 * 1.01 if form.bits == 8 else 0.53 / 7.5) + 1e-6).all()


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.usefixtures("library")
@every_form
def test_storing_tokens_leaves_the_others_as_they_are(form: TokenFormat) -> None:
    stored = empty(form, 4)
    stored.store(random_tokens(form, 64), 0)
    before = stored.load(0, 64, torch.float32)
    stored.store(random_tokens(form, 9, seed=1), 21)
    after = stored.load(0, 64, torch.float32)
    assert torch.equal(after[:, :, :21], before[:, :, :21])
    assert torch.equal(after[:, :, 30:], before[:, :, 30:])
    assert not torch.equal(after[:, :, 21:30], before[:, :, 21:30])


@every_form
def test_cleared_tokens_leave_nothing_behind(form: TokenFormat) -> None:
    tokens = random_tokens(form, 60)
    stored, expected = (StoredTokens.empty(form, BATCH, HEADS, 4) for _ in range(2))
    stored.store(tokens, 0)
    stored.clear(21, 60)
    expected.store(tokens[:, :, :21], 0)
    assert torch.equal(stored.codes, expected.codes)
    assert torch.equal(stored.scale, expected.scale)


@pytest.mark.slow
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_token_that_is_not_finite_does_not_become_a_number(bits: int, value: float) -> None:
    form = TokenFormat(bits, False, 32)
    tokens, stored = random_tokens(form, 3), empty(form, 1)
    tokens[0, 0, 1, 5] = value
    stored.store(tokens, 0)
    loaded = stored.load(0, 3, torch.float32)
    assert not loaded[0, 0, 1].isfinite().all()
    assert loaded[0, 0, [0, 2]].isfinite().all()
    assert loaded[1].isfinite().all()


@pytest.mark.slow
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("bits", [8, 4])
def test_the_smallest_and_the_largest_tokens_are_stored(bits: int) -> None:
    form = TokenFormat(bits, True, 64)
    for power in (-126, -100, -20, 0, 20, 100, 120):
        stored = StoredTokens.empty(form, BATCH, HEADS, 1)
        tokens = random_tokens(form, 3) * 2.0**power
        stored.store(tokens, 0)
        error = (stored.load(0, 3, torch.float32).double() - tokens.double()).norm() / tokens.double().norm()
        assert error < (0.01 if bits == 8 else 0.15) or power == -126, power


def test_formats_say_how_many_bytes_a_token_takes() -> None:
    for bits, columns in itertools.product((8, 4), (64, 128)):
        form = TokenFormat(bits, True, columns)
        stored = StoredTokens.empty(form, 1, 1, 1)
        bits_per_number = 8 * (stored.codes.nbytes + stored.scale.nbytes) / (BLOCK_TOKENS * columns)
        assert bits_per_number == bits + (16 / columns if bits == 8 else 0.5)
