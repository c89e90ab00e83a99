"""Whether the weight files of a model are whole, and every quantized weight in them, before anything is loaded."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.reading import is_safe_name, is_torch_zip, require_regular_file
from hf_trainweights.files.safetensors_file import read_safetensors_header
from hf_trainweights.formats import FORMATS
from hf_trainweights.tensor.coded_weights import CODED_FLOAT_SUFFIX, CODED_SUFFIX
from hf_trainweights.tensor.guards import is_guard
from hf_trainweights.tensor.stored_names import group_stored, parse_stored_name, stored_name

_AGAIN = "Download it again, or save it again from the source."


class StoredWeight(NamedTuple):
    """The file that a weight lies in, and its size there.

    Args:
        file: The file; where its stored tensors lie in several, one of them.
        stored_bytes: Bytes of all its stored tensors.
        kind: Whether it is quantized; or a guard without its weight, see `hf_trainweights.tensor.guards`.
        is_coded: Whether it is entropy-coded there, see `hf_trainweights.tensor.coded_weights`.
    """

    file: Path
    stored_bytes: int
    kind: Literal["float", "quantized", "guard"] = "float"
    is_coded: bool = False


def check_weight_files(
    files: Iterable[str | os.PathLike[str]], directory: str | os.PathLike[str] = ""
) -> dict[str, StoredWeight]:
    """Check that the files of a checkpoint are whole, and every quantized weight in them; return all weights.

    Each is under its name in the checkpoint, a quantized one under that of the float weight. An index must not lead out
    of the model's directory; an id on the Hub is none.
    """
    tensors: dict[str, StoredWeight] = {}
    files = [Path(file) for file in files]
    _check_places(files, Path(directory))
    for file in files:
        if file.suffix == ".safetensors":
            for name, entry in _read_header(file).items():
                start, end = entry["data_offsets"]
                guard = (entry["dtype"], entry["shape"]) == ("U8", [1])
                tensors[name] = StoredWeight(file, end - start, "guard" if guard else "float")
        elif file.suffix == ".bin":
            for name, tensor in _read_bin(file).items():
                tensors[name] = StoredWeight(file, tensor.nbytes, "guard" if is_guard(tensor) else "float")
    weights = {name: stored for name, stored in tensors.items() if parse_stored_name(name) is None}
    for weight, stored in group_stored(tensors).items():
        present = next(iter(stored.values())).file
        if weight in weights and weights[weight].kind != "guard":
            expected, found = f"{weight} once, quantized or not", "both"
            raise CorruptFileError(str(present), expected, found, "The file was edited. " + _AGAIN)
        stored_bytes = sum(tensor.stored_bytes for tensor in stored.values())
        if CODED_FLOAT_SUFFIX in stored or CODED_SUFFIX in stored:
            kind = "float" if CODED_FLOAT_SUFFIX in stored else "quantized"
            weights[weight] = StoredWeight(present, stored_bytes, kind, is_coded=True)
            continue
        # Whether it is the right one of the formats shows when it is loaded.
        missing = min((set(form.tensor_names) - stored.keys() for form in FORMATS.values()), key=len)
        for suffix in missing:
            raise CorruptFileError(
                str(present),
                f"{stored_name(weight, suffix)} beside the other tensors of {weight}",
                f"only {', '.join(sorted(stored))}",
                "A shard is missing or the file was edited. " + _AGAIN,
            )
        weights[weight] = StoredWeight(present, stored_bytes, "quantized")
    return weights


def _check_places(files: Sequence[Path], directory: Path) -> None:
    """Check that files are there, and in the model's directory if it is known, before any of them is opened."""
    for file in files:
        if directory.is_dir() and directory != Path() and not _is_inside(file, directory):
            raise CorruptFileError(str(file), f"a file in {directory}", "a path out of it in the index", _AGAIN)
        try:
            require_regular_file(file)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CorruptFileError(str(file), "a shard, as the index says", "no such file", _AGAIN) from error


def _is_inside(file: Path, directory: Path) -> bool:
    return file.is_relative_to(directory) and is_safe_name(file.relative_to(directory).as_posix())


def _read_header(file: Path) -> dict[str, dict[str, Any]]:
    header = read_safetensors_header(file)
    try:
        # Its own reader knows best which dtypes, shapes and offsets go together.
        with safe_open(file, framework="pt"):
            return header
    except SafetensorError as error:
        raise CorruptFileError(str(file), "a safetensors header", str(error), _AGAIN) from error


def _read_bin(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a `.bin`, on the meta device, so that nothing but the pickle is read."""
    zipped = is_torch_zip(file)
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
    except Exception as error:
        # Damaged bytes make the unpickler raise whatever the operation raises that they have become.
        raise CorruptFileError(str(file), "a file that torch.save wrote", _reason(error), _AGAIN) from error
    if not isinstance(state_dict, dict):
        raise CorruptFileError(str(file), "a dict of tensors", type(state_dict).__name__, _AGAIN)
    tensors = {str(name): tensor for name, tensor in state_dict.items() if isinstance(tensor, Tensor)}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            raise CorruptFileError(str(file), "dense tensors", f"{name} in {tensor.layout}", _AGAIN)
    return tensors


def _reason(error: Exception) -> str:
    """Return the reason in an error, without torch's advice to trust the file."""
    lines = str(error).strip().splitlines()
    told = [line.strip().partition(". Please use")[0] for line in lines if "WeightsUnpickler error" in line]
    if not told:
        told = [line for line in lines[:1] if "weights_only" not in str(error) and "Weights only" not in line]
    return ": ".join([type(error).__name__, *told])
