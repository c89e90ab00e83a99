"""A filled cache in a safetensors file: the stored tensors of each layer, and in the metadata their sizes as JSON.

The tensors of layer 3 of self-attention are called `self.3.keys.codes`, `self.3.keys.scale`, `self.3.keys.channels`,
`self.3.values.codes` and so on; those of tokens that are floats, `self.3.keys.rows`. The entry `trainweights_kv_cache`
of the metadata is a JSON object: `version` (1), `kinds` of keys and values, and a list of layers called `self`, and one
called `cross` where there is cross-attention. A layer has its `batch`, `heads`, `columns` of keys and of values, the
`length` that is stored, the tokens `dropped` before a window and the model's `dtype`; one without tokens is null. Codes
lie in the order of `hf_trainweights/kernels/native/attention.c`. A layer of a class of Transformers, such as that of
linear attention, has its `class` and `attributes` (`own_states`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_trainweights.cache.layers import BITS, KVLayer
from hf_trainweights.cache.own_states import decode_state, encode_state
from hf_trainweights.cache.stores import FloatStore, IntegerStore, Store
from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.files.safetensors_file import (
    TensorToWrite,
    read_safetensors_header,
    safetensors_path,
    write_safetensors,
)
from hf_trainweights.files.staging import staged_files
from hf_trainweights.kernels.tokens import BLOCK_TOKENS, TokenFormat

_ENTRY, _VERSION = "trainweights_kv_cache", 1
_SIDES = ("keys", "values")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
# No memory holds a tensor of this size: a larger number in a file is damage.
_LARGEST = 1 << 40
_AGAIN = "Make the cache again from the prompt."

# The layers of each cache of a model, by the name that they have in a file.
Layers = Mapping[str, Sequence[Any]]


def write_cache(path: str | os.PathLike[str], caches: Layers, kinds: tuple[str, str]) -> None:
    """Write the layers of a cache. An older file stays until the new one is complete.

    ConfigError: the file's name does not end in `.safetensors`, or a model's dtype is no float of 16 or 32 bits.
    UnsupportedError: a layer of Transformers keeps a state that a file cannot hold. SaveError: the file cannot be
    written.
    """
    path = safetensors_path(path)
    content: dict[str, Any] = {"version": _VERSION, "kinds": kinds}
    tensors: dict[str, TensorToWrite] = {}
    for name, layers in caches.items():
        described = [_describe(f"{name}.{index}", layer) for index, layer in enumerate(layers)]
        content[name] = [description for description, _ in described]
        for _, stored in described:
            tensors |= {key: TensorToWrite.of(tensor) for key, tensor in stored.items()}
    with staged_files(path.parent, is_replaced=lambda _: False) as staged:  # no other file leaves the directory
        write_safetensors(staged.path / path.name, tensors, {_ENTRY: json.dumps(content), "format": "pt"})


def _describe(name: str, layer: Any) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """Return the description of a layer, and its tensors by their names in the file."""
    if not isinstance(layer, KVLayer):
        # A DummyLayer is Transformers' placeholder for a layer that stores nothing.
        return (None, {}) if type(layer).__name__ == "DummyLayer" else encode_state(name, layer)
    if not layer.stores:
        return None, {}
    dtype = str(layer.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ConfigError(f"layer {name}", f"a model of {', '.join(_DTYPES)}", dtype, "Use one of these dtypes.")
    batch, heads, _ = layer.stores[0].shape
    columns = [store.shape[2] for store in layer.stores]
    sizes = {"batch": batch, "heads": heads, "columns": columns, "length": layer.length, "dropped": layer.dropped}
    tensors = {
        f"{name}.{side}.{key}": tensor
        for side, store in zip(_SIDES, layer.stores, strict=True)
        for key, tensor in store.tensors().items()
    }
    return {**sizes, "dtype": dtype}, tensors


class CacheFile:
    """A file that `write_cache` wrote, checked against its own description.

    CorruptFileError: it is damaged, or holds something else. ConfigError: there is none.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = safetensors_path(path)
        if not self.path.exists():
            raise ConfigError(str(path), "a file of KVCache.save", "nothing there", "Check the path.")
        self._header = read_safetensors_header(self.path)
        try:
            with safe_open(self.path, framework="pt") as file:
                text = (file.metadata() or {}).get(_ENTRY)
        except SafetensorError as error:
            raise self._corrupt("a safetensors file", str(error)) from error
        try:
            content = json.loads(text or "")
        except (ValueError, RecursionError) as error:
            raise self._corrupt(f"metadata with {_ENTRY}", "none") from error
        if not isinstance(content, dict) or content.get("version") != _VERSION:
            raise self._corrupt(f"version {_VERSION}", repr(content)[:80])
        kinds = content.get("kinds")
        if not isinstance(kinds, list) or len(kinds) != 2 or not all(kind in BITS for kind in map(str, kinds)):
            raise self._corrupt(f"two of {', '.join(BITS)}", repr(kinds)[:80])
        self.kinds: tuple[str, str] = (kinds[0], kinds[1])
        self._content = content

    def fill(self, caches: Layers) -> None:
        """Put the stored tokens into new layers of the same kinds.

        ConfigError: the layers are of another model. CorruptFileError: sizes and tensors do not fit each other.
        """
        names = {name for name in ("self", "cross") if name in self._content}
        counts = {name: len(layers) for name, layers in caches.items()}
        stored = {name: len(self._layers_of(name)) for name in names}
        if counts != stored:
            expected = f"a cache of {', '.join(f'{count} layers ({name})' for name, count in counts.items())}"
            in_file = ", ".join(f"{count} layers ({name})" for name, count in stored.items())
            raise ConfigError(str(self.path), expected, in_file, "Load it for the model that it was made for.")
        with torch.device("cpu"), safe_open(self.path, framework="pt") as file:
            for name, layers in caches.items():
                for index, (layer, sizes) in enumerate(zip(layers, self._layers_of(name), strict=True)):
                    if sizes is not None:
                        self._fill_layer(f"{name}.{index}", layer, sizes, file)

    def _layers_of(self, name: str) -> list[Any]:
        """Return the descriptions of the layers of the cache that is called `self` or `cross` in the file."""
        layers = self._content[name]
        if not isinstance(layers, list):
            raise self._corrupt(f"a list of layers of {name}", repr(layers)[:80])
        return layers

    def _fill_layer(self, name: str, layer: Any, sizes: Any, file: Any) -> None:
        """Put stored tokens into a layer; `sizes` is its description in the file."""
        is_kv_layer = isinstance(layer, KVLayer)
        describes_class = type(sizes) is dict and "class" in sizes
        if is_kv_layer == describes_class:  # one of the two is a class of Transformers, the other is not
            expected = type(layer).__name__
            stored = sizes.get("class", "keys and values") if type(sizes) is dict else sizes
            next_step = "Load it for the model that it was made for."
            raise ConfigError(f"{self.path}, {name}", f"a {expected}", f"{stored!r:.80}", next_step)
        if not is_kv_layer:
            self._fill_layer_of_transformers(name, layer, sizes, file)
            return
        batch, heads, length, dropped, *columns = self._numbers(name, sizes)
        # A token attends to itself and to one less than its window before it.
        if dropped and (layer.window is None or length < layer.window - 1):
            expected = "all tokens" if layer.window is None else f"those of a window of {layer.window}"
            next_step = "Load it for the model that it was made for."
            stored = f"those of a sliding window, {length} of them"
            raise ConfigError(f"{self.path}, {name}", expected, stored, next_step)
        stores: list[Store] = []
        for side, kind, D in zip(_SIDES, self.kinds, columns, strict=True):
            # A store of floats needs only `form.columns`: 8 is a placeholder, because no `TokenFormat` has 16 bits.
            form = TokenFormat(8 if kind == "bf16" else BITS[kind], side == "keys", D)
            stores.append(self._store(f"{name}.{side}", kind, form, (batch, heads, length), file))
        layer.stores, layer.dropped = (stores[0], stores[1]), dropped
        layer.dtype, layer.device, layer.is_initialized = _DTYPES[sizes["dtype"]], torch.device("cpu"), True

    def _fill_layer_of_transformers(self, name: str, layer: Any, state: Any, file: Any) -> None:
        """Give a layer of a class of Transformers its state."""

        def read(key: str) -> Tensor:
            if key not in self._header:
                raise self._corrupt(f"a tensor {key}", "none")
            return file.get_tensor(key).clone()

        try:
            decode_state(layer, state, read)
        except (ValueError, RecursionError) as error:
            expected = f"{name}: the state of a {type(layer).__name__} of this version of Transformers"
            raise self._corrupt(expected, str(error)) from error

    def _numbers(self, name: str, sizes: Any) -> list[int]:
        fields = [sizes.get(field) for field in ("batch", "heads", "length", "dropped")] if type(sizes) is dict else []
        columns = sizes.get("columns") if type(sizes) is dict else None
        numbers = [*fields, *(columns if type(columns) is list else [])]
        is_number = [type(number) is int and 0 <= number < _LARGEST for number in numbers]
        if len(numbers) != 6 or not all(is_number) or sizes.get("dtype") not in list(_DTYPES):
            raise self._corrupt(f"{name}: batch, heads, length, dropped, columns and dtype", repr(sizes)[:200])
        return numbers

    def _store(self, name: str, kind: str, form: TokenFormat, sizes: tuple[int, int, int], file: Any) -> Store:
        batch, heads, length = sizes
        blocks = -(-length // BLOCK_TOKENS)
        if f"{name}.rows" in self._header:
            shapes: dict[str, tuple[int, ...]] = {"rows": (batch, heads, length, form.columns)}
        elif kind == "bf16":
            raise self._corrupt(f"a tensor {name}.rows", "none")
        else:
            shapes = {
                "codes": (batch, heads, blocks, form.block_bytes),
                "scale": (batch, heads, blocks, form.groups, BLOCK_TOKENS),
            }
            if f"{name}.channels" in self._header:
                shapes["channels"] = (batch, heads, 2, form.columns)
        tensors = {key: self._tensor(f"{name}.{key}", key, shape, file) for key, shape in shapes.items()}
        store_class = FloatStore if "rows" in shapes else IntegerStore
        return store_class.from_tensors(tensors, length, form)

    def _tensor(self, name: str, key: str, shape: tuple[int, ...], file: Any) -> Tensor:
        entry = self._header.get(name)
        dtypes = {"codes": ("U8",), "scale": ("BF16",), "channels": ("F32",), "rows": ("BF16", "F16", "F32")}[key]
        if entry is None or entry["shape"] != list(shape) or entry["dtype"] not in dtypes:
            raise self._corrupt(f"{name} of shape {shape} in {' or '.join(dtypes)}", repr(entry)[:120])
        # Not a view of the mapped file: tokens are written behind them.
        return file.get_tensor(name).clone()

    def _corrupt(self, expected: str, found: str) -> CorruptFileError:
        return CorruptFileError(str(self.path), expected, found, _AGAIN)
