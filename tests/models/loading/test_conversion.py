"""Weights become quantized while they load: one by one, exactly as if they were quantized afterwards, or not at all."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, weight_names
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import MergeModulelist
from weights import QUANTIZABLE

from hf_trainweights import QuantizedTensor, TrainWeightsConfig
from hf_trainweights.errors import CorruptFileError, QuantizationError, TrainWeightsError
from hf_trainweights.formats import get_format
from hf_trainweights.models.choosing.selection import choose
from hf_trainweights.models.loading.conversion import LoadState, TrainWeightsDeserialize, TrainWeightsQuantize

# The group size must divide 64, the rows of the tiny models.
CONFIGS = [{"format": "int8"}, {"format": "int8", "group_size": 32}, {"format": "int4", "group_size": 32}]
CONFIGS += [{"format": name} for name in QUANTIZABLE if name not in ("int8", "int4")]
# Their checkpoints keep one tensor per expert; gpt-oss keeps them merged, and transposed.
MERGED = ["qwen3_moe", "mixtral", "deepseek_v3"]
EXPERT = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Save each float model once."""
    root = tmp_path_factory.mktemp("float")

    def directory(name: str) -> Path:
        if not (root / name).exists():
            ARCHITECTURES[name].build().save_pretrained(root / name)
        return root / name

    return directory


def quantized(name: str, directory: Path, config: dict[str, Any], **options: Any) -> PreTrainedModel:
    load = ARCHITECTURES[name].auto_class.from_pretrained
    return load(directory, quantization_config=TrainWeightsConfig(**config), **options)


def damaged(source: Path, target: Path, damage: Callable[[dict[str, Tensor]], object], **options: Any) -> Path:
    """Return a copy of a checkpoint whose tensors `damage` has changed in place."""
    tensors = load_file(source / "model.safetensors")
    damage(tensors)
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def same(tensor: QuantizedTensor, expected: QuantizedTensor) -> bool:
    return (
        (tensor.format, tensor.shape, tensor.dtype, tensor.transposed)
        == (expected.format, expected.shape, expected.dtype, expected.transposed)
    ) and all(torch.equal(stored, expected.tensors[key]) for key, stored in tensor.tensors.items())


# ---- what comes out


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", [*MERGED, "gpt_oss", "gpt2", "llama"])
def test_a_weight_quantized_on_load_equals_the_float_weight_quantized(
    name: str, config: dict[str, Any], directories: Callable[[str], Path]
) -> None:
    float_model = ARCHITECTURES[name].build()
    model = quantized(name, directories(name), config)
    for parameter_name in ARCHITECTURES[name].quantized_names(float_model):
        actual, exact = model.get_parameter(parameter_name), float_model.get_parameter(parameter_name)
        assert isinstance(actual, QuantizedTensor)
        assert same(actual, QuantizedTensor.quantize(exact, get_format(config), actual.transposed))


@pytest.mark.slow
def test_weights_loaded_in_another_dtype_are_quantized_in_that_dtype(directories: Callable[[str], Path]) -> None:
    for name in ("llama", "qwen3_moe"):
        rounded = ARCHITECTURES[name].build(torch.bfloat16)
        model = quantized(name, directories(name), {"format": "int8"}, dtype=torch.bfloat16)
        for parameter_name in ARCHITECTURES[name].quantized_names(rounded):
            actual, exact = model.get_parameter(parameter_name), rounded.get_parameter(parameter_name)
            assert isinstance(actual, QuantizedTensor)
            assert same(actual, QuantizedTensor.quantize(exact, get_format({"format": "int8"})))


@pytest.mark.slow
def test_quantized_weights_are_frozen_parameters_and_float_ones_train(
    directories: Callable[[str], Path], tmp_path: Path
) -> None:
    model = quantized("llama", directories("llama"), {"format": "int8"})
    model.save_pretrained(tmp_path)
    for each in (model, ARCHITECTURES["llama"].auto_class.from_pretrained(tmp_path)):
        for parameter in each.parameters():
            assert isinstance(parameter, nn.Parameter)
            assert parameter.requires_grad == (not isinstance(parameter, QuantizedTensor))


# ---- experts


