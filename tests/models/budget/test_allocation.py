"""A budget of bits or bytes: met, allocated the same way everywhere, kept in config.json, and refused by name."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, outputs
from covering import exhaustive
from tiny_tokenizers import byte_level
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_trainweights import (
    QuantizedTensor,
    TrainWeightsConfig,
    export_compressed_tensors,
    export_gguf,
    quantize_,
    summary,
)
from hf_trainweights.errors import ConfigError, QuantizationError
from hf_trainweights.models.budget.allocation import CANDIDATES, OF_TARGETS
from hf_trainweights.models.choosing.config_values import TARGETS, Budget
from hf_trainweights.models.choosing.summary import Summary


@pytest.fixture(params=["bert", "gpt_oss", "t5", *exhaustive("llama", "gpt2", "qwen3_moe")])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def quantized_bits(found: Summary) -> float:
    return 8 * sum(each.bytes_after for each in found.quantized) / sum(each.numel for each in found.quantized)


def layers(count: int = 40) -> nn.Module:
    """Return many Linears of one size, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    module = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(count)))
    for index, layer in enumerate(module):
        layer.weight.data = torch.randn(128, 128, generator=generator) * (1 + index % 5)  # type: ignore[union-attr]
    return module


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1.2GB", 1_200_000_000), ("900 MiB", 900 << 20), ("12k", 12_000), ("3tb", 3 * 10**12), (77, 77), ("77 B", 77)],
)
def test_a_size_is_read_as_people_write_it(value: str | int, expected: int) -> None:
    assert TrainWeightsConfig(size=value).budget == Budget(None, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 4, "size": "1GB"}, "bits: expected either bits or size"),
        ({"bits": 0}, "bits: expected a number of bits per weight, found 0"),
        ({"bits": True}, "bits: expected a number of bits per weight, found True"),
        ({"bits": "4"}, "bits: expected a number of bits per weight, found '4'"),
        ({"bits": float("nan")}, "bits: expected a number of bits per weight, found nan"),
        ({"size": "1.2 gigabytes"}, "size: expected a number of bytes"),
        ({"size": "-1GB"}, "size: expected a number of bytes"),
        ({"size": 0}, "size: expected a number of bytes"),
        ({"for_target": "gguf"}, "for_target: expected bits or size, for which formats are chosen, found neither"),
        ({"for_target": "onnx", "bits": 6}, "for_target: expected one of gguf, compressed-tensors, found 'onnx'"),
        ({"size": "1GB", "format": "int8"}, "format: expected None with bits or size"),
        ({"bits": 4, "group_size": 32}, "group_size: expected None with bits or size"),
        ({"bits": 8, "activations": "int8"}, "activations: expected None with bits or size"),
        ({"bits": 4, "plan": ["int8"]}, "plan: expected a dict of names to formats"),
        ({"bits": 4, "plan": {"a": "int3"}}, r"plan\['a'\]: expected one of"),
        ({"bits": 4, "plan": {"a": None}}, "plan: expected a dict of names to formats"),
    ],
)
def test_a_value_that_is_no_budget_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainWeightsConfig(**arguments)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("budget", [{"bits": 6.5}, {"bits": 5.2, "include_embeddings": True}, {"size": 0.4}])
def test_formats_are_allocated_alike_in_memory_and_from_files(
    name: str, budget: dict[str, Any], tmp_path: Path
) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    if "size" in budget:
        budget = {"size": int(budget["size"] * sum(parameter.nbytes for parameter in model.parameters()))}
    # Many shards: a weight is looked for in all of them.
    model.save_pretrained(tmp_path / "float", max_shard_size="50KB")
    config = TrainWeightsConfig(**budget)
    loaded = architecture.auto_class.from_pretrained(tmp_path / "float", quantization_config=config)
    quantized = quantize_(model, config)
    assert config == TrainWeightsConfig(**budget)
    for each, out in ((loaded, "loaded"), (model, "in_place")):
        each.save_pretrained(tmp_path / out)
    assert filecmp.cmp(*(tmp_path / out / "model.safetensors" for out in ("loaded", "in_place")), shallow=False)
    assert loaded.hf_quantizer.quantization_config.plan == model.hf_quantizer.quantization_config.plan
    assert str(summary(loaded)) == str(quantized)
    if "bits" in budget:
        assert quantized_bits(quantized) <= budget["bits"]
    else:
        assert (tmp_path / "loaded" / "model.safetensors").stat().st_size <= budget["size"]


