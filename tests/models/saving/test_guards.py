"""A quantized model fails to load where the package is not imported, and nothing else changes by that."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, of_each_family, outputs
from covering import exhaustive
from safetensors.torch import load_file, save_file
from stock_reader import StockReader
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_, quantize_directory
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.exports import export_compressed_tensors
from hf_trainweights.tensor.guards import NOTICE_NAME, guarded_names, is_guard, make_guard

SERIALIZATIONS: dict[str, dict[str, Any]] = {
    "safetensors": {},
    "bin": {"safe_serialization": False},
    "sharded": {"max_shard_size": "32KB"},
    "sharded_bin": {"safe_serialization": False, "max_shard_size": "32KB"},
}
EXPERTS = {r"re:.*\.experts.*": "int8", "re:.*(self_attn|mlp).*": None}
# Classes that take a part of a checkpoint, or put something onto it.
OTHER_CLASSES = {
    "llama": ["LlamaModel", "LlamaForSequenceClassification"],
    "gpt2": ["GPT2ForSequenceClassification"],
    "bert": ["BertForSequenceClassification"],
    "t5": ["T5EncoderModel", "T5Model"],
    "whisper": ["WhisperForCausalLM", "WhisperForAudioClassification"],
    "vit": ["ViTModel"],
    "clip": ["CLIPTextModel", "CLIPVisionModel", "CLIPTextModelWithProjection"],
}


def quantized(name: str, **options: Any) -> PreTrainedModel:
    model = ARCHITECTURES[name].build()
    quantize_(model, TrainWeightsConfig("int8", **options))
    return model


def tensors_of(directory: Path) -> dict[str, Tensor]:
    files = sorted(path for path in directory.glob("*model*") if path.suffix in {".safetensors", ".bin"})
    shards = [load_file(file) if file.suffix == ".safetensors" else torch.load(file) for file in files]
    return {name: tensor for shard in shards for name, tensor in shard.items()}


def unpickled(model: PreTrainedModel) -> PreTrainedModel:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize("copied", [unpickled, copy.deepcopy])
def test_a_copy_of_a_model_writes_the_same_files(
    copied: Callable[[PreTrainedModel], PreTrainedModel], tmp_path: Path
) -> None:
    model = quantized("llama")
    model.save_pretrained(tmp_path / "itself")
    copied(model).save_pretrained(tmp_path / "copy")
    files = [{file.name: file.read_bytes() for file in (tmp_path / each).iterdir()} for each in ("itself", "copy")]
    assert files[0] == files[1]


def guards_of(directory: Path) -> set[str]:
    return {name for name, tensor in tensors_of(directory).items() if is_guard(tensor)}


def assert_refused(told: str) -> None:
    assert NOTICE_NAME in told
    assert "RuntimeError: You set `ignore_mismatched_sizes` to `False`, thus raising an error." in told


def load(cls: Any, directory: Path, **options: Any) -> PreTrainedModel:
    model, info = cls.from_pretrained(directory, output_loading_info=True, **options)
    assert {problem: keys for problem, keys in info.items() if keys} == {}
    return model


# ---- without the package


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("serialization", SERIALIZATIONS)
@pytest.mark.parametrize("include_embeddings", [False, True], ids=["linears", "embeddings_too"])
@pytest.mark.parametrize("name", of_each_family())
def test_without_the_package_every_class_refuses_the_model(
    name: str, include_embeddings: bool, serialization: str, reader: StockReader, tmp_path: Path
) -> None:
    architecture, model = ARCHITECTURES[name], quantized(name, include_embeddings=include_embeddings)
    model.save_pretrained(tmp_path, **SERIALIZATIONS[serialization])
    classes = {type(model).__name__, architecture.auto_class.__name__, "AutoModel"}
    for cls in sorted(classes | set(OTHER_CLASSES.get(name, ()))):
        assert_refused(reader.refusal(tmp_path, cls))


@pytest.mark.slow
@pytest.mark.parametrize("name", of_each_family(("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")))
def test_a_model_in_which_only_experts_are_quantized_is_refused(name: str, reader: StockReader, tmp_path: Path) -> None:
    model = quantized(name, overrides=EXPERTS)
    assert {key.rpartition(".")[0].rpartition(".")[2] for key in quantized_names(model)} == {"experts"}
    model.save_pretrained(tmp_path)
    for cls in (type(model).__name__, "AutoModel"):
        assert_refused(reader.refusal(tmp_path, cls))


def quantized_names(model: PreTrainedModel) -> list[str]:
    return [name for name, weight in model.named_parameters() if isinstance(weight, QuantizedTensor)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2"])
def test_a_model_in_which_only_embeddings_are_quantized_is_refused(
    name: str, reader: StockReader, tmp_path: Path
) -> None:
    model = quantized(name, include_embeddings=True, overrides={r"re:.*(layers|h)\..*": None})
    assert all("layers" not in key and ".h." not in key for key in quantized_names(model))
    model.save_pretrained(tmp_path)
    for cls in (type(model).__name__, "AutoModel"):
        assert_refused(reader.refusal(tmp_path, cls))


@pytest.mark.slow
def test_a_base_model_is_refused_by_the_class_with_a_head(reader: StockReader, tmp_path: Path) -> None:
    model = ARCHITECTURES["llama"].build().model
    quantize_(model, TrainWeightsConfig("int8"))
    model.save_pretrained(tmp_path)
    for cls in ("AutoModel", "AutoModelForCausalLM"):
        assert_refused(reader.refusal(tmp_path, cls))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["text-generation", "feature-extraction"])
def test_a_pipeline_refuses_the_model(task: str, reader: StockReader, tmp_path: Path) -> None:
    quantized("llama").save_pretrained(tmp_path)
    assert_refused(reader.refusal(tmp_path, task))


def quantize_a_directory(out: Path) -> None:
    ARCHITECTURES["llama"].build().save_pretrained(out / "float")
    quantize_directory(out / "float", out / "model", TrainWeightsConfig("int8"))


def save_by_a_trainer(out: Path) -> None:
    arguments = TrainingArguments(str(out), report_to=[], use_cpu=True)
    trainer = Trainer(model=ARCHITECTURES["llama"].build(), args=arguments)
    quantize_(trainer.model, TrainWeightsConfig("int8"))  # Trainer takes no quantized model without adapters
    trainer.save_model(str(out / "model"))


def save_a_given_state_dict(out: Path) -> None:
    model = quantized("llama")
    model.save_pretrained(out / "model", state_dict=model.state_dict())


def save_after_a_reload(out: Path) -> None:
    quantized("llama").save_pretrained(out / "first")
    load(AutoModelForCausalLM, out / "first").save_pretrained(out / "model")


WRITERS = [quantize_a_directory, save_by_a_trainer, save_a_given_state_dict, save_after_a_reload]


@pytest.mark.slow
@pytest.mark.parametrize("write", WRITERS)
def test_every_writer_writes_guards(write: Callable[[Path], None], reader: StockReader, tmp_path: Path) -> None:
    write(tmp_path)
    assert guards_of(tmp_path / "model") == {NOTICE_NAME, "model.layers.0.self_attn.q_proj.weight"}
    assert_refused(reader.refusal(tmp_path / "model", "AutoModelForCausalLM"))


@pytest.mark.slow
def test_a_reader_that_ignores_sizes_is_not_stopped(reader: StockReader, tmp_path: Path) -> None:
    quantized("llama").save_pretrained(tmp_path)
    assert reader.refusal(tmp_path, "AutoModelForCausalLM", ignore_mismatched_sizes=True) == ""


# ---- with the package


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("serialization", SERIALIZATIONS)
@pytest.mark.parametrize("name", ["llama_tied", "gpt2", *exhaustive("llama", "qwen3_moe", "gpt_neox", "clip")])
def test_with_the_package_guards_are_not_seen(name: str, serialization: str, tmp_path: Path) -> None:
    architecture, model = ARCHITECTURES[name], quantized(name, include_embeddings=True)
    model.save_pretrained(tmp_path, **SERIALIZATIONS[serialization])
    assert len(guards_of(tmp_path)) >= 2
    for cls in (type(model), architecture.auto_class):
        reloaded = load(cls, tmp_path)
        inputs = architecture.inputs(model)
        assert all(map(torch.equal, outputs(reloaded, inputs), outputs(model, inputs)))
        assert reloaded.state_dict().keys() == model.state_dict().keys()


def test_a_base_model_loads_from_a_model_with_a_head(tmp_path: Path) -> None:
    model = quantized("llama", include_embeddings=True)
    model.save_pretrained(tmp_path)
    base, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert {problem: keys for problem, keys in info.items() if keys} == {"unexpected_keys": {"lm_head.weight"}}
    loaded, saved = (each.layers[0].self_attn.q_proj.weight for each in (base, model.model))
    assert torch.equal(loaded.qdata, saved.qdata)


def test_a_guard_is_one_zero_byte_in_the_place_of_the_first_weight_of_each_stack(tmp_path: Path) -> None:
    quantized("t5", include_embeddings=True).save_pretrained(tmp_path)
    stacks = {
        *("shared.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"),
        "decoder.block.0.layer.0.SelfAttention.q.weight",
    }
    tensors = tensors_of(tmp_path)
    assert guards_of(tmp_path) - {"lm_head.weight"} == {NOTICE_NAME} | stacks
    assert all(torch.equal(tensors[name], torch.zeros(1, dtype=torch.uint8)) for name in guards_of(tmp_path))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.layers.3.q.weight", "model.layers.4.q.weight"], ["model.layers.3.q.weight"]),
        (["a.layers.0.blocks.1.q.weight", "a.layers.0.mix.weight"], ["a.layers.0.blocks.1.q.weight"]),
        (["a.0.w", "b.0.w", "head.weight", "pooler.weight"], ["a.0.w", "b.0.w", "head.weight", "pooler.weight"]),
        # Its guard would be read before its stored tensors, whose names begin with an underscore.
        (["layers.0.W", "layers.0.w", "K"], ["layers.0.w"]),
        ([], []),
    ],
)
def test_one_weight_of_each_stack_is_guarded(names: list[str], expected: list[str]) -> None:
    assert guarded_names(names) == expected


@pytest.mark.slow
def test_a_dequantized_model_has_no_guards(reader: StockReader, tmp_path: Path) -> None:
    quantized("llama").save_pretrained(tmp_path / "quantized")
    model = load(AutoModelForCausalLM, tmp_path / "quantized")
    model.dequantize()
    model.save_pretrained(tmp_path / "float")
    assert guards_of(tmp_path / "float") == set()
    assert "quantization_config" not in json.loads((tmp_path / "float" / "config.json").read_text())
    assert reader.refusal(tmp_path / "float", "AutoModelForCausalLM") == ""


@pytest.mark.slow
def test_an_export_has_no_guards(tmp_path: Path) -> None:
    quantized("llama").save_pretrained(tmp_path / "quantized")
    export_compressed_tensors(load(AutoModelForCausalLM, tmp_path / "quantized"), tmp_path / "export")
    assert guards_of(tmp_path / "export") == set()


def test_a_model_takes_the_tensors_of_its_own_file_with_their_guards(tmp_path: Path) -> None:
    model = quantized("llama")
    model.save_pretrained(tmp_path)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            (weight.scale if isinstance(weight, QuantizedTensor) else weight).zero_()
    other.load_state_dict(tensors_of(tmp_path), strict=True)
    inputs = ARCHITECTURES["llama"].inputs(model)
    assert all(map(torch.equal, outputs(other, inputs), outputs(model, inputs)))


# ---- files that someone has edited


@pytest.mark.slow
@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize("cls", [AutoModelForCausalLM, AutoModel])
def test_a_guard_whose_weight_is_lost_is_an_error(cls: Any, ignore: bool, tmp_path: Path) -> None:
    quantized("llama").save_pretrained(tmp_path)
    kept = {name: tensor for name, tensor in tensors_of(tmp_path).items() if "0.self_attn.q_proj._" not in name}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    lost = r"model\.safetensors: expected the stored tensors of \S*layers\.0\.self_attn\.q_proj\.weight"
    with pytest.raises(CorruptFileError, match=lost):
        cls.from_pretrained(tmp_path, ignore_mismatched_sizes=ignore)


def test_a_weight_that_is_there_as_float_too_is_an_error(tmp_path: Path) -> None:
    quantized("llama").save_pretrained(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors_of(tmp_path) | {name: torch.zeros(128, 64)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CorruptFileError, match=r"expected model\.layers\.1\.mlp\.up_proj\.weight once"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.slow
def test_a_byte_in_a_float_model_is_no_guard(tmp_path: Path) -> None:
    model = ARCHITECTURES["llama"].build()
    model.model.register_buffer("observer_enabled", make_guard())
    quantize_(model, TrainWeightsConfig("int8"))
    model.save_pretrained(tmp_path)
    assert guards_of(tmp_path) >= {"model.observer_enabled"}
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["unexpected_keys"] == {"model.observer_enabled"}
    assert isinstance(loaded, transformers.LlamaForCausalLM)
