"""What from_pretrained and its model do with a quantizer: device maps, options, damaged files, use, the way back."""

from __future__ import annotations

import copy
import gc
import importlib
import json
import logging
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from architectures import ARCHITECTURES, Architecture, generate, outputs
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.integrations.accelerate import compute_module_sizes
from transformers.quantizers.base import HfQuantizer

import hf_trainweights
from hf_trainweights import QuantizedTensor, TrainWeightsConfig, TrainWeightsHfQuantizer, get_model_size_in_bytes
from hf_trainweights.errors import ConfigError, CorruptFileError, TrainWeightsError, UnsupportedError
from hf_trainweights.testing.values import assert_close_product

LLAMA = ARCHITECTURES["llama"]
INT8 = TrainWeightsConfig("int8")
WEIGHT = "model.layers.0.mlp.up_proj.weight"
STORED = "model.layers.0.mlp.up_proj._weight_"
CPU = torch.device("cpu")
# Two spellings of one device: Transformers takes the first for an accelerator and offloads to the other, hooks and all.
OFFLOADED = {
    "model.embed_tokens": CPU,
    "model.layers.0": CPU,
    "model.layers.1": "cpu",
    "model.norm": CPU,
    "model.rotary_emb": CPU,
    "lm_head": "cpu",
}
OFFLOAD_WARNING = "ignore:Attempting to save a model with offloaded modules:UserWarning"

FloatDirectory = Callable[..., Path]
QuantizedDirectory = Callable[..., Path]


@pytest.fixture(scope="module")
def quantized(float_directory: FloatDirectory) -> PreTrainedModel:
    return load(float_directory(), quantization_config=INT8)


@pytest.fixture(scope="module")
def expected(quantized: PreTrainedModel) -> list[Tensor]:
    return outputs(quantized, LLAMA.inputs(quantized))


@pytest.fixture(scope="module")
def quantized_directory(quantized: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> QuantizedDirectory:
    """Save the quantized model once in each serialization."""
    root = tmp_path_factory.mktemp("quantized")

    def directory(serialization: str = "safetensors") -> Path:
        if not (root / serialization).exists():
            quantized.save_pretrained(root / serialization, safe_serialization=serialization != "bin")
        return root / serialization

    return directory


def load(directory: Path, **options: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, **options)


def same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, actual, expected))


def computes(model: PreTrainedModel, expected: list[Tensor], architecture: Architecture = LLAMA) -> bool:
    # Not architecture.inputs(model): the device of an offloaded model is meta.
    return same(outputs(model, architecture.make_inputs()), expected)


def quantized_weights(model: nn.Module) -> list[QuantizedTensor]:
    return [parameter for parameter in model.parameters() if isinstance(parameter, QuantizedTensor)]


# ---- registration


def test_importing_again_registers_nothing_twice() -> None:
    mapping = transformers.quantizers.auto.AUTO_QUANTIZER_MAPPING
    registered = mapping["trainweights"]
    importlib.reload(hf_trainweights)
    assert mapping["trainweights"] is registered is TrainWeightsHfQuantizer


def test_the_flags_are_what_transformers_asks_for(quantized: PreTrainedModel) -> None:
    quantizer = quantized.hf_quantizer
    assert quantized.is_quantized
    assert quantizer.is_serializable() is True
    assert quantizer.is_trainable is True
    assert quantizer.is_qat_trainable is True
    assert quantizer.is_compileable is True


def test_every_method_but_our_own_is_a_hook_of_the_installed_transformers() -> None:
    methods = {name for name in vars(TrainWeightsHfQuantizer) if not name.startswith("__")}
    assert {name for name in methods if not hasattr(HfQuantizer, name)} == {
        "summary",
        "adopt",
        "_take",
        "_allocate",
    }


def test_the_summary_needs_a_load() -> None:
    with pytest.raises(ConfigError, match=r"summary: expected a loaded model.*after from_pretrained"):
        TrainWeightsHfQuantizer(INT8, pre_quantized=False).summary()


