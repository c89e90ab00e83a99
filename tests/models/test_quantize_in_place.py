"""`quantize_` makes of a Transformers model what `from_pretrained` would have made of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, outputs
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel, RwkvConfig, RwkvForCausalLM

from hf_trainweights import QuantizedTensor, TrainWeightsConfig, quantize_, summary
from hf_trainweights.errors import ConfigError, QuantizationError
from hf_trainweights.models.choosing.selection import WRITTEN


@pytest.fixture(params=["llama", "gpt_neox", "qwen3_moe"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("safe_serialization", [True, False])
def test_a_model_quantized_in_place_saves_and_reloads(tmp_path: Path, name: str, safe_serialization: bool) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    summary = quantize_(model, TrainWeightsConfig("int8"))
    expected = outputs(model, architecture.inputs(model))
    model.save_pretrained(tmp_path, safe_serialization=safe_serialization)
    reloaded = architecture.auto_class.from_pretrained(tmp_path)
    assert str(reloaded.hf_quantizer.summary()) == str(summary)
    assert all(map(torch.equal, outputs(reloaded, architecture.inputs(reloaded)), expected))


@pytest.mark.slow
def test_it_saves_the_files_that_from_pretrained_would_lead_to(tmp_path: Path, name: str) -> None:
    architecture = ARCHITECTURES[name]
    config = TrainWeightsConfig("int4", group_size=32)
    model = architecture.build()
    model.save_pretrained(tmp_path / "float")
    quantize_(model, config)
    model.save_pretrained(tmp_path / "in_place")
    loaded = architecture.auto_class.from_pretrained(tmp_path / "float", quantization_config=config)
    loaded.save_pretrained(tmp_path / "loaded")
    files = [(tmp_path / way / "model.safetensors").read_bytes() for way in ("in_place", "loaded")]
    assert files[0] == files[1]


def test_a_second_call_quantizes_only_the_rest() -> None:
    model: PreTrainedModel = ARCHITECTURES["llama"].build()
    only_mlp = {"re:.*self_attn.*": None}
    quantize_(model, TrainWeightsConfig("int8", overrides=only_mlp))
    up_proj = model.model.layers[0].mlp.up_proj.weight
    summary = quantize_(model, TrainWeightsConfig("float8_e4m3", overrides={"re:.*mlp.*": None}))
    assert model.model.layers[0].mlp.up_proj.weight is up_proj
    assert isinstance(model.model.layers[0].self_attn.q_proj.weight, QuantizedTensor)
    assert str(summary) == str(model.hf_quantizer.summary())


@pytest.mark.parametrize("calibrated_first", [True, False])
def test_what_a_call_says_of_calibration_outlives_another_call(calibrated_first: bool) -> None:
    model: PreTrainedModel = ARCHITECTURES["llama"].build()
    batches = [{"input_ids": torch.arange(96).view(4, 24)}]
    calls = [("mlp", TrainWeightsConfig("uint4", overrides={"self_attn": None}), batches)]
    calls.insert(int(calibrated_first), ("self_attn", TrainWeightsConfig("int8", overrides={"mlp": None}), None))
    summaries = {name: quantize_(model, config, calibration=calibration) for name, config, calibration in calls}
    assert model.hf_quantizer.calibrated is summaries["mlp"].calibrated is not None
    assert model.config.quantization_config.calibration_sha256 is not None


def test_dequantize_gives_an_ordinary_model(tmp_path: Path) -> None:
    model: PreTrainedModel = ARCHITECTURES["llama"].build()
    quantize_(model, TrainWeightsConfig("int8"))
    model.dequantize()
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    assert not any(isinstance(parameter, QuantizedTensor) for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("option", ["overrides", "modules_to_not_convert"])
@pytest.mark.parametrize(
    ("selector", "nearest"),
    [("re:.*donw_proj", "down_proj"), ("lm_haed", "lm_head"), ("model.layer.0", "model.layers.0"), ("norms", "norm")],
)
def test_a_misspelt_selector_is_refused_before_anything_is_quantized(option: str, selector: str, nearest: str) -> None:
    model = ARCHITECTURES["llama"].build()
    value: Any = {selector: "float8_e4m3"} if option == "overrides" else [selector]
    with pytest.raises(ConfigError, match=rf'{option}\[.*nothing that it selects\. Did you mean "{nearest}"\?'):
        quantize_(model, TrainWeightsConfig("int8", **{option: value}))
    assert not any(isinstance(parameter, QuantizedTensor) for parameter in model.parameters())


def test_a_configuration_with_unknown_keys_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = ARCHITECTURES["llama"].build()
    config = TrainWeightsConfig.from_dict({"format": "int8", "group_sise": 32})
    assert "group_sise" in caplog.text
    with pytest.raises(ConfigError, match="found group_sise"):
        quantize_(model, config)
    assert not any(isinstance(parameter, QuantizedTensor) for parameter in model.parameters())


@pytest.mark.slow
def test_a_model_inside_another_module_saves_itself_and_reloads(tmp_path: Path) -> None:
    module = nn.ModuleDict({"encoder": ARCHITECTURES["bert"].build(), "head": nn.Linear(64, 64)})
    quantize_(module, TrainWeightsConfig("int8"))
    model = module["encoder"]
    model.save_pretrained(tmp_path)
    reloaded = type(model).from_pretrained(tmp_path)
    inputs = ARCHITECTURES["bert"].inputs(reloaded)
    assert isinstance(module["head"].weight, QuantizedTensor)
    assert torch.equal(reloaded(**inputs)[0], model(**inputs)[0])


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_model_inside_another_module_keeps_the_same_weights_in_float(name: str) -> None:
    alone, inside = ARCHITECTURES[name].build(), nn.ModuleDict({"model": ARCHITECTURES[name].build()})
    expected = {f"model.{tensor.name}": tensor.reason for tensor in quantize_(alone, "int8").tensors}
    assert {tensor.name: tensor.reason for tensor in quantize_(inside, "int8").tensors} == expected


def test_the_name_of_a_format_is_a_configuration() -> None:
    by_name, by_config = ARCHITECTURES["llama"].build(), ARCHITECTURES["llama"].build()
    assert str(quantize_(by_name, "int8")) == str(quantize_(by_config, TrainWeightsConfig("int8")))
    with pytest.raises(ConfigError, match=r'found \'nf4\'\. Did you mean "int4"\?'):
        quantize_(ARCHITECTURES["llama"].build(), "nf4")
    with pytest.raises(ConfigError, match=r"module: expected an nn\.Module, found 'me/model'\. Load it first"):
        quantize_("me/model", "int8")  # type: ignore[arg-type]


QUANTIZED_ALREADY = {
    "another format": {"format": "int4", "group_size": 32},
    "other parameters": {"format": "int8", "group_size": 32},
    "an override": {"format": "int8", "overrides": {"0": "float8_e4m3"}},
}


@pytest.mark.parametrize("name", QUANTIZED_ALREADY)
def test_weights_of_another_format_are_refused_and_stay(name: str) -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    quantize_(module, TrainWeightsConfig("int8"))
    module.append(nn.Linear(64, 64))
    kept = [layer.weight for layer in module]
    with pytest.raises(ConfigError, match=r"0\.weight in int8.*dequantize_\(module\).*modules_to_not_convert"):
        quantize_(module, TrainWeightsConfig(**QUANTIZED_ALREADY[name]))
    assert [layer.weight for layer in module] == kept


def test_weights_of_another_format_stay_where_the_configuration_leaves_them_alone() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    quantize_(module, TrainWeightsConfig("int8", modules_to_not_convert=["1", "2"]))
    quantize_(module, TrainWeightsConfig("int4", group_size=32, modules_to_not_convert=["0"], overrides={"2": "int8"}))
    quantize_(module, TrainWeightsConfig("int4", group_size=32, overrides={"0": None, "2": "int8"}))
    assert [str(layer.weight.format) for layer in module] == ["int8", "int4 g32", "int8"]


def test_a_budget_counts_what_is_quantized_and_refuses_to_choose_where_nothing_is_left() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    quantize_(module, TrainWeightsConfig("int4", group_size=32, modules_to_not_convert=["1"]))
    quantize_(module, TrainWeightsConfig(bits=6.5))
    assert str(module[0].weight.format) == "int4 g32"
    assert isinstance(module[1].weight, QuantizedTensor)
    with pytest.raises(ConfigError, match=r"0\.weight in int4 g32.*dequantize_"):
        quantize_(module, TrainWeightsConfig(bits=6.5))


def test_a_budget_is_met_by_overrides_of_all_weights() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    quantize_(module, TrainWeightsConfig(bits=9, overrides={"re:.*": "int8"}))
    assert [str(layer.weight.format) for layer in module] == ["int8", "int8"]


def sharded(module: nn.Module) -> Any:
    return fully_shard(module, mesh=init_device_mesh("cpu", (2,)))


def summary_of_shards(rank: int) -> str:
    del rank
    with pytest.raises(QuantizationError, match=r"0\.weight: expected a weight that this process has whole, found a D"):
        quantize_(sharded(nn.Sequential(nn.Linear(64, 64))), "int8")
    module = nn.Sequential(nn.Linear(64, 64))
    quantize_(module, "int8")
    quantize_(sharded(module), "int8")
    return str(summary(module))


@pytest.mark.slow
def test_a_module_is_quantized_before_it_is_sharded_and_shows_that() -> None:
    module = nn.Sequential(nn.Linear(64, 64))
    quantize_(module, "int8")
    assert run_ranks(2, summary_of_shards) == [str(summary(module))] * 2


def test_rwkv_which_divides_its_weights_computes_what_the_float_model_does() -> None:
    torch.manual_seed(0)
    model = RwkvForCausalLM(RwkvConfig(vocab_size=32, hidden_size=64, num_hidden_layers=8)).train()
    inputs = torch.arange(8)[None]
    float_model = copy.deepcopy(model)
    done = quantize_(model, TrainWeightsConfig("int8"))
    assert sum(choice.reason == WRITTEN for choice in done) == 16  # two in each block
    assert not model.rwkv.layers_are_rescaled
    outputs, expected = (each.eval()(inputs).logits for each in (model, float_model))
    assert (outputs - expected).norm() < 0.03 * expected.norm()
    assert model.rwkv.layers_are_rescaled


class Pair(nn.Module):
    """Runs the second of two models twice, so that no weight of it is calibrated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (ARCHITECTURES["llama"].build() for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        outputs = [model(input_ids=input_ids).logits for model in (self.first, self.second, self.second)]
        return torch.stack(outputs)


def test_a_model_of_which_no_weight_was_calibrated_does_not_name_the_inputs() -> None:
    pair = Pair()
    config = TrainWeightsConfig("int4", group_size=32)
    quantize_(pair, config, calibration=[{"input_ids": torch.randint(2, 96, (4, 16))}])
    first, second = (model.config.quantization_config for model in (pair.first, pair.second))
    assert first.calibration_sha256 is not None
    assert second.calibration_sha256 is None
    assert pair.second.hf_quantizer.calibrated is None
