"""New tokens for a model: before it is quantized, with float and with quantized embeddings, and after dequantizing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, outputs
from covering import by_default
from torch import Tensor
from transformers import PreTrainedModel
from weights import QUANTIZABLE, same_stored

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_, verify_model
from hf_trainweights.errors import UnsupportedError
from hf_trainweights.formats import parameters_of

# Each of many tests saves and loads a model.
pytestmark = pytest.mark.slow

NAMES = ["llama", "llama_tied", "bert", "gpt2", "t5"]
each_name = pytest.mark.parametrize("name", by_default(("llama", "llama_tied", "t5"), NAMES))
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


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("size", "how"), [(90, "in place"), (104, "while it was loaded"), (104, "before it was saved")]
)
@each_name
def test_float_embeddings_are_resized(name: str, size: int, how: str, tmp_path: Path) -> None:
    model = quantized(name, TrainWeightsConfig("int8"), tmp_path, how)
    before = shown(name, model)
    assert model.resize_token_embeddings(size, mean_resizing=False).weight.shape[0] == size
    assert model.config.vocab_size == size
    assert any(isinstance(parameter, QuantizedTensor) for parameter in model.parameters())
    kept = min(size, PRESENT)
    torch.testing.assert_close(shown(name, model)[0][..., :kept], before[0][..., :kept], rtol=0, atol=0)
    assert_saved_and_reloaded(name, model, tmp_path / "resized")


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("size", "options"), [(90, {"mean_resizing": False}), (104, {}), (PRESENT, {"pad_to_multiple_of": 64})]
)
@pytest.mark.parametrize(
    ("name", "config"), [*((name, EMBEDDINGS) for name in NAMES), ("llama", HEAD_ALONE)], ids=[*NAMES, "head alone"]
)
def test_quantized_embeddings_are_resized_and_old_rows_keep_their_codes(
    name: str, config: TrainWeightsConfig, size: int, options: dict[str, Any], tmp_path: Path
) -> None:
    model = quantized(name, config, tmp_path, "before it was saved")
    before = {key: each.clone() for key, each in model.state_dict().items()}
    inputs = shown(name, model)
    model.resize_token_embeddings(size, **options)
    wanted, after = 128 if "pad_to_multiple_of" in options else size, model.state_dict()
    kept = min(wanted, PRESENT)
    assert model.config.vocab_size == wanted
    resized = [key for key, each in before.items() if after[key].shape != each.shape]
    assert resized
    assert {key: type(each) for key, each in after.items()} == {key: type(each) for key, each in before.items()}
    for key, each in before.items():
        old, new = (t[:kept] if key in resized else t for t in (each, after[key]))
        assert same_stored(new, old) if isinstance(each, QuantizedTensor) else torch.equal(new, old)
    assert torch.equal(shown(name, model)[0][..., :kept], inputs[0][..., :kept])
    assert_saved_and_reloaded(name, model, tmp_path / "again")


@pytest.mark.parametrize("form", QUANTIZABLE)
def test_new_rows_of_tied_embeddings_are_quantized_in_the_same_format(form: str, tmp_path: Path) -> None:
    options = {"group_size": 32} if "group_size" in parameters_of(form) else {}
    config = TrainWeightsConfig(form, include_embeddings=True, **options)
    model = quantized("llama_tied", config, tmp_path, "in place")
    weight = model.get_input_embeddings().weight
    rows = weight.dequantize().mean(dim=0)
    model.resize_token_embeddings(104, mean_resizing=True)
    resized = model.get_input_embeddings().weight
    assert (resized.format, resized.scale_dtype) == (weight.format, weight.scale_dtype)
    assert model.get_output_embeddings().weight is resized
    # Transformers draws new rows close around the mean of the old ones.
    assert (resized.dequantize()[PRESENT:] - rows).abs().max() < 0.5 * rows.abs().max()


def test_a_size_that_transformers_refuses_changes_nothing(tmp_path: Path) -> None:
    model = quantized("llama_tied", EMBEDDINGS, tmp_path, "in place")
    before = model.get_input_embeddings().weight
    with pytest.raises((RuntimeError, ValueError, TypeError), match=r"negative|pad|integer"):
        model.resize_token_embeddings(104, pad_to_multiple_of=2.5)  # type: ignore[arg-type]
    assert model.get_input_embeddings().weight is before
    assert model.get_output_embeddings().weight is before


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", [{}, {"new_num_tokens": PRESENT}, {"pad_to_multiple_of": 32}], ids=repr)
@each_name
def test_quantized_embeddings_of_the_right_size_stay(name: str, options: dict[str, int], tmp_path: Path) -> None:
    model = quantized(name, EMBEDDINGS, tmp_path, "in place")
    embeddings = model.resize_token_embeddings(**options)
    assert isinstance(embeddings.weight, QuantizedTensor)
    assert_saved_and_reloaded(name, model, tmp_path / "again")


@each_name
def test_a_model_is_resized_first_and_quantized_then(name: str, tmp_path: Path) -> None:
    model = ARCHITECTURES[name].build()
    model.resize_token_embeddings(104, mean_resizing=False)
    quantize_(model, EMBEDDINGS)
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, QuantizedTensor)
    assert weight.shape[0] == 104
    assert_saved_and_reloaded(name, model, tmp_path)


@each_name
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


@pytest.mark.covering(1)
@pytest.mark.parametrize("call", REDO)
@each_name
def test_tying_and_initializing_again_change_no_quantized_weight(name: str, call: str, tmp_path: Path) -> None:
    model = quantized(name, EMBEDDINGS, tmp_path, "before it was saved")
    before = {key: each.clone() for key, each in model.named_parameters() if isinstance(each, QuantizedTensor)}
    REDO[call](model)
    after = dict(model.named_parameters())
    assert before
    assert all(same_stored(after[key], each) for key, each in before.items())
    assert_saved_and_reloaded(name, model, tmp_path / "again")


@pytest.mark.parametrize("config", [EMBEDDINGS, TrainWeightsConfig("int8")])
def test_a_head_that_is_tied_later_is_saved_once(config: TrainWeightsConfig, tmp_path: Path) -> None:
    model = quantized("llama", config, tmp_path, "before it was saved")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert_saved_and_reloaded("llama", model, tmp_path / "tied")


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
