"""Files of filled caches of keys and values: damaged ones are refused by name, others can be read and saved again."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen3NextConfig

from hf_trainweights import KVCache
from hf_trainweights.cache.layers import KVLayer
from tests.fuzz.directories import Content
from tests.fuzz.model_corpus import change_header, change_raw, change_tensors
from tests.fuzz.mutate_json import change_json
from tests.fuzz.target import Outcome, Target

_ENTRY = "trainweights_kv_cache"
_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
# A file of an earlier input is loaded for the model that its cache was made for.
_CONFIGS: dict[str, PreTrainedConfig] = {
    "all tokens": LlamaConfig(**_SIZES),
    "a window": MistralConfig(**_SIZES, sliding_window=16),
    "linear attention": Qwen3NextConfig(**_SIZES, layer_types=["linear_attention", "full_attention"]),
}
_KINDS: tuple[Any, ...] = ("bf16", "int8", ("int8", "int4"))
_KEYS = ["self", "cross", "kinds", "version", "length", "dropped", "columns", "class", "attributes", "tensor", "items"]
_VALUES = ["int4", "bf16", "float16", "bfloat16", {"tensor": "self.0.conv_states.0"}, {"items": []}, {"device": None}]


class CacheFiles(Target):
    """`KVCache.load` of a damaged file: tokens that can be read, or a typed error."""

    name = "cache-files"
    inputs_in_suite = 2000

    def prepare(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.saved: dict[str, tuple[str, bytes]] = {}
        for name, config in _CONFIGS.items():
            for kind in _KINDS:
                cache = filled(KVCache(config, kind))
                cache.save(directory / "cache.safetensors")
                self.saved[f"{name}, {kind}"] = name, (directory / "cache.safetensors").read_bytes()

    def mutate(self, rng: random.Random) -> tuple[str, bytes]:
        name, data = self.saved[rng.choice(sorted(self.saved))]
        if rng.random() < 0.5:
            return name, _with_other_description(rng, data)
        tree: dict[str, Content] = {"cache.safetensors": data}
        rng.choice((change_header, change_tensors, change_raw))(rng, dict(tree), tree)
        content = tree["cache.safetensors"]
        assert isinstance(content, bytes)
        return name, content

    def run(self, given: tuple[str, bytes]) -> Outcome:
        name, content = given
        path = self.directory / "cache.safetensors"
        path.write_bytes(content)
        cache = KVCache.load(path, _CONFIGS[name])
        for layer in cache.layers:
            for store in layer.stores if isinstance(layer, KVLayer) else ():
                store.load(0, torch.float32)
        cache.save(self.directory / "again.safetensors")
        return Outcome.ACCEPTED


def filled(cache: Any) -> Any:
    """Store 70 random tokens in every layer of a cache."""
    generator = torch.Generator().manual_seed(0)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, KVLayer):
            keys, values = torch.randn(2, 1, 2, 70, 16, generator=generator).bfloat16().unbind(0)
            cache.update(keys, values, index)
        else:
            layer.update_conv_state(torch.randn(1, 8, 4, generator=generator))
            layer.update_recurrent_state(torch.randn(1, 2, 4, 4, generator=generator))
    return cache


def _with_other_description(rng: random.Random, data: bytes) -> bytes:
    """Change the JSON that describes the layers."""
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    content = change_json(rng, json.loads(header["__metadata__"][_ENTRY]), _KEYS, _VALUES)
    header["__metadata__"][_ENTRY] = json.dumps(content)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data[8 + length :]