# ---- device maps


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("source", ["float", "safetensors", "bin"])
@pytest.mark.parametrize(
    "device_map", [None, "auto", "balanced", "sequential", "cpu", CPU, {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}]
)
def test_every_device_map_gives_the_same_model(
    device_map: Any,
    source: str,
    float_directory: FloatDirectory,
    quantized_directory: QuantizedDirectory,
    expected: list[Tensor],
) -> None:
    if source == "float":
        model = load(float_directory(), quantization_config=INT8, device_map=device_map)
    else:
        model = load(quantized_directory(source), device_map=device_map)
    assert len(quantized_weights(model)) == 14
    assert computes(model, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings(OFFLOAD_WARNING)
@pytest.mark.parametrize("source", ["float", "safetensors", "bin"])
def test_offloaded_weights_compute_and_are_saved_as_if_they_were_not(
    source: str,
    float_directory: FloatDirectory,
    quantized_directory: QuantizedDirectory,
    expected: list[Tensor],
    tmp_path: Path,
) -> None:
    options = {"device_map": OFFLOADED}
    if source == "float":
        model = load(float_directory(), quantization_config=INT8, **options)
    else:
        model = load(quantized_directory(source), **options)
    assert model.model.layers[1].mlp.up_proj.weight.is_meta, "nothing was offloaded"
    assert computes(model, expected)
    model.save_pretrained(tmp_path / "safetensors")
    saved = (tmp_path / "safetensors" / "model.safetensors").read_bytes()
    assert saved == (quantized_directory() / "model.safetensors").read_bytes()
    model.save_pretrained(tmp_path / "bin", safe_serialization=False, max_shard_size="32KB")
    assert computes(load(tmp_path / "bin"), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings(OFFLOAD_WARNING)
@pytest.mark.parametrize("head", ["cpu", CPU])
def test_tied_quantized_embeddings_survive_offloading(
    head: Any, float_directory: FloatDirectory, tmp_path: Path
) -> None:
    config = TrainWeightsConfig("int8", include_embeddings=True)
    tied = ARCHITECTURES["llama_tied"]
    model = load(float_directory("llama_tied"), quantization_config=config)
    expected = outputs(model, tied.inputs(model))
    model.save_pretrained(tmp_path / "0")
    device_map = {**OFFLOADED, "model.embed_tokens": "cpu", "lm_head": head}
    for index, options in enumerate([{"quantization_config": config}, {}], start=1):
        source = tmp_path / "0" if not options else float_directory("llama_tied")
        offloaded = load(source, device_map=device_map, **options)
        assert computes(offloaded, expected, tied)
        offloaded.save_pretrained(tmp_path / str(index))
        saved = (tmp_path / str(index) / "model.safetensors").read_bytes()
        assert saved == (tmp_path / "0" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_accelerate_offloads_a_loaded_model_to_the_cpu(
    float_directory: FloatDirectory, expected: list[Tensor], tmp_path: Path
) -> None:
    model = load(float_directory(), quantization_config=INT8)
    accelerate.cpu_offload(model, execution_device=CPU)
    assert all(weight.is_meta for weight in quantized_weights(model))
    assert computes(model, expected)
    model.save_pretrained(tmp_path)
    assert computes(load(tmp_path), expected)


def test_accelerate_cannot_offload_quantized_weights_to_the_disk(
    float_directory: FloatDirectory, tmp_path: Path
) -> None:
    model = load(float_directory(), quantization_config=INT8)
    with pytest.raises(UnsupportedError, match=r"numpy: expected a plain tensor, .* Call dequantize\(\) first"):
        accelerate.disk_offload(model, tmp_path, execution_device=CPU)


DISK_MAPS = [{"": "disk"}, {"model": "cpu", "lm_head": "disk"}, {"model": "disk", "lm_head": "cpu"}]


@pytest.mark.parametrize("device_map", DISK_MAPS)
def test_a_float_checkpoint_is_not_quantized_onto_the_disk(device_map: Any, float_directory: FloatDirectory) -> None:
    with pytest.raises(ConfigError, match=r'device_map: .*modules on "disk".*Save a quantized copy first'):
        load(float_directory(), quantization_config=INT8, device_map=device_map)


def test_a_float_checkpoint_is_not_quantized_onto_the_disk_by_auto(float_directory: FloatDirectory) -> None:
    with pytest.raises(ValueError, match=r'modules on "disk".*Save a quantized copy first'):
        load(float_directory(), quantization_config=INT8, device_map="auto", max_memory={"cpu": "60KB"})


@pytest.mark.slow
@pytest.mark.parametrize("source", ["safetensors", "bin"])
@pytest.mark.parametrize("device_map", [*DISK_MAPS, "auto"])
def test_disk_is_memory_mapped_for_a_quantized_checkpoint_and_said_once(
    device_map: Any,
    source: str,
    quantized_directory: QuantizedDirectory,
    expected: list[Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = copy.deepcopy(device_map)
    options = {"max_memory": {"cpu": "60KB"}} if device_map == "auto" else {}
    model = load(quantized_directory(source), device_map=device_map, **options)
    assert device_map == given, "the caller's device map was changed"
    assert computes(model, expected)
    assert len(quantized_weights(model)) == 14
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert [record.message for record in caplog.records if "memory-mapped" in record.message] == [
        'Modules on "disk" are memory-mapped on "cpu" instead: nothing is copied until it is used.'
    ]
    file = next(path for path in quantized_directory(source).iterdir() if path.suffix in {".safetensors", ".bin"})
    mapped = Path("/proc/self/maps")
    if mapped.exists():
        assert str(file) in mapped.read_text()


def test_no_hook_changes_a_map_that_it_is_given() -> None:
    quantizer = TrainWeightsHfQuantizer(INT8, pre_quantized=True)
    for options in ({"weights_only": True}, {}):
        given = {"model": "disk", "lm_head": "cpu"}
        quantizer.validate_environment(device_map=given, **options)
        assert quantizer.update_device_map(given) == {"model": "cpu", "lm_head": "cpu"}
        assert given == {"model": "disk", "lm_head": "cpu"}
    limits = {"cpu": 60_000}
    assert quantizer.adjust_max_memory(limits)["cpu"] > limits["cpu"] == 60_000
    float_quantizer = TrainWeightsHfQuantizer(INT8, pre_quantized=False)
    assert float_quantizer.adjust_max_memory(limits) == limits


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "config",
    [
        INT8,
        TrainWeightsConfig("int4", group_size=32),
        TrainWeightsConfig("int8", overrides={"re:.*(mlp|mixer).*": "float8_e4m3"}),
    ],
    ids=lambda config: config.format,
)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mamba"])
def test_the_size_that_device_maps_are_made_from_is_the_size_that_is_held(
    name: str, config: TrainWeightsConfig, float_directory: FloatDirectory, tmp_path: Path
) -> None:
    model = ARCHITECTURES[name].auto_class.from_pretrained(float_directory(name), quantization_config=config)
    model.save_pretrained(tmp_path)
    # Scales are stored in float32 and stay that: in bfloat16 the weights take more than the configuration tells.
    reloaded = ARCHITECTURES[name].auto_class.from_pretrained(tmp_path, dtype=torch.bfloat16)
    # A weight whose format is not the configured one has its format's name in the file, too.
    named = sum(weight.format != config.default_format for weight in quantized_weights(model))
    for each in (model, reloaded):
        sizes, _ = compute_module_sizes(each, each.hf_quantizer)
        assert sizes[""] == pytest.approx(get_model_size_in_bytes(each), abs=0.5 + 40 * named)


# ---- options of from_pretrained


def test_a_plain_dict_is_a_configuration(float_directory: FloatDirectory, expected: list[Tensor]) -> None:
    model = load(float_directory(), quantization_config={"quant_method": "trainweights", "format": "int8"})
    assert computes(model, expected)
    with pytest.raises(ConfigError, match=r"^quantization_config \(.*passed as a dict\): format: expected one of int8"):
        load(float_directory(), quantization_config={"quant_method": "trainweights", "format": "int3"})
    with pytest.raises(ConfigError, match=r"^quantization_config: expected keys among format.*found formt\."):
        load(float_directory(), quantization_config={"quant_method": "trainweights", "formt": "int4"})


def test_a_configuration_for_a_quantized_model_is_ignored_with_a_warning(
    quantized_directory: QuantizedDirectory, expected: list[Tensor]
) -> None:
    with pytest.warns(UserWarning, match="already has a `quantization_config` attribute"):
        model = load(quantized_directory(), quantization_config=TrainWeightsConfig("int4", group_size=32))
    assert {weight.format.name for weight in quantized_weights(model)} == {"int8"}
    assert model.config.quantization_config == INT8
    assert computes(model, expected)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "bfloat16"])
def test_another_dtype_on_reload_changes_what_is_shown_and_no_scale(
    dtype: Any, source: str, quantized: PreTrainedModel, quantized_directory: QuantizedDirectory
) -> None:
    model = load(quantized_directory(source), dtype=dtype)
    shown = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert {parameter.dtype for parameter in model.parameters()} == {shown}
    for weight, original in zip(quantized_weights(model), quantized_weights(quantized), strict=True):
        assert torch.equal(weight.scale, original.scale)
        assert weight.scale.dtype == torch.float32
        assert torch.equal(weight.dequantize(), original.dequantize().to(shown))
    assert outputs(model, LLAMA.inputs(model))[0].dtype == shown


@pytest.mark.slow
def test_names_of_another_code_base_are_mapped_on_load_and_back_on_save(
    float_directory: FloatDirectory, expected: list[Tensor], tmp_path: Path
) -> None:
    shutil.copytree(float_directory(), tmp_path / "0")
    tensors = load_file(tmp_path / "0" / "model.safetensors")
    renamed = {name.replace("model.", "transformer.", 1): tensor.clone() for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "0" / "model.safetensors", metadata={"format": "pt"})
    mapping = {"key_mapping": {r"^transformer\.": "model."}, "output_loading_info": True}
    options: dict[str, Any] = {"quantization_config": INT8}
    for index in range(3):
        model, info = load(tmp_path / str(index), **mapping, **options)
        assert {problem: keys for problem, keys in info.items() if keys} == {}
        assert computes(model, expected)
        model.save_pretrained(tmp_path / str(index + 1))
        options = {}
    names = set(load_file(tmp_path / "1" / "model.safetensors"))
    assert "transformer.layers.0.mlp.up_proj._weight_qdata" in names
    assert not any(name.startswith("model.") for name in names)
    assert (tmp_path / "2" / "model.safetensors").read_bytes() == (tmp_path / "3" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_loading_saving_and_loading_again_reports_no_key(
    quantized_directory: QuantizedDirectory, expected: list[Tensor], tmp_path: Path
) -> None:
    source = quantized_directory()
    for index in range(3):
        model, info = load(source, output_loading_info=True)
        assert {problem: keys for problem, keys in info.items() if keys} == {}
        assert computes(model, expected)
        source = tmp_path / str(index)
        model.save_pretrained(source)
        assert (source / "model.safetensors").read_bytes() == (quantized_directory() / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("source", ["float", "quantized"])
def test_a_new_head_stays_float_and_trainable_and_is_reported(
    source: str, float_directory: FloatDirectory, quantized_directory: QuantizedDirectory, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"num_labels": 3, "output_loading_info": True}
    if source == "float":
        directory = float_directory()
        options["quantization_config"] = INT8
    else:
        directory = quantized_directory()
    model, info = AutoModelForSequenceClassification.from_pretrained(directory, **options)
    assert info["missing_keys"] == {"score.weight"}
    assert type(model.score.weight) is nn.Parameter
    assert model.score.weight.requires_grad
    assert model.score.weight.isfinite().all()
    assert len(quantized_weights(model)) == 14
    choice = next(choice for choice in model.hf_quantizer.summary().tensors if choice.name == "score.weight")
    assert choice.format is None
    assert choice.reason
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    inputs = {name: value[:1] for name, value in LLAMA.inputs(model).items()}
    assert same(outputs(reloaded, inputs), outputs(model, inputs))


def test_a_weight_that_the_checkpoint_lacks_is_reported_as_float(
    float_directory: FloatDirectory, tmp_path: Path
) -> None:
    shutil.copytree(float_directory("bert"), tmp_path / "source")
    config = TrainWeightsConfig("int8")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "source", quantization_config=config)
    reasons = {choice.name: choice.reason for choice in classifier.hf_quantizer.summary().tensors if not choice.format}
    assert reasons["bert.pooler.dense.weight"] == "not in the checkpoint"
    assert type(classifier.bert.pooler.dense.weight) is nn.Parameter
    assert classifier.bert.pooler.dense.weight.requires_grad
    assert "not in the checkpoint" in str(classifier.hf_quantizer.summary())


def test_the_summary_is_logged_in_one_line(
    float_directory: FloatDirectory, quantized_directory: QuantizedDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="hf_trainweights"):
        model = load(float_directory(), quantization_config=INT8)
        load(quantized_directory())
    lines = [record.message for record in caplog.records if record.message.startswith("quantized: 14 int8")]
    assert lines == [str(model.hf_quantizer.summary())] * 2
    assert "\n" not in lines[0]
    assert "left alone: " in lines[0]


def test_nothing_to_quantize_is_an_error(float_directory: FloatDirectory, tmp_path: Path) -> None:
    config = TrainWeightsConfig("int8", modules_to_not_convert=["re:.*"])
    with pytest.raises(ConfigError, match="at least one weight to quantize to int8"):
        load(float_directory(), quantization_config=config)


def test_float_weights_under_the_configuration_of_quantized_ones_are_an_error(
    float_directory: FloatDirectory, tmp_path: Path
) -> None:
    shutil.copytree(float_directory(), tmp_path / "float")
    text = json.loads((tmp_path / "float" / "config.json").read_text())
    (tmp_path / "float" / "config.json").write_text(json.dumps({**text, "quantization_config": INT8.to_dict()}))
    with pytest.raises(ConfigError, match=r"expected quantized weights, as .*If its weights are float, take"):
        load(tmp_path / "float")


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["_proj", r"model\.layers\.\d+\.mlp", "decoder.layers"])
def test_a_saved_configuration_may_name_what_its_class_lacks_and_mean_what_it_meant(
    float_directory: FloatDirectory, tmp_path: Path, entry: str
) -> None:
    overrides, kept = {"lm_head": "int8"}, ["layers.0.mlp", "lm_head.weight"]
    config = TrainWeightsConfig("int4", group_size=32, overrides=overrides, modules_to_not_convert=kept)
    model = load(float_directory(), quantization_config=config)
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    # An entry as versions that matched suffixes and expressions without "re:" wrote it.
    stored["quantization_config"]["modules_to_not_convert"].append(entry)
    (tmp_path / "config.json").write_text(json.dumps(stored))
    base = AutoModel.from_pretrained(tmp_path)
    formats = {name: getattr(weight, "format", None) for name, weight in base.named_parameters()}
    assert formats == {
        name: getattr(weight, "format", None) for name, weight in model.model.named_parameters(remove_duplicate=False)
    }
    assert isinstance(load(tmp_path).lm_head.weight, QuantizedTensor)


# ---- damaged quantized checkpoints


def change(directory: Path, damage: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()}
    damage(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def change_config(directory: Path, **values: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= values
    (directory / "config.json").write_text(json.dumps(config))


def shorten(tensors: dict[str, Tensor], *suffixes: str) -> None:
    for suffix in suffixes:
        tensors[STORED + suffix] = tensors[STORED + suffix][:-1].clone()


def set_dtype(tensors: dict[str, Tensor], suffix: str, dtype: torch.dtype) -> None:
    tensors[STORED + suffix] = tensors[STORED + suffix].to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda tensors: tensors.pop(f"{STORED}scale"), f"expected {STORED}scale beside", id="no scale"),
        pytest.param(lambda tensors: tensors.pop(f"{STORED}qdata"), f"expected {STORED}qdata beside", id="no qdata"),
        pytest.param(
            lambda tensors: shorten(tensors, "scale"), "expected scale to be .*save it again", id="short scale"
        ),
        pytest.param(
            lambda tensors: shorten(tensors, "scale", "qdata"), "config.json has it.*both again", id="short weight"
        ),
        pytest.param(lambda tensors: set_dtype(tensors, "scale", torch.int32), "expected scale to be", id="int scale"),
        pytest.param(
            lambda tensors: set_dtype(tensors, "qdata", torch.int16), "expected qdata to be", id="int16 qdata"
        ),
        pytest.param(
            lambda tensors: tensors.update({f"{STORED}format": torch.tensor([1, 2], dtype=torch.uint8)}),
            "JSON that names one of the formats",
            id="format",
        ),
    ],
)
def test_a_damaged_weight_is_an_error_that_names_file_and_tensor(
    damage: Callable[[dict[str, Tensor]], object],
    message: str,
    quantized_directory: QuantizedDirectory,
    tmp_path: Path,
) -> None:
    directory = shutil.copytree(quantized_directory(), tmp_path / "damaged")
    change(directory, damage)
    with pytest.raises(CorruptFileError, match=message) as raised:
        load(directory)
    assert str(directory / "model.safetensors") in str(raised.value)
    assert WEIGHT in str(raised.value) or STORED in str(raised.value)


@pytest.mark.parametrize("source", ["safetensors", "bin"])
@pytest.mark.parametrize("kept", [0, 100, -500])
def test_a_truncated_file_is_an_error_that_names_it(
    kept: int, source: str, quantized_directory: QuantizedDirectory, tmp_path: Path
) -> None:
    directory = shutil.copytree(quantized_directory(source), tmp_path / "damaged")
    file = next(path for path in directory.iterdir() if path.suffix in {".safetensors", ".bin"})
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CorruptFileError, match="Download it again"):
        load(directory)


