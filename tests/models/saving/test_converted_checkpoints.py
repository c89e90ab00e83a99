"""Models whose checkpoints join, split or rename weights are saved quantized and loaded again, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import DECODER, TEXT, VISION, randomize
from fresh_process import run_fresh
from oldest_transformers import not_by_5_17
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_trainweights import (
    QuantizedTensor,
    TrainWeightsConfig,
    dequantize_directory,
    export_compressed_tensors,
    quantize_,
    quantize_directory,
    verify_model,
)
from hf_trainweights.errors import UnsupportedError

NOT_BY_5_17 = not_by_5_17("Transformers 5.17 has not this class, or names its weights otherwise")
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "NomicBertModel": ("NomicBertConfig", TEXT),
    "JinaEmbeddingsV3Model": ("JinaEmbeddingsV3Config", TEXT),
    "GteModel": ("GteConfig", TEXT),
    "RadioModel": ("RadioConfig", VISION),
    "HrmTextForCausalLM": ("HrmTextConfig", DECODER),
    "PhimoeForCausalLM": ("PhimoeConfig", {**DECODER, **EXPERTS}),
    "Qwen3VLMoeTextModel": ("Qwen3VLMoeTextConfig", {**DECODER, **EXPERTS, "head_dim": 16}),
    "InternLM3": ("InternLM3Config", {**DECODER, "head_dim": 16}),
}
NEW = ("GteModel", "RadioModel", "InternLM3")
CASES = [pytest.param(name, marks=NOT_BY_5_17) if name in NEW else name for name in MODELS]
JOINED = [
    case for case, name in zip(CASES, MODELS, strict=True) if name in ("NomicBertModel", "GteModel", "RadioModel")
]


def make(name: str) -> PreTrainedModel:
    config_class, options = MODELS[name]
    config = getattr(transformers, config_class)(**options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = (
            getattr(transformers, name)(config)
            if hasattr(transformers, name)
            else AutoModelForCausalLM.from_config(config)
        )
        randomize(made)
    return made.eval()


def load(model: PreTrainedModel, directory: Path, **options: Any) -> PreTrainedModel:
    """Load a model without a missing, unexpected or misfitting tensor."""
    if type(model.config) is not type(model).config_class:
        options["config"] = type(model.config).from_pretrained(directory)
    loaded, report = type(model).from_pretrained(directory, output_loading_info=True, **options)  # pyright: ignore[reportGeneralTypeIssues]
    assert not any(report.values()), report
    return loaded


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.name != "config.json"}


def same(one: nn.Module, other: nn.Module) -> bool:
    expected = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        tensors = [
            value.tensors if isinstance(value, QuantizedTensor) else {"": value}
            for value in (parameter, expected[name])
        ]
        if tensors[0].keys() != tensors[1].keys() or not all(
            torch.equal(tensors[0][k], tensors[1][k]) for k in tensors[0]
        ):
            return False
    return len(expected) == len(list(one.parameters()))


def require_reload(model: PreTrainedModel, directory: Path, **options: Any) -> None:
    model.save_pretrained(directory / "first", **options)
    report = verify_model(directory / "first")
    assert (report.ok, dict(report.problems), report.unchecked) == (True, {}, "")
    reloaded = load(model, directory / "first")
    assert same(reloaded, model)
    reloaded.save_pretrained(directory / "second", **options)
    assert contents(directory / "second") == contents(directory / "first")


@pytest.mark.parametrize("name", CASES)
def test_a_quantized_model_is_loaded_again_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = make(name)
    quantize_(model, TrainWeightsConfig("int8"))
    require_reload(model, tmp_path)


@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize(
    "options",
    [
        {"safe_serialization": False},
        {"max_shard_size": "40KB"},
        {"save_original_format": False},
    ],
    ids=str,
)
def test_a_joined_model_is_loaded_again_however_it_is_saved(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = make(name)
    quantize_(model, TrainWeightsConfig("int4", group_size=32, include_embeddings=True))
    require_reload(model, tmp_path, **options)


@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize(
    "config",
    [
        TrainWeightsConfig("int8"),
        TrainWeightsConfig(bits=5),
        TrainWeightsConfig("int8", compress=True),
        TrainWeightsConfig("int8", modules_to_not_convert=[r"v_proj"]),
    ],
    ids=["int8", "bits", "compress", "partial"],
)
def test_a_joined_model_is_loaded_again_whatever_quantized_it(
    name: str, config: TrainWeightsConfig, tmp_path: Path
) -> None:
    make(name).save_pretrained(tmp_path / "float")
    model = load(make(name), tmp_path / "float", quantization_config=config)
    require_reload(model, tmp_path / "on_the_fly")
    quantize_directory(tmp_path / "float", tmp_path / "directory", config)
    assert same(load(model, tmp_path / "directory"), model)


@pytest.mark.parametrize("name", CASES)
def test_the_float_model_has_the_names_that_it_had_before(name: str, tmp_path: Path) -> None:
    model = make(name)
    model.save_pretrained(tmp_path / "float")
    quantize_directory(tmp_path / "float", tmp_path / "int8", "int8")
    dequantize_directory(tmp_path / "int8", tmp_path / "dequantized")
    names = [load_file(tmp_path / folder / "model.safetensors").keys() for folder in ("float", "dequantized")]
    assert names[0] == names[1]
    quantized = load(model, tmp_path / "int8")
    assert same(load(model, tmp_path / "dequantized"), quantized.dequantize())


@pytest.mark.parametrize("left_float", [None, ["v_proj"]], ids=["all", "some"])
def test_an_export_refuses_weights_that_a_checkpoint_joins(left_float: list[str] | None, tmp_path: Path) -> None:
    model = make("NomicBertModel")
    quantize_(model, TrainWeightsConfig("int8", modules_to_not_convert=left_float))
    with pytest.raises(UnsupportedError, match="that their checkpoint splits, merges or reorders"):
        export_compressed_tensors(model, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def save_and_load(model: PreTrainedModel, directory: Path, load_as: Callable[..., PreTrainedModel]) -> None:
    quantize_(model, TrainWeightsConfig("int8"))
    model.save_pretrained(directory)
    assert same(load_as(directory), model)


@NOT_BY_5_17
def test_a_borrowed_class_is_found_as_the_auto_class_finds_it(tmp_path: Path) -> None:
    save_and_load(make("InternLM3"), tmp_path, AutoModelForCausalLM.from_pretrained)


READ = """
import sys, torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
config = CompressedTensorsConfig(dequantize=True)
model, report = AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=config, output_loading_info=True)
assert not report["missing_keys"] and not report["mismatched_keys"], report
torch.save(model.state_dict(), sys.argv[2])
"""


@NOT_BY_5_17
@pytest.mark.slow
def test_stock_transformers_finds_routers_whose_float_names_alone_are_renamed(tmp_path: Path) -> None:
    model = make("PhimoeForCausalLM")
    quantize_(model, TrainWeightsConfig("int8", overrides={"re:.*router": "int8"}))
    export_compressed_tensors(model, tmp_path / "exported")
    names = load_file(tmp_path / "exported" / "model.safetensors").keys()
    assert "model.layers.0.block_sparse_moe.gate.weight" in names
    assert "model.layers.0.self_attn.q_proj.weight_packed" in names
    run_fresh(READ, tmp_path / "exported", tmp_path / "read.pt", cwd=tmp_path).check_returncode()
    read = torch.load(tmp_path / "read.pt")
    for name, expected in model.dequantize().state_dict().items():
        assert torch.equal(read[name], expected), name
