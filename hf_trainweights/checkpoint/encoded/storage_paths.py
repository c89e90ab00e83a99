"""The name of a storage in messages: the key path of the first tensor that views it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hf_trainweights.checkpoint.encoded.key_paths import KeyPath, path_text
from hf_trainweights.checkpoint.encoded.tree import MAPPING_TYPES, MAX_DEPTH


def storage_name(structure: Mapping[str, Any], index: int) -> str:
    """Return the name of a storage in messages, e.g. `tensor state.0.exp_avg`, or `storage 3` if no tensor views it."""
    path = storage_paths(structure).get(index)
    return f"storage {index}" if path is None else f"tensor {path_text(path)}"


def storage_paths(structure: Mapping[str, Any]) -> dict[int, KeyPath]:
    """Return the key path of the first tensor that views a storage, by its number; `structure` may be malformed."""
    views = structure.get("tensors")
    table = dict(enumerate(views)) if type(views) is list else {}
    paths: dict[int, KeyPath] = {}
    for tensor, path in _tensor_paths(structure.get("tree"), ()):
        view = table.get(tensor) if type(tensor) is int else None
        if type(view) is dict and type(view.get("storage")) is int:
            paths.setdefault(view["storage"], path)
    return paths


def _tensor_paths(node: Any, path: KeyPath) -> Iterator[tuple[Any, KeyPath]]:
    kind, content = next(iter(node.items()), (None, None)) if type(node) is dict else ("tuple", node)
    if kind == "tensor":
        yield content, path
    if type(content) is not list or len(path) >= MAX_DEPTH:
        return
    for index, item in enumerate(content):
        if kind == "tuple":
            yield from _tensor_paths(item, (*path, index))
        elif kind in MAPPING_TYPES and type(item) is list and len(item) == 2:
            yield from _tensor_paths(item[1], (*path, item[0]))