@pytest.mark.slow
def test_a_model_with_allocated_formats_reloads_with_equal_outputs_and_saves_equal_bytes(
    name: str, tmp_path: Path
) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.build()
    actual = quantize_(model, TrainWeightsConfig(bits=6.5))
    expected = outputs(model, architecture.inputs(model))
    model.save_pretrained(tmp_path / "first")
    reloaded = architecture.auto_class.from_pretrained(tmp_path / "first")
    assert all(map(torch.equal, outputs(reloaded, architecture.inputs(reloaded)), expected))
    assert str(summary(reloaded)) == str(actual)
    reloaded.save_pretrained(tmp_path / "second")
    for file in ("model.safetensors", "config.json"):
        assert filecmp.cmp(tmp_path / "first" / file, tmp_path / "second" / file, shallow=False)


@pytest.mark.slow
def test_the_saved_allocation_makes_the_same_model_without_choosing_again(tmp_path: Path) -> None:
    model, again = (ARCHITECTURES["llama"].build() for _ in range(2))
    quantize_(model, TrainWeightsConfig(bits=6.5))
    model.save_pretrained(tmp_path / "first")
    saved = json.loads((tmp_path / "first" / "config.json").read_text())["quantization_config"]
    assert {saved["bits"], *saved["plan"]} == {6.5, *(each.name for each in summary(model).quantized)}
    config = TrainWeightsConfig.from_dict(saved)
    assert not config.needs_plan
    quantize_(again, config)
    again.save_pretrained(tmp_path / "second")
    assert filecmp.cmp(*(tmp_path / out / "model.safetensors" for out in ("first", "second")), shallow=False)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4.5, *exhaustive(5.0, 6.0, 7.0)])
def test_bits_are_met_within_a_hundredth(bits: float) -> None:
    quantized = quantize_(layers().bfloat16(), TrainWeightsConfig(bits=bits))
    assert 0.99 * bits <= quantized_bits(quantized) <= bits


@pytest.mark.slow
@pytest.mark.parametrize("share", [*exhaustive(0.3), 0.36, *exhaustive(0.42)])
def test_a_size_is_met_within_a_hundredth_by_the_file(share: float, tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=96, **shape)).bfloat16()
    size = int(share * sum(parameter.nbytes for parameter in model.parameters())) + 30_000
    quantize_(model, TrainWeightsConfig(size=size))
    model.save_pretrained(tmp_path)
    assert 0.98 * size <= (tmp_path / "model.safetensors").stat().st_size <= size


@pytest.mark.slow
def test_overrides_and_exceptions_win_and_are_counted() -> None:
    module = layers()
    exceptions: dict[str, Any] = {"overrides": {"3": "float8_e4m3", "5": None}, "modules_to_not_convert": ["7"]}
    found = {each.name: each for each in quantize_(module, TrainWeightsConfig(bits=7.0, **exceptions))}
    assert str(found["3.weight"].format) == "float8_e4m3"
    assert found["5.weight"].format is None
    assert found["7.weight"].format is None
    total = sum(each.bytes_after for each in found.values())
    assert 0.99 * 7 <= 8 * total / sum(each.numel for each in found.values()) <= 7


@pytest.mark.slow
def test_what_the_model_keeps_in_float_does_not_count_as_bits() -> None:
    model = ARCHITECTURES["llama"].build()
    assert quantize_(model, TrainWeightsConfig(bits=6.5, modules_to_not_convert=["lm_head"])).quantized


