"""The tiny models themselves, then what the quantizer promises, on each of them and in each format."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, FAMILIES, Architecture, generate, of_each_family, outputs
from helpers import contents
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_

# Each test is short, but there are hundreds.
pytestmark = pytest.mark.slow

# The group size must divide 64, the rows of the tiny models.
FORMATS = {
    "int8": {"format": "int8"},
    "int4": {"format": "int4", "group_size": 32},
    "float8_e4m3": {"format": "float8_e4m3"},
    "codebook4 with column scales": {"format": "codebook4", "column_scale": True},
    "coded": {"format": "coded", "bits": 4.5},
}
SERIALIZATIONS = {
    "safetensors": {},
    "bin": {"safe_serialization": False},
    "sharded": {"max_shard_size": "32KB"},
    "sharded_bin": {"safe_serialization": False, "max_shard_size": "32KB"},
}
# Of the outputs to the float model's: the worst architecture, rounded down. Among the mixtures of experts, a token
# that goes to another expert costs more than all the rounding does.
LEAST_COSINE = {
    "int8": 0.995,
    "int4": 0.85,
    "float8_e4m3": 0.97,
    "codebook4 with column scales": 0.7,
    "coded": 0.85,
}
CAUSAL = [name for name, architecture in ARCHITECTURES.items() if architecture.auto_class is AutoModelForCausalLM]
GENERATING = [name for name, architecture in ARCHITECTURES.items() if architecture.generates]
MOE = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]


@dataclass(frozen=True)
class Quantized:
    """A model quantized on load, and what it computes."""

    model: PreTrainedModel
    outputs: list[Tensor]
    tokens: Tensor | None


@pytest.fixture(scope="session", params=of_each_family())
def architecture(request: pytest.FixtureRequest) -> Architecture:
    return ARCHITECTURES[request.param]


@pytest.fixture(scope="session")
def float_model(architecture: Architecture) -> PreTrainedModel:
    return architecture.build()


@pytest.fixture(scope="session")
def float_directory(float_model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(float_model, tmp_path_factory.mktemp("float"))


@pytest.fixture(scope="session", params=FORMATS)
def format_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def quantized(architecture: Architecture, float_directory: Path, format_name: str) -> Quantized:
    model = load_quantized(architecture, float_directory, format_name)
    return Quantized(model, outputs(model, architecture.inputs(model)), tokens(architecture, model))


def load_quantized(
    architecture: Architecture, float_directory: Path, format_name: str, **config: object
) -> PreTrainedModel:
    config = TrainWeightsConfig(**FORMATS[format_name], **config)
    return load(architecture.auto_class, float_directory, quantization_config=config)


def load(auto_class: type, directory: Path, **options: object) -> PreTrainedModel:
    """Load in eval mode; no key may be missing, unexpected or of another shape."""
    model, info = auto_class.from_pretrained(directory, output_loading_info=True, **options)
    assert {problem: keys for problem, keys in info.items() if keys} == {}
    return model


def save(model: PreTrainedModel, directory: Path, **options: object) -> Path:
    model.save_pretrained(directory, **options)
    return directory


def tokens(architecture: Architecture, model: PreTrainedModel) -> Tensor | None:
    return generate(model, architecture.inputs(model)) if architecture.generates else None


def quantized_names(model: nn.Module) -> set[str]:
    return {name for name, value in model.named_parameters() if isinstance(value, QuantizedTensor)}


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Equal bit for bit, which two NaN would not be."""
    assert [each.dtype for each in actual] == [each.dtype for each in expected]
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


# ---- the tiny models, in float


def test_each_architecture_is_of_one_family() -> None:
    assert sorted(name for family in FAMILIES.values() for name in family) == sorted(ARCHITECTURES)