@pytest.mark.parametrize("options", [{}, {"weights_only": False}])
def test_a_pickle_with_a_foreign_global_is_never_loaded(
    options: dict[str, Any], quantized_directory: QuantizedDirectory, tmp_path: Path
) -> None:
    directory = shutil.copytree(quantized_directory("bin"), tmp_path / "damaged")
    file = directory / "pytorch_model.bin"
    torch.save({**torch.load(file), "x": nn.ReLU()}, file)
    with pytest.raises(CorruptFileError, match=r"pytorch_model\.bin: .*activation\.ReLU.*weights_only=False"):
        load(directory, **options)


IN_FILE = r"^quantization_config \(in config\.json, or passed as a dict\): "


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"format": "int3"}, ConfigError, f"{IN_FILE}format: expected one of int8, int4.*found 'int3'"),
        ({"version": 99}, ConfigError, f"{IN_FILE}version: expected 1 or 2, found 99. Install"),
        ({"format": "int4", "group_size": 3}, ConfigError, f"{IN_FILE}group_size: expected one of 32.*found 3"),
        ({"overrides": {"lm_head": "int3"}}, ConfigError, rf"{IN_FILE}overrides\['lm_head'\]: expected one of"),
        ({"dequantize": True}, ConfigError, f"{IN_FILE}dequantize: expected no such key"),
        ({"format": "int4", "group_size": 32}, CorruptFileError, r"model\.safetensors: .*expected qdata to be"),
    ],
)
def test_a_configuration_that_cannot_be_right_is_refused(
    values: dict[str, Any],
    error: type[TrainWeightsError],
    message: str,
    quantized_directory: QuantizedDirectory,
    tmp_path: Path,
) -> None:
    directory = shutil.copytree(quantized_directory(), tmp_path / "changed")
    change_config(directory, **values)
    with pytest.raises(error, match=message):
        load(directory)


