"""Routers of experts stay in float unless a user says otherwise, by whatever name a model has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, DECODER, TEXT, TOKENS
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PhimoeConfig, PhimoeForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_, quantize_directory
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.models.choosing.selection import ROUTER, choose, router_layers

SIDES = {"d_model": 64, "num_heads": 2, "d_kv": 32, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2}
HYBRID = {**DECODER, "head_dim": 16, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}

# A model's class, its configuration's values, and the routers of all layers, whose numbers are left out.
MODELS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "llama4": ("Llama4ForCausalLM", {**DECODER, "num_local_experts": 4, "head_dim": 16}, {"feed_forward.router"}),
    "phimoe": ("PhimoeForCausalLM", {**DECODER, "num_local_experts": 4}, {"mlp.router"}),
    "gemma4": (
        "Gemma4ForCausalLM",
        {
            **DECODER,
            "head_dim": 16,
            "global_head_dim": 16,
            "enable_moe_block": True,
            "num_experts": 16,
            "top_k_experts": 2,
            "moe_intermediate_size": 64,
            # As many as there are experts, which makes no router of `per_layer_input_gate`.
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 96,
        },
        {"router.proj"},
    ),
    "switch": (
        "SwitchTransformersForConditionalGeneration",
        {**SIDES, "vocab_size": 96, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        {"mlp.router.classifier"},
    ),
    "nllb_moe": (
        "NllbMoeForConditionalGeneration",
        {
            "vocab_size": 96,
            "d_model": 64,
            "num_experts": 4,
            **dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_sparse_step", "decoder_sparse_step"), 1),
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
            **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
        },
        {"ffn.router.classifier"},
    ),
    "jetmoe": (
        "JetMoeForCausalLM",
        {**TEXT, **TOKENS, "num_key_value_heads": 2, "kv_channels": 16, "num_local_experts": 4},
        {"mlp.router.layer", "self_attention.experts.router.layer"},
    ),
    "dbrx": (
        "DbrxForCausalLM",
        {
            "vocab_size": 96,
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 1,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        },
        {"ffn.router.layer"},
    ),
    "hunyuan_moe": (
        "HunYuanMoEV1ForCausalLM",
        {**DECODER, "head_dim": 16, "num_experts": 4, "moe_topk": 2},
        {"mlp.gate.wg"},
    ),
    "zaya": (
        "ZayaForCausalLM",
        {**DECODER, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 64, "router_hidden_size": 32},
        {"mlp.gate.down_proj", *(f"mlp.gate.router_mlp.{name}" for name in ("fc1", "fc2", "out_proj"))},
    ),
    "doge": ("DogeForCausalLM", {**DECODER, "is_moe": True, "num_experts": 16}, {"mlp.router_gate"}),
    "gemma3n": (
        "Gemma3nForCausalLM",
        {**DECODER, "head_dim": 16, "num_kv_shared_layers": 0, "laurel_rank": 8, "hidden_size_per_layer_input": 32},
        {"altup.modality_router"},
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {**DECODER, "num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
        {"mlp.shared_expert_gate"},
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {**HYBRID, **LINEAR_ATTENTION, "num_experts": 4},
        {"mlp.shared_expert_gate"},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForCausalLM",
        {**HYBRID, **LINEAR_ATTENTION, "num_experts": 4},
        {"mlp.shared_expert_gate"},
    ),
}
TINY = {"num_local_experts": 4, "num_experts_per_tok": 2}


def skeleton(class_name: str, values: dict[str, Any]) -> PreTrainedModel:
    cls = getattr(transformers, class_name)
    with torch.device("meta"):
        return cls(cls.config_class(**values))


def names_of_routers(module: nn.Module) -> set[str]:
    routers = router_layers(module)
    return {name for name, part in module.named_modules() if part in routers}


def small_model() -> PreTrainedModel:
    torch.manual_seed(0)
    return PhimoeForCausalLM(PhimoeConfig(**{**DECODER, **TINY})).eval()


def quantized_names(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if isinstance(parameter, QuantizedTensor)}


ROUTERS = {f"model.layers.{number}.mlp.router.weight" for number in range(2)}


@pytest.mark.parametrize("name", MODELS)
def test_the_routers_of_a_model_stay_in_float(name: str) -> None:
    class_name, values, expected = MODELS[name]
    model = skeleton(class_name, values)
    names = names_of_routers(model)
    assert {next(end for end in expected if name.endswith("." + end)) for name in names} == expected
    reasons = {choice.name: choice.reason for choice in choose(model, TrainWeightsConfig("int8")).summary}
    assert {reasons[f"{name}.weight"] for name in names} == {ROUTER}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_models_whose_linear_layers_are_no_routers_have_none(name: str) -> None:
    with torch.device("meta"):
        assert not router_layers(ARCHITECTURES[name].make())


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.zeros(4, 32, 64))


def mixture(experts: nn.Module, **others: nn.Module) -> nn.Module:
    return nn.ModuleDict({"experts": experts, **others})


BESIDE_EXPERTS = {
    "gate": (mixture(Experts(), gate=nn.Linear(64, 4)), {"gate"}),
    "conv1d": (mixture(Experts(), gate=Conv1D(4, 64)), {"gate"}),
    "any name": (mixture(Experts(), scores=nn.Linear(64, 4)), {"scores"}),
    "gate in a module": (mixture(Experts(), gate=nn.ModuleDict({"wg": nn.Linear(64, 4)})), {"gate.wg"}),
    "experts in a list": (mixture(nn.ModuleList([nn.Linear(64, 64)] * 4), gate=nn.Linear(64, 4)), {"gate"}),
    "a gate for each task": (
        mixture(Experts(), gates=nn.ModuleList([nn.Linear(64, 4), nn.Linear(64, 4)])),
        {"gates.0", "gates.1"},
    ),
    "gate of shared experts": (mixture(Experts(), shared_expert_gate=nn.Linear(64, 1)), {"shared_expert_gate"}),
    "other outputs": (mixture(Experts(), gate_proj=nn.Linear(64, 32), head=nn.Linear(64, 1)), set()),
    "no experts": (nn.ModuleDict({"gate": nn.Linear(64, 4), "mlp": nn.Linear(64, 4)}), set()),
    "a router that holds networks": (
        nn.ModuleDict({"router": nn.ModuleDict({"query": nn.Sequential(nn.ModuleList([nn.Linear(64, 64)]))})}),
        set(),
    ),
}


@pytest.mark.parametrize("name", BESIDE_EXPERTS)
def test_a_layer_with_an_output_for_each_expert_beside_it_is_a_router(name: str) -> None:
    module, expected = BESIDE_EXPERTS[name]
    assert names_of_routers(module) == expected


@pytest.mark.parametrize("selector", ["router", "model.layers.0.mlp.router", "re:.*router"])
def test_an_override_quantizes_a_router(selector: str) -> None:
    model = small_model()
    quantize_(model, TrainWeightsConfig("int4", group_size=32, overrides={selector: "int8"}))
    wanted = {name for name in ROUTERS if not selector.startswith("model.") or "layers.0" in name}
    assert quantized_names(model) & ROUTERS == wanted


@pytest.mark.parametrize("values", [{"format": "int4", "group_size": 32}, {"bits": 6.0}, {"size": "700kB"}], ids=str)
@pytest.mark.parametrize("calibrated", [False, True])
def test_routers_stay_in_float_in_place(values: dict[str, Any], calibrated: bool) -> None:
    model = small_model()
    batches = [{"input_ids": torch.randint(3, 96, (4, 16))}] if calibrated else None
    summary = quantize_(model, TrainWeightsConfig(**values), calibration=batches)
    assert not quantized_names(model) & ROUTERS
    assert {choice.reason for choice in summary if choice.name in ROUTERS} == {ROUTER}
    assert f"2 {ROUTER}" in str(summary)


@pytest.mark.parametrize("values", [{"format": "int8"}, {"bits": 6.0}], ids=str)
def test_routers_stay_in_float_in_a_directory(tmp_path: Path, values: dict[str, Any]) -> None:
    small_model().save_pretrained(tmp_path / "float")
    quantize_directory(tmp_path / "float", tmp_path / "small", TrainWeightsConfig(**values))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert quantized_names(model)
    assert not quantized_names(model) & ROUTERS


def save_as_earlier_versions(directory: Path, values: dict[str, Any]) -> PreTrainedModel:
    """Save a model whose routers are quantized although its configuration names no override."""
    model = small_model()
    quantize_(model, TrainWeightsConfig("int8", overrides={"router": "int8"}))
    model.config.quantization_config = TrainWeightsConfig("int8", **values)
    model.hf_quantizer.quantization_config = model.config.quantization_config
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("values", [{}, {"plan": dict.fromkeys(ROUTERS, "int8")}], ids=["format", "plan"])
def test_a_model_that_was_saved_with_quantized_routers_has_them_when_loaded(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    saved = save_as_earlier_versions(tmp_path / "first", values)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    loaded.save_pretrained(tmp_path / "second")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "second")
    ids = {"input_ids": torch.randint(3, 96, (2, 8))}
    for model in (loaded, again):
        assert quantized_names(model) == quantized_names(saved) >= ROUTERS
        assert torch.equal(model(**ids).logits, saved(**ids).logits)


def test_a_quantized_router_that_a_file_has_lost_is_missed(tmp_path: Path) -> None:
    save_as_earlier_versions(tmp_path, {})
    file, lost = tmp_path / "model.safetensors", "layers.0.block_sparse_moe.router"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file({name: tensor for name, tensor in tensors.items() if lost not in name}, file, {"format": "pt"})
    with pytest.raises(CorruptFileError, match=r"none of model\.layers\.0\.mlp\.router\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
