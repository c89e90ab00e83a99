"""A saved cache: what is generated from it is the same, and a file that does not fit is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)

from hf_trainweights import KVCache
from hf_trainweights.cache.own_states import decode_state, encode_state
from hf_trainweights.errors import ConfigError, CorruptFileError, UnsupportedError

from .test_kv_cache import HEADS, KINDS, OTHERS, SIZES, encoder_decoder, generate, llama, made, mistral, prompt

pytestmark = pytest.mark.slow


@torch.no_grad()
def saved(path: Path, kind: Any = "int8", count: int = 70, model: Any = None) -> Any:
    model = model or llama()
    cache = KVCache(model.config, kind)
    model(prompt(count)["input_ids"], past_key_values=cache)
    cache.save(path)
    return model, cache


@pytest.mark.parametrize("count", [5, 70])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@torch.no_grad()
def test_what_is_generated_from_a_loaded_cache_is_the_same(kind: Any, count: int, tmp_path: Path) -> None:
    model, cache = saved(tmp_path / "a.safetensors", kind, count)
    loaded = KVCache.load(tmp_path / "a.safetensors", model.config)
    assert loaded.kinds == cache.kinds
    for more in (1, 90, 3):
        actual, expected = (model(prompt(more)["input_ids"], past_key_values=each).logits for each in (loaded, cache))
        assert torch.equal(actual, expected)
    cache.save(tmp_path / "b.safetensors")
    loaded.save(tmp_path / "c.safetensors")
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "c.safetensors").read_bytes()


@torch.no_grad()
def saved_window(path: Path) -> tuple[PreTrainedModel, KVCache]:
    """Save a cache that has dropped the tokens before its window, and return it with its model."""
    model = mistral()
    cache = KVCache(model.config, "int8")
    for _ in range(12):
        model(prompt(40)["input_ids"], past_key_values=cache)
    cache.save(path)
    return model, cache


@torch.no_grad()
def test_a_window_goes_on_where_it_was(tmp_path: Path) -> None:
    model, cache = saved_window(tmp_path / "a.safetensors")
    loaded = KVCache.load(tmp_path / "a.safetensors", model.config)
    assert loaded.get_seq_length() == 480
    actual, expected = (model(prompt(3)["input_ids"], past_key_values=each).logits for each in (loaded, cache))
    assert torch.equal(actual, expected)


def test_both_caches_of_an_encoder_decoder_are_saved(tmp_path: Path) -> None:
    model = encoder_decoder("BART")
    cache = KVCache(model.config, "int8")
    generate(model, prompt(), cache)
    cache.save(tmp_path / "a.safetensors")
    loaded = KVCache.load(tmp_path / "a.safetensors", model.config)
    assert loaded.is_updated == {0: True, 1: True}
    loaded.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_a_cache_without_tokens_is_saved(tmp_path: Path) -> None:
    cache = KVCache(LlamaConfig(**SIZES), "int8")
    cache.save(tmp_path / "a.safetensors")
    assert KVCache.load(tmp_path / "a.safetensors", LlamaConfig(**SIZES)).get_seq_length() == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LlamaConfig(**{**SIZES, "num_hidden_layers": 3}), r"3 layers \(self\), found 2 layers \(self\)"),
        (encoder_decoder("T5").config, r"2 layers \(cross\)"),
        (
            Qwen3NextConfig(**{**SIZES, "num_hidden_layers": 2}),
            "a LinearAttentionLayer, found 'keys and values'",
        ),
    ],
    ids=["layers", "cross-attention", "linear attention"],
)
def test_the_cache_of_another_model_is_refused(config: Any, message: str, tmp_path: Path) -> None:
    saved(tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=message):
        KVCache.load(tmp_path / "a.safetensors", config)


def test_a_window_is_no_cache_of_all_tokens(tmp_path: Path) -> None:
    saved_window(tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match="all tokens, found those of a sliding window"):
        KVCache.load(tmp_path / "a.safetensors", LlamaConfig(**SIZES))


@torch.no_grad()
def test_a_loaded_cache_moves_to_the_device_of_its_model(tmp_path: Path) -> None:
    saved_window(tmp_path / "a.safetensors")
    layer = KVCache.load(tmp_path / "a.safetensors", mistral().config).layers[0]
    states = torch.empty(1, 2, 1, 16, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ConfigError, match="batch, heads and columns 2, 2, 16"):
        layer.update(states, states)
    keys, values = layer.update(states.expand(2, -1, -1, -1), states.expand(2, -1, -1, -1))
    assert {x.device.type for x in (keys, values, *(store.load(0, torch.float32) for store in layer.stores))} == {
        "meta"
    }


@torch.no_grad()
def test_a_window_is_no_cache_of_a_longer_one(tmp_path: Path) -> None:
    _, cache = saved_window(tmp_path / "a.safetensors")
    stored = cache.layers[0].length
    model = mistral(sliding_window=stored + 1)
    loaded = KVCache.load(tmp_path / "a.safetensors", model.config)
    assert model(prompt(1)["input_ids"], past_key_values=loaded).logits.isfinite().all()
    with pytest.raises(ConfigError, match=rf"a window of {stored + 2}, found those .*, {stored} of them"):
        KVCache.load(tmp_path / "a.safetensors", mistral(sliding_window=stored + 2).config)


def changed(path: Path, change: Any) -> None:
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    content = json.loads(metadata["trainweights_kv_cache"])
    change(content, tensors)
    save_file(tensors, path, {**metadata, "trainweights_kv_cache": json.dumps(content)})


DAMAGES = {
    "version": (lambda content, tensors: content.update(version=2), "version 1"),
    "kinds": (lambda content, tensors: content.update(kinds=["int8", "int2"]), "two of bf16, int8, int4"),
    "layers": (lambda content, tensors: content.update(self=5), "a list of layers of self"),
    "sizes": (lambda content, tensors: content["self"][0].update(length=-1), "batch, heads, length, dropped"),
    "more tokens": (
        lambda content, tensors: content["self"][0].update(length=99),
        r"self.0.keys.codes of shape \(2, 2, 7",
    ),
    "dtype": (lambda content, tensors: content["self"][1].update(dtype="int8"), "columns and dtype"),
    "a tensor": (lambda content, tensors: tensors.pop("self.1.values.scale"), r"self.1.values.scale of shape"),
    "huge": (lambda content, tensors: content["self"][0].update(heads=1 << 39), r"self.0.keys.codes of shape"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_file_that_does_not_fit_its_description_is_damaged(name: str, tmp_path: Path) -> None:
    change, message = DAMAGES[name]
    model, _ = saved(tmp_path / "a.safetensors")
    changed(tmp_path / "a.safetensors", change)
    with pytest.raises(CorruptFileError, match=message):
        KVCache.load(tmp_path / "a.safetensors", model.config)


def test_other_files_are_refused(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CorruptFileError, match="metadata with trainweights_kv_cache"):
        KVCache.load(tmp_path / "model.safetensors", config)
    (tmp_path / "short.safetensors").write_bytes(b"\0" * 4)
    with pytest.raises(CorruptFileError, match="a safetensors header"):
        KVCache.load(tmp_path / "short.safetensors", config)
    with pytest.raises(ConfigError, match=r"a file of KVCache\.save, found nothing there"):
        KVCache.load(tmp_path / "missing.safetensors", config)
    with pytest.raises(ConfigError, match=r"a name that ends in \.safetensors"):
        KVCache(config).save(tmp_path / "cache.pt")


# Models with layers that Transformers keeps itself: linear attention, convolutions, and state spaces beside attention.
HYBRIDS: dict[str, Any] = {
    "linear attention": OTHERS["linear attention"],
    "convolutions": lambda: Lfm2ForCausalLM(Lfm2Config(**SIZES, **HEADS, layer_types=["conv", "full_attention"])),
    "state spaces": lambda: FalconH1ForCausalLM(
        FalconH1Config(**SIZES, **HEADS, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16)
    ),
}


@pytest.mark.parametrize("name", HYBRIDS)
@torch.no_grad()
def test_states_that_transformers_keeps_are_saved_too(name: str, tmp_path: Path) -> None:
    model, cache = saved(tmp_path / "a.safetensors", model=made(HYBRIDS[name]()))
    loaded = KVCache.load(tmp_path / "a.safetensors", model.config)
    for more in (1, 1, 3):
        actual, expected = (model(prompt(more)["input_ids"], past_key_values=each).logits for each in (loaded, cache))
        assert torch.equal(actual, expected)
    loaded.save(tmp_path / "b.safetensors")
    cache.save(tmp_path / "c.safetensors")
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "c.safetensors").read_bytes()


DAMAGED_STATES: dict[str, Any] = {
    "no attributes": (lambda state: state.pop("attributes"), "attributes other than"),
    "an attribute more": (lambda state: state["attributes"].update(a=1), "attributes other than"),
    "a text": (lambda state: state["attributes"].update(dtype="float32"), "as the value of an attribute"),
    "a dtype that is none": (lambda state: state["attributes"].update(dtype={"dtype": "int7"}), "as the value of"),
    "a number for a bool": (lambda state: state["attributes"].update(record_past=3), "record_past that is no bool"),
    "a state less": (lambda state: state["attributes"]["conv_states"].update(items=[]), "conv_states without 0"),
    "a tensor less": (
        lambda state: state["attributes"].update(conv_states={"items": [[0, {"tensor": "self.9.x"}]]}),
        r"a tensor self\.9\.x",
    ),
}


@pytest.mark.parametrize("name", DAMAGED_STATES)
def test_a_damaged_state_is_refused(name: str, tmp_path: Path) -> None:
    change, message = DAMAGED_STATES[name]
    model, _ = saved(tmp_path / "a.safetensors", model=made(OTHERS["linear attention"]()))
    changed(tmp_path / "a.safetensors", lambda content, _: change(content["self"][0]))
    with pytest.raises(CorruptFileError, match=message):
        KVCache.load(tmp_path / "a.safetensors", model.config)


class Plain:
    """A layer of a class that is not this package's, with one attribute."""

    def __init__(self, state: Any = None):
        self.state = state


