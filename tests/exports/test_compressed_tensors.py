"""The layout is what compressed-tensors itself writes, and what it cannot hold is refused by name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from architectures import ARCHITECTURES
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig
from every_architecture.models import one_of_each_type
from oldest_transformers import not_by_5_17
from peft import LoraConfig
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import Chunk, WeightConverter

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_
from hf_trainweights.errors import UnsupportedError
from hf_trainweights.exports.compressed_tensors import lay_out, pack
from hf_trainweights.formats.int8 import Int8

NOT_BY_5_17 = not_by_5_17("Transformers 5.17 splits no weight of this class")
INT4 = {"format": "int4", "group_size": 32}
EXPERTS = "model.layers.*.mlp.experts."


def quantized(architecture: str, dtype: torch.dtype = torch.float32, **config: Any) -> PreTrainedModel:
    model = ARCHITECTURES[architecture].build(dtype)
    quantize_(model, TrainWeightsConfig(**config))
    return model


def laid_out(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors, config = lay_out(model)
    made = {name: tensor.make() for name, tensor in tensors.items()}
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in made.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()
    }
    return made, config


@pytest.mark.parametrize("K", [1, 3, 4, 32, 36, 37])
def test_int8_codes_are_packed_as_compressed_tensors_packs_them(K: int) -> None:
    codes = torch.randint(-128, 128, (5, K), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(pack(codes), pack_to_int32(codes, 8))


def test_int4_codes_are_packed_as_compressed_tensors_packs_them() -> None:
    model = quantized("llama", **INT4)
    weight = model.model.layers[0].mlp.down_proj.weight
    codes = (weight.dequantize().unflatten(-1, (-1, 32)) / weight.scale.unsqueeze(-1)).flatten(-2).round()
    packed = laid_out(model)[0]["model.layers.0.mlp.down_proj.weight_packed"]
    assert torch.equal(packed, pack_to_int32(codes.to(torch.int8), 4))


def test_tensors_are_named_as_the_layout_names_them() -> None:
    tensors, _ = laid_out(quantized("llama", torch.bfloat16, format="int8", overrides={"re:.*v_proj": "float8_e4m3"}))
    of_layer = {name.removeprefix("model.layers.0.self_attn."): tensor for name, tensor in tensors.items()}
    assert of_layer["q_proj.weight_scale"].dtype == torch.bfloat16
    assert of_layer["q_proj.weight_shape"].tolist() == [64, 64]
    assert of_layer["v_proj.weight"].dtype == torch.float8_e4m3fn
    assert "q_proj.weight" not in of_layer
    assert "v_proj.weight_packed" not in of_layer


def test_experts_are_named_one_by_one() -> None:
    model = quantized("qwen3_moe", **INT4)
    tensors, _ = laid_out(model)
    experts = model.model.layers[1].mlp.experts
    prefix = "model.layers.1.mlp.experts.3."
    assert torch.equal(tensors[prefix + "up_proj.weight_packed"], experts.gate_up_proj.qdata[3, 64:])
    assert torch.equal(tensors[prefix + "down_proj.weight_scale"], experts.down_proj.scale[3])
    assert tensors[prefix + "gate_proj.weight_shape"].tolist() == [64, 64]
    assert not any(name.endswith(("experts.gate_up_proj", "experts.down_proj")) for name in tensors)


@pytest.mark.parametrize("architecture", ["llama_tied", "qwen3_moe"])
def test_tensors_are_the_models_own(architecture: str) -> None:
    model = quantized(architecture, **INT4)
    held = {tensor.untyped_storage().data_ptr() for tensor in model.buffers()}
    for parameter in model.parameters():
        tensors = parameter.tensors.values() if isinstance(parameter, QuantizedTensor) else [parameter]
        held |= {tensor.untyped_storage().data_ptr() for tensor in tensors}
    copied = [n for n, tensor in laid_out(model)[0].items() if tensor.untyped_storage().data_ptr() not in held]
    assert copied
    assert all(name.endswith(".weight_shape") for name in copied)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "config", "ignored"),
    [
        ("llama", INT4, ["lm_head"]),
        ("llama_tied", INT4, ["lm_head"]),
        ("llama", INT4 | {"overrides": {"lm_head": "int8"}}, []),
        ("llama", INT4 | {"overrides": {"re:.*0.*o_proj": None}}, ["model.layers.0.self_attn.o_proj", "lm_head"]),
        ("qwen3_moe", INT4, ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head"]),
    ],
)
def test_what_is_in_float_is_ignored(architecture: str, config: dict[str, Any], ignored: list[str]) -> None:
    assert laid_out(quantized(architecture, **config))[1]["ignore"] == ignored


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "weights", "layout"),
    [
        ({"format": "int8"}, {"num_bits": 8, "type": "int", "strategy": "channel"}, "pack-quantized"),
        (
            {"format": "int8", "group_size": 32},
            {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32},
            "pack-quantized",
        ),
        (INT4, {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, "pack-quantized"),
        ({"format": "float8_e4m3"}, {"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized"),
    ],
    ids=["int8", "int8_g32", "int4_g32", "float8"],
)
def test_one_format_is_one_group(config: dict[str, Any], weights: dict[str, Any], layout: str) -> None:
    parsed = QuantizationConfig.model_validate(laid_out(quantized("qwen3_moe", **config))[1])
    assert parsed.format == layout
    assert parsed.quantization_status == "compressed"
    (group,) = parsed.config_groups.values()
    assert (group.targets, group.format) == (["Linear"], layout)
    assert (group.input_activations, group.output_activations) == (None, None)
    assert group.weights.model_dump(exclude_none=True).items() >= (weights | {"symmetric": True}).items()


def test_several_formats_are_a_group_each_by_name() -> None:
    overrides = {"re:.*experts.*": "int8", "re:.*o_proj": "float8_e4m3"}
    config = laid_out(quantized("qwen3_moe", **INT4, overrides=overrides))[1]
    groups = [(group["weights"]["num_bits"], group["targets"]) for group in config["config_groups"].values()]
    assert config["format"] == "mixed-precision"
    assert groups == [
        (4, ["Linear"]),
        (8, [f"model.layers.{layer}.self_attn.o_proj" for layer in range(2)]),
        (8, [r"re:.*\.experts\.\d+\..*"]),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "config", "names", "found"),
    [
        ("gpt2", INT4, "transformer.h.*.attn.c_attn.weight, transformer.h.*.attn.c_proj.weight, ", "keeps transposed"),
        ("gpt_oss", INT4, f"{EXPERTS}gate_up_proj, {EXPERTS}down_proj: ", "keeps transposed"),
        ("llama", INT4 | {"column_scale": True}, "model.layers.", "weights in int4 g32 with column scales"),
        ("llama", {"format": "codebook4"}, "model.layers.", "weights in codebook4 g32"),
        ("llama", {"format": "uint4"}, "model.layers.*.self_attn.q_proj.weight, ", "weights in uint4 g16"),
        ("llama", INT4 | {"include_embeddings": True}, "model.embed_tokens.weight: ", "quantized embeddings"),
        ("llama_tied", INT4 | {"include_embeddings": True}, "model.embed_tokens.weight: ", "quantized embeddings"),
        (
            "qwen3_moe",
            INT4 | {"overrides": {"re:.*experts.down_proj": "int8"}},
            f"{EXPERTS}gate_up_proj, {EXPERTS}down_proj: ",
            "experts in int4 g32 and int8",
        ),
        (
            "qwen3_moe",
            INT4 | {"overrides": {"re:.*experts.*": None}},
            f"{EXPERTS}*.down_proj.weight, {EXPERTS}*.gate_proj.weight, {EXPERTS}*.up_proj.weight: ",
            "experts in float",
        ),
    ],
)
def test_what_has_no_place_is_refused_by_name(
    architecture: str, config: dict[str, Any], names: str, found: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"^{re.escape(names)}.*{found}"):
        laid_out(quantized(architecture, **config))


def test_scales_of_another_dtype_than_the_models_are_refused() -> None:
    model = quantized("llama", **INT4).to(torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"q_proj.*scales in torch\.float32 in a model in torch\.bfloat16"):
        laid_out(model)


def test_a_format_of_ones_own_is_refused() -> None:
    @dataclass(frozen=True)
    class Mine(Int8):
        name: ClassVar[str] = "mine"

    model = quantized("llama", **INT4)
    weight = QuantizedTensor.quantize(torch.ones(64, 64), Mine())
    model.model.layers[1].self_attn.k_proj.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"^model\.layers\.\*\.self_attn\.k_proj\.weight: .*weights in mine"):
        laid_out(model)


def test_weights_that_the_checkpoint_merges_are_refused() -> None:
    model = quantized("llama", format="int8")
    parts = ["self_attn.k_proj.weight", "self_attn.v_proj.weight"]
    model._weight_conversions = [WeightConverter(["self_attn.kv_proj.weight"], parts, [Chunk(dim=0)])]
    with pytest.raises(UnsupportedError, match=r"k_proj\.weight: .*splits, merges or reorders"):
        laid_out(model)


def of_every_architecture(model_type: str, **config: Any) -> PreTrainedModel:
    model = next(each for each in one_of_each_type() if each.model_type == model_type).build()
    quantize_(model, TrainWeightsConfig(**config))
    return model


def test_experts_and_dense_weights_of_one_format_do_not_share_a_group_with_others_beside_them() -> None:
    overrides = {"re:.*o_proj": "float8_e4m3"}
    config = laid_out(quantized("qwen3_moe", **INT4, overrides=overrides))[1]
    groups = [(group["weights"]["num_bits"], group["targets"]) for group in config["config_groups"].values()]
    assert groups == [
        (4, ["Linear"]),
        (8, [f"model.layers.{layer}.self_attn.o_proj" for layer in range(2)]),
        (4, [r"re:.*\.experts\.\d+\..*"]),
    ]


@pytest.mark.parametrize("model_type", ["olmo_hybrid", "kimi_linear"])
def test_float_weights_that_a_load_merges_are_written_merged(model_type: str) -> None:
    model = of_every_architecture(model_type, format="int8")
    tensors, _ = laid_out(model)
    own = {name: tensor for name, tensor in model.state_dict().items() if name.endswith(".conv1d.weight")}
    assert own
    assert all(torch.equal(tensors[name], tensor) for name, tensor in own.items())
    assert not any("q_conv1d" in name for name in tensors)


def test_a_weight_of_a_module_that_is_named_weight_is_written_in_float() -> None:
    model = of_every_architecture("qwen4_exp_text", format="int8")
    tensors, config = laid_out(model)
    name = "model.layers.0.mlp_hyper_connection.block_inject_weight"
    weight = model.get_submodule(name).weight
    assert torch.equal(tensors[f"{name}.weight"], weight.dequantize())
    assert name in config["ignore"]


@pytest.mark.parametrize(
    ("model_type", "found"),
    [
        ("rt_detr", r"normalization\.weight: .*found buffers that a reader takes for weights"),
        ("maskformer", r"criterion\.empty_weight: .*found buffers that a reader takes for weights"),
        pytest.param("dinov2", r"weights_in\.weight: .*found weights that a load splits", marks=NOT_BY_5_17),
    ],
)
def test_a_class_that_transformers_does_not_read_is_refused(model_type: str, found: str) -> None:
    with pytest.raises(UnsupportedError, match=found):
        laid_out(of_every_architecture(model_type, format="int8"))


def test_adapters_are_refused() -> None:
    model = quantized("llama", **INT4)
    model.add_adapter(LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UnsupportedError, match="found one with adapters"):
        laid_out(model)
