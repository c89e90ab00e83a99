"""Convert a sharded checkpoint into directories that need no hf_trainweights: a model's directory, or plain DCP files.

One tensor is in memory at a time, assembled from the shards of all ranks. So the memory only has to hold the largest
tensor, for any number of ranks.
"""

from __future__ import annotations

import dataclasses
import io
import shutil
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from hf_trainweights.checkpoint.dcp.metadata import ITEM_SUFFIX, METADATA_NAME, Place
from hf_trainweights.checkpoint.dcp.reader import ShardedContents, current_manifest, dcp_directories, read_place
from hf_trainweights.checkpoint.encoded.structure import ANCHOR_SUFFIX
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, Manifest
from hf_trainweights.checkpoint.run.checkpoints import intact_manifest, list_files
from hf_trainweights.checkpoint.sharded.index import file_names, free_number, pickled_metadata
from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.files.atomic import create_file, remove_files, replace_file
from hf_trainweights.files.reading import read_json_object
from hf_trainweights.files.safetensors_file import TensorToWrite, write_safetensors, write_shards
from hf_trainweights.models.saving.new_directories import copy_companions, new_directory, require_vacant_directory

_CONFIG, _ADAPTER_CONFIG = "config.json", "adapter_config.json"


def restore_as_model(source: str | Path, out: str | Path, *, config: str | Path | None = None) -> None:
    """Write the weights of a sharded checkpoint as a directory that `from_pretrained` reads.

    Args:
        source: A DCP directory, plain or encoded, or a Trainer's checkpoint with one.
        out: A new or empty directory.
        config: The model's `config.json`, or the `adapter_config.json` of adapters. Default: the one beside the
            checkpoint, or up to two directories above it. Files beside it, such as a tokenizer's, are copied.

    Raises:
        ConfigError: `source` is no sharded checkpoint or holds no weights, there is no configuration, or `out` is not
            empty.
        CorruptFileError: A file of `source` is damaged; nothing was written.
        MissingAnchorError: `source` was moved without an anchor that it needs.
        SaveError: `out` cannot be written; nothing is left behind.

    Examples:
        >>> restore_as_model("run/checkpoint-100", "model")  # doctest: +SKIP
    """
    source, out = Path(source), Path(out)
    require_vacant_directory(out)
    contents, names = _weights(source)
    config_file = _find_config(contents.directory) if config is None else Path(config)
    try:
        is_adapter = "peft_type" in read_json_object(config_file)
    except (CorruptFileError, OSError) as error:
        raise ConfigError(str(config_file), "a model's configuration", str(error), "Name another file.") from error
    tensors = {}
    for name, stored in names.items():
        entry = contents.tensors[stored]
        make = partial(contents.read_tensor, stored)
        tensors[name] = TensorToWrite(tuple(entry.size), entry.properties.dtype, make)
    with new_directory(out) as temporary:
        if is_adapter:
            write_safetensors(temporary / "adapter_model.safetensors", tensors, {"format": "pt"})
        else:
            copy_companions(config_file.parent, temporary)
            write_shards(tensors, temporary)
        shutil.copyfile(config_file, temporary / (_ADAPTER_CONFIG if is_adapter else _CONFIG))


def restore_as_dcp(source: str | Path, out: str | Path) -> None:
    """Write a sharded checkpoint as plain DCP files, which load without this package.

    Args:
        source: A DCP directory, plain or encoded, or a Trainer's checkpoint with several DCP directories, whose other
            files are copied.
        out: A new or empty directory.

    Raises:
        ConfigError: `source` is no sharded checkpoint, or `out` is not empty.
        CorruptFileError: A file of `source` is damaged; nothing was written.
        MissingAnchorError: `source` was moved without an anchor that it needs.
        SaveError: `out` cannot be written; nothing is left behind.

    Examples:
        >>> restore_as_dcp("run/checkpoint-100", "plain/checkpoint-100")  # doctest: +SKIP
    """
    source, out = Path(source), Path(out)
    require_vacant_directory(out)
    directories = dcp_directories(source)
    contents = [ShardedContents(directory) for directory in directories or [source]]
    verified_manifest(source, directories)
    with new_directory(out) as temporary:
        for content in contents:
            target = temporary / content.directory.relative_to(source)
            target.mkdir(exist_ok=True)
            metadata = _write_items(content, target, {name: name for name in content.files})
            with create_file(target / METADATA_NAME) as file:
                file.write(metadata)
        if directories != [source]:
            for name in list_files(source):
                if Path(name).name != MANIFEST_NAME and (source / name).parent not in directories:
                    (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source / name, temporary / name, follow_symlinks=False)


