import math

import numpy as np
import pytest
import torch
from checkpoint.codecs.cases import error

from hf_trainweights.checkpoint.codecs import delta_uniform
from hf_trainweights.checkpoint.codecs.delta_uniform import DeltaUniform, rms_difference
from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.testing.codecs import bits_equal, decode


def normal(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(scale)


def example(steps_per_rms, shape=(700, 700)):
    anchor = normal(*shape, scale=0.02)
    weight = anchor + normal(*shape, seed=1, scale=1e-4)
    codec = DeltaUniform(rms_difference(weight, anchor) / steps_per_rms)
    encoded = codec.encode(weight, {"anchor": anchor})
    return weight, anchor, codec, encoded, decode(codec, encoded, weight, {"anchor": anchor})


@pytest.mark.parametrize(("steps_per_rms", "most_bits"), [(8, 5.15), (4, 4.15), (2, 3.15), (1, 2.2)])
def test_a_normal_difference_takes_two_bits_and_one_more_for_each_halving_of_the_step(steps_per_rms, most_bits):
    weight, _, _, encoded, _ = example(steps_per_rms)
    assert 8 * encoded.payload_bytes / weight.numel() < most_bits


@pytest.mark.parametrize("steps_per_rms", [4, 1, 0.2])
def test_errors_have_no_mean_and_do_not_depend_on_the_change(steps_per_rms):
    weight, anchor, codec, _, decoded = example(steps_per_rms)
    errors, change = (decoded - weight).double() / codec.step, (weight - anchor).double() / codec.step
    # Uniform in +-1/2: the standard error of the mean of 490,000 is 4e-4.
    assert abs(errors.mean()) < 2e-3
    assert errors.square().mean() == pytest.approx(1 / 12, rel=0.02)
    assert abs((errors * change).mean() / change.square().mean().sqrt()) < 2e-3
    assert errors.abs().max() < 0.502


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_small_steps_after_a_resume_are_not_undone_by_the_next_save(dtype):
    anchor = torch.zeros(500, 500)
    codec = DeltaUniform(2.0**-4)
    weight = normal(500, 500)
    for _ in range(5):
        encoded = codec.encode(weight.to(dtype), {"anchor": anchor.to(dtype)})
        resumed = decode(codec, encoded, weight.to(dtype), {"anchor": anchor.to(dtype)}).float()
        weight = resumed + codec.step / 4
    # With the dither of the save before, every one of these would round back.
    moved = (resumed - normal(500, 500)).mean().item() / codec.step
    assert moved == pytest.approx(4 / 4, rel=0.05)


def test_equal_tensors_have_equal_dither_and_others_another():
    weight = normal(64, 64)
    changed = weight.clone()
    changed[-1, -1] = torch.nextafter(changed[-1, -1], torch.tensor(torch.inf))
    shifts = [DeltaUniform(0.1).encode(each).params["shift"] for each in (weight, weight.clone(), changed)]
    assert shifts[0] == shifts[1] != shifts[2]


@pytest.mark.parametrize("shift", [-1, 4093])
def test_a_shift_outside_the_table_is_an_error(shift):
    weight = normal(64, 64)
    encoded = DeltaUniform(0.1).encode(weight)
    with pytest.raises(CorruptFileError, match=r"parameter shift: expected 0 to 4092, found"):
        DeltaUniform.decode(encoded.payloads, {**encoded.params, "shift": shift}, weight.shape, weight.dtype, {})


def test_unchanged_elements_are_exact_and_free():
    weight, anchor, codec, _, _ = example(1)
    weight[torch.arange(700) % 10 != 0] = anchor[torch.arange(700) % 10 != 0]
    encoded = codec.encode(weight, {"anchor": anchor})
    decoded = decode(codec, encoded, weight, {"anchor": anchor})
    assert torch.equal(decoded[weight == anchor], anchor[weight == anchor])
    assert (decoded == anchor).float().mean() < 0.91
    assert 8 * encoded.payload_bytes / weight.numel() < 0.26


def test_what_is_not_finite_or_too_far_away_is_stored_exactly():
    anchor = normal(40, 50)
    weight = anchor + normal(40, 50, seed=1, scale=1e-5)
    weight[3, :6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -3e38, 5.0])
    anchor[4, :3] = torch.tensor([torch.nan, torch.inf, -1e38])
    encoded = DeltaUniform(1e-5).encode(weight, {"anchor": anchor})
    decoded = decode(DeltaUniform(1e-5), encoded, weight, {"anchor": anchor})
    assert bits_equal(decoded[3, :6], weight[3, :6])
    assert bits_equal(decoded[4, :3], weight[4, :3])
    assert encoded.bound <= 0.51e-5


