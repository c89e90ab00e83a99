"""Which parameters can be quantized, and which way round their layers keep them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_trainweights.models.choosing.selection import is_experts, is_transposed, is_weight


@pytest.mark.parametrize(
    ("attribute", "shape", "expected"),
    [
        ("num_experts", (4, 8, 64), True),
        ("is_transposed", (4, 8, 64), True),
        ("other", (4, 8, 64), False),
        ("num_experts", (8, 64), False),
        ("num_experts", (2, 4, 8, 64), False),
        ("num_experts", (4, 1, 64), False),
        ("num_experts", (4, 64, 1), False),
    ],
)
def test_experts_are_matrices_of_a_module_that_has_experts(
    attribute: str, shape: tuple[int, ...], expected: bool
) -> None:
    owner = nn.Module()
    setattr(owner, attribute, 1)
    assert is_experts(owner, torch.zeros(shape)) == expected


def test_a_class_that_says_it_is_of_experts_has_experts() -> None:
    class MyExpertWeights(nn.Module):
        pass

    assert is_experts(MyExpertWeights(), torch.zeros(4, 8, 64))


@pytest.mark.parametrize("declared", [False, True])
def test_a_layout_that_a_module_declares_is_taken(declared: bool) -> None:
    module = nn.Module()
    module.is_transposed = declared
    assert is_transposed(module, torch.zeros(4, 8, 64)) == declared


@pytest.mark.parametrize(("shape", "expected"), [((4, 64, 192), True), ((4, 192, 64), False), ((4, 64, 64), False)])
def test_a_layout_that_is_not_declared_is_told_by_the_hidden_size(shape: tuple[int, ...], expected: bool) -> None:
    module = nn.Module()
    module.hidden_size, module.gate_up_proj = 64, nn.Parameter(torch.zeros(shape))
    assert is_transposed(module, torch.zeros(4, 96, 64)) == expected


def test_only_transformers_conv1d_keeps_a_matrix_transposed() -> None:
    other = type("Conv1D", (nn.Linear,), {})(4, 8)
    assert is_transposed(Conv1D(4, 8), torch.zeros(8, 4))
    assert not is_transposed(other, other.weight)
    assert not is_transposed(nn.Linear(4, 8), torch.zeros(8, 4))


def test_a_convolution_has_no_weight_to_quantize_and_neither_have_biases() -> None:
    convolution, linear = nn.Conv1d(4, 4, 3), Conv1D(4, 8)
    assert not is_weight(convolution, "weight", convolution.weight)
    assert is_weight(linear, "weight", linear.weight)
    assert not is_weight(linear, "bias", linear.bias)
