"""Transformers' caches of keys and values: the class that a layer extends, and the layers that a model wants."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from hf_trainweights.models.host import private, unsupported

try:
    from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, EncoderDecoderCache
except ImportError as error:
    raise unsupported("transformers.cache_utils") from error

__all__ = ["Cache", "CacheLayerMixin", "DynamicCache", "EncoderDecoderCache", "dynamic_layer", "layer_types"]


def layer_types(config: PreTrainedConfig) -> list[tuple[str, dict[str, Any]]]:
    """List the type of each layer of a decoder, and the options that Transformers gives the layer's cache."""
    types, options = private("cache_utils", "get_layer_types_and_kwargs")(config.get_text_config(decoder=True))
    # Transformers 5.17 has one dict for all layers, which names the window for those without one, too.
    options = [dict(options) for _ in types] if isinstance(options, dict) else options
    return list(zip(types, options, strict=True))


def dynamic_layer(layer_type: str, options: dict[str, Any]) -> Any:
    """Make the layer that Transformers' `DynamicCache` has for a type."""
    return private("cache_utils", "DYNAMIC_LAYER_TYPE_MAPPING")[layer_type](**options)
