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

import torch

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.state_dict import group_stored, stored_name

# The header of a safetensors file may not be larger; the format's own limit.
_MAX_HEADER_BYTES = 100_000_000

_AGAIN = "Download it again, or save it again from the source."

# model.safetensors, model-00001-of-00002.safetensors, model.safetensors.index.json, each with .variant before the end
# of its stem; the same for pytorch_model.bin.
_WEIGHT_FILE = re.compile(
    r"(?P<family>model|pytorch_model)(?:\.(?P<variant>[^.]+?))?(?:-\d{5}-of-\d{5})?\.(?P<kind>safetensors|bin)"
    r"(?:\.index(?:\.(?P<index_variant>[^.]+))?\.json)?"
)


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


def check_weight_files(files: Iterable[str | os.PathLike[str]]) -> None:
    """Check that the files of a checkpoint are whole, and that every quantized weight in them is.

    Args:
        files: The `.safetensors` and `.bin` files of one checkpoint.

    Raises:
        CorruptFileError: A file is truncated, is not what its name says, or holds a pickle with a global that is not
            allowed; or a stored tensor of a weight is missing.
    """
    where: dict[str, Path] = {}
    for file in map(Path, files):
        if file.suffix == ".safetensors":
            where |= dict.fromkeys(read_safetensors_header(file), file)
        elif file.suffix == ".bin":
            where |= dict.fromkeys(_read_bin_names(file), file)
    for weight, stored in group_stored(where).items():
        for suffix in {"qdata", "scale"} - stored.keys():
            present = next(iter(stored.values()))
            raise CorruptFileError(
                str(present),
                f"{stored_name(weight, suffix)} beside the other tensors of {weight}",
                f"only {', '.join(sorted(stored))}",
                "A shard is missing or the file was edited. " + _AGAIN,
            )


def read_safetensors_header(file: Path) -> dict[str, dict[str, object]]:
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
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise CorruptFileError(
                str(file), "a safetensors header", f"bytes that are none ({error})", _AGAIN
            ) from error
    if 8 + length + end != size:
        raise CorruptFileError(str(file), f"{8 + length + end} bytes, as its header says", f"{size}", _AGAIN)
    return header


def _read_bin_names(file: Path) -> list[str]:
    """Return the names in a `.bin`; on the meta device, so that nothing but the pickle is read."""
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
            str(error).partition("\n")[0],
            "It is not loaded with weights_only=False: that would run whatever code it holds. Convert it where you "
            "trust it, to safetensors.",
        ) from error
    except (RuntimeError, zipfile.BadZipFile, EOFError, ValueError, KeyError) as error:
        raise CorruptFileError(
            str(file), "a file that torch.save wrote", f"{error}".partition("\n")[0], _AGAIN
        ) from error
    if not isinstance(state_dict, dict):
        raise CorruptFileError(str(file), "a dict of tensors", type(state_dict).__name__, _AGAIN)
    return [str(name) for name in state_dict]
