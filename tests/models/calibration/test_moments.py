"""Second moments: their factor, and the weight that makes up for changed inputs."""

from __future__ import annotations

import pytest
import torch
from helpers import default_dtype
from torch import Tensor

from hf_trainweights.models.calibration.feedback import Moments

K = 32


def some(tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, K, generator=generator) * torch.linspace(0.1, 2, K)


def moments_of(own: Tensor, reference: Tensor) -> Moments:
    moments = Moments(K, torch.device("cpu"))
    for one, other in zip(own.split(100), reference.split(100), strict=True):
        moments.add(one, other)
    return moments


@pytest.mark.parametrize("tokens", [16, 400, 10_000])
def test_the_factor_is_that_of_the_inverse_of_the_damped_moments(tokens: int) -> None:
    own = some(tokens)
    moments = moments_of(own, own)
    factor = moments.factor()
    assert torch.equal(factor, factor.triu())
    damped = torch.linalg.inv(factor.double().t() @ factor.double())
    expected = (own.double().t() @ own.double()) / tokens
    damping = min(0.1, max(0.01, 0.1 * K / tokens)) * expected.diagonal().mean()
    torch.testing.assert_close(damped, expected + damping * torch.eye(K), rtol=1e-4, atol=1e-4)
    assert moments.tokens == tokens


def test_inputs_of_zeros_have_a_factor() -> None:
    zeros = torch.zeros(50, K)
    assert moments_of(zeros, zeros).factor().isfinite().all()
    nothing = moments_of(zeros[:0], zeros[:0])
    assert nothing.factor().isfinite().all()


def test_the_default_dtype_changes_nothing() -> None:
    own, reference = some(100), some(100, seed=1)
    expected = moments_of(own, reference)
    with default_dtype(torch.bfloat16):
        moments = moments_of(own, reference)
        factor = moments.factor()
    assert torch.equal(factor, expected.factor())
    assert torch.equal(moments.corrected(own, factor), expected.corrected(own, factor))


def test_a_weight_follows_half_of_the_way_to_inputs_that_have_changed() -> None:
    reference, weight = (
        some(20_000) / torch.linspace(0.1, 2, K),
        torch.randn(8, K, generator=torch.Generator().manual_seed(3)),
    )
    own = 1.25 * reference
    moments = moments_of(own, reference)
    corrected = moments.corrected(weight, moments.factor())
    # All of the way would be 1 / 1.25 = .8 of the weight, but for the damping.
    torch.testing.assert_close(corrected, 0.9 * weight, rtol=0.02, atol=0.02)


def test_a_weight_stays_as_it_is_for_inputs_that_have_not_changed() -> None:
    own, weight = some(500), torch.randn(8, K, generator=torch.Generator().manual_seed(3))
    moments = moments_of(own, own)
    torch.testing.assert_close(moments.corrected(weight, moments.factor()), weight)


def test_blended_moments_count_as_so_many_tokens() -> None:
    own, other = some(100), some(100, seed=1)
    blended, both = moments_of(own, own), moments_of(torch.cat((own, other)), torch.cat((own, other)))
    blended.blend(moments_of(other, other).mean, 100)
    torch.testing.assert_close(blended.mean, both.mean)
