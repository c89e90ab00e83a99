"""`KVCache`, which a user passes to `generate` as `past_key_values`."""

from __future__ import annotations

import os
from typing import Any

from transformers import PreTrainedConfig

from hf_trainweights.cache.cache_file import CacheFile, write_cache
from hf_trainweights.cache.layers import BITS, KVLayer
from hf_trainweights.errors import ConfigError
from hf_trainweights.models.host.caches import Cache, DynamicCache, EncoderDecoderCache, dynamic_layer, layer_types

# The types of layers that become a `KVLayer`, each with the option that is its window. Transformers makes the layers of
# all other types. It passes the size of a chunk as `sliding_window`, because a cache may drop the same tokens then.
_WINDOWS = {"full_attention": None, "sliding_attention": "sliding_window", "chunked_attention": "sliding_window"}


class KVCache(DynamicCache):
    """A cache of keys and values that is small, grows without copying, and is read as it is stored.

    Pass it as `past_key_values` to `generate` or to the model. Use it for one batch of sequences, and go on with it for
    the next turn of the same sequences.

    `"bf16"` holds keys and values as they are in models of 16 bits; the logits are those of Transformers'
    `DynamicCache` to the last bit. `"int8"` takes half, `("int8", "int4")` two fifths and `"int4"` a quarter of the
    bytes. The first 64 tokens stay floats until all of them are there. They give the mean and the magnitude of each
    channel of the keys, by which all keys are centred and divided. So channels far larger than others cost no
    precision.

    On a CPU the compiled library attends to the codes themselves. The codes are dequantized first where there is no
    library, on other devices, for eager attention and for gradients. Linear attention and state spaces keep
    Transformers' own layers.

    Args:
        config: The configuration of the model. An encoder-decoder gets a cache for self-attention and one for
            cross-attention.
        kind: `"bf16"`, `"int8"` or `"int4"`, or a pair of these for keys and for values.

    Raises:
        ConfigError: `kind` is none of these.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=99
        ... )
        >>> model = LlamaForCausalLM(config)
        >>> cache = KVCache(model.config, "int8")
        >>> prompt = torch.arange(90).reshape(1, 90)
        >>> tokens = model.generate(prompt, past_key_values=cache, max_new_tokens=3, min_new_tokens=3, pad_token_id=0)
        >>> tokens.shape, cache.get_seq_length()
        (torch.Size([1, 93]), 92)
    """

    kinds: tuple[str, str]

    def __new__(cls, config: PreTrainedConfig | None = None, kind: str | tuple[str, str] = "int8") -> Any:
        """Make the cache; an encoder-decoder's is a pair of caches."""
        if config is not None and config.is_encoder_decoder:
            return EncoderDecoderKVCache(config, kind)
        return super().__new__(cls)

    def __init__(self, config: PreTrainedConfig, kind: str | tuple[str, str] = "int8"):
        self._set_layers(layer_types(config), kind)

    def _set_layers(self, types: list[tuple[str, dict[str, Any]]], kind: str | tuple[str, str]) -> None:
        self.kinds = checked_kinds(kind)
        layers: list[Any] = [
            KVLayer(*self.kinds, window=options[_WINDOWS[name]] if _WINDOWS[name] else None)
            if name in _WINDOWS
            else dynamic_layer(name, options)
            for name, options in types
        ]
        Cache.__init__(self, layers=layers)

    @property
    def stored_bytes(self) -> int:
        """The bytes of all stored keys and values, with the room that is there for more."""
        layers = (layer for layer in self.layers if isinstance(layer, KVLayer))
        return sum(store.stored_bytes for layer in layers for store in layer.stores)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the stored tokens as one safetensors file, e.g. those of a long prompt.

        Args:
            path: The file. An older one stays until the new one is complete.

        Raises:
            ConfigError: The file's name does not end in `.safetensors`, or the model has another dtype than float32,
                bfloat16 and float16.
            UnsupportedError: A layer of a class of Transformers has a state that a file cannot hold.
            SaveError: The file cannot be written.
        """
        write_cache(path, {"self": self.layers}, self.kinds)

    @classmethod
    def load(cls, path: str | os.PathLike[str], config: PreTrainedConfig) -> Any:
        """Load a cache that `save` wrote. A model generates the same from it as from the saved one.

        Args:
            path: The file.
            config: The configuration of the model.

        Returns:
            A cache of the kind that was saved, on the CPU until a model on another device stores a token in it. It
            shares no memory with the file.

        Raises:
            ConfigError: There is no such file, or it is of another model.
            CorruptFileError: The file is damaged, or holds something else.
        """
        file = CacheFile(path)
        cache = KVCache(config, file.kinds)
        if isinstance(cache, EncoderDecoderKVCache):
            cross: list[Any] = cache.cross_attention_cache.layers
            file.fill({"self": cache.self_attention_cache.layers, "cross": cross})
            cache.is_updated = {index: layer.length > 0 for index, layer in enumerate(cross)}
        else:
            file.fill({"self": cache.layers})
        return cache

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store new tokens of a layer, as Transformers' models do.

        Raises:
            ConfigError: The cache was made for a model with fewer layers, or for other batches, heads or columns.
        """
        if not 0 <= layer_idx < len(self.layers):
            expected = f"one of the {len(self.layers)} layers that the cache was made for"
            raise ConfigError(
                "KVCache, layer", expected, str(layer_idx), "Make the cache by the configuration of this model."
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens from all layers.

        Args:
            tokens_to_remove: A negative number: -3 removes three tokens.

        Raises:
            ConfigError: Fewer tokens are stored, or a window before them is not any more; then no layer has changed.
        """
        for layer in self.layers:  # all of them raise their errors before any layer changes
            if isinstance(layer, KVLayer):
                layer.count_to_remove(tokens_to_remove)
        super().crop(tokens_to_remove)


class EncoderDecoderKVCache(EncoderDecoderCache):
    """The `KVCache` of an encoder-decoder: one for self-attention, one for cross-attention.

    Args:
        config: The configuration of the model.
        kind: As for `KVCache`.

    Raises:
        ConfigError: `kind` is none of those.
    """

    self_attention_cache: Any
    cross_attention_cache: Any

    def __init__(self, config: PreTrainedConfig, kind: str | tuple[str, str] = "int8"):
        types = layer_types(config)
        self_attention, cross_attention = KVCache.__new__(KVCache), KVCache.__new__(KVCache)
        self_attention._set_layers(types, kind)
        cross_attention._set_layers([("full_attention", {})] * len(types), kind)
        super().__init__(self_attention, cross_attention)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the stored tokens as one safetensors file; arguments and errors are those of `KVCache.save`."""
        caches = {"self": self.self_attention_cache.layers, "cross": self.cross_attention_cache.layers}
        write_cache(path, caches, self.self_attention_cache.kinds)

    @property
    def stored_bytes(self) -> int:
        """The bytes of all stored keys and values, with the room that is there for more."""
        return self.self_attention_cache.stored_bytes + self.cross_attention_cache.stored_bytes


def checked_kinds(kind: object) -> tuple[str, str]:
    """Check a kind of cache, and return that of keys and that of values; ConfigError: it is none."""
    kinds = (kind, kind) if isinstance(kind, str) else kind
    if isinstance(kinds, tuple | list) and len(kinds) == 2 and all(isinstance(k, str) and k in BITS for k in kinds):
        return kinds[0], kinds[1]
    expected = f"one of {', '.join(map(repr, BITS))}, or a pair of them for keys and values"
    raise ConfigError("kind", expected, repr(kind), "Choose one of these.")