def test_configuration_keys_of_a_newer_version_are_kept(
    quantized_directory: QuantizedDirectory, expected: list[Tensor], tmp_path: Path
) -> None:
    directory = shutil.copytree(quantized_directory(), tmp_path / "newer")
    change_config(directory, some_new_key=[1, 2])
    model = load(directory)
    assert computes(model, expected)
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["quantization_config"]["some_new_key"] == [1, 2]


# ---- using the model


def test_generation_through_a_pipeline_is_generation(
    quantized: PreTrainedModel, quantized_directory: QuantizedDirectory
) -> None:
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(96)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")
    pipeline = transformers.pipeline("text-generation", model=str(quantized_directory()), tokenizer=tokenizer)
    assert len(quantized_weights(pipeline.model)) == 14
    text = pipeline("w3 w4 w5", max_new_tokens=4, do_sample=False, return_full_text=True)[0]["generated_text"]
    tokens = quantized.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False)[0]
    assert text.replace(" ", "") == "".join(f"w{token}" for token in tokens)


@pytest.mark.exhaustive
def test_generation_with_a_compiled_forward_gives_the_same_tokens(float_directory: FloatDirectory) -> None:
    model = load(float_directory(), quantization_config=TrainWeightsConfig("int4", group_size=32))
    inputs = LLAMA.inputs(model)
    tokens = generate(model, inputs)
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(generate(model, inputs), tokens)


