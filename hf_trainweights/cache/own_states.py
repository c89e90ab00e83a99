"""The state of a cache layer of a class of Transformers, such as linear attention: its attributes as JSON and tensors.

Attributes are numbers, tensors, dtypes, devices and dicts of these. In JSON a tensor is `{"tensor": its name}`, a dtype
is `{"dtype": its name}`, a device is `{"device": null}`, and a dict is `{"items": [[key, value], ...]}`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.errors import UnsupportedError

# The dtypes of the models whose caches a file may hold: `cache_file` refuses others.
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _FLOATS}


def encode_state(name: str, layer: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the attributes of a layer as JSON, and its tensors by name. `name` is the layer's in a file, as `self.3`.

    UnsupportedError: an attribute is none of those that a file can hold.
    """
    tensors: dict[str, Tensor] = {}
    attributes = {key: _encode(f"{name}.{key}", value, tensors) for key, value in vars(layer).items()}
    return {"class": type(layer).__name__, "attributes": attributes}, tensors


def _encode(name: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict) and all(type(key) in (int, str) for key in value):
        return {"items": [[key, _encode(f"{name}.{key}", item, tensors)] for key, item in value.items()]}
    if isinstance(value, torch.dtype) and value in _FLOATS:
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": None}
    if value is None or type(value) in (bool, int, float):
        return value
    next_step = "Process the prompt again where the cache is needed."
    raise UnsupportedError(name, "a number, a tensor or a dict of these", type(value).__name__, next_step)


def decode_state(layer: Any, state: Any, read: Callable[[str], Tensor]) -> None:
    """Give a new layer the attributes of a saved one, on the CPU; `read` returns a tensor by its name.

    ValueError: it is the state of another class, or not one that `encode_state` returned.
    """
    if type(state) is not dict or state.get("class") != type(layer).__name__:
        raise ValueError(f"not the state of a {type(layer).__name__}")
    attributes = state.get("attributes")
    if type(attributes) is not dict or attributes.keys() != vars(layer).keys():
        raise ValueError(f"attributes other than {', '.join(vars(layer))}")
    decoded = {key: _decode(value, read) for key, value in attributes.items()}
    for key, value in decoded.items():
        expected = vars(layer)[key]
        # A new layer has None for most attributes, and these may get any value: only the others show a type to check.
        if isinstance(expected, dict) and (not isinstance(value, dict) or value.keys() != expected.keys()):
            raise ValueError(f"{key} without {', '.join(map(str, expected))}")
        if type(expected) in (bool, int, float) and type(value) is not type(expected):
            raise ValueError(f"{key} that is no {type(expected).__name__}")
    vars(layer).update(decoded)


def _decode(value: Any, read: Callable[[str], Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float):
        return value
    kind, content = next(iter(value.items())) if type(value) is dict and len(value) == 1 else (None, None)
    if kind == "tensor" and type(content) is str:
        return read(content)
    if kind == "dtype" and type(content) is str and content in _DTYPES:
        return _DTYPES[content]
    if kind == "device":
        return torch.device("cpu")
    if kind == "items" and type(content) is list and all(_is_item(item) for item in content):
        return {key: _decode(item, read) for key, item in content}
    raise ValueError(f"{value!r:.80} as the value of an attribute")


def _is_item(item: Any) -> bool:
    return type(item) is list and len(item) == 2 and type(item[0]) in (int, str)
