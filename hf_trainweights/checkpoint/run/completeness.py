"""Whether a plain checkpoint, which has no digests, is complete and whole, as far as a look at its files shows."""

from __future__ import annotations

import json
import stat
import zipfile
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError, safe_open

from hf_trainweights.checkpoint.dcp.contents import dcp_directories, sharded_problem
from hf_trainweights.checkpoint.encoded.anchor_files import (
    ANCHOR_SUFFIX,
    MissingAnchorError,
    anchor_file_name,
    register_anchor_directory,
    sha256_once,
)
from hf_trainweights.checkpoint.encoded.decoder import open_anchor
from hf_trainweights.checkpoint.encoded.reader import is_encoded, load_file, read_structure
from hf_trainweights.checkpoint.run.verification import list_files
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.regular_files import open_regular_file, require_regular_file
from hf_trainweights.files.torch_zip import TORCH_SUFFIXES, open_zip
from hf_trainweights.files.weight_files import ENTRY_POINTS, shard_names

# Progress and extras of a plain loop, written by `save_checkpoint`.
STATE_NAME = "trainweights_state.pt"
TRAINER_STATE_NAME = "trainer_state.json"
# Each rank writes one, when it comes to it.
RNG_PREFIX = "rng_state"

# What a Trainer loads beside the weights, on one machine and under FSDP with FULL_STATE_DICT.
_RESUMED_FROM = ("optimizer.pt", "optimizer.bin", "pytorch_model_fsdp.bin")

_READ_BYTES = 1 << 20


def plain_problem(directory: Path) -> str | None:
    """Say why a checkpoint without a manifest cannot be used; None if all that a resume needs can be read."""
    problem = missing_problem(directory)
    if problem:
        return problem
    sharded = dcp_directories(directory)
    if sharded:
        return next(filter(None, map(sharded_problem, sharded)), None)
    weights = _weights(directory)[0]
    others = [directory / name for name in _RESUMED_FROM if (directory / name).exists()]
    problem = weights_problem(weights) or next(filter(None, map(zip_problem, others)), None)
    return problem or next(filter(None, map(_anchor_problem, [weights, *others])), None)


def missing_problem(directory: Path) -> str | None:
    """Say which part a resume would not find in a checkpoint, its progress or its weights, or return None."""
    state = directory / STATE_NAME
    problem = zip_problem(state) if state.is_file() else _trainer_state_problem(directory / TRAINER_STATE_NAME)
    if problem or dcp_directories(directory) or _weights(directory):
        return problem
    return "no weight file is there"


def _weights(directory: Path) -> list[Path]:
    """Return the files of weights that a loader may open first, those of further adapters in folders of their own."""
    folders = [directory, *sorted(path for path in directory.iterdir() if path.is_dir())]
    return [folder / name for folder in folders for name in ENTRY_POINTS if (folder / name).is_file()]


def _anchor_problem(path: Path) -> str | None:
    """Say which anchor or base a file of weights needs and cannot read, or return None."""
    try:
        _require_anchor(path)
    except MissingAnchorError as error:
        return f"{path.name} needs its {error.where}: {error.found}"
    except (CorruptFileError, OSError) as error:
        return f"{path.name} cannot be decoded: {error}"
    return None


def _require_anchor(path: Path) -> None:
    """Open the anchor or the base of an encoded file, where whoever loads the checkpoint looks for it."""
    register_anchor_directory(path.parent)
    anchor = read_structure(path).get("anchor") if is_encoded(path) else None
    if anchor is not None:
        open_anchor(anchor)


def require_undamaged(directory: Path, verified: Collection[str]) -> None:
    """Check all files of a checkpoint but the `verified` ones, before a manifest says that they are whole.

    What several ranks write is left out: another rank may not be done. CorruptFileError: a file is not as it was
    written, as far as its checksums or its structure show. MissingAnchorError: an encoded one needs an anchor that is
    found nowhere.
    """
    for name, status in list_files(directory).items():
        if name in verified or name.startswith(RNG_PREFIX) or not stat.S_ISREG(status.st_mode):
            continue
        path = directory / name
        problem = _damage(path)
        if problem:
            next_step = "Nothing was changed. Use another checkpoint, restore the file from a copy, or remove it."
            raise CorruptFileError(str(path), "a whole file", problem, next_step)
        if path.suffix in TORCH_SUFFIXES:
            _require_anchor(path)


def _damage(path: Path) -> str | None:
    """Say why a file is not as it was written; None also where its format has nothing that shows it."""
    if path.name == TRAINER_STATE_NAME:
        return _trainer_state_problem(path)
    if path.suffix == ".safetensors":
        return _safetensors_problem(path)
    if path.suffix == ANCHOR_SUFFIX:
        return None if path.name == anchor_file_name(sha256_once(path)) else f"{path.name} has another SHA-256"
    if path.suffix not in TORCH_SUFFIXES:
        return None
    with open_regular_file(path) as file:
        is_zip = file.read(4) == b"PK\x03\x04" or zipfile.is_zipfile(file)  # it begins like one, or ends like one
    if is_zip:
        return zip_problem(path)
    if path.name not in (STATE_NAME, *_RESUMED_FROM, *ENTRY_POINTS):
        return None
    try:
        load_file(path)  # PyTorch before 1.6 wrote no zip archives
    except CorruptFileError as error:
        return f"{path.name} cannot be read: {error}"
    return None


def _trainer_state_problem(path: Path) -> str | None:
    try:
        with open_regular_file(path) as file:
            if isinstance(json.load(file), dict):
                return None
    except (OSError, ValueError, RecursionError) as error:
        return f"{path.name} cannot be read: {error}"
    return f"{path.name} is not a JSON object"


def weights_problem(path: Path) -> str | None:
    """Say why a weight file or an index cannot be loaded, as far as its structure shows, or return None."""
    if path.suffix == ".bin":
        return zip_problem(path)
    if path.suffix == ".safetensors":
        return _safetensors_problem(path)
    try:
        names = shard_names(path)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"{path.name} cannot be read: {error!r}"
    return next(filter(None, (weights_problem(path.parent / name) for name in names)), None)


def zip_problem(path: Path) -> str | None:
    """Say why a file of torch.save cannot be loaded, as far as its zip structure and checksums show, or return None."""
    try:
        with open_zip(path) as archive:
            for member in archive.infolist():
                # torch writes a zero where its checksums are switched off, see torch.serialization.set_crc32_options.
                if member.CRC != 0:
                    with archive.open(member) as file:
                        while file.read(_READ_BYTES):
                            pass
    except (CorruptFileError, OSError) as error:
        return f"{path.name} cannot be read: {error}"
    return None


def _safetensors_problem(path: Path) -> str | None:
    try:
        require_regular_file(path)
        with safe_open(path, framework="pt") as file:
            file.keys()
    except (CorruptFileError, OSError, SafetensorError) as error:
        return f"{path.name} cannot be read: {error}"
    return None
