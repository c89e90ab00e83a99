"""The weights of a model as safetensors files of limited size, and their index, written tensor by tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import split_state_dict_into_shards_factory

from hf_trainweights.errors import ConfigError
from hf_trainweights.files.reading import file_sha256
from hf_trainweights.files.safetensors_file import TensorToWrite, write_safetensors
from hf_trainweights.files.weight_files import entry_point_rank, is_shard

MAX_SHARD_SIZE = "5GB"

# Of the SHA-256 in a name; where another file has the same by chance, only the step between two models is lost.
_DIGEST_DIGITS = 8
_NUMBER = re.compile(r"(?:-[0-9a-f]{8})?(-\d{5}-of-\d{5}\.)")


def write_shards(
    tensors: Mapping[str, TensorToWrite], directory: Path, max_shard_size: int | str = MAX_SHARD_SIZE
) -> None:
    """Write safetensors files of at most `max_shard_size`, bytes or e.g. `"5GB"`, and their index if several."""
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
    digests = {
        file: write_safetensors(directory / file, {name: tensors[name] for name in names}, {"format": "pt"})
        for file, names in split.filename_to_tensors.items()
    }
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        name_shards(directory, digests)


def name_shards(directory: Path, digests: Mapping[str, str]) -> dict[str, str]:
    """Put the beginning of each shard's SHA-256 into its name, also in indices; return all digests by the new names.

    So the shards of a save never take the place of those of another one, and the index is all that is replaced. Equal
    shards have equal names.
    """
    named = dict(digests)
    for path in sorted(path for path in directory.glob("*.index*.json") if entry_point_rank(path.name) is not None):
        index = json.loads(path.read_text(encoding="utf-8"))
        names: dict[str, str] = {}
        for name in sorted(set(filter(is_shard, index["weight_map"].values()))):
            sha256 = named.pop(name, None) or file_sha256(directory / name)
            # `model-0a1b2c3d-00001-of-00002.safetensors` for `model-00001-of-00002.safetensors`.
            names[name] = own = _NUMBER.sub(f"-{sha256[:_DIGEST_DIGITS]}\\1", name)
            (directory / name).rename(directory / own)
            named[own] = sha256
        index["weight_map"] = {tensor: names.get(name, name) for tensor, name in index["weight_map"].items()}
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return named