@pytest.mark.slow
def test_experts_are_never_merged_in_float(directories: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(*_: object, **__: object) -> None:
        raise AssertionError("experts were merged before they were quantized")

    monkeypatch.setattr(MergeModulelist, "convert", convert)
    for name in MERGED:
        quantized(name, directories(name), {"format": "int8"})


@pytest.mark.slow
def test_experts_left_in_float_are_merged_as_ever_and_reported(directories: Callable[[str], Path]) -> None:
    for name in MERGED:
        exact = ARCHITECTURES[name].build()
        config = {"format": "int8", "overrides": {r"re:.*experts\..*_proj": None}}
        model = quantized(name, directories(name), config)
        summary = {choice.name: choice for choice in model.hf_quantizer.summary().tensors}
        for parameter in ("gate_up_proj", "down_proj"):
            full_name = f"{EXPERT}.{parameter}"
            assert torch.equal(model.get_parameter(full_name), exact.get_parameter(full_name))
            assert summary[full_name].format is None
            assert summary[full_name].reason == "override"
        assert re.search(r"left alone: .*\d override", str(model.hf_quantizer.summary()))


def test_a_dequantized_mixture_of_experts_is_saved_under_the_names_it_was_loaded_from(
    directories: Callable[[str], Path], tmp_path: Path
) -> None:
    model = quantized("qwen3_moe", directories("qwen3_moe"), {"format": "int8"})
    model.dequantize()
    model.save_pretrained(tmp_path)
    with (
        safe_open(tmp_path / "model.safetensors", "pt") as written,
        safe_open(directories("qwen3_moe") / "model.safetensors", "pt") as source,
    ):
        assert sorted(written.keys()) == sorted(source.keys())
        name = f"{EXPERT}.2.up_proj.weight"
        expected = get_format({"format": "int8"})
        exact = source.get_tensor(name)
        rounded = expected.dequantize(expected.quantize(exact), exact.shape, exact.dtype)
        assert torch.equal(written.get_tensor(name), rounded)


# ---- the ops themselves


@pytest.fixture
def state() -> LoadState:
    return LoadState(get_format({"format": "int8"}))


def small_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4))
    model.get_parameter_or_buffer = model.get_parameter
    return model


def test_quantize_takes_lists_tensors_and_several_weights_at_once(state: LoadState) -> None:
    model = small_model()
    summary = choose(model, TrainWeightsConfig("int8", modules_to_not_convert=["2"])).summary
    state.choices = {choice.name: choice for choice in summary.quantized}
    given = {"0.weight": [model[0].weight], "1.weight": model[1].weight, "2.weight": [model[2].weight]}
    given |= {"0.bias": model[0].bias}
    converted = TrainWeightsQuantize(state).convert(given, model=model, source_patterns=[], missing_keys=None)
    assert list(converted) == list(given)
    assert isinstance(converted["0.weight"], QuantizedTensor)
    assert isinstance(converted["1.weight"], QuantizedTensor)
    assert converted["2.weight"] is model[2].weight
    assert converted["0.bias"] is model[0].bias
    assert same(converted["0.weight"], QuantizedTensor.quantize(model[0].weight, state.default))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_deserialize_shows_the_dtype_of_the_skeleton_and_leaves_scales_alone(
    state: LoadState, dtype: torch.dtype
) -> None:
    weight = QuantizedTensor.quantize(torch.randn(4, 8), state.default)
    stored = {":qdata": [weight.qdata], ":scale": weight.scale}
    model = small_model().to(dtype)
    loaded = TrainWeightsDeserialize(state).convert(stored, model=model, full_layer_name="1.weight", config=None)
    assert isinstance(loaded["1.weight"], QuantizedTensor)
    assert loaded["1.weight"].dtype == dtype
    assert loaded["1.weight"].scale is weight.scale
    assert loaded["1.weight"].qdata is weight.qdata


@pytest.mark.parametrize("operation", [TrainWeightsQuantize, TrainWeightsDeserialize])
def test_a_copied_op_shares_the_state_of_the_load(operation: type, state: LoadState) -> None:
    original = operation(state)
    assert copy.deepcopy(original).state is state
    assert original.hf_quantizer, "Transformers casts scales to the dtype of the model without this attribute"


# ---- float checkpoints that are damaged


def set_nan(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name][..., 0, 0] = torch.nan


def set_inf(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name][..., -1, -1] = -torch.inf


