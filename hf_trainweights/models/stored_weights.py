"""Weight files as they lie on disk: which they are, and whether they are whole, before anything is loaded from them."""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.tensor.stored_names import group_stored, parse_stored_name, stored_name

# The header of a safetensors file may not be larger; the format's own limit.
_MAX_HEADER_BYTES = 100_000_000

# Where int8 products read memory without copying it first, and what the format lets a header grow by.
_INT8_ALIGNMENT, _HEADER_ALIGNMENT = 16, 8
# Bytes that are moved at a time.
_MOVED_BYTES = 8 << 20

_AGAIN = "Download it again, or save it again from the source."

# model.safetensors, model-00001-of-00002.safetensors, model.safetensors.index.json, each with .variant before the end
# of its stem; the same for pytorch_model.bin.
_WEIGHT_FILE = re.compile(
    r"(?P<family>model|pytorch_model)(?:\.(?P<variant>[^.]+?))?(?:-\d{5}-of-\d{5})?\.(?P<kind>safetensors|bin)"
    r"(?:\.index(?:\.(?P<index_variant>[^.]+))?\.json)?"
)


class StoredWeight(NamedTuple):
    """Where a weight lies and what it takes there.

    Args:
        file: The file; where its stored tensors lie in several, one of them.
        stored_bytes: Bytes of all its stored tensors.
    """

    file: Path
    stored_bytes: int


class StoredTensorPlace(NamedTuple):
    """Where a tensor lies in a safetensors file.

    Args:
        file: The file.
        name: Its name there.
        shape: Its shape.
        start: Its first byte, counted from the beginning of the file.
        end: The byte behind its last.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    start: int
    end: int


def is_weight_file(name: str, variant: str | None = None) -> bool:
    """Return whether a file name is one that Transformers looks for weights under, shards and indices included.

    Args:
        name: A file name without its directory.
        variant: The variant whose files are meant; None for those without.

    Example:
        >>> is_weight_file("model-00001-of-00002.safetensors"), is_weight_file("model.fp16.safetensors")
        (True, False)
    """
    match = _WEIGHT_FILE.fullmatch(name)
    return match is not None and (match["variant"] or match["index_variant"]) == variant


def check_weight_files(files: Iterable[str | os.PathLike[str]]) -> dict[str, StoredWeight]:
    """Check that the files of a checkpoint are whole, and that every quantized weight in them is.

    Args:
        files: The `.safetensors` and `.bin` files of one checkpoint.

    Returns:
        Every weight under its name in the checkpoint, a quantized one under the name of the float weight.

    Raises:
        CorruptFileError: A file is truncated, is not what its name says, or holds a pickle with a global that is not
            allowed; or a stored tensor of a weight is missing.
    """
    tensors: dict[str, StoredWeight] = {}
    for file in map(Path, files):
        if not file.is_file():
            raise CorruptFileError(str(file), "a shard, as the index says", "no such file", _AGAIN)
        if file.suffix == ".safetensors":
            entries = read_safetensors_header(file).items()
            sizes = {name: end - start for name, entry in entries for start, end in [entry["data_offsets"]]}
        elif file.suffix == ".bin":
            sizes = {name: tensor.nbytes for name, tensor in _read_bin(file).items()}
        else:
            continue
        tensors |= {name: StoredWeight(file, size) for name, size in sizes.items()}
    weights = {name: stored for name, stored in tensors.items() if parse_stored_name(name) is None}
    for weight, stored in group_stored(tensors).items():
        present = next(iter(stored.values())).file
        for suffix in {"qdata", "scale"} - stored.keys():
            raise CorruptFileError(
                str(present),
                f"{stored_name(weight, suffix)} beside the other tensors of {weight}",
                f"only {', '.join(sorted(stored))}",
                "A shard is missing or the file was edited. " + _AGAIN,
            )
        weights[weight] = StoredWeight(present, sum(tensor.stored_bytes for tensor in stored.values()))
    return weights


def read_safetensors_header(file: Path) -> dict[str, dict[str, Any]]:
    """Return name to dtype, shape and offsets of the tensors in a safetensors file, after checking its length.

    Args:
        file: Path of the file.

    Raises:
        CorruptFileError: The header does not parse, or the file is longer or shorter than it says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise CorruptFileError(
                str(file),
                "a safetensors header of 2 bytes or more inside the file",
                f"{length} of {size} bytes",
                _AGAIN,
            )
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            # The format allows no holes, so the sizes add up to the length of the file.
            data_bytes = sum(end - start for entry in header.values() for start, end in [entry["data_offsets"]])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptFileError(
                str(file), "a safetensors header", f"bytes that are none ({error})", _AGAIN
            ) from error
    if 8 + length + data_bytes != size:
        raise CorruptFileError(str(file), f"{8 + length + data_bytes} bytes, as its header says", f"{size}", _AGAIN)
    return header


