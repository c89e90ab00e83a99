import pytest
import torch

from hf_trainweights.checkpoint.directory.drift import expected_drift_rms

SHAPE = (96, 64)


def adam(lr, *, steps=50, seed=1):
    moment = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    state = {"step": torch.tensor(float(steps)), "exp_avg": 0.1 * moment, "exp_avg_sq": moment.square()}
    return {"state": {0: state}, "param_groups": [{"lr": lr, "betas": (0.9, 0.999), "params": [0]}]}


def test_drift_is_what_adam_would_move_in_independent_steps():
    drift = expected_drift_rms(adam(lr=1e-3, steps=64), {0: "w"})
    # The example's update is 0.1 everywhere, but for the correction of the moments' slow start.
    correction = (1 - 0.999**64) ** 0.5 / (1 - 0.9**64)
    assert drift == {"w": pytest.approx(1e-3 * 0.1 * correction * 8, rel=1e-3)}


@pytest.mark.parametrize(
    ("steps", "interval_steps", "counted"),
    [(64, None, 64), (64, 16, 16), (16, 64, 16), (400, None, 100), (400, 300, 100)],
)
def test_no_more_steps_count_than_lie_between_two_saves(steps, interval_steps, counted):
    one_step = expected_drift_rms(adam(lr=1e-3, steps=steps), {0: "w"}, 1)["w"]
    drift = expected_drift_rms(adam(lr=1e-3, steps=steps), {0: "w"}, interval_steps)
    assert drift == {"w": pytest.approx(one_step * counted**0.5)}


@pytest.mark.parametrize(
    "optimizer",
    [
        {},
        {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    ],
)
def test_without_adams_moments_there_is_no_drift_to_expect(optimizer):
    assert expected_drift_rms(optimizer, {0: "w"}) == {}


def test_moments_that_are_all_zero_mean_no_drift():
    optimizer = adam(lr=1e-2)
    optimizer["state"][0]["exp_avg"].zero_()
    optimizer["state"][0]["exp_avg_sq"].zero_()
    assert expected_drift_rms(optimizer, {0: "w"}) == {"w": 0.0}
