"""The weights of a model as safetensors files of limited size, and their index, written tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import split_state_dict_into_shards_factory

from hf_trainweights.errors import ConfigError
from hf_trainweights.files.safetensors_file import TensorToWrite, write_safetensors

MAX_SHARD_SIZE = "5GB"


def write_shards(
    tensors: Mapping[str, TensorToWrite], directory: Path, max_shard_size: int | str = MAX_SHARD_SIZE
) -> None:
    """Write safetensors files, and their index where there are several.

    Args:
        tensors: By name.
        directory: Where to; it exists.
        max_shard_size: Bytes of one file at most, or a text such as `"5GB"`.

    Raises:
        ConfigError: `max_shard_size` is no size.
        SaveError: A tensor that was made has another shape or dtype than was said.
        OSError: A file cannot be written.
    """
    try:
        split = split_state_dict_into_shards_factory(
            dict(tensors),
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
    except (ValueError, TypeError, OverflowError) as error:
        next_step = "Pass a number of bytes, or a text of a number and KB, MB, GB or TB."
        raise ConfigError(
            "max_shard_size", 'bytes, or a text such as "5GB"', repr(max_shard_size), next_step
        ) from error
    for file, names in split.filename_to_tensors.items():
        write_safetensors(directory / file, {name: tensors[name] for name in names}, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")