def cut_rows(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = tensors[name][:-1].clone()


def add_rows(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = torch.cat([tensors[name], tensors[name]])


def cut_columns(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = tensors[name][..., :-1].clone()


LINEAR = ("llama", "model.layers.0.mlp.up_proj.weight")
CONV1D = ("gpt2", "transformer.h.0.mlp.c_fc.weight")
GATE = ("qwen3_moe", f"{EXPERT}.2.gate_proj.weight")
UP = ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w3.weight")
DOWN = ("deepseek_v3", f"{EXPERT}.3.down_proj.weight")
MERGED_AND_TRANSPOSED = ("gpt_oss", f"{EXPERT}.gate_up_proj")


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("damage", [set_nan, set_inf])
@pytest.mark.parametrize(("name", "tensor"), [LINEAR, CONV1D, GATE, UP, DOWN, MERGED_AND_TRANSPOSED])
def test_a_weight_that_is_not_finite_is_named_with_its_file(
    name: str, tensor: str, damage: Callable[..., None], directories: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = damaged(directories(name), tmp_path / "damaged", lambda tensors: damage(tensors, tensor))
    with pytest.raises(QuantizationError, match=r"finite values, found NaN or Inf.*Repair the checkpoint") as raised:
        quantized(name, directory, {"format": "int8"})
    assert tensor in raised.value.where
    assert str(directory / "model.safetensors") in raised.value.where


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("damage", [cut_rows, add_rows, cut_columns])
@pytest.mark.parametrize(("name", "tensor"), [LINEAR, CONV1D, GATE, UP, DOWN, MERGED_AND_TRANSPOSED])
def test_a_weight_of_another_shape_is_named_with_its_file(
    name: str, tensor: str, damage: Callable[..., None], directories: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = damaged(directories(name), tmp_path / "damaged", lambda tensors: damage(tensors, tensor))
    with pytest.raises(
        CorruptFileError, match=r"as config.json has it, found \(.*belong to different models.*modules_to_not_convert"
    ) as raised:
        quantized(name, directory, {"format": "int8"})
    assert tensor in raised.value.where
    assert str(directory / "model.safetensors") in raised.value.where


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "counts"),
    [
        (lambda tensors: tensors.pop(f"{EXPERT}.2.up_proj.weight"), "4 and 3"),
        (lambda tensors: tensors.pop(f"{EXPERT}.3.down_proj.weight"), "3"),
        (lambda tensors: tensors.update({f"{EXPERT}.4.down_proj.weight": torch.zeros(64, 64)}), "5"),
    ],
)
def test_a_missing_or_surplus_expert_is_reported(
    damage: Callable[..., object], counts: str, directories: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = damaged(directories("qwen3_moe"), tmp_path / "damaged", damage)
    with pytest.raises(CorruptFileError, match=rf"expected 4 experts, found {counts}\. A shard is missing") as raised:
        quantized("qwen3_moe", directory, {"format": "int8"})
    assert EXPERT in raised.value.where


def test_half_of_a_merged_weight_is_not_enough(directories: Callable[[str], Path], tmp_path: Path) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "layers.1" in name and name.endswith("up_proj.weight")]:
            del tensors[name]

    directory = damaged(directories("qwen3_moe"), tmp_path / "damaged", damage)
    with pytest.raises(
        CorruptFileError, match=r"experts\.0\.gate_proj\.weight: expected shape \(128, 64\).*found \(64, 64\)"
    ):
        quantized("qwen3_moe", directory, {"format": "int8"})


def test_a_damaged_tensor_in_a_shard_is_named_with_that_shard(tmp_path: Path) -> None:
    model = ARCHITECTURES["qwen3_moe"].build()
    for index in (0, 1):
        with torch.no_grad():
            model.get_parameter(f"model.layers.{index}.mlp.experts.gate_up_proj")[3, 0, 0] = torch.nan
    model.save_pretrained(tmp_path, max_shard_size="64KB")
    with pytest.raises(QuantizationError, match="finite") as raised:
        quantized("qwen3_moe", tmp_path, {"format": "int8"})
    file, _, tensor = raised.value.where.partition(": ")
    assert tensor == "model.layers.0.mlp.experts.3.gate_proj.weight"
    with safe_open(file, "pt") as shard:
        assert tensor in shard.keys()  # noqa: SIM118


def test_a_weight_of_a_given_state_dict_is_named_without_a_file() -> None:
    model = ARCHITECTURES["llama"].build()
    state_dict = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    set_nan(state_dict, LINEAR[1])
    options = {"quantization_config": TrainWeightsConfig("int8"), "config": model.config, "state_dict": state_dict}
    with pytest.raises(QuantizationError, match=rf"state_dict: {LINEAR[1]}: expected finite"):
        type(model).from_pretrained(None, **options)


def test_an_error_of_the_load_is_raised_whatever_the_device_map(
    directories: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = damaged(directories("llama"), tmp_path / "damaged", lambda tensors: set_nan(tensors, LINEAR[1]))
    # Two spellings of one device make Transformers dispatch the model with hooks before the quantizer has its say.
    device_map = {"model": "cpu", "lm_head": torch.device("cpu")}
    with pytest.raises(TrainWeightsError, match="finite values"):
        quantized("llama", directory, {"format": "int8"}, device_map=device_map)


@pytest.mark.slow
def test_names_of_quantized_weights_are_the_only_ones_that_are_chosen(directories: Callable[[str], Path]) -> None:
    for name in MERGED:
        model = quantized(name, directories(name), {"format": "int8"})
        chosen = {choice.name for choice in model.hf_quantizer.summary().quantized}
        assert chosen == {key for key, value in model.named_parameters() if isinstance(value, QuantizedTensor)}
        assert chosen <= set(weight_names(model))
