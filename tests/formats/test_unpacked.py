"""A format takes a weight apart to numbers and scales whose product is what it dequantizes to, bit for bit."""

from __future__ import annotations

import pytest
import torch
from covering import exhaustive
from torch import Tensor
from weights import QUANTIZABLE, random_weight

from hf_trainweights.formats import get_format
from hf_trainweights.formats.unpacked import Unpacked

DTYPES = [torch.float32, torch.bfloat16, *exhaustive(torch.float16)]


def unpacked(name: str, weight: Tensor, *, as_bytes: bool = False) -> tuple[Unpacked, Tensor]:
    """Return a weight taken apart, and dequantized in float32."""
    form = get_format({"format": name})
    stored = form.quantize(weight)
    plain = dict(stored)
    if as_bytes and stored["qdata"].dtype != torch.int8:
        plain["qdata"] = stored["qdata"].view(torch.uint8)
    found = form.unpack(plain)
    assert found is not None
    return found, form.dequantize(stored, weight.shape, torch.float32)


@pytest.mark.slow
@pytest.mark.covering(2)
@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("shape", [(24, 256), (3, 8, 128)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", QUANTIZABLE)
def test_the_parts_make_the_weight(name: str, dtype: torch.dtype, shape: tuple[int, ...], as_bytes: bool) -> None:
    found, wanted = unpacked(name, random_weight(*shape).to(dtype), as_bytes=as_bytes)
    assert torch.equal(found.weight(), wanted)


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_numbers_zeros_and_scales_of_groups_are_what_a_product_of_blocks_needs(name: str) -> None:
    found, wanted = unpacked(name, random_weight(24, 256))
    numbers, scale = found.numbers(), found.group_scale
    groups = numbers.unflatten(-1, (scale.shape[-1], -1))
    zeros = torch.zeros(1, 1) if found.zeros is None else found.zeros
    torch.testing.assert_close(((groups - zeros.unsqueeze(-1)) * scale.unsqueeze(-1)).flatten(-2), wanted)
    if found.limits is not None:
        assert torch.equal(numbers, numbers.round())
        assert found.limits[0] <= numbers.min() <= numbers.max() <= found.limits[1]
