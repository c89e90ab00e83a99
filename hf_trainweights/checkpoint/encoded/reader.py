"""Opens plain and encoded files, and finds the anchors and bases that they are stored against.

An anchor is a file of weights. It is hard-linked into every checkpoint directory that needs it as
`<sha256 of the file>.anchor`, so any link is as good as another: at a recorded path or in a registered directory.

A base is weights outside the run. Readers look for copies of its files in the run, then in the Hub's cache, then in
directories that the caller names. A file's claims about its base are trusted only as far as they can do no harm. A file
may name a repository and a commit, which lead into the Hub's cache and nowhere else, and digests, under which the run
may keep the base's files. It cannot name a path: readers open a base elsewhere only if the caller has named its
directory in this process, with `register_base` or as `anchor`. Wherever a file lies, its digest is compared before
anything reads it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from huggingface_hub import constants
from torch import Tensor

from hf_trainweights.checkpoint.encoded.structure import (
    DECODE_CALL,
    Base,
    TensorReport,
    anchor_file_name,
    is_repository,
    storage_paths,
)
from hf_trainweights.checkpoint.encoded.tree import corrupt, path_text
from hf_trainweights.errors import ConfigError, CorruptFileError, MissingAnchorError
from hf_trainweights.files.reading import (
    TORCH_SUFFIXES,
    begins_like_zip,
    open_pickle,
    open_regular_file,
    pickle_in,
    require_regular_file,
    sha256_once,
    zip_in,
)
from hf_trainweights.files.torch_zip import MemoryFile
from hf_trainweights.files.weight_files import ENTRY_POINTS, shard_names

leave_undecoded: ContextVar[bool] = ContextVar("leave_undecoded", default=False)
"""Whether `decode_file`, which torch.load calls, should return an `Undecoded` instead of decoding."""

_CHUNK_BYTES = 1 << 20

# Registered directories of anchors, and of bases; both in the order of registration.
_directories: dict[Path, None] = {}
_base_directories: dict[Path, None] = {}


@dataclass(frozen=True)
class Undecoded:
    """An encoded file that was opened but not decoded: its checked structure, and its payload, memory-mapped."""

    structure: dict[str, Any]
    payload: Tensor


def load_file(path: str | Path, *, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """Load a plain or an encoded torch file to the CPU like `torch.load(path, weights_only=True)`; errors name it.

    `map_location` and `mmap` are torch's. An encoded file is always memory-mapped, because decoding copies it. A file
    of torch before 1.6 cannot be mapped. CorruptFileError: it is damaged, no torch file, or holds more than data.
    MissingAnchorError: its anchor is gone.
    """
    with open_regular_file(path) as file:
        is_zip = begins_like_zip(file)
        mmap = mmap or (is_zip and is_encoded_in(file, path))
    with _load_errors(str(path), is_zip):
        if not is_zip:
            # A file of PyTorch before 1.6 may claim a text of 4 GB. torch cannot read beyond bytes in memory.
            return torch.load(io.BytesIO(Path(path).read_bytes()), map_location=map_location, weights_only=True)
        return torch.load(os.fspath(path), map_location=map_location, mmap=mmap, weights_only=True)


def load_item(data: bytes, where: str) -> Any:
    """Load the bytes of a plain or an encoded torch zip file to the CPU as `load_file` does; errors say `where`."""
    file: Any = MemoryFile(np.frombuffer(data, np.uint8))
    with _load_errors(where, is_zip=True):
        return torch.load(file, map_location="cpu", weights_only=True)


@contextlib.contextmanager
def _load_errors(where: str, is_zip: bool) -> Iterator[None]:
    """Put `where` before the errors of a block that calls torch.load, and turn its reader's into CorruptFileErrors."""
    try:
        yield
    except (CorruptFileError, MissingAnchorError) as error:
        raise type(error)(f"{where}, {error.where}", error.expected, error.found, error.next_step) from error
    except (MemoryError, torch.OutOfMemoryError, Warning):  # a caller's filter may turn warnings into errors
        raise
    except Exception as error:  # torch's reader raises any error on damaged files, even EINVAL if it seeks beyond them
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        # If torch could not allocate memory, the machine lacks it. But a damaged file of PyTorch before 1.6 may lie
        # about a size, for which torch allocates memory before it reads the bytes.
        if is_zip and "DefaultCPUAllocator" in str(error):
            raise
        next_step = "Restore it from a copy, unless it was never a torch file."
        raise CorruptFileError(where, "a file that torch.load reads", _complaint(error, is_zip), next_step) from error