@pytest.mark.parametrize("state", [0.5, math.inf, 3, True, None, torch.bfloat16, {"a": {0: 0.25}}], ids=str)
def test_the_attributes_of_a_layer_come_back(state: Any) -> None:
    encoded, tensors = encode_state("self.0", Plain(state))
    layer = Plain()
    decode_state(layer, json.loads(json.dumps(encoded)), tensors.__getitem__)
    assert layer.state == state


def test_a_dtype_that_no_cache_has_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"self\.0\.state: expected a number, a tensor or a dict .*found dtype"):
        encode_state("self.0", Plain(torch.float64))


class Strange:
    """A layer with a state that no file can hold."""

    def __init__(self):
        self.state = object()


def test_a_state_that_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    cache = KVCache(LlamaConfig(**SIZES), "int8")
    cache.layers.append(Strange())
    with pytest.raises(UnsupportedError, match=r"self\.2\.state: expected a number, a tensor or a dict"):
        cache.save(tmp_path / "a.safetensors")
    assert not (tmp_path / "a.safetensors").exists()


@torch.no_grad()
def test_a_file_that_is_replaced_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    model, _ = saved(path)
    _, cache = saved(path, "int4", 80, model)
    assert KVCache.load(path, model.config).kinds == ("int4", "int4")
    assert KVCache.load(path, model.config).get_seq_length() == cache.get_seq_length() == 80
