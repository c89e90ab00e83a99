"""Lists the tensors of weight files with format, shape and size, without executing anything in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch

from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.files.digests import CONFIG_NAME, read_quantization_config
from hf_trainweights.files.reading import open_zip
from hf_trainweights.formats.base import Format
from hf_trainweights.inspection.stored_tensors import StoredTensor, find_parts, read_part, unsafe_calls
from hf_trainweights.models.choosing.config import QUANT_METHOD, TrainWeightsConfig
from hf_trainweights.notebook import html_table
from hf_trainweights.tensor.guards import is_guard, is_notice
from hf_trainweights.tensor.stored_names import (
    CODED_SUFFIXES,
    FORMAT_SUFFIX,
    group_stored,
    parse_stored_name,
    unflatten_weight,
)

_MEMBER = "zip member"


@dataclass(frozen=True)
class Entry:
    """One tensor in a listing. A quantized weight is one entry, although a file holds several tensors for it.

    Args:
        name: The tensor's name; for a quantized weight, the name of the float weight.
        format: The quantized format or the dtype, e.g. `int4 g128`, `bfloat16`; for a member of a zip archive that was
            not unpickled, `zip member`.
        shape: The tensor's shape; for a quantized weight, the shape of the float weight; None for a zip member.
        stored_bytes: Bytes in the file, scales included; None if the tensor is sparse, or if the file is encoded and
            no manifest lists them.
        file: Name of the file.
    """

    name: str
    format: str
    shape: tuple[int, ...] | None
    stored_bytes: int | None
    file: str


@dataclass(frozen=True)
class Inspection:
    """The result of listing weight files.

    Args:
        entries: The tensors, in the order of the files.
        unsafe: Names of the files that were not unpickled, with the functions that unpickling would call and torch
            does not allow. The entries of such a file are the members of its zip archive.
    """

    entries: tuple[Entry, ...]
    unsafe: dict[str, tuple[str, ...]]

    def _repr_html_(self) -> str:
        head = ("tensor", "format", "shape", "bytes", "file")
        return html_table(f"{len(self.entries)} tensors", head, (astuple(entry) for entry in self.entries), folded=True)


def inspect_weights(path: str | Path) -> Inspection:
    """List the tensors of a model, a checkpoint, or one file.

    Args:
        path: A directory of a model or a checkpoint, sharded or not, a `.safetensors` file, or a file that torch.save
            wrote.

    Returns:
        The tensors. The `config.json` beside the files names the format of quantized weights; without one, their
        stored tensors are listed one by one.

    Raises:
        ConfigError: The directory holds no weights.
        CorruptFileError: A file is damaged, or a newer version wrote the configuration.
        OSError: A file cannot be read.

    Examples:
        >>> import tempfile
        >>> import torch
        >>> from safetensors.torch import save_file
        >>> file = Path(tempfile.mkdtemp(), "model.safetensors")
        >>> save_file({"weight": torch.zeros(2, 3)}, file)
        >>> inspect_weights(file).entries
        (Entry(name='weight', format='float32', shape=(2, 3), stored_bytes=24, file='model.safetensors'),)
    """
    path = Path(path)
    default = configured_format(path if path.is_dir() else path.parent)
    tensors: dict[str, StoredTensor] = {}
    members: list[Entry] = []
    unsafe: dict[str, tuple[str, ...]] = {}
    for part_name, files in find_parts(path).items():
        for file in files:
            calls = () if file.is_dir() else unsafe_calls(file)
            if calls:
                unsafe[file.name] = calls
                members += _members(file)
            else:
                tensors |= _read(file, part_name)
    entries = [_entry(stored) for stored in fold_weights(tensors, default, values=False)]
    return Inspection((*entries, *members), unsafe)


def _read(file: Path, part_name: str) -> dict[str, StoredTensor]:
    tensors = dict(read_part([file], part_name, values=False))
    format_suffixes = (FORMAT_SUFFIX, *CODED_SUFFIXES)
    keys_of_formats = [key for key in tensors if (parse_stored_name(key) or ("", ""))[1] in format_suffixes]
    if any(tensors[key].tensor.is_meta for key in keys_of_formats):
        # The file of a compressed checkpoint was not decoded. But the format of a quantized weight is the content of a
        # tensor, and a coded weight has its shape in the header of one: their values are needed.
        stored = read_part([file], part_name)
        tensors |= {key: stored[key] for key in keys_of_formats}
    return tensors


def configured_format(directory: Path) -> Format | None:
    """Return the default format in the config.json of a directory; None if it does not configure this quantizer."""
    config = read_quantization_config(directory) or {}
    if config.get("quant_method") != QUANT_METHOD:
        return None
    try:
        # The format of activations does not matter for reading weights.
        return TrainWeightsConfig.from_dict(config, activations=None).default_format
    except ConfigError as error:
        next_step = "Restore it from a copy, or inspect the files one by one."
        raise CorruptFileError(
            str(directory / CONFIG_NAME), "a model's configuration", str(error), next_step
        ) from error


def _members(file: Path) -> list[Entry]:
    with open_zip(file) as archive:
        return [
            Entry(info.filename.partition("/")[2], _MEMBER, None, info.file_size, file.name)
            for info in archive.infolist()
        ]


def fold_weights(
    tensors: dict[str, StoredTensor], default: Format | None, values: bool = True
) -> Iterable[StoredTensor]:
    """Yield tensors, with the stored tensors of each quantized weight combined into one, at the position of the first.

    `default` is the format in the configuration. If it is None, stored tensors stay separate. If `values` is false,
    entropy-coded weights are on the meta device and are not decoded.
    """
    groups = group_stored(tensors) if default else {}
    weights = set(groups)
    for key, stored in tensors.items():
        parsed = parse_stored_name(key)
        # Two kinds of one-byte tensors hold no weight (`tensor/guards.py`). A guard has the plain name of a quantized
        # weight, so that a loader without this package fails at it; the notice names the package to import.
        if default is not None and (is_notice(key) or (key in weights and is_guard(stored.tensor))):
            continue
        if parsed is None or default is None:
            yield stored
            continue
        members = groups.pop(parsed[0], None)
        if members is None:
            continue
        plain = {suffix: member.tensor for suffix, member in members.items()}
        # If the scale is missing, the dtype does not matter: unflatten_weight raises an error.
        dtype = plain["scale"].dtype if "scale" in plain else torch.float32
        if _is_coded(plain):
            dtype = None  # a coded weight has its dtype in its header
        weight = unflatten_weight(parsed[0], plain, dtype, default, values=values)
        stored_bytes = total_bytes(member.stored_bytes for member in members.values())
        yield replace(stored, name=parsed[0], tensor=weight, stored_bytes=stored_bytes)


def _is_coded(suffixes: Iterable[str]) -> bool:
    return any(suffix in CODED_SUFFIXES for suffix in suffixes)


def total_bytes(counts: Iterable[int | None]) -> int | None:
    """Return the sum of the bytes of several entries; None if the bytes of one entry are unknown."""
    bytes_or_none = list(counts)
    return None if None in bytes_or_none else sum(filter(None, bytes_or_none))


def _entry(stored: StoredTensor) -> Entry:
    assert stored.file is not None
    return Entry(stored.name, stored.format, tuple(stored.tensor.shape), stored.stored_bytes, stored.file.name)
