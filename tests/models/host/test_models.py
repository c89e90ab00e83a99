"""What the installed Transformers' models say about themselves, and what is done where they do not."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from packaging.version import Version
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel, modelcard
from transformers.integrations.peft import PeftAdapterMixin
from transformers.quantizers.base import HfQuantizer

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.models.choosing.config_values import listed
from hf_trainweights.models.host.models import (
    base_prefix,
    cache_argument,
    has_adapters,
    is_stateful,
    modules_kept_in_float,
    names_tied_now,
    tasks_of,
    tied_names,
    was_loaded,
)


def test_tied_parameters_are_told_by_name() -> None:
    assert tied_names(ARCHITECTURES["llama_tied"].build()) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert tied_names(ARCHITECTURES["llama"].build()) == {}
    assert tied_names(nn.Linear(2, 2)) == {}


def test_the_argument_for_a_cache_is_the_one_that_transformers_itself_uses() -> None:
    model = ARCHITECTURES["llama"].build().eval()
    name, ids = cache_argument(model), torch.arange(6)[None]
    first = model(ids[:, :4], use_cache=True)
    step = model(ids[:, 4:], use_cache=True, **{name: first[name]})
    torch.testing.assert_close(step.logits, model(ids).logits[:, 4:])
    assert cache_argument(nn.Linear(2, 2)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_asks_for_what_transformers_itself_keeps_in_float(name: str) -> None:
    model = ARCHITECTURES[name].build()
    kept = set(modules_kept_in_float(model, include_embeddings=False))
    # Transformers asks before a load ties weights: then the last of them may be one that is to be tied.
    for tied in tied_names(model):
        module, _, leaf = tied.rpartition(".")
        setattr(model.get_submodule(module), leaf, nn.Parameter(model.get_parameter(tied).detach()))
    float32 = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    expected = {*HfQuantizer.get_modules_to_not_convert(model), *float32}
    assert kept == expected == set(modules_kept_in_float(model, include_embeddings=False))


@pytest.mark.slow
@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="earlier versions match parts of names")
@pytest.mark.parametrize(
    "pattern",
    ["lm_head", "layers.1", "layers.*", "mlp.gate", "a|b", "fc1", ".*", r"(?:lm|x)_head", r"layers\.\d", r"[ml]\w+"],
)
def test_modules_not_to_convert_are_matched_as_transformers_matches_them(pattern: str) -> None:
    should_convert_module = import_module("transformers.quantizers.quantizers_utils").should_convert_module
    for name in ("lm_head", "model.lm_head", "layers.1.mlp", "layers.11.mlp", "mlp.gate_proj", "b.weight", "x.fc1"):
        assert bool(listed([pattern], [name])) != should_convert_module(name, [pattern])


def test_a_parameter_that_was_loaded_is_told_from_one_that_was_made(tmp_path: Path) -> None:
    ARCHITECTURES["bert"].build().save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    made = {name for name, parameter in model.named_parameters() if not was_loaded(parameter)}
    assert made == {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"}


class WithoutBase(PreTrainedModel):
    """An instance of PreTrainedModel itself would leave marks on that class, which change every other model."""


def test_the_prefix_of_the_base_model_is_that_of_its_parameters() -> None:
    model = ARCHITECTURES["gpt2"].build()
    assert base_prefix(model) == base_prefix(model.base_model) == "transformer."
    assert base_prefix(WithoutBase(PreTrainedConfig())) == ""


def test_embeddings_and_head_are_not_kept_where_they_are_included() -> None:
    assert modules_kept_in_float(ARCHITECTURES["llama"].build(), include_embeddings=False) == ["lm_head"]
    for name in ("llama", "llama_tied"):
        kept = modules_kept_in_float(ARCHITECTURES[name].build(), include_embeddings=True)
        assert {"lm_head", "model.embed_tokens"}.isdisjoint(kept)
    for include_embeddings in (False, True):
        assert "wo" in modules_kept_in_float(ARCHITECTURES["t5"].build(), include_embeddings)


def test_another_module_keeps_nothing_in_float() -> None:
    assert modules_kept_in_float(nn.Linear(2, 2), include_embeddings=False) == []


@pytest.mark.parametrize(
    ("ask", "attribute"),
    [
        (tied_names, "all_tied_weights_keys"),
        (names_tied_now, "get_expanded_tied_weights_keys"),
        (modules_kept_in_float, "_keep_in_fp32_modules"),
        (modules_kept_in_float, "_keep_in_fp32_modules_strict"),
        (is_stateful, "_is_stateful"),
    ],
)
def test_an_attribute_that_is_missing_is_named_with_the_versions_that_have_it(
    ask: Callable[..., object], attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ARCHITECTURES["llama"].build()
    if attribute in vars(model):
        monkeypatch.delattr(model, attribute)
    monkeypatch.delattr(PreTrainedModel, attribute, raising=False)
    with pytest.raises(UnsupportedError, match=rf"{attribute}: expected transformers>=5\.17.*pip install"):
        ask(model, *([False] if ask is modules_kept_in_float else []))


def test_adapters_are_told() -> None:
    model = ARCHITECTURES["llama"].build()
    assert not has_adapters(model)
    model.add_adapter(LoraConfig(target_modules=["q_proj"]))
    assert has_adapters(model)
    assert model._hf_peft_config_loaded
    model.delete_adapter("default")
    assert not has_adapters(model)


def test_adapters_are_told_by_their_configuration_where_the_flag_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, adapted = ARCHITECTURES["llama"].build(), ARCHITECTURES["llama"].build()
    adapted.add_adapter(LoraConfig(target_modules=["q_proj"]))
    del adapted._hf_peft_config_loaded
    monkeypatch.delattr(PeftAdapterMixin, "_hf_peft_config_loaded")
    assert (has_adapters(model), has_adapters(adapted)) == (False, True)


def test_a_class_is_for_the_tasks_of_the_hub() -> None:
    assert tasks_of("LlamaForCausalLM") == ["text-generation"]
    assert tasks_of("Gemma3ForConditionalGeneration")[-1] == "image-text-to-text"
    assert tasks_of("OwnModel") == []


def test_without_a_table_of_tasks_a_class_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(modelcard, "TASK_MAPPING")
    assert tasks_of("LlamaForCausalLM") == []
