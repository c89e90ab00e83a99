"""A model from the configuration of a quantized one: refused, but for skeletons and for float configurations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from architectures import ARCHITECTURES
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from hf_trainweights import TrainWeightsConfig, quantize_
from hf_trainweights.errors import ConfigError


@pytest.fixture
def config(tmp_path: Path) -> Any:
    model = ARCHITECTURES["llama"].build()
    quantize_(model, TrainWeightsConfig("int8"))
    model.save_pretrained(tmp_path)
    return AutoConfig.from_pretrained(tmp_path)


def test_the_configuration_of_a_quantized_model_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM\.from_config: .* Load the model with from_pretrained"):
        AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"delete config\.quantization_config"):
        LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)


def test_the_configuration_of_a_model_in_memory_is_refused() -> None:
    model = ARCHITECTURES["llama"].build()
    quantize_(model, TrainWeightsConfig("int8"))
    with pytest.raises(ConfigError, match="from_pretrained"):
        AutoModelForCausalLM.from_config(model.config)


@pytest.mark.parametrize("on_meta", [lambda: torch.device("meta"), init_empty_weights])
def test_a_skeleton_is_made_of_it(config: Any, on_meta: Callable[[], AbstractContextManager[Any]]) -> None:
    with on_meta():
        model = AutoModelForCausalLM.from_config(config)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_the_next_step_gives_a_quantized_model_of_random_weights(config: Any) -> None:
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    quantize_(model, TrainWeightsConfig("int8"))
    assert model.is_quantized
    assert model.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("other", [None, {"quant_method": "bitsandbytes", "load_in_8bit": True}])
def test_other_configurations_are_left_alone(config: Any, other: dict[str, Any] | None) -> None:
    config.quantization_config = other
    assert isinstance(AutoModelForCausalLM.from_config(config), LlamaForCausalLM)
