"""A `KVCache` for programs that call `generate` themselves and take no cache from their user."""

from __future__ import annotations

import functools
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from hf_trainweights.cache.kv_cache import KVCache, checked_kinds


def use_in_generate(kind: str | tuple[str, str]) -> None:
    """Let `generate` of all models in this process make a `KVCache` for each call that is handed no cache.

    Calls with `use_cache=False` or a `cache_implementation`, and models that keep another state, such as Mamba, stay as
    they are. ConfigError: `kind` is none of those that `KVCache` takes.
    """
    mixin: Any = GenerationMixin
    kinds, original = checked_kinds(kind), mixin.generate

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _takes_a_cache(self, kwargs):
            kwargs["past_key_values"] = KVCache(self.config, kinds)
        return original(self, *args, **kwargs)

    mixin.generate = generate


def _takes_a_cache(model: PreTrainedModel, kwargs: dict[str, Any]) -> bool:
    """Tell whether a call leaves the choice of the cache to `generate`, which would make a `DynamicCache`."""
    if kwargs.get("past_key_values") is not None or getattr(model, "_is_stateful", False):
        return False
    configs = (kwargs.get("generation_config"), model.generation_config)
    settings = {name: _first(kwargs, configs, name) for name in ("use_cache", "cache_implementation")}
    return settings["use_cache"] is not False and settings["cache_implementation"] is None


def _first(kwargs: dict[str, Any], configs: tuple[Any, ...], name: str) -> Any:
    """Return a setting of a call: from its arguments, else from its configuration, else from the model's."""
    values = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)
