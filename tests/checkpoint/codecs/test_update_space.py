import pytest
import torch

from hf_trainweights.checkpoint.codecs.moments import UpdateSpace
from hf_trainweights.errors import ConfigError
from hf_trainweights.testing.codecs import bits_equal, decode


def moments(*shape, seed=0):
    """Returns Adam's two moments of normal gradients with rows of very different size."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(shape[0], 1, generator=generator).mul_(3).exp_().mul_(1e-6)
    exp_avg, exp_avg_sq = torch.zeros(shape), torch.zeros(shape)
    for _ in range(60):
        gradient = torch.randn(shape, generator=generator) * sizes
        exp_avg.mul_(0.9).add_(gradient, alpha=0.1)
        exp_avg_sq.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
    return exp_avg, exp_avg_sq


@pytest.mark.slow
@pytest.mark.parametrize(("step", "most_bits"), [(0.25, 2.1), (0.5, 1.35)])
def test_moments_take_one_or_two_bits(step, most_bits):
    exp_avg, exp_avg_sq = moments(300, 900)
    encoded = UpdateSpace(step).encode(exp_avg, {"exp_avg_sq": exp_avg_sq})
    assert 8 * encoded.payload_bytes / exp_avg.numel() < most_bits
    assert encoded.bound == pytest.approx(step / 2, rel=1e-3)


def test_where_the_second_moment_is_zero_the_first_is_exact():
    exp_avg, exp_avg_sq = moments(30, 40)
    exp_avg_sq[::2] = 0
    exp_avg[::4] = 0
    exp_avg[2, :4] = torch.tensor([1e-45, -1e-40, 1e-30, 3.0])
    references = {"exp_avg_sq": exp_avg_sq}
    decoded = decode(UpdateSpace(), UpdateSpace().encode(exp_avg, references), exp_avg, references)
    assert torch.equal(decoded[::2], exp_avg[::2])


def test_strange_moments_are_exact():
    exp_avg, exp_avg_sq = moments(30, 40)
    exp_avg[0, :5] = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38])
    exp_avg_sq[1, :4] = torch.tensor([torch.nan, torch.inf, -1.0, 1e-45])
    references = {"exp_avg_sq": exp_avg_sq}
    decoded = decode(UpdateSpace(), UpdateSpace().encode(exp_avg, references), exp_avg, references)
    assert bits_equal(decoded[0, :5], exp_avg[0, :5])
    assert bits_equal(decoded[1, :3], exp_avg[1, :3])


def test_square_root_is_correctly_rounded():
    from hf_trainweights.checkpoint.codecs.moments import _unit

    squares = torch.rand(2**16, generator=torch.Generator().manual_seed(0)) * 1e-9
    assert torch.equal(torch.from_numpy(_unit(squares.numpy(), 1.0)), squares.double().sqrt().float())


def test_second_moment_is_needed():
    with pytest.raises(ConfigError, match="codec update-space, references: expected exp_avg_sq, found nothing"):
        UpdateSpace().encode(torch.ones(3))


@pytest.mark.parametrize("step", [0.0, -0.25, 1e-4, 2000.0, float("nan")])
def test_steps_that_cannot_be_used_are_errors(step):
    with pytest.raises(ConfigError, match="update-space, step: expected a number from"):
        UpdateSpace(step)
