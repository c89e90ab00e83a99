"""An export is read by others, to the same weights; it is whole or not there, and takes no float copy of a model."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, outputs
from covering import exhaustive
from helpers import contents
from oldest_transformers import IS_OLDEST, not_by_5_17
from safetensors.torch import load_file
from stock_reader import StockReader
from torch import nn
from transformers import PreTrainedModel

from hf_trainweights import TrainWeightsConfig, export_compressed_tensors, quantize_
from hf_trainweights.errors import ConfigError, SaveError, UnsupportedError
from hf_trainweights.formats.base import Format
from hf_trainweights.tensor.dispatch import FALLBACKS

pytestmark = pytest.mark.slow  # the process that reads takes seconds to start

INT4 = {"format": "int4", "group_size": 32}
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "int8_g32": {"format": "int8", "group_size": 32},
    "int4_g32": INT4,
    "int4_g64": {"format": "int4", "group_size": 64},
    # Rows of 64 elements fall back to int8, and rows of 128 do not.
    "int4_g128": {"format": "int4", "group_size": 128},
    "float8": {"format": "float8_e4m3"},
    "coded": {"format": "coded", "bits": 3.5},
    "mixed": INT4 | {"overrides": {"re:.*(o_proj|experts.*)": "int8", "re:.*v_proj": "float8_e4m3", "lm_head": "int8"}},
}


# What docs/export/compressed_tensors.md says that the oldest supported Transformers does not read, or not exactly.
NOT_BY_5_17 = not_by_5_17("Transformers 5.17 initializes T5's dequantized Linears by name")


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    return quantize_on_load(tmp_path / "float", "llama", INT4)


def quantize_on_load(
    directory: Path, architecture: str, config: dict[str, Any], dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    ARCHITECTURES[architecture].build(dtype).save_pretrained(directory)
    auto_class = ARCHITECTURES[architecture].auto_class
    return auto_class.from_pretrained(directory, dtype="auto", quantization_config=TrainWeightsConfig(**config))


def assert_reads_the_same(
    reader: StockReader, directory: Path, model: PreTrainedModel, architecture: str, dequantize: bool = False
) -> None:
    """Check that what a stock process computes is what the dequantized model does; `model` is float afterwards."""
    inputs = ARCHITECTURES[architecture].inputs(model)
    actual = reader.outputs(directory, inputs, dequantize)
    model.dequantize()
    expected = outputs(model, inputs)
    assert expected
    assert [tensor.dtype for tensor in actual] == [tensor.dtype for tensor in expected]
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("architecture", ["llama", "llama_tied", "qwen3_moe"])
def test_stock_transformers_computes_the_same(
    tmp_path: Path, reader: StockReader, architecture: str, name: str, dtype: torch.dtype
) -> None:
    if IS_OLDEST and (architecture, name, dtype) == ("qwen3_moe", "float8", torch.float32):
        pytest.skip("Transformers 5.17 casts float8 experts to bfloat16")
    config = dict(FORMATS[name])
    if architecture == "llama_tied" and name == "mixed":
        config["overrides"] = {key: value for key, value in config["overrides"].items() if key != "lm_head"}
    if architecture == "qwen3_moe" and name == "int4_g128":
        # One expert weight has rows of 64 elements, the other of 128: they would have two formats.
        config["overrides"] = {"re:.*experts.*": INT4}
    model = quantize_on_load(tmp_path / "float", architecture, config, dtype)
    export_compressed_tensors(model, tmp_path / "out")
    assert_reads_the_same(reader, tmp_path / "out", model, architecture)


@pytest.mark.parametrize(
    "architecture",
    ["mixtral", "gpt_neox", "whisper", "clip", *exhaustive("deepseek_v3", "bert", "distilbert", "vit")],
)
def test_stock_transformers_reads_other_architectures(tmp_path: Path, reader: StockReader, architecture: str) -> None:
    model = quantize_on_load(tmp_path / "float", architecture, INT4)
    export_compressed_tensors(model, tmp_path / "out")
    assert_reads_the_same(reader, tmp_path / "out", model, architecture)


@pytest.mark.covering(1)
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", pytest.param("t5", marks=NOT_BY_5_17)])
@pytest.mark.parametrize("name", ["int8", "int4_g32", "float8"])
def test_stock_transformers_dequantizes_while_it_loads(
    tmp_path: Path, reader: StockReader, architecture: str, name: str
) -> None:
    model = quantize_on_load(tmp_path / "float", architecture, FORMATS[name], torch.bfloat16)
    export_compressed_tensors(model, tmp_path / "out")
    assert_reads_the_same(reader, tmp_path / "out", model, architecture, dequantize=True)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_shards_are_read(tmp_path: Path, reader: StockReader, architecture: str) -> None:
    model = quantize_on_load(tmp_path / "float", architecture, INT4)
    export_compressed_tensors(model, tmp_path / "out", max_shard_size="40KB")
    shards = sorted((tmp_path / "out").glob("model-*-of-*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(shards) > 2
    sizes = [sum(tensor.nbytes for tensor in load_file(shard).values()) for shard in shards]
    assert max(sizes) <= 40_000
    assert index["metadata"]["total_size"] == sum(sizes)
    assert_reads_the_same(reader, tmp_path / "out", model, architecture)


@pytest.mark.parametrize("size", ["1B", "many", "infGB", None])
def test_a_shard_size_that_is_none_is_refused_and_leaves_nothing(
    tmp_path: Path, model: PreTrainedModel, size: Any
) -> None:
    with pytest.raises(ConfigError, match=f"^max_shard_size: expected bytes, or a text such as .*, found {size!r}"):
        export_compressed_tensors(model, tmp_path / "out", max_shard_size=size)
    assert list(tmp_path.glob("out/*")) == []


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("options", [{}, {"safe_serialization": False}], ids=["safetensors", "bin"])
def test_a_directory_gives_the_files_of_its_model(tmp_path: Path, architecture: str, options: dict[str, Any]) -> None:
    model = quantize_on_load(tmp_path / "float", architecture, INT4)
    model.save_pretrained(tmp_path / "saved", **options)
    export_compressed_tensors(model, tmp_path / "of_model")
    export_compressed_tensors(tmp_path / "saved", tmp_path / "of_directory")
    assert contents(tmp_path / "of_directory") == contents(tmp_path / "of_model")


def test_a_model_quantized_in_place_gives_the_same_files(tmp_path: Path) -> None:
    loaded = quantize_on_load(tmp_path / "float", "qwen3_moe", INT4)
    in_place = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float")
    quantize_(in_place, TrainWeightsConfig(**INT4))
    export_compressed_tensors(loaded, tmp_path / "of_loaded")
    export_compressed_tensors(in_place, tmp_path / "of_in_place")
    assert contents(tmp_path / "of_in_place") == contents(tmp_path / "of_loaded")


def test_what_lies_beside_the_weights_of_a_directory_is_copied(tmp_path: Path, model: PreTrainedModel) -> None:
    model.save_pretrained(tmp_path / "saved")
    copied = {"tokenizer.json": "{}", "vocab.txt": "a", "spiece.model": "b", "chat_template.jinja": "c"}
    left = {"README.md": "x", "optimizer.pt": "x", "training_args.bin": "x", "trainer_state.json": "{}"}
    for name, text in (copied | left).items():
        (tmp_path / "saved" / name).write_text(text)
    export_compressed_tensors(tmp_path / "saved", tmp_path / "out")
    files = contents(tmp_path / "out")
    assert {name: files[name].decode() for name in copied} == copied
    assert files.keys() == {"config.json", "generation_config.json", "model.safetensors", *copied}


def test_the_model_is_as_before(tmp_path: Path, model: PreTrainedModel) -> None:
    inputs = ARCHITECTURES["llama"].inputs(model)
    config, expected = model.config.to_dict(), outputs(model, inputs)
    export_compressed_tensors(model, tmp_path / "out")
    assert model.config.to_dict() == config
    assert all(torch.equal(a, b) for a, b in zip(outputs(model, inputs), expected, strict=True))


def test_no_weight_is_dequantized(tmp_path: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(Format, "dequantize", refuse)
    before = FALLBACKS.copy()
    export_compressed_tensors(model, tmp_path / "out")
    assert before == FALLBACKS


def test_weight_files_of_another_save_are_removed(tmp_path: Path, model: PreTrainedModel) -> None:
    model.save_pretrained(tmp_path / "out", max_shard_size="32KB")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    export_compressed_tensors(model, tmp_path / "out")
    assert contents(tmp_path / "out").keys() == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "notes.txt",
    }


def test_a_failure_leaves_what_was_there(
    tmp_path: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    model.save_pretrained(tmp_path / "out")
    before = contents(tmp_path / "out")
    monkeypatch.setattr("hf_trainweights.files.safetensors_file.write_safetensors", fail)
    with pytest.raises(SaveError, match="expected enough free disk space"):
        export_compressed_tensors(model, tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_what_is_refused_writes_nothing(tmp_path: Path) -> None:
    model = quantize_on_load(tmp_path / "float", "gpt2", INT4)
    with pytest.raises(UnsupportedError, match="keeps transposed"):
        export_compressed_tensors(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a model that Transformers loads"):
        export_compressed_tensors(tmp_path, tmp_path / "out")


def test_a_directory_of_an_unknown_class_is_refused(tmp_path: Path, model: PreTrainedModel) -> None:
    model.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config | {"architectures": ["MyLlama"]}))
    with pytest.raises(ConfigError, match="found MyLlama"):
        export_compressed_tensors(tmp_path / "saved", tmp_path / "out")


def test_a_float_model_is_refused(tmp_path: Path) -> None:
    model = ARCHITECTURES["llama"].build()
    model.save_pretrained(tmp_path / "float")
    for source in (model, tmp_path / "float"):
        with pytest.raises(ConfigError, match="expected quantized weights, found none"):
            export_compressed_tensors(source, tmp_path / "out")


def test_a_module_that_is_no_model_of_transformers_is_refused(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(64, 64))
    quantize_(module, "int8")
    with pytest.raises(UnsupportedError, match="expected a model of Transformers, found Sequential"):
        export_compressed_tensors(module, tmp_path / "out")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_code_of_a_model_that_is_not_in_transformers_comes_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "modeling_mine.py"
    file.write_text("from transformers import LlamaForCausalLM\n\nclass Mine(LlamaForCausalLM):\n    pass\n")
    spec = importlib.util.spec_from_file_location("modeling_mine", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "modeling_mine", module)
    spec.loader.exec_module(module)
    module.Mine.register_for_auto_class("AutoModelForCausalLM")
    model = module.Mine(ARCHITECTURES["llama"].build().config)
    quantize_(model, TrainWeightsConfig(**INT4))
    export_compressed_tensors(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["auto_map"] == {"AutoModelForCausalLM": "modeling_mine.Mine"}
    assert (tmp_path / "out" / file.name).read_text() == file.read_text()