@pytest.mark.slow
def test_more_important_weights_get_more_bits() -> None:
    """Rows with a few large values lose more at four bits than others."""
    module = layers()
    with torch.no_grad():
        for index in (1, 11, 21):
            module[index].weight[:, ::32] *= 8  # type: ignore[index]
    quantize_(module, TrainWeightsConfig(bits=5.2))
    sizes = [layer.weight.stored_bytes for layer in module]  # type: ignore[union-attr]
    assert min(sizes[index] for index in (1, 11, 21)) == max(sizes) > min(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [{"bits": 1.5}, *exhaustive({"size": "10kB"})])
def test_a_budget_below_the_smallest_model_names_that(budget: dict[str, Any]) -> None:
    module = layers()
    with pytest.raises(
        ConfigError, match=r"(bits|size): expected at least [\d.,]+( bytes)?, which the smallest"
    ) as found:
        quantize_(module, TrainWeightsConfig(**budget))
    assert not any(isinstance(parameter, QuantizedTensor) for parameter in module.parameters())
    least = found.value.expected.split()[2].rstrip(",").replace(",", "")
    key, value = ("bits", float(least)) if "bits" in budget else ("size", int(least))
    assert quantize_(module, TrainWeightsConfig(**{key: value})).quantized


@pytest.mark.slow
def test_weights_of_which_no_values_are_known_are_refused(tmp_path: Path) -> None:
    model = ARCHITECTURES["llama"].build()
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan
    model.save_pretrained(tmp_path)
    for quantize in (
        lambda config: quantize_(model, config),
        lambda config: type(model).from_pretrained(tmp_path, quantization_config=config),
    ):
        with pytest.raises(QuantizationError, match=r"up_proj.*expected finite values, found NaN or Inf"):
            quantize(TrainWeightsConfig(bits=6))
    with torch.device("meta"):
        skeleton = layers()
    with pytest.raises(QuantizationError, match="one on the meta device"):
        quantize_(skeleton, TrainWeightsConfig(bits=6))


def test_formats_for_a_state_dict_cannot_be_allocated_as_it_is_loaded() -> None:
    model = ARCHITECTURES["llama"].build()
    options: dict[str, Any] = {"config": model.config, "state_dict": model.state_dict()}
    with pytest.raises(ConfigError, match="expected the files of a checkpoint, found a state dict"):
        type(model).from_pretrained(None, quantization_config=TrainWeightsConfig(bits=6), **options)


def test_candidates_lead_from_the_smallest_to_the_most_exact() -> None:
    shape = (256, 1024)
    sizes = [form.stored_bytes(shape, torch.bfloat16) for form in CANDIDATES]
    assert sizes == sorted(set(sizes))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_formats_for_an_export_are_among_those_that_it_holds(target: str, tmp_path: Path) -> None:
    model, tokenizer = ARCHITECTURES["llama"].build(torch.float16), byte_level(size=300)
    model.resize_token_embeddings(len(tokenizer))
    quantize_(model, TrainWeightsConfig(bits=6.5, for_target=target))
    found = {weight.format for weight in model.parameters() if isinstance(weight, QuantizedTensor)}
    assert len(found) > 1
    assert found <= set(OF_TARGETS[target])
    if target == "gguf":
        export_gguf(model, tmp_path / "model.gguf", tokenizer)
    else:
        export_compressed_tensors(model, tmp_path / "out")


@pytest.mark.slow
def test_formats_are_allocated_for_an_export_as_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    ARCHITECTURES["llama"].build().save_pretrained(tmp_path)
    config = TrainWeightsConfig(bits=5, for_target="gguf")
    model = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    found = {weight.format for weight in model.parameters() if isinstance(weight, QuantizedTensor)}
    assert found <= set(OF_TARGETS["gguf"])
    assert [str(form) for form in OF_TARGETS["gguf"]] == ["int4 g32", "int8"]
    assert [str(form) for form in OF_TARGETS["compressed-tensors"]] == ["int4 g128", "int4 g64", "int4 g32", "int8"]
    with pytest.raises(ConfigError, match="which the smallest formats take \\(int4 g32\\)"):
        LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=TrainWeightsConfig(bits=2, for_target="gguf"))