def test_memory_footprint_and_print_tell_the_truth(quantized: PreTrainedModel, float_directory: FloatDirectory) -> None:
    held = sum(weight.stored_bytes for weight in quantized_weights(quantized))
    plain = [parameter for parameter in quantized.parameters() if not isinstance(parameter, QuantizedTensor)]
    held += sum(parameter.nbytes for parameter in plain)
    buffers = sum(buffer.nbytes for buffer in quantized.buffers())
    assert quantized.get_memory_footprint() == held + buffers
    assert quantized.get_memory_footprint(return_buffers=False) == held
    assert held < load(float_directory()).get_memory_footprint() / 2
    assert "(up_proj): Linear(in_features=64, out_features=128, bias=False, weight=int8)" in str(quantized)
    assert "(lm_head): Linear(in_features=64, out_features=96, bias=False)" in str(quantized)


def test_a_copied_model_is_a_model_of_its_own(
    quantized: PreTrainedModel, expected: list[Tensor], tmp_path: Path
) -> None:
    copied = copy.deepcopy(quantized)
    with torch.no_grad():
        for weight in quantized_weights(copied):
            weight.scale.zero_()
        copied.lm_head.weight.zero_()
    assert computes(quantized, expected)
    copied.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["lm_head.weight"].count_nonzero() == saved[f"{STORED}scale"].count_nonzero() == 0


