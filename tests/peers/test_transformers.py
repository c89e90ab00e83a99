"""What Transformers' suites ask of bitsandbytes, torchao, quanto, HQQ and FP8, asked of TrainWeightsConfig.

Only cases that no other test of this package has. What differs on purpose is an xfail that gives the reason, or a test
of the error that says so.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, DECODER, text_inputs
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from hf_trainweights import QuantizedTensor, TrainWeightsConfig
from hf_trainweights.errors import ConfigError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    ARCHITECTURES["llama"].build().save_pretrained(directory)
    return directory


def load(directory: Path, dtype: torch.dtype = torch.float32, **config: object) -> PreTrainedModel:
    quantization_config = TrainWeightsConfig(**(config or {"format": "int8"}))
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, quantization_config=quantization_config)


def quantized_modules(model: nn.Module) -> set[str]:
    return {
        name for name, module in model.named_modules() if isinstance(getattr(module, "weight", None), QuantizedTensor)
    }


@pytest.mark.slow
def test_the_number_of_parameters_stays_as_it_was(llama: Path) -> None:
    float_model = AutoModelForCausalLM.from_pretrained(llama)
    for name in ("int8", "int4", "float8_e4m3"):
        assert load(llama, format=name).num_parameters() == float_model.num_parameters()


def test_the_configuration_of_a_quantized_model_is_json(llama: Path) -> None:
    config = load(llama).config
    assert config.to_dict()["quantization_config"]["quant_method"] == "trainweights"
    assert config.to_diff_dict()["quantization_config"]["format"] == "int8"
    assert json.loads(config.to_json_string())["quantization_config"]["quant_method"] == "trainweights"


@pytest.mark.slow
@pytest.mark.parametrize("original", DTYPES, ids=str)
@pytest.mark.parametrize("cast", DTYPES, ids=str)
def test_dequantizing_restores_the_original_dtype_after_a_cast(
    original: torch.dtype, cast: torch.dtype, llama: Path
) -> None:
    model = load(llama, original)
    model.to(cast)
    model.dequantize()
    assert {parameter.dtype for parameter in model.parameters()} == {original}
    assert model(**text_inputs()).logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantizing_to_a_dtype_gives_a_model_of_that_dtype(dtype: torch.dtype, llama: Path, tmp_path: Path) -> None:
    model = load(llama, torch.bfloat16)
    model.dequantize(dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model(**text_inputs()).logits.dtype == dtype
    model.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == dtype


def test_dequantizing_leaves_weights_that_a_model_keeps_in_float32(tmp_path: Path) -> None:
    ARCHITECTURES["t5"].build().save_pretrained(tmp_path)
    config = TrainWeightsConfig("int8")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path, dtype=torch.float16, quantization_config=config
    )
    assert model.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
    model.dequantize()
    assert model.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
    assert model.encoder.block[0].layer[0].SelfAttention.q.weight.dtype == torch.float16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "architecture", "head"),
    [
        ("AutoModelForCausalLM", "llama", "lm_head"),
        ("AutoModelForSequenceClassification", "llama", "score"),
        ("AutoModelForTokenClassification", "bert", "classifier"),
        ("AutoModelForSeq2SeqLM", "t5", "lm_head"),
    ],
)
def test_the_head_of_each_task_stays_a_float_parameter(name: str, architecture: str, head: str, tmp_path: Path) -> None:
    ARCHITECTURES[architecture].build().save_pretrained(tmp_path)
    config = TrainWeightsConfig("int8")
    model = getattr(transformers, name).from_pretrained(tmp_path, quantization_config=config)
    assert type(model.get_submodule(head).weight) is nn.Parameter
    assert quantized_modules(model)


def test_a_module_that_is_skipped_takes_all_below_it_along(llama: Path) -> None:
    quantized = quantized_modules(load(llama, format="int8", modules_to_not_convert=["model.layers.0"]))
    assert {name.split(".")[2] for name in quantized} == {"1"}


@pytest.mark.slow
def test_each_layer_may_have_settings_of_its_own(llama: Path) -> None:
    """HQQ calls this its dynamic configuration: names of layers in every block to settings."""
    dynamic = {"self_attn.q_proj": {"format": "int4", "group_size": 32}, "mlp.down_proj": {"format": "int8"}}
    overrides = {f"re:.*{name.replace('.', '[.]')}": settings for name, settings in dynamic.items()}
    model = load(llama, format="float8_e4m3", overrides=overrides)
    for layer in model.model.layers:
        formats = [str(each.weight.format) for each in (layer.self_attn.q_proj, layer.mlp.down_proj, layer.mlp.up_proj)]
        assert formats == ["int4 g32", "int8", "float8_e4m3"]


@pytest.mark.slow
def test_nothing_is_left_on_the_meta_device(llama: Path, tmp_path: Path) -> None:
    load(llama).save_pretrained(tmp_path)
    for model in (load(llama), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_a_local_change_of_a_float_weight_survives_saving(llama: Path, tmp_path: Path) -> None:
    model = load(llama)
    with torch.no_grad():
        model.model.norm.weight.fill_(2)
    model.save_pretrained(tmp_path)
    assert (AutoModelForCausalLM.from_pretrained(tmp_path).model.norm.weight == 2).all()


def test_float8_in_blocks_of_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"group_size.*found \[128, 128\]"):
        TrainWeightsConfig("float8_e4m3", group_size=[128, 128])


def test_a_model_from_a_quantized_configuration_alone_is_refused(llama: Path, tmp_path: Path) -> None:
    load(llama).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="from_pretrained"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))


def test_a_layer_whose_columns_groups_do_not_divide_is_quantized_all_the_same(tmp_path: Path) -> None:
    sizes = {**DECODER, "hidden_size": 80, "intermediate_size": 72, "num_attention_heads": 4}
    transformers.LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path)
    model = load(tmp_path, format="int4")
    assert {str(model.get_submodule(name).weight.format) for name in quantized_modules(model)} == {"int8"}
    assert model(**text_inputs()).logits.isfinite().all()
