"""`use_in_generate`: calls that would make Transformers' cache get ours, and all others stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import DynamicCache, GenerationConfig, GenerationMixin, MambaConfig, MambaForCausalLM

from hf_trainweights import KVCache
from hf_trainweights.cache.generation import use_in_generate
from hf_trainweights.errors import ConfigError

from .test_kv_cache import SIZES, encoder_decoder, llama, prompt

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GenerationMixin, "generate", GenerationMixin.generate)  # puts it back afterwards
    use_in_generate("int8")


def cache_of(model: Any, **options: Any) -> Any:
    inputs = prompt(batch=1)
    options = {"max_new_tokens": 2, "return_dict_in_generate": True, **options}
    return model.generate(**inputs, **options).past_key_values


def test_a_call_without_a_cache_gets_one() -> None:
    cache = cache_of(llama())
    assert isinstance(cache, KVCache)
    assert cache.kinds == ("int8", "int8")


def test_an_encoder_decoder_gets_both_of_its_caches() -> None:
    assert isinstance(cache_of(encoder_decoder("T5")).cross_attention_cache, KVCache)


def test_a_cache_that_a_caller_passes_stays() -> None:
    model = llama()
    cache = DynamicCache(config=model.config)
    assert cache_of(model, past_key_values=cache) is cache


@pytest.mark.parametrize("options", [{"use_cache": False}, {"cache_implementation": "static"}], ids=str)
def test_a_call_that_chooses_otherwise_stays(options: dict[str, Any]) -> None:
    assert not isinstance(cache_of(llama(), **options), KVCache)
    config = GenerationConfig(max_new_tokens=2, return_dict_in_generate=True, pad_token_id=0, **options)
    inputs = prompt(batch=1)
    assert not isinstance(llama().generate(**inputs, generation_config=config).past_key_values, KVCache)


def test_a_model_with_another_state_stays() -> None:
    model = MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=SIZES["vocab_size"]))
    tokens = model.generate(prompt(batch=1)["input_ids"], max_new_tokens=2, pad_token_id=0)
    assert tokens.shape[1] > 80


def test_a_kind_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of 'bf16', 'int8', 'int4'"):
        use_in_generate("int5")
