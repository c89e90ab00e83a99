"""A format that is registered later may store tensors that no built-in one has: here a zero point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from architectures import ARCHITECTURES
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.formats import FORMATS, Format, round_scale

PROMPT = torch.tensor([[1, 2, 3, 4]])


@dataclass(frozen=True)
class Asymmetric(Format):
    """Codes 0 to 255 between the smallest and the largest weight of a row."""

    name: ClassVar[str] = "asymmetric"
    tensor_names: ClassVar[tuple[str, ...]] = ("qdata", "scale", "zero_point")

    def tensor_specs(
        self, shape: Sequence[int], scale_dtype: torch.dtype
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        *lead, K = shape
        of_row = (*lead, 1)
        return {
            "qdata": ((*lead, K), torch.uint8),
            "scale": (of_row, scale_dtype),
            "zero_point": (of_row, torch.uint8),
        }

    def quantize_rows(self, rows: Tensor, amax: Tensor, out: Mapping[str, Tensor]) -> None:
        del amax
        low, high = (rows.float().amin(-1, keepdim=True).clamp_max(0), rows.float().amax(-1, keepdim=True).clamp_min(0))
        scale = out["scale"].copy_(round_scale((high - low) / 250, 255, rows.dtype)).float()
        zero_point = (-low / scale).round().clamp(0, 255)
        out["zero_point"].copy_(zero_point)
        out["qdata"].copy_((rows.float() / scale + zero_point).round().clamp(0, 255))

    def dequantize_rows(self, tensors: Mapping[str, Tensor], K: int, dtype: torch.dtype) -> Tensor:
        codes = tensors["qdata"].float() - tensors["zero_point"].float()
        return (codes * tensors["scale"].float()).to(dtype)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    monkeypatch.setitem(FORMATS, Asymmetric.name, Asymmetric)
    model = ARCHITECTURES["llama"].build()
    quantize_(model, TrainWeightsConfig("asymmetric", overrides={"re:.*o_proj": "int8"}))
    assert model.model.layers[0].mlp.up_proj.weight.tensors.keys() == {"qdata", "scale", "zero_point"}
    return model


@pytest.mark.slow
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_a_zero_point_is_saved_and_loaded(safe: bool, model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path, safe_serialization=safe, max_shard_size="40kB")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(reloaded(PROMPT).logits, model(PROMPT).logits)
    weight, expected = (each.model.layers[1].mlp.up_proj.weight for each in (reloaded, model))
    assert weight.format == Asymmetric()
    assert all(torch.equal(weight.tensors[name], tensor) for name, tensor in expected.tensors.items())


def test_a_model_is_quantized_to_it_while_it_loads(model: PreTrainedModel, tmp_path: Path) -> None:
    ARCHITECTURES["llama"].build().save_pretrained(tmp_path)
    config = TrainWeightsConfig("asymmetric", overrides={"re:.*o_proj": "int8"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert torch.equal(loaded(PROMPT).logits, model(PROMPT).logits)


def test_a_state_dict_of_plain_tensors_is_loaded_in_place(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    changed = {name: t if name.endswith("_format") else torch.zeros_like(t) for name, t in stored.items()}
    reloaded.load_state_dict(changed, strict=False)
    assert not any(
        tensor.any()
        for weight in reloaded.parameters()
        if isinstance(weight, QuantizedTensor)
        for tensor in weight.tensors.values()
    )


def test_a_missing_zero_point_is_told(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj._weight_zero_point"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        CorruptFileError, match=r"up_proj\.weight: expected zero_point to be torch\.uint8.*found no tensor"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)
