"""A lowered model computes with its dequantized weights, by plain tensors alone, and is itself again afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from architectures import ARCHITECTURES
from exports.models import FORMATS, dequantized_outputs, quantized
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_trainweights import QuantizedTensor
from hf_trainweights.errors import UnsupportedError
from hf_trainweights.exports.lowering import lowered
from hf_trainweights.exports.sources import Inputs
from hf_trainweights.exports.targets import Target
from hf_trainweights.formats.int8 import Int8


def is_quantized(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, QuantizedTensor)


def held(model: nn.Module) -> dict[str, tuple[int, object]]:
    """Return which weights a model holds."""
    parameters = model.named_parameters()
    return {name: id(weight) for name, weight in parameters if is_quantized(weight)}


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("config", FORMATS)
@pytest.mark.parametrize(
    "architecture", ["llama", "llama_tied", "gpt2", "qwen3_moe", "gpt_oss", "whisper", "vit", "t5"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_lowered_model_computes_what_the_dequantized_model_computes(
    architecture: str, config: str, dtype: torch.dtype
) -> None:
    model = quantized(architecture, config, dtype)
    inputs = Inputs.of(model, ARCHITECTURES[architecture].inputs(model)).kwargs  # without a cache
    wanted = dequantized_outputs(model, **inputs)
    dense = {name: weight.dequantize() for name, weight in model.named_parameters() if is_quantized(weight)}
    with torch.no_grad(), lowered(model, Target()):
        for name, weight in dense.items():
            module, _, own = name.rpartition(".")
            assert torch.equal(getattr(model.get_submodule(module), own).dequantize(), weight), name
        found = [leaf for leaf in tree_leaves(model(**inputs)) if isinstance(leaf, torch.Tensor)]
    assert len(found) == len(wanted) > 0
    # Equal weights; but a weight that its layer keeps transposed has other strides, so its product rounds otherwise.
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    for own, other in zip(found, wanted, strict=True):
        assert (own - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("config", FORMATS)
def test_a_lowered_model_holds_the_codes_and_nothing_else(config: str) -> None:
    model = quantized("llama", config)
    weight = model.get_parameter("lm_head.weight")
    with lowered(model, Target()):
        state = model.state_dict()
        assert not any(isinstance(tensor, QuantizedTensor) for tensor in state.values())
        assert "lm_head.weight" not in state
        assert torch.equal(state["lm_head._weight_qdata"].view(torch.uint8), weight.qdata.view(torch.uint8))
        assert torch.equal(state["lm_head._weight_scale"].view(torch.uint8), weight.scale.view(torch.uint8))


def test_the_places_of_a_tied_weight_share_their_tensors() -> None:
    model = quantized("llama_tied", "int8")
    with lowered(model, Target()):
        state = model.state_dict()
        assert state["lm_head._weight_qdata"].data_ptr() == state["model.embed_tokens._weight_qdata"].data_ptr()


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_itself_again_afterwards(fails: bool) -> None:
    model = quantized("gpt2", "int4 g32")
    before = held(model)
    keys, attributes = list(model.state_dict()), [set(vars(module)) for module in model.modules()]
    with pytest.raises(RuntimeError, match="stopped") if fails else torch.no_grad(), lowered(model, Target()):
        assert list(model.state_dict()) != keys
        if fails:
            raise RuntimeError("stopped")
    assert list(model.state_dict()) == keys
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert held(model) == before


def test_other_uses_of_a_weight_get_the_dequantized_one() -> None:
    linear = quantized(nn.Sequential(nn.Linear(64, 32)), "int4 g32")[0]
    dense = linear.weight.dequantize()
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), lowered(linear, Target()):
        weight = linear.weight
        assert (tuple(weight.shape), weight.dtype, len(weight)) == ((32, 64), torch.float32, 32)
        assert torch.equal(x @ weight.t(), x @ dense.t())
        assert torch.equal(torch.cat([weight, weight]), torch.cat([dense, dense]))
        assert torch.equal(weight[3:5], dense[3:5])
        assert torch.equal(F.linear(input=x, weight=weight), F.linear(x, dense))


def test_a_float_model_stays_as_it_is() -> None:
    linear = nn.Linear(3, 2)
    with lowered(linear, Target()):
        assert sorted(linear.state_dict()) == ["bias", "weight"]


def test_a_format_without_plain_ops_is_refused_by_the_name_of_its_weight() -> None:
    @dataclass(frozen=True)
    class Odd(Int8):
        name: ClassVar[str] = "odd"

        def unpack(self, tensors: Any) -> None:  # type: ignore[override]
            del tensors

    linear = nn.Linear(64, 32)
    weight = QuantizedTensor.quantize(linear.weight, Odd())
    model = nn.Sequential(linear)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    message = r"^0\.weight: expected a format that tells by which plain ops it is unpacked .* found odd\. Quantize"
    with pytest.raises(UnsupportedError, match=message), lowered(model, Target()):
        pass
