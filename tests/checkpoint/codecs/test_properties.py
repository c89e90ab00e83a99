"""The contract, on whatever hypothesis can think of: dtypes, shapes, strides and bit patterns."""

import json

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from checkpoint.codecs.cases import error
from hypothesis import given, settings

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.codecs.base import ALL_DTYPES, LOSSY_DTYPES
from hf_trainweights.checkpoint.codecs.delta_uniform import DeltaUniform
from hf_trainweights.checkpoint.codecs.moments import LogRank1, UpdateSpace
from hf_trainweights.testing.codecs import bits_equal

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
quickly = settings(max_examples=100, deadline=None, derandomize=True, database=None)

LOSSLESS = [codec() for codec in CODECS.values() if codec.lossless]
# What arithmetic gets wrong, in every dtype: signs of zero, denormals, the ends of the range, what is not a number.
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-42, 1e-38, 2.0**-126, 3e38, -3e38, np.inf, -np.inf, np.nan, 65504.0, 6e-8]


@st.composite
def tensors(draw, dtypes, finite_floats=False):
    """Draws any tensor: shape, strides, and either any bits or floats in which special values are common."""
    dtype = draw(st.sampled_from(sorted(dtypes, key=str)))
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    count = torch.Size(shape).numel()
    if finite_floats:
        scale = draw(st.sampled_from([1.0, 1e-3, 1e-9, 1e-20, 1e-36, 1e30]))
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        values = rng.standard_normal(count) * scale
        chosen = rng.random(count) < draw(st.sampled_from([0, 0.1, 1]))
        values[chosen] = rng.choice(SPECIAL, chosen.sum())
        flat = torch.from_numpy(values).to(torch.float32).to(dtype)
    else:
        raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
        flat = torch.tensor(list(raw), dtype=torch.uint8)
        flat = (flat & 1 if dtype == torch.bool else flat).view(dtype)
    tensor = flat.view(shape)
    if tensor.dim() >= 2 and draw(st.booleans()):
        order = draw(st.permutations(range(tensor.dim())))
        back = [order.index(dim) for dim in range(tensor.dim())]
        tensor = tensor.permute(order).contiguous().permute(back)
    return tensor


def normal(rng, shape):
    return torch.from_numpy(rng.standard_normal(shape.numel())).view(shape)


def chance(rng, shape, share):
    return torch.from_numpy(rng.random(shape.numel()) < share).view(shape)


def like(tensor, seed, sizes):
    """Returns a tensor of the same shape and dtype that differs from `tensor` by little, much or nothing."""
    rng = np.random.default_rng(seed)
    other = tensor.to(torch.float64) + normal(rng, tensor.shape) * rng.choice(sizes)
    return torch.where(chance(rng, tensor.shape, 0.2), tensor.to(torch.float64), other).to(tensor.dtype)


def roundtrip(codec, tensor, references):
    encoded = codec.encode(tensor, references)
    params = json.loads(json.dumps(encoded.params))
    decoded = codec.decode(encoded.payloads, params, list(tensor.shape), tensor.dtype, references)
    assert (decoded.shape, decoded.dtype) == (tensor.shape, tensor.dtype)
    return encoded, decoded


@pytest.mark.exhaustive  # tests of the contract try chosen tensors
@quickly
@given(
    tensor=tensors(ALL_DTYPES) | tensors(LOSSY_DTYPES, finite_floats=True), anchor_seed=st.none() | st.integers(0, 3)
)
def test_lossless_codecs_keep_every_bit(tensor, anchor_seed):
    references = {}
    if anchor_seed is not None and tensor.numel():
        raw = tensor.contiguous().view(-1).view(torch.uint8).clone()
        raw[anchor_seed::7] ^= 1
        references["anchor"] = raw.view(tensor.dtype).view(tensor.shape)
    for codec in (each for each in LOSSLESS if tensor.dtype in each.dtypes):
        _, decoded = roundtrip(codec, tensor, references)
        assert bits_equal(decoded, tensor)


@pytest.mark.exhaustive  # tests of the contract try chosen tensors
@quickly
@given(
    tensor=tensors(LOSSY_DTYPES, finite_floats=True),
    seed=st.none() | st.integers(0, 99),
    step=st.sampled_from([1e-30, 1e-9, 1e-4, 0.3, 1e6]),
    bounded=st.booleans(),
)
def test_delta_uniform_is_within_its_bound(tensor, seed, step, bounded):
    references = {} if seed is None else {"anchor": like(tensor, seed, [1e-9, 1e-4, 0.1])}
    codec = DeltaUniform.within(step) if bounded else DeltaUniform(step)
    encoded, decoded = roundtrip(codec, tensor, references)
    assert error(codec, tensor, decoded, references) <= encoded.bound <= step
    assert torch.equal(decoded.isnan(), tensor.isnan())
    unchanged = tensor == references["anchor"] if references else tensor == 0
    assert torch.equal(decoded[unchanged], tensor[unchanged])


@pytest.mark.exhaustive  # tests of the contract try chosen tensors
@quickly
@given(
    tensor=tensors(LOSSY_DTYPES, finite_floats=True),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1e-12, 1e-3, 10.0]),
    step=st.sampled_from([0.25, 0.5, 0.1]),
)
def test_update_space_is_within_its_bound(tensor, seed, scale, step):
    rng = np.random.default_rng(seed)
    squares = (normal(rng, tensor.shape) * scale).square().to(torch.float32)
    chosen = chance(rng, tensor.shape, 0.2)
    squares[chosen] = torch.from_numpy(rng.choice(SPECIAL, chosen.sum().item())).to(torch.float32)
    codec, references = UpdateSpace(step), {"exp_avg_sq": squares.to(tensor.dtype)}
    encoded, decoded = roundtrip(codec, tensor, references)
    usable = references["exp_avg_sq"] > 0
    usable_references = {"exp_avg_sq": references["exp_avg_sq"][usable]}
    assert error(codec, tensor[usable], decoded[usable], usable_references) <= encoded.bound <= 0.75 * step * 1.001
    assert torch.allclose(decoded[~usable], tensor[~usable], rtol=0, atol=0, equal_nan=True)


@pytest.mark.exhaustive  # tests of the contract try chosen tensors
@quickly
@given(tensor=tensors(LOSSY_DTYPES, finite_floats=True), positive=st.booleans(), step=st.integers(1, 3))
def test_log_rank1_is_within_its_bound_and_keeps_zeros_and_nothing_but_zeros(tensor, positive, step):
    squares = tensor.abs() if positive else tensor
    codec = LogRank1(step)
    encoded, decoded = roundtrip(codec, squares, {})
    assert torch.equal(decoded == 0, squares == 0)
    assert torch.equal(decoded.isfinite(), squares.isfinite())
    assert error(codec, squares, decoded, {}) <= encoded.bound <= step / 2 + 0.02
    strange = ~(squares > 0) | ~squares.isfinite()
    assert torch.allclose(decoded[strange], squares[strange], rtol=0, atol=0, equal_nan=True)
