"""The way back to a checkpoint goes through names that the installed Transformers has, and others are named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from architectures import ARCHITECTURES
from checkpoint.trainers import assert_equal
from covering import exhaustive
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import Transpose, WeightConverter, WeightRenaming
from transformers.trainer_utils import load_sharded_checkpoint

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, export_compressed_tensors, quantize_
from hf_trainweights.errors import UnsupportedError
from hf_trainweights.models.host.checkpoints import (
    checkpoint_tensors,
    load_offloaded,
    names_not_saved,
    restore_conversions,
    save_remote_code,
    writing_files_by,
)
from hf_trainweights.models.host.module_names import converted_names
from hf_trainweights.models.loading.conversion import TrainWeightsDeserialize

EXPERTS = "model.layers.1.mlp.experts"
NAME = "model.layers.0.mlp.up_proj.weight"


def reloaded(name: str, directory: Path) -> PreTrainedModel:
    """Return a model that was loaded from a quantized checkpoint."""
    architecture = ARCHITECTURES[name]
    architecture.build().save_pretrained(directory / "float")
    load: Callable[..., PreTrainedModel] = architecture.auto_class.from_pretrained
    load(directory / "float", quantization_config=TrainWeightsConfig("int8")).save_pretrained(directory / "quantized")
    return load(directory / "quantized")


@pytest.mark.slow
def test_a_model_does_not_keep_our_converter_which_has_no_inverse(tmp_path: Path) -> None:
    conversions: Any = reloaded("qwen3_moe", tmp_path)._weight_conversions
    operations = [op for conversion in conversions for op in getattr(conversion, "operations", ())]
    assert operations
    assert not any(isinstance(op, TrainWeightsDeserialize) for op in operations)


@pytest.mark.slow
def test_a_reloaded_model_knows_that_checkpoints_keep_experts_one_by_one(tmp_path: Path) -> None:
    model = reloaded("qwen3_moe", tmp_path)
    weight = torch.empty(model.get_parameter(f"{EXPERTS}.down_proj").shape, device="meta")
    assert len(checkpoint_tensors(model, {f"{EXPERTS}.down_proj": weight})) == 4
    before = [conversion.source_patterns for conversion in model._weight_conversions]
    restore_conversions(model, [])
    assert [conversion.source_patterns for conversion in model._weight_conversions] == before


def test_experts_get_the_names_of_a_checkpoint_one_by_one() -> None:
    model = ARCHITECTURES["qwen3_moe"].build()
    weight = model.get_parameter(f"{EXPERTS}.down_proj")
    tensors = checkpoint_tensors(model, {f"{EXPERTS}.down_proj": weight.detach()})
    assert sorted(tensors) == [f"{EXPERTS}.{expert}.down_proj.weight" for expert in range(4)]
    assert torch.equal(tensors[f"{EXPERTS}.2.down_proj.weight"], weight[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_converted_names_are_those_that_a_save_writes_and_no_module_has(tmp_path: Path, name: str) -> None:
    model = ARCHITECTURES[name].build()
    names = converted_names(model)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors").keys()
    assert names == stored - model.state_dict().keys()
    assert bool(names) == (name in {"gpt_neox", "qwen3_moe", "mixtral", "deepseek_v3", "vit"})


def test_a_tensor_that_a_save_changes_under_its_own_name_counts_as_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ARCHITECTURES["llama"].build()
    transpose = WeightConverter("q_proj.weight", "q_proj.weight", operations=[Transpose(0, 1)])
    monkeypatch.setattr(model, "_weight_conversions", [transpose], raising=False)
    assert converted_names(model) == {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)}


def test_modules_that_transformers_does_not_convert_have_no_converted_names(tmp_path: Path) -> None:
    assert converted_names(nn.Linear(2, 2)) == set()
    model = ARCHITECTURES["gpt_neox"].build()
    model.save_pretrained(tmp_path)
    quantized = type(model).from_pretrained(tmp_path, quantization_config=TrainWeightsConfig("int8"))
    assert converted_names(quantized) == set()
    model.add_adapter(LoraConfig(target_modules=["query_key_value"]))
    assert converted_names(model) == set()


@pytest.mark.slow
@pytest.mark.parametrize("in_shards", [True, False])
@pytest.mark.parametrize(
    ("name", "in_float"),
    [
        ("mixtral", "re:.*down_proj"),
        *exhaustive(("deepseek_v3", "re:.*experts.gate_up_proj"), ("vit", "re:.*fc1"), ("gpt_neox", "re:.*dense")),
    ],
)
def test_a_quantized_model_takes_what_its_own_files_rename_split_and_merge(
    tmp_path: Path, name: str, in_float: str, in_shards: bool
) -> None:
    model = ARCHITECTURES[name].build()
    quantize_(model, TrainWeightsConfig("int8", modules_to_not_convert=[in_float]))
    model.save_pretrained(tmp_path, max_shard_size="20KB" if in_shards else "1GB")
    expected = values(model)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            for stored in tensor.tensors.values() if isinstance(tensor, QuantizedTensor) else [tensor]:
                stored.zero_()
    if in_shards:
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
        load_sharded_checkpoint(model, str(tmp_path), strict=False)
    else:
        result = model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
        assert result.unexpected_keys == []
    assert_equal(values(model), expected)


@pytest.mark.slow
def test_a_renaming_that_leads_astray_by_the_base_models_prefix_is_followed_as_a_load_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ARCHITECTURES["llama"].build()
    quantize_(model, "int8")
    model.save_pretrained(tmp_path)
    expected = values(model)
    everything_below = [WeightRenaming("^", "model.")]
    monkeypatch.setattr(model, "_weight_conversions", everything_below, raising=False)
    tensors = {name.removeprefix("model."): each for name, each in load_file(tmp_path / "model.safetensors").items()}
    torch.nn.init.zeros_(model.get_parameter("lm_head.weight"))
    torch.nn.init.zeros_(model.get_parameter("model.norm.weight"))
    assert model.load_state_dict(tensors, strict=False).unexpected_keys == []
    assert_equal(values(model), expected)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor.clone()
        for name, tensor in model.state_dict().items()
    }


@pytest.mark.slow
def test_a_model_takes_the_files_of_one_that_named_its_weights_otherwise(tmp_path: Path) -> None:
    model = ARCHITECTURES["mixtral"].build()
    quantize_(model, "int8")
    gate = "model.layers.1.mlp.gate.weight"
    expected = model.get_parameter(gate).detach().clone()
    for original in (True, False):
        model.save_pretrained(tmp_path, save_original_format=original)
        torch.nn.init.zeros_(model.get_parameter(gate))
        model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
        assert torch.equal(model.get_parameter(gate), expected)


def test_names_that_transformers_does_not_save_are_told() -> None:
    model = ARCHITECTURES["llama"].build()
    assert names_not_saved(model) == set()
    model._keys_to_ignore_on_save = [NAME]
    assert names_not_saved(model) == {NAME}
    model._keys_to_ignore_on_save = None
    assert names_not_saved(model) == set()


@pytest.mark.slow
def test_where_transformers_does_not_tell_them_all_tensors_are_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hasattr(PreTrainedModel, "_keys_to_ignore_on_save")
    model = reloaded("llama", tmp_path)
    export_compressed_tensors(model, tmp_path / "expected")
    del model._keys_to_ignore_on_save
    monkeypatch.delattr(PreTrainedModel, "_keys_to_ignore_on_save")
    export_compressed_tensors(model, tmp_path / "exported")
    exported, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("exported", "expected"))
    assert exported.keys() == expected.keys()


def test_an_offloaded_parameter_is_fetched() -> None:
    model = ARCHITECTURES["llama"].build()
    expected = model.get_parameter(NAME).detach().clone()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.get_parameter(NAME).is_meta
    assert torch.equal(load_offloaded(model, NAME), expected)


def test_the_files_of_a_save_are_written_by_a_function_in_this_thread_alone(tmp_path: Path) -> None:
    model, written = ARCHITECTURES["llama"].build(), []

    def write(tensors: dict[str, Tensor], file: str, metadata: dict[str, str]) -> None:
        written.append((set(tensors), Path(file).name, metadata))

    with writing_files_by(write):
        other = threading.Thread(target=model.save_pretrained, args=(tmp_path / "elsewhere",))
        other.start()
        other.join()
        assert written == []
        model.save_pretrained(tmp_path / "here")
    names = load_file(tmp_path / "elsewhere" / "model.safetensors").keys()
    assert written == [(names, "model.safetensors", {"format": "pt"})]
    assert not (tmp_path / "here" / "model.safetensors").exists()
    model.save_pretrained(tmp_path / "after")
    assert load_file(tmp_path / "after" / "model.safetensors").keys() == names


def test_where_no_function_can_write_the_files_they_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ARCHITECTURES["llama"].build()
    quantize_(model, TrainWeightsConfig("int8"))
    model.save_pretrained(tmp_path / "by_a_function", max_shard_size="32KB")
    monkeypatch.setattr("hf_trainweights.models.host.checkpoints._SAVE_FILE", "not_there")
    model.save_pretrained(tmp_path / "as_ever", max_shard_size="32KB")
    one, other = (sorted((tmp_path / name).iterdir()) for name in ("by_a_function", "as_ever"))
    assert len(one) > 4
    assert [(path.name, path.read_bytes()) for path in one] == [(path.name, path.read_bytes()) for path in other]


def test_the_code_of_a_model_is_copied_and_named(tmp_path: Path) -> None:
    class OwnModel(type(ARCHITECTURES["llama"].build())):
        _auto_class = "AutoModel"

    model = OwnModel(ARCHITECTURES["llama"].build().config)
    save_remote_code(model, tmp_path, model.config)
    assert (tmp_path / Path(__file__).name).is_file()
    assert model.config.auto_map == {"AutoModel": f"{Path(__file__).stem}.OwnModel"}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("core_model_loading.revert_weight_conversion", lambda model: checkpoint_tensors(model, {})),
        ("integrations.accelerate.load_offloaded_parameter", lambda model: load_offloaded(model, NAME)),
        ("dynamic_module_utils.custom_object_save", lambda model: save_remote_code(model, Path(), model.config)),
    ],
)
def test_a_function_that_is_missing_is_named_with_the_versions_that_have_it(
    name: str, call: Callable[[nn.Module], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(f"transformers.{name}")
    with pytest.raises(UnsupportedError, match=rf"^transformers\.{name}: expected transformers>=5\.17.*pip install"):
        call(ARCHITECTURES["llama"].build())