def test_building_twice_gives_the_same_weights(architecture: Architecture, float_model: PreTrainedModel) -> None:
    again = architecture.build().state_dict()
    assert again.keys() == float_model.state_dict().keys()
    assert all(torch.equal(again[name], value) for name, value in float_model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_gives_finite_outputs(architecture: Architecture, dtype: torch.dtype) -> None:
    model = architecture.build(dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert all(value.isfinite().all() for value in outputs(model, architecture.inputs(model)))


def test_float_roundtrip_is_bit_exact(
    architecture: Architecture, float_model: PreTrainedModel, float_directory: Path
) -> None:
    inputs = architecture.inputs(float_model)
    reloaded = load(architecture.auto_class, float_directory)
    assert type(reloaded) is type(float_model)
    assert_same(outputs(reloaded, inputs), outputs(float_model, inputs))


def test_every_layer_counts_in_the_outputs(architecture: Architecture, float_model: PreTrainedModel) -> None:
    inputs = architecture.inputs(float_model)
    expected = outputs(float_model, inputs)
    changed = architecture.build()
    for name in architecture.quantized_names(float_model):
        parameter = changed.get_parameter(name)
        original = parameter.detach().clone()
        parameter.data.neg_()
        assert not all(map(torch.equal, outputs(changed, inputs), expected)), f"{name} does not matter"
        parameter.data.copy_(original)


# ---- quantized on load


@pytest.mark.covering(1)
@pytest.mark.parametrize("architecture", ARCHITECTURES, indirect=True)
def test_defaults_quantize_exactly_the_expected_weights(
    architecture: Architecture, float_model: PreTrainedModel, quantized: Quantized
) -> None:
    assert quantized_names(quantized.model) == architecture.quantized_names(float_model)


@pytest.mark.covering(1)
def test_quantized_outputs_are_close_to_float(
    architecture: Architecture, float_model: PreTrainedModel, quantized: Quantized, format_name: str
) -> None:
    expected = outputs(float_model, architecture.inputs(float_model))
    for actual, exact in zip(quantized.outputs, expected, strict=True):
        assert actual.isfinite().all()
        cosine = torch.cosine_similarity(actual.flatten().double(), exact.flatten().double(), dim=0)
        assert cosine >= LEAST_COSINE[format_name]


@pytest.mark.covering(1)
def test_quantizing_in_place_gives_the_same_model(
    architecture: Architecture, quantized: Quantized, format_name: str
) -> None:
    model = architecture.build()
    quantize_(model, TrainWeightsConfig(**FORMATS[format_name]))
    assert quantized_names(model) == quantized_names(quantized.model)
    assert_same(outputs(model, architecture.inputs(model)), quantized.outputs)


@pytest.mark.covering(1)
def test_dequantized_model_computes_the_same(architecture: Architecture, quantized: Quantized) -> None:
    model = copy.deepcopy(quantized.model)
    model.dequantize()
    assert quantized_names(model) == set()
    for actual, expected in zip(outputs(model, architecture.inputs(model)), quantized.outputs, strict=True):
        assert torch.allclose(actual, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.covering(1)
@pytest.mark.parametrize("architecture", of_each_family(GENERATING), indirect=True)
def test_quantized_model_generates_as_many_tokens_as_the_float_model(
    architecture: Architecture, float_model: PreTrainedModel, quantized: Quantized
) -> None:
    assert quantized.tokens.shape == tokens(architecture, float_model).shape


@pytest.mark.covering(1)
@pytest.mark.parametrize("serialization", SERIALIZATIONS)
def test_roundtrip_is_bit_exact_and_saves_repeat(
    architecture: Architecture, quantized: Quantized, serialization: str, tmp_path: Path
) -> None:
    options = SERIALIZATIONS[serialization]
    first = save(quantized.model, tmp_path / "first", **options)
    reloaded = load(architecture.auto_class, first)
    assert quantized_names(reloaded) == quantized_names(quantized.model)
    assert_same(outputs(reloaded, architecture.inputs(reloaded)), quantized.outputs)
    if architecture.generates:
        assert torch.equal(tokens(architecture, reloaded), quantized.tokens)

    second = save(reloaded, tmp_path / "second", **options)
    third = save(load(architecture.auto_class, second), tmp_path / "third", **options)
    assert contents(second) == contents(third)
    suffix = ".safetensors" if options.get("safe_serialization", True) else ".bin"
    weight_files = sorted(path.name for path in first.iterdir() if path.suffix in {".safetensors", ".bin"})
    assert {Path(name).suffix for name in weight_files} == {suffix}
    assert (len(weight_files) > 1) == ("max_shard_size" in options)


@pytest.mark.covering(1)
def test_roundtrip_is_bit_exact_in_bfloat16(architecture: Architecture, format_name: str, tmp_path: Path) -> None:
    float_directory = save(architecture.build(torch.bfloat16), tmp_path / "float")
    model = load_quantized(architecture, float_directory, format_name)
    reloaded = load(architecture.auto_class, save(model, tmp_path / "quantized"))
    inputs = architecture.inputs(model)
    assert quantized_names(reloaded) == quantized_names(model) != set()
    assert {name: value.dtype for name, value in reloaded.state_dict().items()} == {
        name: value.dtype for name, value in model.state_dict().items()
    }
    assert_same(outputs(reloaded, inputs), outputs(model, inputs))


# ---- one property each


@pytest.mark.covering(1)
@pytest.mark.parametrize("serialization", ["safetensors", "sharded_bin"])
@pytest.mark.parametrize("architecture", of_each_family(CAUSAL), indirect=True)
def test_auto_model_loads_the_body_of_a_causal_lm(
    architecture: Architecture, quantized: Quantized, serialization: str, tmp_path: Path
) -> None:
    directory = save(quantized.model, tmp_path / "saved", **SERIALIZATIONS[serialization])
    body, info = AutoModel.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    inputs = architecture.inputs(body)
    assert_same(outputs(body, inputs), outputs(quantized.model.base_model, inputs))


@pytest.mark.parametrize("architecture", of_each_family(MOE), indirect=True)
def test_experts_are_quantized_as_three_dimensional_weights(
    architecture: Architecture, float_model: PreTrainedModel, quantized: Quantized
) -> None:
    for name in ("gate_up_proj", "down_proj"):
        weight = quantized.model.get_parameter(f"model.layers.1.mlp.experts.{name}")
        assert isinstance(weight, QuantizedTensor)
        assert weight.shape == float_model.get_parameter(f"model.layers.1.mlp.experts.{name}").shape
        assert weight.ndim == 3


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("name", "weight_name", "output_dim"),
    [
        ("llama", "model.layers.0.mlp.down_proj.weight", 0),
        ("gpt2", "transformer.h.0.mlp.c_fc.weight", 1),
        ("gpt2", "transformer.h.0.attn.c_proj.weight", 1),
        ("qwen3_moe", "model.layers.0.mlp.experts.gate_up_proj", 1),
        ("qwen3_moe", "model.layers.0.mlp.experts.down_proj", 1),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj", 2),
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj", 2),
    ],
)
def test_output_features_of_very_different_size_do_not_share_a_scale(
    name: str, weight_name: str, output_dim: int, format_name: str, tmp_path: Path
) -> None:
    float_model = ARCHITECTURES[name].build()
    exact = float_model.get_parameter(weight_name)
    sizes = torch.logspace(-4, 0, exact.shape[output_dim])
    with torch.no_grad():
        exact.mul_(sizes.view([-1 if dim == output_dim else 1 for dim in range(exact.ndim)]))
    model = load_quantized(ARCHITECTURES[name], save(float_model, tmp_path / "float"), format_name)
    weight = model.get_parameter(weight_name)
    assert isinstance(weight, QuantizedTensor)
    assert weight.shape == exact.shape
    input_dim = 2 * exact.ndim - 3 - output_dim  # the other one of the last two
    errors = (weight.dequantize() - exact).norm(dim=input_dim) / exact.norm(dim=input_dim)
    assert errors.max() < 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_t5_keeps_wo_in_float(dtype: torch.dtype, tmp_path: Path) -> None:
    t5 = ARCHITECTURES["t5"]
    float_directory = save(t5.build(dtype), tmp_path / "float")
    model = load_quantized(t5, float_directory, "int8")
    reloaded = load(t5.auto_class, save(model, tmp_path / "quantized"))
    expected = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    for each in (model, reloaded):
        kept = {name: value for name, value in each.named_parameters() if name.endswith(".wo.weight")}
        assert len(kept) == 4
        assert not any(isinstance(value, QuantizedTensor) for value in kept.values())
        assert {value.dtype for value in kept.values()} == {expected}


@pytest.mark.covering(1)
@pytest.mark.parametrize("serialization", SERIALIZATIONS)
@pytest.mark.parametrize("architecture", ["llama_tied"], indirect=True)
def test_quantized_embeddings_stay_tied(
    architecture: Architecture, float_directory: Path, format_name: str, serialization: str, tmp_path: Path
) -> None:
    model = load_quantized(architecture, float_directory, format_name, include_embeddings=True)
    expected = outputs(model, architecture.inputs(model))
    reloaded = load(architecture.auto_class, save(model, tmp_path / "saved", **SERIALIZATIONS[serialization]))
    for each in (model, reloaded):
        assert isinstance(each.model.embed_tokens.weight, QuantizedTensor)
        assert each.lm_head.weight is each.model.embed_tokens.weight
    assert_same(outputs(reloaded, architecture.inputs(reloaded)), expected)


@pytest.mark.parametrize("architecture", ["llama"], indirect=True)
def test_separate_embeddings_stay_separate(architecture: Architecture, float_directory: Path, tmp_path: Path) -> None:
    model = load_quantized(architecture, float_directory, "int8", include_embeddings=True)
    reloaded = load(architecture.auto_class, save(model, tmp_path / "saved"))
    for each in (model, reloaded):
        assert isinstance(each.lm_head.weight, QuantizedTensor)
        assert isinstance(each.model.embed_tokens.weight, QuantizedTensor)
        assert each.lm_head.weight is not each.model.embed_tokens.weight
    assert_same(outputs(reloaded, architecture.inputs(reloaded)), outputs(model, architecture.inputs(model)))