def _complaint(error: Exception, is_zip: bool) -> str:
    """Return torch.load's complaint without its advice to switch `weights_only` off, which would run any code."""
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
        return "one that is damaged or holds more than data" if is_zip else "neither a zip archive nor plain data"
    return f"{type(error).__name__}: {error}"[:300]


def is_encoded(path: str | Path) -> bool:
    """Return whether a file claims to be an encoded one; False if it is too damaged to tell."""
    with contextlib.suppress(CorruptFileError), open_regular_file(path) as file:
        return is_encoded_in(file, path)
    return False


def is_encoded_in(file: IO[bytes], path: str | Path) -> bool:
    """Return whether an open file claims to be an encoded one, as `is_encoded` does for the file at `path`."""
    try:
        with zip_in(file, path) as archive, pickle_in(archive) as pickled:
            return pickled.read(len(DECODE_CALL)) == DECODE_CALL
    except CorruptFileError:
        return False


def read_structure(path: str | Path) -> dict[str, Any]:
    """Read and check the structure of an encoded file (see structure.py). Neither decoding nor the anchor is needed."""
    return load_undecoded(path).structure


def read_report(path: str | Path) -> dict[str, Any]:
    """Rebuild from an encoded file the report that its manifest had, if the manifest is lost."""
    return report_of(read_structure(path))


