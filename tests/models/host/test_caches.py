"""Private names of Transformers that a cache of keys and values needs."""

from __future__ import annotations

import pytest
from transformers import DynamicCache, Gemma3TextConfig, LlamaConfig, Qwen3NextConfig, T5Config

from hf_trainweights.models.host.caches import CacheLayerMixin, dynamic_layer, layer_types


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(num_hidden_layers=3),
        Gemma3TextConfig(num_hidden_layers=7, sliding_window=64),
        Qwen3NextConfig(num_hidden_layers=4),
        T5Config(num_layers=2),
    ],
    ids=lambda config: config.model_type,
)
def test_layers_are_those_of_transformers_own_cache(config: LlamaConfig) -> None:
    own = DynamicCache(config=config)
    made = [dynamic_layer(name, options) for name, options in layer_types(config)]
    assert [type(layer) for layer in made] == [type(layer) for layer in own.layers]
    windows = [getattr(layer, "sliding_window", None) for layer in own.layers]
    assert [
        options.get("sliding_window") if "sliding" in name else None for name, options in layer_types(config)
    ] == windows


def test_a_layer_of_ours_is_in_no_table_of_transformers() -> None:
    from transformers import cache_utils

    from hf_trainweights.cache.layers import KVLayer

    assert issubclass(KVLayer, CacheLayerMixin)
    assert KVLayer not in cache_utils.DYNAMIC_LAYER_TYPE_MAPPING.values()
