"""The Triton kernels of attention on CPU tensors, by Triton's interpreter, as `interpreted_products` has products.

The interpreter cuts off what it stores as bfloat16, so queries are of other dtypes here.
"""

from __future__ import annotations

import math

import pytest
import torch
from covering import exhaustive
from forbidden_page import before_a_forbidden_page
from stored_tokens import MASKS, SIZES, Sizes, attention_mask, expected, operands
from torch import Tensor

from hf_trainweights.kernels import cuda, cuda_attention
from hf_trainweights.kernels.tokens import StoredTokens, TokenFormat

LIMITS = {torch.float32: 5e-6, torch.float16: 5e-4}
# One section of one token, and more columns than a block of tokens.
MORE_SIZES = [Sizes(1, 1, 1, 1, 32, 32, 1), Sizes(1, 2, 8, 2, 256, 160, 90, 50), Sizes(1, 1, 1, 1, 512, 64, 40)]


@pytest.fixture(autouse=True)
def a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU be a GPU whose kernels are right."""
    monkeypatch.setattr(cuda, "has_triton", lambda index: True)
    monkeypatch.setattr(cuda, "is_right", lambda case: True)


def attend(query: Tensor, keys: StoredTokens, values: StoredTokens, tokens: slice, mask: Tensor | None) -> Tensor:
    out = cuda_attention.attend(query, keys, values, tokens, 0.2, mask)
    assert out is not None
    return out


@pytest.mark.covering(1)
@pytest.mark.parametrize("sizes", [*SIZES, *exhaustive(*((sizes,) for sizes in MORE_SIZES))], ids=str)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 8), (4, 4)], ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_attention_is_that_to_dequantized_tokens(
    sizes: Sizes, dtype: torch.dtype, bits: tuple[int, int], kind: str
) -> None:
    query, keys, values = operands(sizes, dtype, bits)
    mask, tokens = attention_mask(kind, sizes, dtype), slice(sizes.first, sizes.tokens)
    out, reference = attend(query, keys, values, tokens, mask), expected(query, keys, values, tokens, mask)
    assert out.dtype == dtype
    assert (out.float() - reference).norm() <= LIMITS[dtype] * reference.norm()


@pytest.mark.parametrize("programs", [1, 4, 64])
def test_sections_of_the_tokens_give_the_same(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_attention, "_PROGRAMS", programs)
    query, keys, values = operands(Sizes(1, 2, 3, 2, 128, 128, 700), torch.float32)
    # The second row attends to nothing in the first sections.
    mask = torch.ones(2, 695, dtype=torch.bool)
    mask[1, :500] = False
    tokens = slice(5, 700)
    reference = expected(query, keys, values, tokens, mask)
    torch.testing.assert_close(attend(query, keys, values, tokens, mask), reference, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rows_are_on_their_own() -> None:
    query, keys, values = operands(Sizes(1, 2, 2, 3, 64, 64, 40), torch.float32)
    mask = torch.ones(1, 1, 3, 40, dtype=torch.bool)
    mask[:, :, 1] = False
    reference = expected(query, keys, values, slice(0, 40), None)
    query[0, 1, 2, 3], query[0, 2, 0, 5] = math.nan, math.inf
    out = attend(query, keys, values, slice(0, 40), mask)
    assert not out[:, :, 1].any()
    for head, row in ((1, 2), (2, 0)):
        assert out[0, head, row].isnan().all()
        out[0, head, row] = reference[0, head, row]
    torch.testing.assert_close(out[:, :, [0, 2]], reference[:, :, [0, 2]], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("bits", [8, 4])
def test_a_token_that_is_not_finite_is_lost_to_those_alone_that_do_not_attend_to_it(bits: int) -> None:
    query, keys, values = operands(Sizes(1, 1, 2, 1, 64, 64, 40), torch.float32, (bits, bits))
    reference = expected(query, keys, values, slice(9, 40), None)
    for stored in (keys, values):
        broken = torch.randn(1, 1, 1, 64)
        broken[..., 0] = math.nan
        stored.store(broken, 7)
    assert attend(query, keys, values, slice(0, 40), None).isnan().any()
    # Others of the same block attend as before.
    torch.testing.assert_close(attend(query, keys, values, slice(9, 40), None), reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("power", [-110, -30, 30, 100])
@pytest.mark.parametrize("bits", [8, 4])
def test_tokens_of_any_size_are_read(bits: int, power: int) -> None:
    query, keys, values = operands(Sizes(1, 1, 2, 1, 64, 64, 40), torch.float32, (bits, bits))
    large = torch.randn(1, 1, 40, 64) * 2.0**power
    large[:, :, :20] *= 2.0**-9
    for stored, size in ((keys, 1 / 64), (values, 1.0)):
        stored.channels = None
        stored.store(large * size, 0)
    query *= 2.0**-power
    out, reference = (way(query, keys, values, slice(0, 40), None).double() for way in (attend, expected))
    assert (out - reference).norm() <= 1e-5 * reference.norm()


@pytest.mark.covering(1)
@pytest.mark.parametrize("sizes", [Sizes(1, 2, 3, 1, 64, 64, 35, 20), Sizes(2, 1, 1, 2, 40, 96, 16)], ids=str)
@pytest.mark.parametrize("bits", [(8, 8), (4, 4)], ids=str)
def test_nothing_is_read_past_the_end(sizes: Sizes, bits: tuple[int, int]) -> None:
    query, keys, values = operands(sizes, torch.float32, bits)
    mask, tokens = attention_mask("bool", sizes, torch.float32), slice(sizes.first, sizes.tokens)
    assert mask is not None
    before = attend(query, keys, values, tokens, mask)
    for stored in (keys, values):
        blocks = -(-sizes.tokens // 16)
        stored.codes, stored.scale = (
            before_a_forbidden_page(x[:, :, :blocks].contiguous()) for x in (stored.codes, stored.scale)
        )
        stored.channels = None if stored.channels is None else before_a_forbidden_page(stored.channels)
    query, mask = before_a_forbidden_page(query), before_a_forbidden_page(mask)
    assert torch.equal(attend(query, keys, values, tokens, mask), before)


@pytest.mark.covering(1)
@pytest.mark.parametrize("columns", [(64, 64), *exhaustive(((40, 96),), ((512, 128),))], ids=str)
@pytest.mark.parametrize("mask", [None, torch.bool, torch.float16], ids=str)
def test_the_check_before_the_first_use_passes(columns: tuple[int, int], mask: torch.dtype | None) -> None:
    keys, values = TokenFormat(8, True, columns[0]), TokenFormat(4, False, columns[1])
    for dtype in (torch.float32, torch.float16):
        assert cuda._check(cuda_attention.Case(keys, values, 16, dtype, mask, True, torch.device("cpu")))