def test_a_pickled_model_is_a_model_of_its_own(
    quantized: PreTrainedModel, expected: list[Tensor], tmp_path: Path
) -> None:
    torch.save(quantized, tmp_path / "model.pt")
    model = torch.load(tmp_path / "model.pt", weights_only=False)
    assert computes(model, expected)
    model.save_pretrained(tmp_path / "saved")
    assert computes(load(tmp_path / "saved"), expected)


def test_half_and_float_are_refused_and_to_changes_the_dtype_shown(quantized: PreTrainedModel) -> None:
    for cast in (quantized.half, quantized.float):
        with pytest.raises(ValueError, match="not supported for quantized model"):
            cast()
    model = copy.deepcopy(quantized).to(torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    for weight, original in zip(quantized_weights(model), quantized_weights(quantized), strict=True):
        assert torch.equal(weight.qdata, original.qdata)
        assert torch.equal(weight.scale, original.scale)


# ---- the way back


@pytest.mark.slow
@pytest.mark.parametrize("saved_before", [False, True])
def test_a_dequantized_model_is_a_plain_model(
    saved_before: bool, quantized: PreTrainedModel, expected: list[Tensor], tmp_path: Path
) -> None:
    model = copy.deepcopy(quantized)
    if saved_before:
        model.save_pretrained(tmp_path / "quantized")
        assert model.config.dtype == "float32", "Transformers made a string of the dtype"
    model.dequantize()
    assert not quantized_weights(model)
    assert not model.is_quantized
    assert not hasattr(model, "hf_quantizer")
    assert not hasattr(model.config, "quantization_config")
    assert "weight=int8" not in str(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    dense, exact = (outputs(each, LLAMA.make_inputs()) for each in (model, copy.deepcopy(model).double()))
    for result, plain, reference in zip(expected, dense, exact, strict=True):
        assert_close_product(result, plain, reference)
    for options in ({}, {"safe_serialization": False}):
        directory = tmp_path / f"plain{len(options)}"
        model.save_pretrained(directory, **options)
        assert "quantization_config" not in json.loads((directory / "config.json").read_text())
        reloaded, info = load(directory, output_loading_info=True)
        assert {problem: keys for problem, keys in info.items() if keys} == {}
        assert computes(reloaded, dense)


def test_a_dequantized_model_saves_the_state_dict_it_is_given(quantized: PreTrainedModel, tmp_path: Path) -> None:
    model = copy.deepcopy(quantized)
    model.dequantize()
    model.save_pretrained(tmp_path, state_dict={name: tensor * 0 for name, tensor in model.state_dict().items()})
    saved = load_file(tmp_path / "model.safetensors")
    assert not any(tensor.count_nonzero() for tensor in saved.values())


def test_dequantize_takes_a_dtype(quantized: PreTrainedModel) -> None:
    model = copy.deepcopy(quantized)
    model.dequantize(dtype=torch.bfloat16)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("format_name", "activations"), [("int8", "int8"), ("float8_e4m3", "float8")])
def test_rounded_activations_survive_saving(
    format_name: str, activations: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    LLAMA.make().to(dtype).save_pretrained(tmp_path / "float")
    config = TrainWeightsConfig(format_name, activations=activations)
    model = load(tmp_path / "float", quantization_config=config)
    assert f"{format_name} with {activations} activations" in str(model.hf_quantizer.summary())
    model.save_pretrained(tmp_path / "quantized")
    reloaded = load(tmp_path / "quantized")
    assert {weight.format for weight in quantized_weights(reloaded)} == {config.default_format}
    assert computes(reloaded, outputs(model, LLAMA.make_inputs()))


@pytest.mark.slow
def test_what_is_quantized_is_told_by_the_files_not_by_the_order_of_overrides(tmp_path: Path) -> None:
    """Transformers sorts the keys in config.json, and of expressions that match the first one wins."""
    moe = ARCHITECTURES["qwen3_moe"]
    moe.build().save_pretrained(tmp_path / "float")
    config = TrainWeightsConfig("int8", overrides={r"re:.*experts\.down_proj": "int8", "re:.*experts.*": None})
    model = load(tmp_path / "float", quantization_config=config)
    assert isinstance(model.get_parameter("model.layers.0.mlp.experts.down_proj"), QuantizedTensor)
    model.save_pretrained(tmp_path / "saved")
    inputs = moe.inputs(model)
    assert all(map(torch.equal, outputs(load(tmp_path / "saved"), inputs), outputs(model, inputs)))


def test_a_deleted_model_leaves_nothing_once_garbage_is_collected(quantized_directory: QuantizedDirectory) -> None:
    model = AutoModelForCausalLM.from_pretrained(quantized_directory())
    outputs(model, LLAMA.inputs(model))
    left = [weakref.ref(each) for each in (model, *model.modules(), *model.parameters())]
    del model
    gc.collect()
    assert not any(each() for each in left)
