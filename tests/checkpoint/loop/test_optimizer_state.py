import torch
from checkpoint.loops import Net, everything, train
from torch import nn

from hf_trainweights.checkpoint.loop.optimizer_state import scaler_update_hook
from hf_trainweights.checkpoint.loop.training_state import (
    build_checkpoint,
    load_checkpoint,
    restore_checkpoint,
    save_checkpoint,
)
from hf_trainweights.checkpoint.planning.roles import optimizer_parameter_names


class Float32Moments(torch.optim.Optimizer):
    """Keeps float32 moments for bfloat16 weights, and leaves loading to torch."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            moment = state.setdefault("moment", torch.zeros_like(parameter, dtype=torch.float32))
            moment.mul_(0.9).add_(parameter.grad.float())
            parameter.data.sub_(1e-3 * moment)


def test_float32_moments_of_bfloat16_weights_are_not_rounded(tmp_path):
    def build():
        model = nn.Linear(70, 70).bfloat16()
        return model, Float32Moments(model.parameters())

    model, optimizer = build()
    for _ in range(3):
        model(torch.randn(4, 70).bfloat16()).sum().backward()
        optimizer.step()
    save_checkpoint(build_checkpoint(model, optimizer), tmp_path / "a")
    other, restored = build()
    restore_checkpoint(load_checkpoint(tmp_path / "a"), other, restored)
    assert restored.state[other.weight]["moment"].dtype == torch.float32
    assert torch.equal(restored.state[other.weight]["moment"], optimizer.state[model.weight]["moment"])


def test_a_model_of_another_dtype_gets_moments_of_its_own(tmp_path):
    model, optimizer, *_ = source = everything()
    train(*source, 1)
    save_checkpoint(build_checkpoint(model, optimizer), tmp_path / "a")
    half, restored, *_ = everything(dtype=torch.bfloat16)
    restore_checkpoint(load_checkpoint(tmp_path / "a"), half, restored)
    assert restored.state[half.conv.weight]["exp_avg"].dtype == torch.bfloat16


def test_parameter_names_follow_the_optimizers_own_indices():
    model = Net()
    groups = [{"params": [model.unused, model.conv.bias]}, {"params": [model.embed.weight, torch.ones(2)]}]
    assert optimizer_parameter_names(model, torch.optim.SGD(groups)) == {0: "unused", 1: "conv.bias", 2: "embed.weight"}
    assert optimizer_parameter_names(model, None) == {}


def test_a_scaler_tells_of_updates_only_within_the_block():
    calls = []
    model, optimizer, _, scaler = everything(enabled=True)
    with scaler_update_hook(scaler, lambda: calls.append(scaler.get_scale())):
        for _ in range(2):
            scaler.scale(torch.tensor(torch.inf) * model.unused.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert calls == [4.0, 2.0]  # both steps were skipped
    assert optimizer.state_dict()["state"] == {}
    scaler.scale(model.unused.sum()).backward()
    optimizer.zero_grad()
    scaler.scale(model.unused.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert len(calls) == 2
