"""Whether a plain checkpoint, which has no digests, is complete, as far as a look at its files shows."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from hf_trainweights.checkpoint.sharded.contents import dcp_directories, sharded_problem
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.regular_files import open_regular_file, require_regular_file
from hf_trainweights.files.torch_zip import open_zip
from hf_trainweights.files.weight_files import ENTRY_POINTS, shard_names

# Progress and extras of a plain loop, written by `save_checkpoint`.
STATE_NAME = "trainweights_state.pt"

# What a Trainer loads beside the weights, on one machine and under FSDP with FULL_STATE_DICT.
_RESUMED_FROM = ("optimizer.pt", "optimizer.bin", "pytorch_model_fsdp.bin")

_READ_BYTES = 1 << 20


def plain_problem(directory: Path) -> str | None:
    """Say why a checkpoint without a manifest cannot be used.

    Args:
        directory: Its directory.

    Returns:
        The reason, or None: progress, weights and, if there is one, the optimizer's state can be read.

    Raises:
        OSError: The directory cannot be read.
    """
    state = directory / STATE_NAME
    problem = zip_problem(state) if state.is_file() else _trainer_state_problem(directory / "trainer_state.json")
    if problem:
        return problem
    sharded = dcp_directories(directory)
    if sharded:
        return next(filter(None, map(sharded_problem, sharded)), None)
    folders = [directory, *sorted(path for path in directory.iterdir() if path.is_dir())]  # one per further adapter
    weights = [folder / name for folder in folders for name in ENTRY_POINTS if (folder / name).is_file()]
    if not weights:
        return "no weight file is there"
    others = [directory / name for name in _RESUMED_FROM if (directory / name).exists()]
    return weights_problem(weights[0]) or next(filter(None, map(zip_problem, others)), None)


def _trainer_state_problem(path: Path) -> str | None:
    try:
        with open_regular_file(path) as file:
            if isinstance(json.load(file), dict):
                return None
    except (OSError, ValueError, RecursionError) as error:
        return f"{path.name} cannot be read: {error}"
    return f"{path.name} is not a JSON object"


def weights_problem(path: Path) -> str | None:
    """Say why a weight file cannot be loaded, as far as its structure shows.

    Args:
        path: A file whose name is in `ENTRY_POINTS`.

    Returns:
        The reason, or None.
    """
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
    """Say why a torch file cannot be loaded, as far as its zip structure and checksums show.

    Args:
        path: A file that torch.save wrote.

    Returns:
        The reason, or None.
    """
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
