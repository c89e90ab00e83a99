from collections import OrderedDict

import pytest
import torch
from torch import nn

from hf_trainweights.checkpoint.whole.buffers import find_buffers

BUFFERS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "average"}


def trained(optimizer_of):
    model = nn.Sequential(OrderedDict(linear=nn.Linear(6, 5), norm=nn.BatchNorm1d(5), head=nn.Linear(5, 7)))
    model.register_buffer("average", torch.zeros(3, 4))
    optimizer = optimizer_of(model)
    model(torch.rand(4, 6)).sum().backward()
    optimizer.step()
    return model, optimizer.state_dict()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
def test_names_that_the_optimizer_records_tell_buffers_exactly(kind):
    model, optimizer = trained(lambda model: kind(model.named_parameters(), lr=1e-3))
    assert find_buffers(model.state_dict(), optimizer) == BUFFERS


def test_shapes_of_states_tell_every_buffer():
    model, optimizer = trained(lambda model: torch.optim.AdamW(list(model.parameters())))
    found = find_buffers(model.state_dict(), optimizer)
    assert found >= BUFFERS
    # Of the shape of the running averages there are more tensors than states.
    assert found - BUFFERS == {"linear.bias", "norm.weight", "norm.bias"}


def test_names_that_are_not_those_of_the_file_tell_nothing():
    model, optimizer = trained(lambda model: torch.optim.AdamW(model.named_parameters()))
    weights = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    found = find_buffers(weights, optimizer)
    assert {f"module.{name}" for name in BUFFERS} <= found
    assert "module.linear.weight" not in found


@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda model: torch.optim.SGD(list(model.parameters()), lr=1e-3),
        lambda model: torch.optim.Adafactor(list(model.parameters())),
    ],
    ids=["SGD", "Adafactor"],
)
def test_without_states_of_the_parameters_shapes_only_matrices_count_as_trained(optimizer_of):
    model, optimizer = trained(optimizer_of)
    assert set(model.state_dict()) - find_buffers(model.state_dict(), optimizer) == {
        "linear.weight",
        "head.weight",
        "average",
    }


def test_a_frozen_weight_counts_as_a_buffer():
    weights = {"trained": torch.ones(4, 4), "frozen": torch.ones(4, 5), "head": torch.ones(5, 5)}
    parameters = [nn.Parameter(weights["trained"]), nn.Parameter(weights["head"])]
    optimizer = torch.optim.AdamW(parameters)
    sum(parameter.sum() for parameter in parameters).backward()
    optimizer.step()
    assert find_buffers(weights, optimizer.state_dict()) == {"frozen"}
