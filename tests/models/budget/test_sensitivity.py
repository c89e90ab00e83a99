"""Which weights matter, as gradients tell it, by random tokens or a user's batches; the model is left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from cpus import GENOA, HASWELL, use_cpu
from helpers import default_dtype
from torch import Tensor, nn

from hf_trainweights import TrainWeightsConfig, quantize_
from hf_trainweights.errors import ConfigError
from hf_trainweights.models.budget import sensitivity
from hf_trainweights.models.budget.allocation import weights_to_allocate
from hf_trainweights.models.budget.measure import sensitivities_of_tokens
from hf_trainweights.models.budget.sensitivity import random_tokens, sensitivities
from hf_trainweights.models.choosing.selection import choose


class Branches(nn.Module):
    """Linears whose outputs are added, the second a hundredth of the first, in a model that trains."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.loud, self.quiet, self.unused = (nn.Linear(128, 128) for _ in range(3))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.loud(x) + 0.01 * self.quiet(x))


@pytest.fixture
def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 128, generator=generator), {"x": torch.randn(16, 128, generator=generator)}]


def test_a_sensitivity_is_what_noise_in_the_weight_changes(batches: list[Any]) -> None:
    module = Branches().eval()
    found = sensitivities(module, weights_to_allocate(choose(module, TrainWeightsConfig(bits=6))), batches)
    assert found.keys() == {"loud.weight", "quiet.weight"}
    # Both weights have equal norms, and a tenth of a product is a hundredth of its square.
    assert found["loud.weight"] / found["quiet.weight"] == pytest.approx(10_000, rel=0.2)


def test_weights_that_matter_more_get_more_bits(batches: list[Any]) -> None:
    module = Branches()
    chosen = {each.name: each for each in quantize_(module, TrainWeightsConfig(bits=6.5), calibration=batches)}
    assert chosen["loud.weight"].bytes_after > chosen["quiet.weight"].bytes_after


def test_a_module_is_as_it_was_after_it_was_measured(batches: list[Any]) -> None:
    module = Branches()
    module.quiet.requires_grad_(False)
    before = {name: (parameter, parameter.requires_grad) for name, parameter in module.named_parameters()}
    sensitivities(module, weights_to_allocate(choose(module, TrainWeightsConfig(bits=6))), batches)
    assert module.dropout.training
    for name, parameter in module.named_parameters():
        assert (parameter, parameter.requires_grad, parameter.grad) == (*before[name], None)
    assert not any(child._forward_hooks for child in module.modules())


def test_the_same_call_gives_the_same_numbers() -> None:
    model = ARCHITECTURES["llama"].build()
    weights = weights_to_allocate(choose(model, TrainWeightsConfig(bits=6)))
    with torch.random.fork_rng(devices=[]):
        first = sensitivities_of_tokens(model, weights)
    assert first == sensitivities_of_tokens(model, weights)
    assert first.keys() == {weight.name for weight in weights}


def test_a_float_head_tells_the_same_where_it_is_multiplied_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ARCHITECTURES["llama"].build().bfloat16()
    weights = weights_to_allocate(choose(model, TrainWeightsConfig(bits=6)))
    measured, heads = [], []
    forward = sensitivity._Float32Linear.forward
    monkeypatch.setattr(sensitivity, "_WIDENED_ROWS", 50)  # so that the last block is not whole
    for cpu in (GENOA, HASWELL):
        use_cpu(cpu, monkeypatch)
        calls: list[Any] = []
        counted = lambda ctx, x, *others, calls=calls: (calls.append(x.shape), forward(ctx, x, *others))[1]  # noqa: E731
        monkeypatch.setattr(sensitivity._Float32Linear, "forward", staticmethod(counted))
        measured.append(sensitivities_of_tokens(model, weights))
        heads.append(len(calls))
    assert (heads[0], heads[1] > 0) == (0, True)
    assert measured[0] == pytest.approx(measured[1], rel=0.1)


@pytest.mark.parametrize("bias", [None, torch.arange(70.0).bfloat16()], ids=["plain", "bias"])
def test_a_product_in_float32_has_the_gradient_of_a_linear(
    bias: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensitivity, "_WIDENED_ROWS", 32)
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(size, 16, generator=generator).bfloat16() for size in (70, 6))
    x = x.view(2, 3, 16).requires_grad_()
    actual = sensitivity._Float32Linear.apply(x, weight, bias)
    wanted = nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(actual, wanted.bfloat16(), rtol=0.01, atol=0.01)
    gradient = torch.randn(actual.shape, generator=generator).bfloat16()
    with default_dtype(torch.bfloat16):
        (got,) = torch.autograd.grad(actual, x, gradient)
    (expected,) = torch.autograd.grad(wanted, x, gradient.float())
    torch.testing.assert_close(got, expected, rtol=0.01, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert", "t5", "qwen3_moe", "gpt_oss", "gpt2"])
def test_random_tokens_tell_of_every_weight_but_embeddings(name: str) -> None:
    model = ARCHITECTURES[name].build()
    weights = weights_to_allocate(choose(model, TrainWeightsConfig(bits=6)))
    found = sensitivities_of_tokens(model, weights)
    assert all(value > 0 for value in found.values())
    # The output of BERT does not depend on its pooler, nor that of a module that is never called.
    assert len(found) >= len(weights) - 1


@pytest.mark.slow
def test_formats_of_a_model_of_images_are_allocated_by_the_sizes_of_its_weights() -> None:
    model = ARCHITECTURES["vit"].build()
    assert random_tokens(model) == []
    assert quantize_(model, TrainWeightsConfig(bits=6.5)).quantized


@pytest.mark.slow
def test_formats_of_a_model_that_random_tokens_do_not_suit_are_allocated_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = ARCHITECTURES["llama"].build()

    def refuse(*_: object) -> None:
        raise KeyError("pixel_values")

    model.model.register_forward_pre_hook(refuse)
    assert quantize_(model, TrainWeightsConfig(bits=6.5)).quantized
    assert "A random batch does not tell which weights matter (KeyError('pixel_values'))" in caplog.text


def test_a_calibration_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    module = Branches()
    before = list(module.parameters())
    with pytest.raises(ConfigError, match=r"calibration: expected inputs that the module runs on, found RuntimeError"):
        quantize_(module, TrainWeightsConfig(bits=6.5), calibration=[torch.ones(2, 7)])
    assert all(one is other for one, other in zip(module.parameters(), before, strict=True))
