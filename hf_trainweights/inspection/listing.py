"""What lies in weight files: every tensor with its format, shape and size. Nothing in them is executed."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.formats import get_format
from hf_trainweights.formats.base import Format
from hf_trainweights.inspection.stored_tensors import StoredTensor, find_parts, read_tensors
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor
from hf_trainweights.tensor.stored_names import FORMAT_SUFFIX, group_stored, parse_stored_name, unflatten_weight

_QUANT_METHOD = "trainweights"
_MEMBER = "zip member"


@dataclass(frozen=True)
class Entry:
    """One tensor, a quantized weight as one.

    Args:
        name: Its name; of a quantized weight that of the float weight, of a zip member its name in the file.
        format: The quantized format, else the dtype, e.g. `int4 g128`, `bfloat16`; `zip member` for one.
        shape: Its shape; of a quantized weight that of the float weight; None for a zip member.
        stored_bytes: What it takes in the file, scales included; None where no manifest says it.
        file: Name of the file.
    """

    name: str
    format: str
    shape: tuple[int, ...] | None
    stored_bytes: int | None
    file: str


@dataclass(frozen=True)
class Inspection:
    """What was found.

    Args:
        entries: In the order of the files.
        unsafe: File name to what unpickling it would call beside what torch allows. Of such a file nothing was
            unpickled, and its entries are the members of its zip archive.
    """

    entries: tuple[Entry, ...]
    unsafe: dict[str, tuple[str, ...]]


def inspect_weights(path: str | Path) -> Inspection:
    """Lists the tensors of a model, a checkpoint, or one file.

    Args:
        path: A directory with weights, a `.safetensors` file, or one that torch.save wrote.

    Returns:
        What lies there. Formats of quantized weights are told by the `config.json` beside them; without one they are
        listed as the plain tensors that they are stored as.

    Raises:
        ConfigError: The directory holds no weights.
        CorruptFileError: A file is damaged.
        OSError: It cannot be read.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from safetensors.torch import save_file
        >>> file = Path(tempfile.mkdtemp(), "model.safetensors")
        >>> save_file({"weight": torch.zeros(2, 3)}, file)
        >>> inspect_weights(file).entries
        (Entry(name='weight', format='float32', shape=(2, 3), stored_bytes=24, file='model.safetensors'),)
    """
    path = Path(path)
    default = _configured_format(path if path.is_dir() else path.parent)
    tensors: dict[str, StoredTensor] = {}
    members: list[Entry] = []
    unsafe: dict[str, tuple[str, ...]] = {}
    for part, files in find_parts(path).items():
        for file in files:
            calls = _unsafe_calls(file)
            if calls:
                unsafe[file.name] = calls
                members += _members(file)
            else:
                tensors |= _read(file, part)
    entries = [_entry(stored) for stored in _fold(tensors, default)]
    return Inspection((*entries, *members), unsafe)


def _read(file: Path, part: str) -> dict[str, StoredTensor]:
    tensors = {stored.key: stored for stored in read_tensors(file, part, values=False)}
    formats = [key for key in tensors if (parse_stored_name(key) or ("", ""))[1] == FORMAT_SUFFIX]
    if any(tensors[key].tensor.is_meta for key in formats):
        # An encoded file of quantized weights: how to read them is among the values.
        tensors = {stored.key: stored for stored in read_tensors(file, part)}
    return tensors


def _configured_format(directory: Path) -> Format | None:
    """Return the format that a config.json names for the weights beside it."""
    file = directory / "config.json"
    try:
        config = json.loads(file.read_bytes()).get("quantization_config", {}) if file.is_file() else {}
        if config.get("quant_method") != _QUANT_METHOD:
            return None
        known = {key: config[key] for key in ("format", "group_size") if config.get(key) is not None}
        return get_format(known)
    except (ValueError, AttributeError) as error:
        next_step = "Restore it from a copy, or inspect the files one by one."
        raise CorruptFileError(str(file), "a model's configuration", str(error), next_step) from error


def _unsafe_calls(file: Path) -> tuple[str, ...]:
    if file.suffix == ".safetensors" or not zipfile.is_zipfile(file):
        return ()
    try:
        return tuple(sorted(get_unsafe_globals_in_checkpoint(file)))
    except (RuntimeError, ValueError):  # Damage, which reading the file reports.
        return ()


def _members(file: Path) -> list[Entry]:
    with zipfile.ZipFile(file) as archive:
        return [
            Entry(info.filename.partition("/")[2], _MEMBER, None, info.file_size, file.name)
            for info in archive.infolist()
        ]


def _fold(tensors: dict[str, StoredTensor], default: Format | None) -> Iterable[StoredTensor]:
    """Yield each tensor, the stored tensors of a quantized weight as one, in the place of the first of them."""
    groups = group_stored(tensors) if default else {}
    for key, stored in tensors.items():
        parsed = parse_stored_name(key)
        if parsed is None or default is None:
            yield stored
            continue
        parts = groups.pop(parsed[0], None)
        if parts is None:
            continue
        plain = {suffix: part.tensor for suffix, part in parts.items()}
        dtype = plain["scale"].dtype if "scale" in plain else torch.float32  # unflatten_weight says that it is missing
        weight = unflatten_weight(parsed[0], plain, dtype, default)
        stored_bytes = total_bytes(part.stored_bytes for part in parts.values())
        yield replace(stored, key=parsed[0], tensor=weight, stored_bytes=stored_bytes)


def total_bytes(counts: Iterable[int | None]) -> int | None:
    """Return the sum, None if one of them is not known.

    Args:
        counts: Bytes of tensors.
    """
    known = list(counts)
    return None if None in known else sum(filter(None, known))


def _entry(stored: StoredTensor) -> Entry:
    tensor = stored.tensor
    shown = str(tensor.format) if isinstance(tensor, QuantizedTensor) else str(tensor.dtype).removeprefix("torch.")
    return Entry(stored.key, shown, tuple(tensor.shape), stored.stored_bytes, stored.file.name)
