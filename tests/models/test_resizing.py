"""New tokens for a quantized model: before it is quantized, with float embeddings, and after dequantizing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, outputs
from torch import Tensor
from transformers import PreTrainedModel
from weights import same_stored

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_, verify_model
from hf_trainweights.errors import UnsupportedError

NAMES = ["llama", "llama_tied", "bert", "gpt2", "t5"]
EMBEDDINGS = TrainWeightsConfig("int8", include_embeddings=True)
HEAD_ALONE = TrainWeightsConfig("int8", overrides={"lm_head": "int8"})
PRESENT = 96


def quantized(name: str, config: TrainWeightsConfig, directory: Path, how: str) -> PreTrainedModel:
    """Return a model that was quantized in place, while it was loaded, or before it was saved."""
    model = ARCHITECTURES[name].build()
    if how == "while it was loaded":
        model.save_pretrained(directory / "float")
        cls = ARCHITECTURES[name].auto_class
        return cls.from_pretrained(directory / "float", quantization_config=copy.deepcopy(config))
    quantize_(model, config)
    if how == "in place":
        return model
    model.save_pretrained(directory / "quantized")
    return ARCHITECTURES[name].auto_class.from_pretrained(directory / "quantized")


def shown(name: str, model: PreTrainedModel) -> list[Tensor]:
    """Return what the model makes of tokens that every size has."""
    inputs = ARCHITECTURES[name].make_inputs()
    return outputs(model, {key: value % 90 if "ids" in key else value for key, value in inputs.items()})


def assert_saved_and_reloaded(name: str, model: PreTrainedModel, directory: Path) -> None:
    model.save_pretrained(directory)
    assert verify_model(directory).ok
    again = ARCHITECTURES[name].auto_class.from_pretrained(directory)
    assert all(map(torch.equal, shown(name, again), shown(name, model)))
    assert {key: type(each) for key, each in again.named_parameters()} == {
        key: type(each) for key, each in model.named_parameters()
    }


@pytest.mark.parametrize(
    ("size", "how"), [(90, "in place"), (104, "while it was loaded"), (104, "before it was saved")]
)
@pytest.mark.parametrize("name", NAMES)
def test_float_embeddings_are_resized(name: str, size: int, how: str, tmp_path: Path) -> None:
    model = quantized(name, TrainWeightsConfig("int8"), tmp_path, how)
    before = shown(name, model)
    assert model.resize_token_embeddings(size, mean_resizing=False).weight.shape[0] == size
    assert model.config.vocab_size == size
    assert any(isinstance(parameter, QuantizedTensor) for parameter in model.parameters())
    kept = min(size, PRESENT)
    torch.testing.assert_close(shown(name, model)[0][..., :kept], before[0][..., :kept], rtol=0, atol=0)
    assert_saved_and_reloaded(name, model, tmp_path / "resized")


@pytest.mark.parametrize(
    ("size", "options"), [(90, {"mean_resizing": False}), (104, {}), (PRESENT, {"pad_to_multiple_of": 64})]
)
@pytest.mark.parametrize(
    ("name", "config"), [*((name, EMBEDDINGS) for name in NAMES), ("llama", HEAD_ALONE)], ids=[*NAMES, "head alone"]
)
def test_quantized_embeddings_are_not_resized_and_nothing_changes(
    name: str, config: TrainWeightsConfig, size: int, options: dict[str, Any], tmp_path: Path
) -> None:
    model = quantized(name, config, tmp_path, "before it was saved")
    before = {key: each.clone() for key, each in model.state_dict().items()}
    with pytest.raises(UnsupportedError, match=r"Resize the float model first .*; or call model\.dequantize"):
        model.resize_token_embeddings(size, **options)
    after = model.state_dict()
    assert model.config.vocab_size == PRESENT
    assert after.keys() == before.keys()
    for key, each in before.items():
        if isinstance(each, QuantizedTensor):
            assert same_stored(after[key], each)
        else:
            assert torch.equal(after[key], each)
    assert_saved_and_reloaded(name, model, tmp_path / "again")


@pytest.mark.parametrize("options", [{}, {"new_num_tokens": PRESENT}, {"pad_to_multiple_of": 32}], ids=repr)
@pytest.mark.parametrize("name", NAMES)
def test_quantized_embeddings_of_the_right_size_stay(name: str, options: dict[str, int], tmp_path: Path) -> None:
    model = quantized(name, EMBEDDINGS, tmp_path, "in place")
    embeddings = model.resize_token_embeddings(**options)
    assert isinstance(embeddings.weight, QuantizedTensor)
    assert_saved_and_reloaded(name, model, tmp_path / "again")


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_resized_first_and_quantized_then(name: str, tmp_path: Path) -> None:
    model = ARCHITECTURES[name].build()
    model.resize_token_embeddings(104, mean_resizing=False)
    quantize_(model, EMBEDDINGS)
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, QuantizedTensor)
    assert weight.shape[0] == 104
    assert_saved_and_reloaded(name, model, tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_a_dequantized_model_is_resized_and_quantized_again(name: str, tmp_path: Path) -> None:
    model = quantized(name, EMBEDDINGS, tmp_path, "before it was saved").dequantize()
    model.resize_token_embeddings(104, mean_resizing=False)
    quantize_(model, EMBEDDINGS)
    assert isinstance(model.get_input_embeddings().weight, QuantizedTensor)
    assert_saved_and_reloaded(name, model, tmp_path / "again")


REDO: dict[str, Callable[[PreTrainedModel], object]] = {
    "tie_weights": lambda model: model.tie_weights(),
    "init_weights": lambda model: model.init_weights(),
}


@pytest.mark.parametrize("call", REDO)
@pytest.mark.parametrize("name", NAMES)
def test_tying_and_initializing_again_change_no_quantized_weight(name: str, call: str, tmp_path: Path) -> None:
    model = quantized(name, EMBEDDINGS, tmp_path, "before it was saved")
    before = {key: each.clone() for key, each in model.named_parameters() if isinstance(each, QuantizedTensor)}
    REDO[call](model)
    after = dict(model.named_parameters())
    assert before
    assert all(same_stored(after[key], each) for key, each in before.items())
    assert_saved_and_reloaded(name, model, tmp_path / "again")


@pytest.mark.parametrize("how", ["in place", "before it was saved"])
def test_a_table_with_a_row_of_padding_is_not_drawn_anew(how: str, tmp_path: Path) -> None:
    model = quantized("bert", EMBEDDINGS, tmp_path, how)
    embeddings = model.get_input_embeddings()
    assert embeddings.padding_idx == 0
    before = embeddings.weight.clone()
    if how == "in place":
        with pytest.raises(UnsupportedError, match=r"dequantize\(\) the model, change it, and quantize it again"):
            model._init_weights(embeddings)
    else:  # Transformers knows that it was loaded
        model._init_weights(embeddings)
    assert same_stored(embeddings.weight, before)
