"""A saved model quantized into another directory: its weights, what is copied beside them, and what is refused."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from covering import exhaustive
from fresh_process import run_command
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, ResNetConfig, ResNetModel

from hf_trainweights import TrainWeightsConfig, import_directory
from hf_trainweights.errors import ConfigError, CorruptFileError, QuantizationError, SaveError, UnsupportedError
from hf_trainweights.exports import export_compressed_tensors, export_onnx
from hf_trainweights.models.directory import dequantize_directory, push_directory, quantize_directory
from hf_trainweights.models.loading.saved_models import load_saved, load_tokenizer, saved_parameter_names
from hf_trainweights.models.saving import new_directories

INT4 = {"format": "int4", "group_size": 32}
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "merges.txt", "spiece.model", "preprocessor_config.json")
LEFT_BEHIND = ("README.md", "optimizer.pt", "tf_model.h5", "trainer_state.json", "trainweights.json", ".gitattributes")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    ARCHITECTURES["llama"].build().save_pretrained(tmp_path / "float")
    return tmp_path / "float"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("llama_tied", {"include_embeddings": True}),
        ("qwen3_moe", {}),
        ("mixtral", {}),
        ("gpt_oss", {}),
        ("gpt2", {"include_embeddings": True}),
        *exhaustive(("gpt_neox", {}), ("t5", {"overrides": {"re:.*wo": None}}), ("clip", {})),
    ],
)
def test_it_writes_what_loading_and_saving_writes(name: str, options: dict[str, object], tmp_path: Path) -> None:
    architecture = ARCHITECTURES[name]
    architecture.build(torch.bfloat16).save_pretrained(tmp_path / "float", max_shard_size="100KB")
    assert len(list((tmp_path / "float").glob("*.safetensors"))) > 1
    summary = quantize_directory(tmp_path / "float", tmp_path / "out", TrainWeightsConfig(**INT4, **options))
    config = TrainWeightsConfig(**INT4, **options)
    model = architecture.auto_class.from_pretrained(tmp_path / "float", dtype="auto", quantization_config=config)
    model.save_pretrained(tmp_path / "expected")
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    assert str(summary) == str(model.hf_quantizer.summary())


@pytest.mark.slow
def test_the_head_that_was_saved_is_kept(tmp_path: Path) -> None:
    ARCHITECTURES["bert"].build().save_pretrained(tmp_path / "float")
    quantize_directory(tmp_path / "float", tmp_path / "out", TrainWeightsConfig("int8"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    assert "cls.predictions.transform.dense._weight_qdata" in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.slow
def test_tokenizer_and_processor_are_copied_and_the_rest_is_not(llama: Path, tmp_path: Path) -> None:
    for name in (*COMPANIONS, *LEFT_BEHIND):
        (llama / name).write_text(name)
    (llama / "additional_chat_templates").mkdir()
    (llama / "additional_chat_templates" / "rag.jinja").write_text("rag")
    (llama / "2_Dense").mkdir()
    (llama / "2_Dense" / "model.safetensors").write_text("of a module behind the model")
    (llama / "checkpoint-10").mkdir()
    before = contents(llama)
    quantize_directory(llama, tmp_path / "out", TrainWeightsConfig("int8"))
    written = contents(tmp_path / "out")
    assert {name: written.get(name) for name in COMPANIONS} == {name: name.encode() for name in COMPANIONS}
    assert written["additional_chat_templates/rag.jinja"] == b"rag"
    assert written["2_Dense/model.safetensors"] == b"of a module behind the model"
    assert written.keys().isdisjoint(LEFT_BEHIND)
    assert not (tmp_path / "out" / "checkpoint-10").exists()
    assert json.loads(written["generation_config.json"])["bos_token_id"] == 1
    assert contents(llama) == before


def test_a_directory_with_anything_in_it_is_not_written_to(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").touch()
    for out in (tmp_path / "out", tmp_path / "out" / "thesis.txt", llama):
        before = contents(tmp_path)
        with pytest.raises(ConfigError, match="expected a new or empty directory"):
            quantize_directory(llama, out, TrainWeightsConfig("int8"))
        assert contents(tmp_path) == before


def test_what_lies_where_calibration_keeps_its_blocks_stays(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "out.calibration").mkdir()
    (tmp_path / "out.calibration" / "texts.txt").touch()
    quantize_directory(llama, tmp_path / "out", "int8")
    assert (tmp_path / "out.calibration" / "texts.txt").exists()


@pytest.mark.slow
def test_a_quantized_model_is_refused(llama: Path, tmp_path: Path) -> None:
    quantize_directory(llama, tmp_path / "int8", TrainWeightsConfig("int8"))
    with pytest.raises(ConfigError, match="expected a float model, found a quantization_config"):
        quantize_directory(tmp_path / "int8", tmp_path / "out", TrainWeightsConfig(**INT4))


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        lambda source, out: quantize_directory(source, out, "int8"),
        lambda source, out: quantize_directory(source, out, INT4, calibration=["a text"]),
        dequantize_directory,
        import_directory,
        export_compressed_tensors,
        lambda source, out: export_onnx(source, out, task="text-generation"),
        lambda source, out: push_directory(source, "me/model"),
    ],
)
def test_a_model_with_an_adapter_is_refused(call: Callable[..., Any], is_alone: bool, llama: Path) -> None:
    # Transformers would apply the adapter and save nothing else.
    (llama / "adapter_config.json").write_text("{}")
    if is_alone:
        (llama / "config.json").unlink()
    before = contents(llama.parent)
    with pytest.raises(ConfigError, match=r"expected a model by itself, found an adapter \(adapter_config\.json\)"):
        call(llama, llama.with_name("out"))
    assert contents(llama.parent) == before
    assert not llama.with_name("out").exists()


def add_tensor(folder: Path, name: str, value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: torch.full((64,), value)}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.norm.bias", "model.layers.1.mlp.up_proj.lora_A.weight"]
)
@pytest.mark.parametrize("call", [quantize_directory, lambda source, out, _: load_saved(source)])
def test_a_tensor_that_a_layer_has_no_place_for_is_refused_unless_it_is_zero(
    call: Callable[..., Any], name: str, llama: Path, tmp_path: Path
) -> None:
    add_tensor(llama, name, 0.5)
    with pytest.raises(UnsupportedError, match=rf"places in LlamaForCausalLM .* found none for {re.escape(name)}"):
        call(llama, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()
    add_tensor(llama, name, 0)
    call(llama, tmp_path / "out", "int8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("bert", "cls.seq_relationship.weight"),
        ("bert", "bert.pooler.dense.bias"),
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("gpt_neox", "gpt_neox.layers.0.attention.masked_bias"),
        ("qwen3_moe", "mtp.fc.weight"),
    ],
)
def test_parts_of_other_tasks_and_old_buffers_are_left_out(architecture: str, name: str, tmp_path: Path) -> None:
    ARCHITECTURES[architecture].build().save_pretrained(tmp_path / "float")
    add_tensor(tmp_path / "float", name, 0.5)
    quantize_directory(tmp_path / "float", tmp_path / "out", "int8")
    assert name not in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("leaf", ["qweight", "weight_packed", "weight_scale_inv", "SCB"])
@pytest.mark.parametrize(
    "call",
    [
        quantize_directory,
        lambda source, _, form: load_saved(source),
        lambda source, _, form: LlamaForCausalLM.from_pretrained(source, quantization_config=TrainWeightsConfig(form)),
    ],
)
def test_weights_that_another_quantizer_wrote_are_refused(
    call: Callable[..., Any], leaf: str, llama: Path, tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(llama / "model.safetensors")
    tensors[f"{name.removesuffix('weight')}{leaf}"] = tensors.pop(name).to(torch.int32)
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"found one that is already quantized, with .*up_proj\.{leaf}"):
        call(llama, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()


def test_missing_weights_are_an_error_and_not_random(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"none for model\.layers\.1\.mlp\.up_proj\.weight"):
        quantize_directory(llama, tmp_path / "out", TrainWeightsConfig("int8"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("architectures", [None, ["MyOwnModel"]])
def test_a_model_of_no_class_of_transformers_is_refused(architectures: list[str] | None, llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "architectures": architectures}))
    with pytest.raises(ConfigError, match="expected a class of Transformers"):
        load_saved(llama)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a model that Transformers loads"):
        load_saved(tmp_path)


def test_weights_that_cannot_be_quantized_leave_nothing_behind(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    with pytest.raises(QuantizationError, match="NaN"):
        quantize_directory(llama, tmp_path / "out", TrainWeightsConfig("int8"))
    assert not (tmp_path / "out").exists()


def test_a_failed_save_names_its_target_and_leaves_nothing_behind(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_trainweights.files.safetensors_file._write_pieces", full)
    with pytest.raises(SaveError, match="No space left") as caught:
        quantize_directory(llama, tmp_path / "out", TrainWeightsConfig("int8"))
    assert caught.value.where == str(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_cannot_be_read_is_named_and_nothing_is_left_behind(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unreadable(io.BytesIO):
        def read(self, *_: object) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    (llama / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(new_directories, "open_regular_file", lambda path: Unreadable())
    with pytest.raises(ConfigError, match=r"/float/\w+\.json: expected .*, found .*Input/output error\. Check"):
        quantize_directory(llama, tmp_path / "out", TrainWeightsConfig("int8"))
    assert [path.name for path in tmp_path.iterdir()] == ["float"]


def test_a_file_that_does_not_fit_is_an_error_of_the_target(llama: Path, tmp_path: Path) -> None:
    (llama / "tokenizer.json").write_bytes(bytes(1 << 20))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, hard))
    try:
        with pytest.raises(SaveError, match=r"/out: expected enough free disk space, found .* It is as it was\. Free"):
            quantize_directory(llama, tmp_path / "out", TrainWeightsConfig("int8"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["float"]


def test_a_target_that_cannot_be_looked_at_is_named(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(SaveError, match=r"expected .*, found .*File name too long"):
        quantize_directory(llama, tmp_path / ("o" * 300), TrainWeightsConfig("int8"))
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="expected a new or empty directory, found something there"):
        quantize_directory(llama, tmp_path / "loop", TrainWeightsConfig("int8"))


def test_a_file_in_place_of_a_directory_is_named_with_its_directory(llama: Path, tmp_path: Path) -> None:
    told = rf"expected the directory of a model, found a file\. Give {re.escape(str(llama))}\."
    for name in ("config.json", "model.safetensors"):
        with pytest.raises(ConfigError, match=told):
            quantize_directory(llama / name, tmp_path / "out", "int8")
        with pytest.raises(ConfigError, match=told):
            import_directory(llama / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (shutil.rmtree, "found nothing there. Give the directory of a saved model"),
    "no weights": (
        lambda source: (source / "model.safetensors").unlink(),
        "found Error no file named",
    ),
    "FIFO as weights": (lambda source: put_fifo(source / "model.safetensors"), "no file named model.safetensors"),
    "FIFO as config": (lambda source: put_fifo(source / "config.json"), "found Unrecognized model"),
    # Transformers 5.17 says TypeError here, later ones Unrecognized model.
    "config of a list": (
        lambda source: (source / "config.json").write_text("[]"),
        "expected a model that Transformers loads, found",
    ),
    "config of odd type": (
        lambda source: (source / "config.json").write_text('{"model_type": []}'),
        "found TypeError:",
    ),
    "config of bytes": (lambda source: (source / "config.json").write_bytes(b"\xff"), "is not a valid JSON file"),
    "index of a list": (lambda source: put_index(source, []), "index.json: expected a weight_map"),
    "index out of it": (lambda source: put_index(source, {"weight_map": {"a": "../a.bin"}}), "found '../a.bin'"),
    "no metadata": (lambda source: put_index(source, {"weight_map": {"a": "a.bin"}}), "found KeyError: 'metadata'"),
}


def put_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def put_index(source: Path, content: object) -> None:
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(json.dumps(content))


@pytest.mark.slow
@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_source_is_a_typed_error_that_names_it(name: str, llama: Path, tmp_path: Path) -> None:
    spoil, expected = SPOILED[name]
    spoil(llama)
    with pytest.raises((ConfigError, CorruptFileError), match=re.escape(expected)) as raised:
        quantize_directory(llama, tmp_path / "out", TrainWeightsConfig("int8"))
    assert raised.value.where.startswith(str(llama))
    assert not (tmp_path / "out").exists()


def test_only_regular_files_are_copied(llama: Path, tmp_path: Path) -> None:
    os.mkfifo(llama / "merges.txt")
    (llama / "vocab.txt").symlink_to("/dev/zero")
    (llama / "loop").symlink_to("loop")
    (llama / "additional_chat_templates").mkdir()
    (llama / "additional_chat_templates" / "again").symlink_to(".")
    (llama / "tokenizer.json").write_text("{}")
    quantize_directory(llama, tmp_path / "out", TrainWeightsConfig("int8"))
    expected = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "trainweights_files.json",
    }
    assert {path.name for path in (tmp_path / "out").rglob("*")} == expected


@pytest.mark.slow
def test_a_model_in_the_cache_of_the_hub_is_found_by_its_name(llama: Path, tmp_path: Path) -> None:
    (llama / "tokenizer.json").write_text("{}")
    repository = tmp_path / "hub" / "models--me--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    llama.rename(repository / "snapshots" / ("0" * 40))
    environment = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = run_command("quantize", "me/tiny", "out", "--format", "int8", cwd=tmp_path, environment=environment)
    assert (done.returncode, done.stderr) == (0, "")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= names


def test_a_tokenizer_that_is_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"calibration: expected a tokenizer in .*, found none that loads\. Save one"):
        load_tokenizer(tmp_path, "calibration", "Save one.")


def test_parameters_are_told_from_buffers_by_the_configuration_alone(tmp_path: Path) -> None:
    model = ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic"))
    model.config.architectures = ["ResNetModel"]
    model.config.save_pretrained(tmp_path)
    names = saved_parameter_names(tmp_path)
    assert names == {name for name, _ in model.named_parameters()}
    assert any("running_mean" in name for name in model.state_dict().keys() - names)


def test_tied_parameters_have_each_of_their_names(llama: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "tied")
    names = saved_parameter_names(tmp_path / "tied")
    assert names is not None
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= names


@pytest.mark.parametrize(
    "values",
    [{"architectures": None}, {"architectures": ["MyOwnModel"]}, {"hidden_size": "x"}, {"num_attention_heads": 0}],
)
def test_without_a_class_of_transformers_and_its_values_no_parameters_are_told(
    values: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    assert saved_parameter_names(tmp_path) is None
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, **values}))
    assert saved_parameter_names(llama) is None