@pytest.mark.parametrize("bound", [1e-2, 1e-5, 1e-8, 1e-12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_stated_bound_holds_with_and_without_anchor(bound, dtype):
    weight = normal(100, 100, scale=0.02).to(dtype)
    for references in ({}, {"anchor": (weight.float() + normal(100, 100, seed=1, scale=1e-4)).to(dtype)}):
        codec = DeltaUniform.within(bound)
        encoded = codec.encode(weight, references)
        decoded = decode(codec, encoded, weight, references)
        assert error(codec, weight, decoded, references) <= encoded.bound <= bound


def test_a_stated_bound_without_anchor_costs_what_it_must():
    weight = normal(512, 512, scale=0.02)
    encoded = DeltaUniform.within(1e-4).encode(weight)
    expected_bits = math.log2(0.02 * math.sqrt(2 * math.pi * math.e) / 2e-4)
    assert 8 * encoded.payload_bytes / weight.numel() < expected_bits + 0.2


def test_step_is_rounded_to_float32_before_it_is_used_and_kept():
    encoded = DeltaUniform(0.1).encode(normal(5))
    assert encoded.params["step"] == float(torch.tensor(0.1))


def test_dither_takes_each_of_4093_values_once_and_is_the_documented_one():
    table = torch.from_numpy(delta_uniform._dither_table())
    period = table[:4093]
    assert torch.equal(table[4093 : 2 * 4093], period)
    assert torch.equal(period.sort().values, torch.arange(-2046, 2047) / 4096)
    for k in (1, 2, 4092):
        assert (round(period[k].item() * 4096 + 2046) * k) % 4093 == 1
    assert abs(torch.corrcoef(torch.stack([period[:-1], period[1:]]))[0, 1]) < 0.05


def test_rms_of_the_difference():
    weight, anchor = normal(500, 700).to(torch.bfloat16), normal(500, 700, seed=1).to(torch.bfloat16)
    expected = (weight.double() - anchor.double()).square().mean().sqrt().item()
    assert rms_difference(weight, anchor) == pytest.approx(expected, rel=1e-6)
    assert rms_difference(weight) == pytest.approx(weight.double().square().mean().sqrt().item(), rel=1e-6)
    assert rms_difference(weight, weight) == 0.0
    assert rms_difference(torch.empty(0, 3)) == 0.0
    assert math.isnan(rms_difference(torch.tensor([torch.nan, 1.0])))
    assert rms_difference(torch.full([4], 1e-30)) == pytest.approx(1e-30)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e-40, 1e40])
def test_steps_that_cannot_be_used_are_errors(value):
    with pytest.raises(ConfigError, match="delta-uniform, step: expected a number from"):
        DeltaUniform(value)
    with pytest.raises(ConfigError, match="delta-uniform, limit: expected a number from"):
        DeltaUniform(1.0, limit=value)
    with pytest.raises(ConfigError, match="delta-uniform, bound: expected a number from"):
        DeltaUniform.within(value)


def test_zeros_keep_the_sign_that_files_have_always_decoded_to():
    from hf_trainweights.checkpoint.codecs import delta_uniform

    anchor = torch.full([1, 4093], -0.0)
    encoded = DeltaUniform(0.1).encode(anchor.clone(), {"anchor": anchor})
    decoded = decode(DeltaUniform(0.1), encoded, anchor, {"anchor": anchor})
    shift = encoded.params["shift"]
    assert isinstance(shift, int)
    dither = delta_uniform._dither_table()[shift : shift + 4093]
    assert torch.equal(decoded.signbit().view(-1), torch.from_numpy(dither >= 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_never_had_a_gradient_stays_at_a_rounded_anchor(dtype):
    torch.manual_seed(0)
    step, start = 2**-10, torch.randn(80, 64)
    first = DeltaUniform(step).encode(start)
    anchor = DeltaUniform.decode(first.payloads, first.params, start.shape, start.dtype)
    moment = torch.rand(80, 64).add(0.1).to(dtype)
    moment[:60] = 0
    weight = torch.where(moment == 0, start, start + 1e-3 * torch.randn(80, 64))
    plain, hinted = (
        DeltaUniform(step).encode(weight, {"anchor": anchor, **hint}) for hint in ({}, {"exp_avg_sq": moment})
    )
    decoded = DeltaUniform.decode(hinted.payloads, hinted.params, weight.shape, weight.dtype, {"anchor": anchor})
    assert torch.equal(decoded[:60], anchor[:60])
    assert (decoded - weight).abs().max() <= hinted.bound <= 0.5001 * step
    assert hinted.payload_bytes < 0.6 * plain.payload_bytes


def test_what_moved_without_a_gradient_by_more_than_half_a_step_is_no_anchor():
    anchor, moment = torch.ones(80, 64), torch.zeros(80, 64)
    weight = anchor * (1 - 2**-8)  # weight decay
    encoded = DeltaUniform(2**-9).encode(weight, {"anchor": anchor, "exp_avg_sq": moment})
    assert encoded.bound <= 0.5001 * 2**-9


def test_dither_goes_on_beyond_32_bits_where_numpy_counts_in_them(monkeypatch):
    arange = np.arange
    monkeypatch.setattr(np, "arange", lambda *args, dtype=np.int32: arange(*args, dtype=dtype))
    starts = delta_uniform._dither_starts(slice(2**20, 2**20 + 2), slice(5, 9), 2**14, 3)
    assert starts.tolist() == [(row * 2**14 + 8) % 4093 for row in (2**20, 2**20 + 1)]
