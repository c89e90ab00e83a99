"""The table of the names under which loaders look for weights.

| family | one file | shards | their index |
|---|---|---|---|
| safetensors | `model.safetensors` | `model-0a1b2c3d-00001-of-00002.safetensors` | `model.safetensors.index.json` |
| `.bin` | `pytorch_model.bin` | `pytorch_model-0a1b2c3d-00001-of-00002.bin` | `pytorch_model.bin.index.json` |
| adapters | `adapter_model.safetensors`, `adapter_model.bin` | | |

A variant stands before the last suffix: `model.fp16.safetensors`, `model.safetensors.index.fp16.json`. The digest in
the name of a shard, `0a1b2c3d` here, is this package's; other writers have none. Transformers and accelerate take a
file whose stem ends in `-00001-of-00002` for a shard, and remove it when they save over it.
"""

from __future__ import annotations

import fnmatch
import json
import re
from pathlib import Path

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.reading import is_safe_name, open_regular_file

# The files that a loader opens first, in the order in which Transformers and PEFT look for them.
ENTRY_POINTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)

FOREIGN_WEIGHTS = ("*.h5", "*.msgpack", "*.ot", "*.onnx*", "*.gguf", "*.ggml", "*.tflite", "*.mlmodel*", "*.pdparams")
"""Patterns of the names of weight files that this package does not read, of other frameworks."""

# Files beside the weights that do not change the model that a loader makes.
_UNREAD = ("README.md", "trainweights_files*.json")

# The most characters of a damaged value that an error shows.
_MAX_SHOWN = 200

# Patterns of names of files that some loader might take for weights, besides other weight files or instead of them.
_LOADABLE = ("*.safetensors", "*_model*.bin", "*.index*.json")

_WEIGHT_FILE = re.compile(
    r"(?P<family>model|pytorch_model)(?:\.(?P<variant>[^.]+?))?(?P<shard>(?:-[0-9a-f]{8})?-\d{5}-of-\d{5})?"
    r"\.(?P<kind>safetensors|bin)"
    r"(?P<index>\.index(?:\.(?P<index_variant>[^.]+))?\.json)?"
)


def is_weight_file(name: str, variant: str | None = None) -> bool:
    """Return whether Transformers looks for weights under a file name; shards and indices are included.

    Examples:
        >>> is_weight_file("model-00001-of-00002.safetensors"), is_weight_file("model.fp16.safetensors")
        (True, False)
    """
    match = _WEIGHT_FILE.fullmatch(name)
    return match is not None and (match["variant"] or match["index_variant"]) == variant


def may_be_loaded(name: str) -> bool:
    """Return whether some loader might take a file for weights: those of `is_weight_file`, and more.

    Examples:
        >>> may_be_loaded("consolidated.safetensors"), may_be_loaded("training_args.bin")
        (True, False)
    """
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _LOADABLE)


def safetensors_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model, single files and shards, of any variant, sorted."""
    return sorted(directory.glob("model*.safetensors"))


def entry_point_rank(name: str) -> int | None:
    """Return the position of a file in `ENTRY_POINTS`, its variant aside; None for shards and other files.

    Examples:
        >>> entry_point_rank("model.safetensors"), entry_point_rank("pytorch_model.bin.index.fp16.json")
        (0, 3)
    """
    match = _WEIGHT_FILE.fullmatch(name)
    if match is not None and not match["shard"]:
        index = ".index.json" if match["index"] else ""
        name = f"{match['family']}.{match['kind']}{index}"
    return ENTRY_POINTS.index(name) if name in ENTRY_POINTS else None


def is_shard(name: str) -> bool:
    """Return whether a file is a shard, whose weights a loader finds only by an index.

    Examples:
        >>> is_shard("model-0a1b2c3d-00001-of-00002.safetensors"), is_shard("model.safetensors.index.json")
        (True, False)
    """
    match = _WEIGHT_FILE.fullmatch(name)
    return match is not None and match["shard"] is not None


def is_read_by_loaders(name: str) -> bool:
    """Return whether a file of a model directory can change the loaded model; cards and digests cannot.

    Examples:
        >>> is_read_by_loaders("config.json"), is_read_by_loaders("trainweights_files.json")
        (True, False)
    """
    return not any(fnmatch.fnmatchcase(name, pattern) for pattern in _UNREAD)


def bin_name(name: str) -> str:
    """Return the name of the `.bin` file that corresponds to a safetensors file, shard or index.

    Examples:
        >>> bin_name("model-00001-of-00002.safetensors")
        'pytorch_model-00001-of-00002.bin'
    """
    return name.replace("model", "pytorch_model", 1).replace(".safetensors", ".bin", 1)


def shard_names(index: Path) -> list[str]:
    """Return the names of the shards in an index, each once, sorted; CorruptFileError: one is no plain file name."""
    with open_regular_file(index) as file:
        text = file.read()
    try:
        names = sorted(set(json.loads(text)["weight_map"].values()))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _no_index(index, repr(error)[:_MAX_SHOWN]) from error
    for name in names:
        if not isinstance(name, str) or not _may_be_shard(name):
            raise _no_index(index, repr(name)[:_MAX_SHOWN])
    if not names:
        raise _no_index(index, "none")
    return names


def _may_be_shard(name: str) -> bool:
    return "/" not in name and is_safe_name(name) and name.endswith((".safetensors", ".bin"))


def _no_index(index: Path, found: str) -> CorruptFileError:
    expected = "a weight_map to names of .safetensors or .bin files in the same directory"
    next_step = "Download it again, or save the model again from its source."
    return CorruptFileError(str(index), expected, found, next_step)
