"""`KVCache` in Transformers: every way of generating gives what Transformers' own cache gives, exactly or nearly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from cache.cached_models import HEADS, KINDS, SIZES, VOCAB, WINDOW, llama, made, mistral, prompt
from oldest_transformers import not_by_5_17
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_trainweights import KVCache
from hf_trainweights.cache import states
from hf_trainweights.cache.kv_cache import EncoderDecoderKVCache
from hf_trainweights.cache.layers import LEAST_TOKENS
from hf_trainweights.errors import ConfigError
from hf_trainweights.kernels.compiled import is_available

pytestmark = pytest.mark.slow
NOT_BY_5_17 = not_by_5_17("an assistant with a window fails in Transformers 5.17 with its own cache")

NEW_TOKENS = 12
# The largest relative error of logits, of keys and values that are exact, of 8 bits, of 4 in part or whole.
LIMITS = {"bf16": 0.0, "int8": 0.02, ("int8", "int4"): 0.12, "int4": 0.12}


def padded() -> dict[str, Tensor]:
    inputs = prompt()
    inputs["attention_mask"][0, :17] = 0
    inputs["input_ids"][0, :17] = 0
    return inputs


def generate(model: PreTrainedModel, inputs: Mapping[str, Tensor], cache: Any = None, **options: Any) -> Any:
    torch.manual_seed(3)
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, **options}
    given = {} if cache is None else {"past_key_values": cache}
    return model.generate(**inputs, **given, **options, return_dict_in_generate=True, output_logits=True)


WAYS: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "greedy": (prompt(), {}),
    "left padding": (padded(), {}),
    "a short prompt": (prompt(9), {"max_new_tokens": LEAST_TOKENS}),
    "beams": (padded(), {"num_beams": 3}),
    "sampling": (prompt(), {"do_sample": True, "num_return_sequences": 2}),
    "a prompt in chunks": (padded(), {"prefill_chunk_size": 32}),
    "prompt lookup": (prompt(batch=1), {"prompt_lookup_num_tokens": 4}),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [llama, mistral], ids=["all tokens", "a window"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_generating_gives_what_transformers_cache_gives(way: str, make: Any, kind: Any) -> None:
    torch.manual_seed(0)
    model, (inputs, options) = make(), WAYS[way]
    expected, actual = (
        generate(model, inputs, **options),
        generate(model, inputs, KVCache(model.config, kind), **options),
    )
    if kind == "bf16":
        assert torch.equal(actual.sequences, expected.sequences)
        assert all(map(torch.equal, actual.logits, expected.logits))
        return
    # Until a near tie falls the other way, after which all is another text.
    for own, exact in zip(actual.logits[:2], expected.logits[:2], strict=True):
        if own.shape == exact.shape and way != "sampling":
            assert (own - exact).norm() <= LIMITS[kind] * exact.norm()


@pytest.mark.parametrize("make", [llama, pytest.param(mistral, marks=NOT_BY_5_17)])
def test_an_assistant_proposes_tokens_that_are_taken_back(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = make()
    assistant = copy.deepcopy(model)
    for parameter in assistant.parameters():
        parameter.data *= 0.9
    options = {"assistant_model": assistant, "max_new_tokens": 3 * NEW_TOKENS}
    expected = generate(model, prompt(batch=1), **options)
    actual = generate(model, prompt(batch=1), KVCache(model.config, "bf16"), **options)
    assert torch.equal(actual.sequences, expected.sequences)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@torch.no_grad()
def test_a_second_turn_goes_on_with_the_same_cache(kind: Any) -> None:
    torch.manual_seed(0)
    model = llama()
    own, exact = KVCache(model.config, kind), DynamicCache(config=model.config)
    for count in (70, 50, 1, 1, 20):
        ids = prompt(count)["input_ids"]
        actual, expected = (model(ids, past_key_values=cache).logits for cache in (own, exact))
        assert (actual - expected).norm() <= LIMITS[kind] * expected.norm()
    assert own.get_seq_length() == exact.get_seq_length() == 142


def encoder_decoder(name: str) -> PreTrainedModel:
    sizes = {"d_model": 64, "vocab_size": VOCAB, "decoder_start_token_id": 1}
    if name == "T5":
        return made(T5ForConditionalGeneration(T5Config(**sizes, d_kv=16, d_ff=64, num_layers=2, num_heads=4)))
    layers = {
        f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in (("layers", 2), ("ffn_dim", 64))
    }
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return made(BartForConditionalGeneration(BartConfig(**sizes, **layers, **heads, forced_eos_token_id=None)))


@pytest.mark.parametrize("name", ["T5", "BART"])
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_an_encoder_decoder_has_a_cache_for_each_attention(name: str, kind: str) -> None:
    torch.manual_seed(0)
    model = encoder_decoder(name)
    cache = KVCache(model.config, kind)
    assert isinstance(cache, EncoderDecoderKVCache)
    expected, actual = generate(model, prompt()), generate(model, prompt(), cache)
    for own, exact in zip(actual.logits[:2], expected.logits[:2], strict=True):
        assert (own - exact).norm() <= LIMITS[kind] * exact.norm()
    assert cache.cross_attention_cache.layers[1].length == len(prompt()["input_ids"][0])


OTHERS: dict[str, Any] = {
    "keys and values of other sizes": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **SIZES,
            moe_intermediate_size=32,
            num_attention_heads=4,
            num_key_value_heads=4,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=24,
            v_head_dim=24,
            first_k_dense_replace=2,
        )
    ),
    "a soft cap, which is eager": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, **HEADS, head_dim=32, sliding_window=WINDOW)
    ),
    "windows and all tokens": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, **HEADS, head_dim=32, sliding_window=WINDOW, sliding_window_pattern=2)
    ),
    "linear attention": lambda: Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **{**SIZES, "num_hidden_layers": 4},
            **HEADS,
            head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        )
    ),
    "eager attention": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, attn_implementation="eager")),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_models_of_other_attention_get_right_results(name: str, kind: str) -> None:
    torch.manual_seed(0)
    model = made(OTHERS[name]())
    expected, actual = generate(model, prompt()), generate(model, prompt(), KVCache(model.config, kind))
    for own, exact in zip(actual.logits[:2], expected.logits[:2], strict=True):
        assert (own - exact).norm() <= LIMITS[kind] * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["bf16", "int8"])
@torch.no_grad()
def test_models_of_every_dtype_are_served(dtype: torch.dtype, kind: str) -> None:
    torch.manual_seed(0)
    model = llama().to(dtype)
    own, exact = KVCache(model.config, kind), DynamicCache(config=model.config)
    for count in (70, 3, 1):
        ids = prompt(count)["input_ids"]
        actual, expected = (model(ids, past_key_values=cache).logits for cache in (own, exact))
        limit = 0.005 if kind == "bf16" and dtype == torch.float32 else LIMITS[kind]
        assert actual.dtype == dtype
        assert (actual - expected).norm() <= limit * expected.norm()


@pytest.mark.skipif(not is_available(), reason="this machine has no compiled library")
@pytest.mark.parametrize("way", ["greedy", "left padding", "beams", "prompt lookup"])
def test_codes_are_read_as_they_are_stored(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Tensor) -> Tensor:
        raise AssertionError("dequantized")

    model, (inputs, options) = llama(), WAYS[way]
    monkeypatch.setattr(states.CachedStates, "dequantize", refuse)
    generate(model, inputs, KVCache(model.config, "int8"), **options)


def test_gradients_flow_through_a_step_that_reads_the_cache() -> None:
    model = llama()
    cache = KVCache(model.config, "int8")
    model(prompt(70)["input_ids"], past_key_values=cache)
    model(prompt(3)["input_ids"], past_key_values=cache).logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_bytes_are_half_two_fifths_and_a_quarter() -> None:
    model = made(LlamaForCausalLM(LlamaConfig(**{**SIZES, "hidden_size": 256}, **HEADS)))
    sizes = {}
    for kind in KINDS:
        cache = KVCache(model.config, kind)
        model(prompt(1600)["input_ids"], past_key_values=cache)
        sizes[str(kind)] = cache.stored_bytes
    full = sizes.pop("bf16")
    assert [round(size / full, 2) for size in sizes.values()] == [0.52, 0.4, 0.28]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@torch.no_grad()
def test_a_copy_goes_its_own_way(kind: Any) -> None:
    model = llama()
    cache = KVCache(model.config, kind)
    model(prompt(70)["input_ids"], past_key_values=cache)
    copied = copy.deepcopy(cache)
    first = model(prompt(5)["input_ids"], past_key_values=cache).logits
    assert copied.get_seq_length() == 70
    assert torch.equal(model(prompt(5)["input_ids"], past_key_values=copied).logits, first)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@torch.no_grad()
def test_tokens_are_taken_back(kind: Any) -> None:
    model = llama()
    caches = [KVCache(model.config, kind) for _ in range(2)]
    for cache in caches:
        model(prompt(70)["input_ids"], past_key_values=cache)
    model(prompt(9)["input_ids"], past_key_values=caches[0])
    caches[0].crop(-9)
    actual, expected = (model(prompt(1)["input_ids"], past_key_values=cache).logits for cache in caches)
    assert torch.equal(actual, expected)


@torch.no_grad()
def test_a_cache_begins_anew_after_reset() -> None:
    model = llama()
    cache = KVCache(model.config, "int8")
    first = model(prompt(70)["input_ids"], past_key_values=cache).logits
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(model(prompt(70)["input_ids"], past_key_values=cache).logits, first)


@pytest.mark.parametrize("kind", ["int3", ("int8",), ("int8", "int2"), 8, None])
def test_a_kind_that_there_is_not_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match="one of 'bf16', 'int8', 'int4', or a pair of them"):
        KVCache(LlamaConfig(**SIZES), kind)


@torch.no_grad()
def test_calls_that_do_not_fit_change_nothing() -> None:
    model = llama()
    cache = KVCache(model.config, "int8")
    model(prompt(70)["input_ids"], past_key_values=cache)
    with pytest.raises(ConfigError, match="batch, heads and columns 2, 2, 16"):
        model(prompt(1, batch=3)["input_ids"], past_key_values=cache)
    with pytest.raises(ConfigError, match="at most 70 tokens to remove, found 71"):
        cache.crop(-71)
    states = torch.zeros(2, 2, 1, 16, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="one of the 2 layers that the cache was made for, found 2"):
        cache.update(states, states, 2)
    assert cache.get_seq_length() == 70


@torch.no_grad()
def test_tokens_before_a_window_are_forgotten_and_cannot_come_back() -> None:
    model = mistral()
    cache = KVCache(model.config, "int8")
    for _ in range(30):
        model(prompt(40)["input_ids"], past_key_values=cache)
    assert cache.get_seq_length() == 1200
    assert cache.layers[0].length < 500
    with pytest.raises(ConfigError, match="tokens to remove, found 600"):
        cache.crop(-600)


@torch.no_grad()
def test_while_the_past_is_recorded_a_crop_forgets_tokens_before_a_window() -> None:
    model = mistral()
    caches = [KVCache(model.config, "int8") for _ in range(2)]
    caches[0].activate_past_recording()
    for _ in range(30):
        for cache in caches:
            model(prompt(40)["input_ids"], past_key_values=cache)
    assert caches[0].layers[0].length == 1200
    caches[0].crop(0)
    assert caches[0].get_seq_length() == 1200
    assert caches[0].layers[0].length < 500
    recorded, expected = (model(prompt(1)["input_ids"], past_key_values=cache).logits for cache in caches)
    assert torch.equal(recorded, expected)
