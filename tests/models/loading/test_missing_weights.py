"""A quantized weight that its checkpoint lacks is an error, and a new head is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from architectures import ARCHITECTURES
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    PreTrainedModel,
)
from transformers import AutoModelForSequenceClassification as Classifier

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.models.loading.stored_weights import saved_class


def save(name: str, directory: Path, *, include_embeddings: bool = False) -> PreTrainedModel:
    model = ARCHITECTURES[name].build()
    quantize_(model, TrainWeightsConfig("int8", include_embeddings=include_embeddings))
    model.save_pretrained(directory)
    return model


def remove(directory: Path, part: str) -> None:
    """Take the tensors away whose name holds a part."""
    tensors = load_file(directory / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if part not in name}
    assert len(kept) < len(tensors)
    save_file(kept, directory / "model.safetensors", {"format": "pt"})


def quantized(model: PreTrainedModel) -> set[str]:
    return {name for name, parameter in model.named_parameters() if isinstance(parameter, QuantizedTensor)}


@pytest.mark.slow
@pytest.mark.parametrize("cls", [AutoModelForCausalLM, AutoModel, Classifier])
def test_a_weight_of_the_saved_model_that_is_missing_is_named_by_every_class(cls: type, tmp_path: Path) -> None:
    save("llama", tmp_path)
    remove(tmp_path, "layers.0.mlp.up_proj._weight")
    with pytest.raises(CorruptFileError, match=r"none of \S*layers\.0\.mlp\.up_proj\.weight\. Tra"):
        cls.from_pretrained(tmp_path)


def test_of_many_the_first_are_named(tmp_path: Path) -> None:
    save("llama", tmp_path, include_embeddings=True)
    remove(tmp_path, "proj.")
    with pytest.raises(CorruptFileError, match=r"none of (\S+, ){2}\S+ and 11 more"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.slow
def test_missing_experts_are_named(tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path)
    remove(tmp_path, "experts._down_proj")
    with pytest.raises(CorruptFileError, match=r"none of .*experts\.down_proj"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_layers_that_only_the_config_has_are_named(tmp_path: Path) -> None:
    save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptFileError, match=r"none of model\.layers\.\d\.self_attn\.q_proj\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("include_embeddings", [False, True])
@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("llama", AutoModel),
        ("llama", Classifier),
        ("bert", AutoModelForQuestionAnswering),
        ("llama_tied", AutoModel),
        ("llama_tied", Classifier),
        ("bert", Classifier),
        ("bert", AutoModel),
        ("gpt2", Classifier),
    ],
)
def test_a_new_head_may_be_missing(name: str, cls: type, include_embeddings: bool, tmp_path: Path) -> None:
    save(name, tmp_path / "base", include_embeddings=include_embeddings)
    model = cls.from_pretrained(tmp_path / "base")
    assert quantized(model)
    model.save_pretrained(tmp_path / "again")
    assert quantized(cls.from_pretrained(tmp_path / "again")) == quantized(model)


@pytest.mark.slow
def test_a_base_model_may_get_a_head(tmp_path: Path) -> None:
    save("llama", tmp_path / "whole")
    AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert len(quantized(model)) == 14
    remove(tmp_path / "base", "layers.1.mlp.up_proj")
    with pytest.raises(CorruptFileError, match=r"none of model\.layers\.1\.mlp\.up_proj\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "base")


def architectures(*names: object) -> transformers.PretrainedConfig:
    config = transformers.LlamaConfig()
    # Without the check of Transformers 5.17.
    vars(config)["architectures"] = list(names)
    return config


@pytest.mark.parametrize(
    "name",
    [
        "pipeline",
        "AutoTokenizer",
        "logging",
        "PretrainedConfig",
        "PreTrainedModel",
        "BertModel",
        "set_seed",
        "",
        3,
        None,
        [],
    ],
)
def test_only_a_class_of_a_model_is_taken_from_a_config(name: object) -> None:
    assert saved_class(architectures(name))[1] is None
    assert saved_class(architectures("LlamaModel", name)) == ("LlamaModel", transformers.LlamaModel)


def test_architectures_that_are_no_list_name_no_class() -> None:
    config = architectures()
    for architecture in (64, True, {"LlamaModel": 1}, "LlamaModel"):
        vars(config)["architectures"] = architecture
        assert saved_class(config) == ("none", None)