def tensor_places(file: Path) -> list[StoredTensorPlace]:
    """Return where each tensor of a safetensors file lies.

    Args:
        file: Path of the file.

    Raises:
        CorruptFileError: It is no whole safetensors file.
    """
    header = read_safetensors_header(file)
    # The format allows no holes, so the tensors are the end of the file.
    data = file.stat().st_size - max((entry["data_offsets"][1] for entry in header.values()), default=0)
    return [
        StoredTensorPlace(file, name, tuple(entry["shape"]), data + start, data + end)
        for name, entry in header.items()
        for start, end in [entry["data_offsets"]]
    ]


def align_int8(file: Path) -> None:
    """Let the int8 tensors of a safetensors file begin where the memory-mapped file can be multiplied with as it is.

    They lie one behind the other, so 8 spaces more in the header align all of them, or the most where their sizes are
    odd. The content stays the same, and equal files stay equal.

    Args:
        file: A whole file, which nothing has mapped yet; rewritten in place where that helps.

    Raises:
        CorruptFileError: It is no safetensors file.
        OSError: It cannot be written; it is damaged then.
    """
    header = read_safetensors_header(file)
    starts = [entry["data_offsets"][0] for entry in header.values() if entry["dtype"] == "I8"]
    with file.open("r+b") as stream:
        length = struct.unpack("<Q", stream.read(8))[0]
        aligned, moved = (
            sum((8 + length + padding + start) % _INT8_ALIGNMENT == 0 for start in starts)
            for padding in (0, _HEADER_ALIGNMENT)
        )
        if moved <= aligned:
            return
        end = file.stat().st_size
        while end > 8 + length:
            start = max(8 + length, end - _MOVED_BYTES)
            stream.seek(start)
            block = stream.read(end - start)
            stream.seek(start + _HEADER_ALIGNMENT)
            stream.write(block)
            end = start
        stream.seek(8 + length)
        stream.write(b" " * _HEADER_ALIGNMENT)
        stream.seek(0)
        stream.write(struct.pack("<Q", length + _HEADER_ALIGNMENT))


def _read_bin(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a `.bin`, on the meta device, so that nothing but the pickle is read."""
    with file.open("rb") as stream:
        zipped = stream.read(4) == b"PK\x03\x04"
    try:
        if zipped:
            with zipfile.ZipFile(file):
                pass
        state_dict = torch.load(file, weights_only=True, map_location="meta", mmap=zipped or None)
    except pickle.UnpicklingError as error:
        raise CorruptFileError(
            str(file),
            "a pickle of plain tensors",
            _reason(error),
            "It is not loaded with weights_only=False: that would run whatever code it holds. Convert it where you "
            "trust it, to safetensors.",
        ) from error
    except (RuntimeError, zipfile.BadZipFile, EOFError, ValueError, KeyError) as error:
        raise CorruptFileError(str(file), "a file that torch.save wrote", _reason(error), _AGAIN) from error
    if not isinstance(state_dict, dict):
        raise CorruptFileError(str(file), "a dict of tensors", type(state_dict).__name__, _AGAIN)
    return {str(name): tensor for name, tensor in state_dict.items() if isinstance(tensor, Tensor)}


def _reason(error: Exception) -> str:
    """Return the part of an error that says what is wrong; torch puts advice to trust the file around it."""
    lines = str(error).strip().splitlines()
    told = [line.strip().partition(". Please use")[0] for line in lines if "WeightsUnpickler error" in line]
    return ": ".join([type(error).__name__, *(told or lines[:1])])