def report_of(structure: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuild a manifest's report from the structure of its file.

    Names and roles stood in the plan only, so they are guessed from key paths.
    """
    paths, tensors = storage_paths(structure), []
    for index, entry in enumerate(structure["storages"]):
        keys = paths.get(index, ())
        is_moment = keys[-1:] in (("exp_avg",), ("exp_avg_sq",))
        role = str(keys[-1]) if is_moment else "weight" if len(keys) == 1 else "other"
        tensors.append(vars(TensorReport.of(entry, path_text(keys), path_text(keys), role)))
    return {"anchor": structure.get("anchor", {}).get("sha256"), "tensors": tensors}


def anchor_digests(path: Path) -> Collection[str]:
    """Return the digests of the anchor, or of the files of the base, that a file refers to, if it refers to any.

    CorruptFileError: it is too damaged to tell.
    """
    if path.suffix in TORCH_SUFFIXES:
        with open_pickle(path) as pickled:
            while pickled.read(_CHUNK_BYTES):  # the checksum is compared at the end
                pass
    if not path.is_file() or not is_encoded(path):
        return ()
    return anchor_digests_in(read_structure(path))


def anchor_digests_in(structure: Mapping[str, Any]) -> Collection[str]:
    """Return the digests of the anchor, or of the files of the base, that the structure of a file refers to, if any."""
    anchor = structure.get("anchor")
    if anchor is None:
        return ()
    return anchor["base"]["files"].values() if "base" in anchor else anchor.get("parts", (anchor["sha256"],))


def load_undecoded(path: str | Path) -> Undecoded:
    """Open an encoded file; it is not decoded, and needs no anchor. CorruptFileError: damaged, or another file."""
    require_regular_file(path)
    token = leave_undecoded.set(True)
    try:
        loaded = load_file(path, mmap=True) if is_encoded(path) else None
    finally:
        leave_undecoded.reset(token)
    if type(loaded) is not Undecoded:
        raise corrupt(str(path), "an encoded file", "another file")
    return loaded


def register_anchor_directory(path: str | Path) -> None:
    """Let this process look for anchors in a directory, too, if they have moved. The directory need not exist."""
    _directories[Path(path).absolute()] = None


def find_anchor(sha256: str, recorded_path: str) -> Path:
    """Return the path of an anchor, a regular file with this digest; `recorded_path` is where it lay at the save.

    MissingAnchorError: it is neither there nor in a registered directory, nor in a checkpoint beside one.
    CorruptFileError: it exists but is damaged. OSError: it exists but cannot be read from the disk.
    """
    first_error: Exception | None = None
    for path in anchor_paths(sha256, Path(recorded_path)):
        try:
            verify_anchor(path)
        except FileNotFoundError:
            continue
        except (CorruptFileError, OSError) as error:
            first_error = first_error or error
            continue
        return path
    for path in _files_in_runs(anchor_file_name(sha256)):
        with contextlib.suppress(CorruptFileError, OSError):
            if sha256_once(path) == sha256:
                return path
    if first_error is not None:
        raise first_error
    raise MissingAnchorError(
        f"anchor {anchor_file_name(sha256)}",
        f"a file at {recorded_path}",
        "none there, nor in a registered directory, nor in a checkpoint beside one",
        "Call hf_trainweights.latest(run) first: it looks through all checkpoints of a run. One outside of a run "
        "is looked through by `trainweights checkpoint restore PATH`.",
    )


def verify_anchor(path: Path) -> str:
    """Compare the digest of an anchor with its name, and return it. Its bytes are read once per process.

    CorruptFileError: it differs, or `path` is no regular file. OSError: it is missing or cannot be read.
    """
    sha256 = sha256_once(path)
    if path.name != anchor_file_name(sha256):
        next_step = "It is damaged or renamed: restore it from another checkpoint of the same run, they share it."
        raise CorruptFileError(str(path), "an anchor named by its SHA-256", sha256, next_step)
    return sha256


def anchor_paths(sha256: str, recorded_path: Path) -> Iterator[Path]:
    """Yield the paths where an anchor may lie; the recorded one only if it is absolute, local and ends in its name."""
    name = anchor_file_name(sha256)
    # A path that begins with two slashes leads to any host of the network, and Windows would log in there.
    is_local = not str(recorded_path).startswith(("//", r"\\"))
    if recorded_path.is_absolute() and is_local and recorded_path.name == name:
        yield recorded_path
    for directory in _directories:
        yield directory / name


def _files_in_runs(name: str) -> Iterator[Path]:
    """Yield files that may be a lost anchor: anchors of its name in checkpoints of registered runs, then their weights.

    An anchor is also the file of weights of the checkpoint that wrote it, and no record says which checkpoint that was.
    """
    runs = dict.fromkeys(directory.parent for directory in _directories)
    for pattern in (name, "*_model.bin"):
        for run in runs:
            yield from sorted(run.glob(f"checkpoint-*/{pattern}"))


def register_base(path: str | Path) -> None:
    """Add a directory of weights in which the base of checkpoints may be found, for this process.

    Checkpoints that are stored against a model of the Hub need no such call: their base is found in the Hub's cache.

    Args:
        path: The directory, or one of its files. It need not exist. A file in it is used only if a checkpoint names its
            SHA-256.

    Examples:
        >>> register_base("models/mine")
    """
    path = Path(path).absolute()
    _base_directories[path.parent if path.is_file() else path] = None


def identify_base(path: Path) -> Base:
    """Return the `Base` of weights on the disk: repository and commit or path, and the digests of their files."""
    files = require_weights(path)
    digests = {name: sha256_once(file.resolve()) for name, file in files.items()}
    directory = next(iter(files.values())).parent
    repository, commit = _repository_of(directory)
    return Base(digests, repository, commit, None if repository else str(directory))


def require_weights(path: Path) -> dict[str, Path]:
    """Return the files of a directory, a file or an index of plain weights by name, and register their directory.

    ConfigError: there are no weights, or they are encoded ones of this package.
    """
    path = path.absolute()
    entry = next((path / name for name in ENTRY_POINTS if (path / name).is_file()), path)
    if not entry.is_file():
        expected = f"a directory with {ENTRY_POINTS[0]} or another file of weights"
        raise ConfigError("anchor", expected, str(path), "Pass the directory of the model that the run starts from.")
    names = shard_names(entry) if entry.name.endswith(".index.json") else [entry.name]
    files = {name: entry.parent / name for name in names}
    for name, file in files.items():
        kind = "no file" if not file.is_file() else "an encoded file" if is_encoded(file) else "a file"
        if kind != "a file" or not name.endswith((".safetensors", ".bin")):
            next_step = "Pass the model that the run starts from, or make this checkpoint plain by restore_directory."
            raise ConfigError("anchor", "plain files of weights, .safetensors or .bin", f"{kind} at {file}", next_step)
    register_base(entry.parent)
    return files


def find_base(base: Base, directory: Path) -> dict[str, Path]:
    """Return the paths of a base's files by name, after comparing digests. An absolute `directory` may hold copies.

    CorruptFileError: a file in the Hub's cache is a link out of it, or every copy of a file has changed.
    MissingAnchorError: a file is found nowhere. Both errors name repository and commit, and the next step.
    """
    return {name: _find_file(base, name, directory) for name in base.files}


def _find_file(base: Base, name: str, directory: Path) -> Path:
    sha256, changed = base.files[name], None
    for path in _candidates(base, name, directory):
        try:
            actual_sha256 = sha256_once(path)
        except OSError:
            continue
        except CorruptFileError as error:
            changed = error
            continue
        if actual_sha256 == sha256:
            return path
        changed = CorruptFileError(str(path), f"{name} of {base}, SHA-256 {sha256}", actual_sha256, base.next_step)
    if changed is not None:
        raise changed
    where = "the checkpoint, the Hub's cache or a registered directory"
    raise MissingAnchorError(f"base {base}", f"its file {name}", f"none in {where}", base.next_step)


def _candidates(base: Base, name: str, directory: Path) -> Iterator[Path]:
    sha256 = base.files[name]
    yield from anchor_paths(sha256, directory / anchor_file_name(sha256))
    if base.repository is not None and base.commit is not None:
        yield _cached_file(base.repository, base.commit, name)
    for registered in _base_directories:
        yield (registered / name).resolve()


def snapshot_path(repository: str, commit: str) -> Path:
    """Return the path of a commit in the Hub's cache, https://huggingface.co/docs/huggingface_hub/guides/manage-cache."""
    return Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "snapshots" / commit


def cached_snapshots(repository: str) -> list[Path]:
    """List the directories of a model's commits in the Hub's cache, that of its branch `main` first."""
    snapshots = snapshot_path(repository, "main").parent
    main = snapshots.parent / "refs" / "main"
    newest = main.read_text(encoding="utf-8").strip() if main.is_file() else ""
    directories = sorted(snapshots.iterdir()) if snapshots.is_dir() else []
    return sorted(directories, key=lambda path: path.name != newest)


def _cached_file(repository: str, commit: str, name: str) -> Path:
    snapshot = snapshot_path(repository, commit)
    folder, file = snapshot.parent.parent.resolve(), (snapshot / name).resolve()
    if not file.is_relative_to(folder):
        next_step = "Someone has changed the cache: remove this snapshot, and download it again."
        raise CorruptFileError(f"{name} of {repository}", f"a file inside {folder}", f"a link to {file}", next_step)
    return file


def _repository_of(directory: Path) -> tuple[str, str] | tuple[None, None]:
    """Return repository and commit of a snapshot in the Hub's cache."""
    cache = Path(constants.HF_HUB_CACHE).resolve()
    resolved = directory.resolve()
    parts = resolved.relative_to(cache).parts if resolved.is_relative_to(cache) else ()
    if len(parts) == 3 and parts[0].startswith("models--") and parts[1] == "snapshots":
        repository = parts[0].removeprefix("models--").replace("--", "/")
        if is_repository(repository, parts[2]):
            return repository, parts[2]
    return None, None
