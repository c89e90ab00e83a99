"""How a sentence encoder makes one embedding of those of its tokens: sentence-transformers' `modules.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf

from hf_trainweights.errors import ConfigError, UnsupportedError

_MODULES = "modules.json"
# By their names in sentence-transformers 6, and by the ends of older settings, of which each mode had one.
_TYPES = {
    "mean": gguf.PoolingType.MEAN,
    "mean_tokens": gguf.PoolingType.MEAN,
    "cls": gguf.PoolingType.CLS,
    "cls_token": gguf.PoolingType.CLS,
    "lasttoken": gguf.PoolingType.LAST,
}
# llama.cpp makes embeddings unit vectors by itself.
_WITHOUT_WEIGHTS = ("Transformer", "Pooling", "Normalize")


def describe_pooling(writer: gguf.GGUFWriter, directory: Path | None) -> None:
    """Write the pooling of a sentence encoder, if its directory says what it is."""
    if directory is None or not (directory / _MODULES).is_file():
        return
    next_step = "For other readers there is export_compressed_tensors."
    for module in _read(directory / _MODULES, list):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in _WITHOUT_WEIGHTS:
            raise UnsupportedError(str(directory / _MODULES), ", ".join(_WITHOUT_WEIGHTS), kind, next_step)
        config = directory / str(module.get("path", "")) / "config.json"
        if kind == "Pooling" and config.is_file():
            modes = _modes(_read(config, dict))
            if len(modes) != 1 or modes[0] not in _TYPES:
                expected = "one pooling, by mean, cls or lasttoken"
                raise UnsupportedError(str(config), expected, ", ".join(modes) or "none", next_step)
            writer.add_pooling_type(_TYPES[modes[0]])


def _modes(settings: dict[str, Any]) -> list[str]:
    if isinstance(mode := settings.get("pooling_mode"), str):
        return [mode]
    prefix = "pooling_mode_"
    return [key.removeprefix(prefix) for key, value in settings.items() if key.startswith(prefix) and value is True]


def _read(path: Path, expected: type) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        next_step = "Save the sentence encoder again, or delete the file."
        raise ConfigError(str(path), "a JSON file", f"{type(error).__name__}: {error}", next_step) from error
    modules = content if isinstance(content, list) else [content]
    if not isinstance(content, expected) or not all(isinstance(module, dict) for module in modules):
        next_step = "Save the sentence encoder again, or delete the file."
        raise ConfigError(str(path), "what sentence-transformers writes there", type(content).__name__, next_step)
    return content
