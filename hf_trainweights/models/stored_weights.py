"""Whether the weight files of a model are whole, and every quantized weight in them, before anything is loaded."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.safetensors_file import read_safetensors_header
from hf_trainweights.formats import FORMATS
from hf_trainweights.tensor.stored_names import group_stored, parse_stored_name, stored_name

_AGAIN = "Download it again, or save it again from the source."


class StoredWeight(NamedTuple):
    """The file that a weight lies in, and its size there.

    Args:
        file: The file; where its stored tensors lie in several, one of them.
        stored_bytes: Bytes of all its stored tensors.
    """

    file: Path
    stored_bytes: int


def check_weight_files(files: Iterable[str | os.PathLike[str]]) -> dict[str, StoredWeight]:
    """Check that the files of a checkpoint are whole, and that every quantized weight in them is.

    Args:
        files: The `.safetensors` and `.bin` files of one checkpoint.

    Returns:
        Every weight under its name in the checkpoint, a quantized one under the name of the float weight.

    Raises:
        CorruptFileError: A file is missing or truncated, is of another kind than its name says, or holds a pickle with
            a global that is not allowed; or a stored tensor of a weight is missing.
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
        # Whether it is the right one of the formats shows when it is loaded.
        missing = min((set(form.tensor_names) - stored.keys() for form in FORMATS.values()), key=len)
        for suffix in missing:
            raise CorruptFileError(
                str(present),
                f"{stored_name(weight, suffix)} beside the other tensors of {weight}",
                f"only {', '.join(sorted(stored))}",
                "A shard is missing or the file was edited. " + _AGAIN,
            )
        weights[weight] = StoredWeight(present, sum(tensor.stored_bytes for tensor in stored.values()))
    return weights


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
    """Return the reason in an error, without torch's advice to trust the file."""
    lines = str(error).strip().splitlines()
    told = [line.strip().partition(". Please use")[0] for line in lines if "WeightsUnpickler error" in line]
    return ": ".join([type(error).__name__, *(told or lines[:1])])
