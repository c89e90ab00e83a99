import pytest
import torch

from hf_trainweights.checkpoint.run.drift import expected_drift_rms, second_moments

SHAPE = (96, 64)


def adam(lr, *, steps=50, seed=1):
    moment = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    state = {"step": torch.tensor(float(steps)), "exp_avg": 0.1 * moment, "exp_avg_sq": moment.square()}
    return {"state": {0: state}, "param_groups": [{"lr": lr, "betas": (0.9, 0.999), "params": [0]}]}


def test_drift_is_how_far_adam_moves_weights_whose_gradients_are_independent():
    torch.manual_seed(0)
    weight = torch.zeros(SHAPE, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=1e-3)
    for _ in range(80):
        weight.grad = torch.randn(SHAPE)
        optimizer.step()
        if optimizer.state[weight]["step"] == 40:
            before = weight.detach().clone()
    drift = expected_drift_rms(optimizer.state_dict(), {0: "w"}, 40)
    assert drift == {"w": pytest.approx((weight - before).square().mean().sqrt().item(), rel=0.15)}


@pytest.mark.parametrize(
    ("steps", "interval_steps", "counted"),
    [(64, None, 64), (64, 16, 16), (16, 64, 16), (400, None, 100), (400, 300, 100)],
)
def test_no_more_steps_count_than_lie_between_two_saves(steps, interval_steps, counted):
    def drift(interval):
        return expected_drift_rms(adam(lr=1e-3, steps=steps), {0: "w"}, interval)["w"]

    assert drift(interval_steps) == pytest.approx(drift(counted))
    assert drift(counted) > drift(counted - 8)


def test_second_moments_are_found_by_name_and_only_those_of_adam():
    optimizer = adam(lr=1e-3)
    optimizer["state"] |= {1: {"momentum_buffer": torch.ones(2)}, 2: optimizer["state"][0]}
    assert list(second_moments(optimizer, {0: "w", 1: "v"})) == ["w"]
    assert second_moments({}, {}) == {}


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
