"""One file of a checkpoint, read once: whether it is as it was written, whether it is encoded, and its anchor.

Every function opens a file for itself. `read_content` answers all questions about a file with one opening, two more if
the file is encoded. A rewriting keeps these answers in a `Listing` (in_place.py).
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError, safe_open

from hf_trainweights.checkpoint.encoded.decoder import open_anchor
from hf_trainweights.checkpoint.encoded.reader import (
    is_encoded,
    is_encoded_in,
    load_file,
    read_structure,
    register_anchor_directory,
    verify_anchor,
)
from hf_trainweights.checkpoint.encoded.structure import ANCHOR_SUFFIX
from hf_trainweights.checkpoint.encoded.workers import in_order, worker_count
from hf_trainweights.checkpoint.run.checkpoints import STATE_NAME, TRAINER_STATE_NAME
from hf_trainweights.errors import CorruptFileError, MissingAnchorError
from hf_trainweights.files.reading import (
    TORCH_SUFFIXES,
    begins_like_zip,
    check_member,
    open_regular_file,
    parse_json_object,
    read_chunks,
    require_regular_file,
    zip_in,
)
from hf_trainweights.files.weight_files import shard_names

# Smaller files are not encoded: RNG states, schedulers, scalers, training_args.bin.
SMALL_BYTES = 64 << 10

# The errors of damaged files.
_DAMAGE = (CorruptFileError, OSError, SafetensorError, TypeError, ValueError, RecursionError)


@dataclass(frozen=True)
class FileContent:
    """Facts about the bytes of an undamaged file.

    Args:
        sha256: The digest of the bytes that were checked; None for a large file, which may be about to be replaced.
        structure: The structure of an encoded torch file; None for any other file.
        trainer_state: The content of a trainer_state.json; empty for any other file.
    """

    sha256: str | None = None
    structure: Mapping[str, Any] | None = None
    trainer_state: Mapping[str, Any] = field(default_factory=dict)


class DamagedFileError(Exception):
    """The checksums or the structure of a file show that it is not as it was written."""


def read_content(path: Path, *, is_torch: bool = True) -> FileContent:
    """Check a file, and read the facts about it; a small file's digest is that of the very bytes that were checked.

    If `is_torch` is false, another program may have written the file although its suffix is one of torch's.
    DamagedFileError: its text says in which way. CorruptFileError: the structure of an encoded file is damaged.
    OSError: the disk refuses to read it.
    """
    is_small = path.lstat().st_size < SMALL_BYTES
    opened = io.BytesIO(b"".join(read_chunks(path))) if is_small else open_regular_file(path, follow_links=False)
    try:
        with opened as file:
            trainer_state = _check(path, file, is_torch)
            file.seek(0)
            sha256 = hashlib.sha256(file.read()).hexdigest() if is_small else None
            file.seek(0)
            encoded = begins_like_zip(file) and is_encoded_in(file, path)
    except _DAMAGE as error:
        raise DamagedFileError(_sentence(path, error)) from error
    if path.suffix == ANCHOR_SUFFIX:
        sha256 = path.stem  # as `_check` has seen
    return FileContent(sha256, _structure(path) if encoded else None, trainer_state)


def read_verified(path: Path, sha256: str) -> FileContent:
    """Read nothing but the structure of a file whose digest was compared before."""
    return FileContent(sha256, _structure(path) if is_encoded(path) else None)


def _structure(path: Path) -> Mapping[str, Any] | None:
    try:
        return read_structure(path)
    except CorruptFileError:
        if path.suffix in (*TORCH_SUFFIXES, ANCHOR_SUFFIX):
            raise
        return None  # for example several encoded files in one file, as torch.distributed.checkpoint writes them


def file_problem(path: Path) -> str | None:
    """Return which checksum or structure shows that a file is not as it was written, or None if it looks intact."""
    try:
        with open_regular_file(path) as file:
            _check(path, file, is_torch=True)
    except _DAMAGE as error:
        return _sentence(path, error)
    return None


def _sentence(path: Path, error: Exception) -> str:
    return f"{path.name} cannot be read: {error}"


def _check(path: Path, file: IO[bytes], is_torch: bool) -> Mapping[str, Any]:
    """Check the content of an open file, and return the state in a trainer_state.json, empty for any other file."""
    if path.name == TRAINER_STATE_NAME:
        return parse_json_object(file, path)
    if path.suffix == ".safetensors":
        require_regular_file(path)
        with safe_open(path, framework="pt") as tensors:
            tensors.keys()
    elif path.suffix == ANCHOR_SUFFIX:
        verify_anchor(path)
    elif path.suffix in TORCH_SUFFIXES:
        if begins_like_zip(file) or zipfile.is_zipfile(file):  # the file begins like a zip archive, or ends like one
            _check_members(path, file)
        elif is_torch:
            load_file(path)  # PyTorch before 1.6 wrote no zip archives
    return {}


def _check_members(path: Path, file: IO[bytes]) -> None:
    with zip_in(file, path) as archive:
        tasks = [(member.file_size, partial(check_member, archive, member)) for member in archive.infolist()]
        workers = worker_count(sum(size_bytes for size_bytes, _ in tasks))
        for _ in in_order(tasks, workers, lambda _: 0):  # a check returns nothing that takes memory
            pass


def progress_problem(directory: Path) -> str | None:
    """Return why a resume could not read how far the training of a checkpoint had come, or None if it could."""
    state = directory / STATE_NAME
    return file_problem(state if state.is_file() else directory / TRAINER_STATE_NAME)


def anchor_problem(path: Path) -> str | None:
    """Return why the anchor or base that a weight file needs cannot be read, or None if it can."""
    register_anchor_directory(path.parent)  # whoever loads the checkpoint does that, too
    try:
        require_anchor(read_structure(path) if is_encoded(path) else None)
    except MissingAnchorError as error:
        return f"{path.name} needs its {error.where}: {error.found}"
    except (CorruptFileError, OSError) as error:
        return f"{path.name} cannot be decoded: {error}"
    return None


def require_anchor(structure: Mapping[str, Any] | None) -> None:
    """Open the anchor or the base that an encoded file refers to; CorruptFileError, MissingAnchorError: it fails."""
    anchor = structure.get("anchor") if structure is not None else None
    if anchor is not None:
        open_anchor(anchor)


def weights_problem(path: Path) -> str | None:
    """Return why a weight file, or a shard of an index, cannot be loaded, or None if its structure is sound."""
    try:
        names = shard_names(path) if path.name.endswith(".index.json") else [path.name]
    except (CorruptFileError, OSError) as error:
        return f"{path.name} cannot be read: {error}"
    return next(filter(None, (file_problem(path.parent / name) for name in names)), None)
