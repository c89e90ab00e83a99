"""An optimizer.pt may hold anything under the names that torch's optimizers use, and its states tell buffers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.loops import Net
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from trees import ADAM_SETTINGS, fingerprint

from hf_trainweights.checkpoint.directory import compress_directory
from hf_trainweights.checkpoint.planning.roles import (
    StateName,
    find_buffers,
    is_optimizer_state,
    models,
    optimizer_parameter_names,
    optimizer_states,
    recorded_names,
)

MOMENT = torch.linspace(-1.0, 1.0, 6400).view(80, 80)
ADAM = {"step": torch.tensor(3.0), "exp_avg": MOMENT, "exp_avg_sq": MOMENT.square()}
GROUP: dict[str, Any] = {"params": [0], "lr": 1e-3, "betas": (0.9, 0.99), **ADAM_SETTINGS, "param_names": ["w"]}

OTHERS: dict[str, dict[str, Any]] = {
    "groups are no list": {"param_groups": {"a": 1}},
    "a group is a number": {"param_groups": [1]},
    "a group has no parameters": {"param_groups": [{"lr": 1}]},
    "the parameters are no list": {"param_groups": [{**GROUP, "params": 3}]},
    "a parameter is a list": {"param_groups": [{**GROUP, "params": [[1]]}]},
    "the names are a number": {"param_groups": [{**GROUP, "param_names": 5}]},
    "a name is a list": {"param_groups": [{**GROUP, "param_names": [[1]]}]},
    "betas are None": {"param_groups": [{**GROUP, "betas": None}]},
    "betas are text": {"param_groups": [{**GROUP, "betas": ("a", "b")}]},
    "a beta is 1": {"param_groups": [{**GROUP, "betas": (1.0, 1.0)}]},
    "there is no learning rate": {"param_groups": [{**GROUP, "lr": None}]},
    "states are a list": {"state": [ADAM]},
    "a state is a number": {"state": {0: 5}},
}
ODD_STATES: dict[str, dict[str, Any]] = {
    "the step is text": {"step": "x"},
    "moments of two shapes": {"exp_avg": torch.ones(3)},
    "a moment is a number": {"exp_avg": 1.0},
    "a negative second moment": {"exp_avg_sq": -MOMENT.square()},
    "a step of zero": {"step": torch.tensor(0.0)},
}


def optimizer(**changes: Any) -> dict[str, Any]:
    return {"state": {0: ADAM}, "param_groups": [GROUP]} | changes


def compressed(path: Path, tree: dict[str, Any], mode: str) -> dict[str, Any]:
    torch.save({"w": MOMENT}, path / "pytorch_model.bin")
    torch.save(tree, path / "optimizer.pt")
    compress_directory(path, mode=mode)
    return torch.load(path / "optimizer.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lossless", "compact"])
@pytest.mark.parametrize("kind", OTHERS)
def test_another_layout_is_stored_exactly(kind: str, mode: str, tmp_path: Path) -> None:
    tree = optimizer(**OTHERS[kind])
    assert not is_optimizer_state(tree)
    assert fingerprint(compressed(tmp_path, tree, mode)) == fingerprint(tree)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ODD_STATES)
def test_a_state_that_is_not_adams_does_not_stop_a_lossy_mode(kind: str, tmp_path: Path) -> None:
    tree = optimizer(state={0: ADAM | ODD_STATES[kind]})
    assert compressed(tmp_path, tree, "compact")["param_groups"] == tree["param_groups"]


def test_the_names_that_an_optimizer_records_serve_a_lossy_mode(tmp_path: Path) -> None:
    assert recorded_names(optimizer()) == {0: "w"}
    quick = {"state": {0: ADAM}, "param_groups": [GROUP | {"lr": 0.1}]}
    compressed(tmp_path, quick, "compact")
    weight = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)["w"]
    assert not torch.equal(weight, MOMENT)  # its moments, found by its name, say how far it drifts


MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
BUFFERS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "average"}


def trained(optimizer_of: MakeOptimizer) -> tuple[nn.Module, dict[str, Any]]:
    model = nn.Sequential(OrderedDict(linear=nn.Linear(6, 5), norm=nn.BatchNorm1d(5), head=nn.Linear(5, 7)))
    model.register_buffer("average", torch.zeros(3, 4))
    optimizer = optimizer_of(model)
    model(torch.rand(4, 6)).sum().backward()
    optimizer.step()
    return model, optimizer.state_dict()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
def test_names_that_the_optimizer_records_tell_buffers_exactly(kind: Any) -> None:
    model, optimizer = trained(lambda model: kind(model.named_parameters(), lr=1e-3))
    assert find_buffers(model.state_dict(), optimizer) == BUFFERS


def test_shapes_of_states_tell_every_buffer() -> None:
    model, optimizer = trained(lambda model: torch.optim.AdamW(list(model.parameters())))
    buffers = find_buffers(model.state_dict(), optimizer)
    assert buffers >= BUFFERS
    # Of the shape of the running averages there are more tensors than states.
    assert buffers - BUFFERS == {"linear.bias", "norm.weight", "norm.bias"}


def test_names_that_are_not_those_of_the_file_tell_nothing() -> None:
    model, optimizer = trained(lambda model: torch.optim.AdamW(model.named_parameters()))
    weights = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    buffers = find_buffers(weights, optimizer)
    assert {f"module.{name}" for name in BUFFERS} <= buffers
    assert "module.linear.weight" not in buffers


@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda model: torch.optim.SGD(list(model.parameters()), lr=1e-3),
        lambda model: torch.optim.Adafactor(list(model.parameters())),
    ],
    ids=["SGD", "Adafactor"],
)
def test_without_states_of_the_parameters_shapes_only_matrices_count_as_trained(
    optimizer_of: MakeOptimizer,
) -> None:
    model, optimizer = trained(optimizer_of)
    assert set(model.state_dict()) - find_buffers(model.state_dict(), optimizer) == {
        "linear.weight",
        "head.weight",
        "average",
    }


@pytest.mark.parametrize("named", [False, True])
def test_tied_weights_count_as_trained(named: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4), nn.Linear(4, 6, bias=False))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.named_parameters() if named else model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert find_buffers(model.state_dict(), optimizer.state_dict()) == set()


def test_a_frozen_weight_counts_as_a_buffer() -> None:
    weights = {"trained": torch.ones(4, 4), "frozen": torch.ones(4, 5), "head": torch.ones(5, 5)}
    parameters = [nn.Parameter(weights["trained"]), nn.Parameter(weights["head"])]
    optimizer = torch.optim.AdamW(parameters)
    sum(parameter.sum() for parameter in parameters).backward()
    optimizer.step()
    assert find_buffers(weights, optimizer.state_dict()) == {"frozen"}


def test_parameter_names_follow_the_optimizers_own_indices() -> None:
    model = Net()
    groups = [{"params": [model.unused, model.conv.bias]}, {"params": [model.embed.weight, torch.ones(2)]}]
    assert optimizer_parameter_names(model, torch.optim.SGD(groups)) == {0: "unused", 1: "conv.bias", 2: "embed.weight"}
    assert optimizer_parameter_names(model, None) == {}


def test_weights_and_states_are_told_by_the_names_that_dcp_gives_them() -> None:
    adam = {"state": {"0.weight": ADAM}, "param_groups": [{**GROUP, "params": ["0.weight"]}]}
    flat, paths = flatten_state_dict({"model": {"0.weight": MOMENT}, "optim": adam, "step": MOMENT})
    states = optimizer_states(flat)
    assert states["optim.state.0.weight.exp_avg"] == StateName("optim", "0.weight", "exp_avg")
    assert states["optim.param_groups.0.lr"] == StateName("optim", "0", "lr")
    assert states.keys() == {name for name in flat if name.startswith("optim.")}
    weights = [name for name, value in flat.items() if isinstance(value, torch.Tensor) and name not in states]
    assert models(weights, paths) == {"model": {"0.weight": "model.0.weight"}, "": {"step": "step"}}
