"""Products with codebook4 weights: every index, factor and sign by the compiled functions, and an op that behaves."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from weights import random_weight

from hf_trainweights.formats.arithmetic import FLOAT_DTYPES
from hf_trainweights.formats.codebook4 import GROUP_BITS, GROUP_SIZE, Codebook4
from hf_trainweights.formats.group_scales import pack_bits
from hf_trainweights.formats.packing import pack_int4
from hf_trainweights.kernels import linear
from hf_trainweights.testing.values import assert_close_product

FORM = Codebook4()


def every_code(dtype: torch.dtype, G: int) -> dict[str, torch.Tensor]:
    """Return a weight `[16, 32 * G]` with each index in every place of a group, and all 128 codes of groups."""
    N, K = 16, GROUP_SIZE * G
    indices = (torch.arange(N).unsqueeze(1) + torch.arange(K) * 7) % 16
    groups = (torch.arange(N * G).view(N, G) * 5) % (1 << GROUP_BITS)
    scale = random_weight(N, 1).abs().add_(0.5).to(dtype)
    packed = pack_bits(groups, GROUP_BITS)
    return {"qdata": pack_int4(indices.to(torch.int8) - 8), "scale": scale, "group_scale": packed}


@pytest.mark.slow
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("G", [1, 7, 8, 11])
def test_every_index_factor_and_sign_is_multiplied(G: int, dtype: torch.dtype) -> None:
    tensors, K = every_code(dtype, G), GROUP_SIZE * G
    weight = FORM.dequantize(tensors, (16, K), torch.float64)
    for rows in (1, 3, 17):
        x = random_weight(rows, K, dtype=dtype, seed=rows)
        result = linear(x, tensors, FORM)
        assert result is not None
        assert_close_product(result, F.linear(x, weight.to(dtype)), F.linear(x.double(), weight))