def verified_manifest(path: Path, dcp_directories: Sequence[Path]) -> Manifest | None:
    """Compare the files of a sharded checkpoint with its manifest, and return the manifest.

    None if there is no manifest, or if a process died between writing it and `.metadata`. CorruptFileError: a file is
    damaged.
    """
    return None if path in dcp_directories and current_manifest(path) is None else intact_manifest(path)


def write_plain_in_place(contents: ShardedContents) -> list[str]:
    """Replace the files of an encoded DCP directory by plain ones, and return the names of the new files.

    The old files stay until `.metadata` is replaced, so after an error the directory is intact.
    """
    directory, number = contents.directory, free_number(contents.directory)
    new_names = {name: file_names(rank, number)[0] for rank, name in enumerate(contents.files)}
    metadata = _write_items(contents, directory, new_names)
    remove_files([directory / MANIFEST_NAME])  # .metadata alone is enough to read the old files
    with replace_file(directory / METADATA_NAME) as file:
        file.write(metadata)
    old_files = [*map(directory.joinpath, new_names), *directory.glob(f"*{ANCHOR_SUFFIX}")]
    remove_files(sorted(old_files))
    return list(new_names.values())


def _write_items(contents: ShardedContents, target: Path, new_names: Mapping[str, str]) -> bytes:
    """Write every item as torch.save does, and return the `.metadata` for the new files."""
    items: dict[str, list[MetadataIndex]] = defaultdict(list)
    for index, old_place in sorted(contents.places.items(), key=lambda item: item[1].start):
        items[old_place.file].append(index)
    places: dict[MetadataIndex, Place] = {}
    for name, new_name in new_names.items():
        start = 0
        with replace_file(target / new_name, target.glob(f"*{ITEM_SUFFIX}")) as file:
            for index in items[name]:
                data = _plain_bytes(contents, index)
                file.write(data)
                places[index] = Place(new_name, start, start + len(data))
                start += len(data)
    return pickled_metadata(dataclasses.replace(contents.metadata), places, save_id=uuid.uuid4().hex)


def _plain_bytes(contents: ShardedContents, index: MetadataIndex) -> bytes:
    if not isinstance(contents.metadata.state_dict_metadata[index.fqn], TensorStorageMetadata):
        return read_place(contents.directory, contents.places[index])
    buffer = io.BytesIO()
    torch.save(contents.read_item(index), buffer)
    return buffer.getvalue()


def _weights(source: Path) -> tuple[ShardedContents, dict[str, str]]:
    for directory in dcp_directories(source) or [source]:
        contents = ShardedContents(directory)
        names = contents.model_weights()
        if names:
            contents.require_complete()
            return contents, names
    next_step = "Save the model's state dict alone, or under the key `model`."
    raise ConfigError(str(source), "a sharded checkpoint with a model's weights", "none", next_step)


def _find_config(directory: Path) -> Path:
    directory = directory.absolute()
    for folder in (directory, *directory.parents[:2]):
        for name in (_CONFIG, _ADAPTER_CONFIG):
            if (folder / name).is_file():
                return folder / name
    next_step = "Name the model's config.json (`--config` on the command line)."
    raise ConfigError(str(directory), f"a {_CONFIG} beside the checkpoint or above it", "none", next_step)
