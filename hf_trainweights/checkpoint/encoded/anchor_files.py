"""Where anchors are found: by the digest in their name, at a recorded path or in a registered directory.

An anchor is a file of weights that other files are stored against. It is hard-linked into every checkpoint
directory that needs it as `<sha256 of the file>.anchor`, so any link is as good as another.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from hf_trainweights.errors import CorruptFileError, TrainWeightsError
from hf_trainweights.files.sha256 import file_sha256

ANCHOR_SUFFIX = ".anchor"
"""What follows the SHA-256, in hexadecimal, in the name of an anchor."""

_directories: dict[Path, None] = {}  # in the order of registration
_digests: dict[tuple[int, int, int, int], str] = {}


class MissingAnchorError(TrainWeightsError, FileNotFoundError):
    """A file needs an anchor that is not where it was when the file was written."""


def register_anchor_directory(path: str | Path) -> None:
    """Add a directory, which need not exist, in which this process looks for anchors that are not where they were.

    Examples:
        >>> register_anchor_directory("runs/a/checkpoint-500")
    """
    _directories[Path(path).absolute()] = None


def find_anchor(sha256: str, recorded_path: str) -> Path:
    """Return the path of an anchor, a regular file with this digest; `recorded_path` is where it lay before.

    MissingAnchorError: it is neither there nor in a registered directory, nor in a checkpoint beside one.
    CorruptFileError: it is there, and damaged. OSError: it is there, and the disk does not let it be read.
    """
    refused: Exception | None = None
    for path in anchor_paths(sha256, Path(recorded_path)):
        try:
            verify_anchor(path)
        except FileNotFoundError:
            continue
        except (CorruptFileError, OSError) as error:
            refused = refused or error
            continue
        return path
    for path in _files_in_runs(f"{sha256}{ANCHOR_SUFFIX}"):
        with contextlib.suppress(CorruptFileError, OSError):
            if sha256_once(path) == sha256:
                return path
    if refused is not None:
        raise refused
    raise MissingAnchorError(
        f"anchor {sha256}{ANCHOR_SUFFIX}",
        f"a file at {recorded_path}",
        "none there, nor in a registered directory, nor in a checkpoint beside one",
        "Call hf_trainweights.latest(run) first: it looks through all checkpoints of a run. One outside of a run "
        "is looked through by `trainweights checkpoint restore PATH`.",
    )


def verify_anchor(path: Path, sha256: str | None = None) -> str:
    """Return the digest of an anchor after comparing its bytes with it (default: with its name), once per process.

    CorruptFileError: it differs, or `path` is no regular file. OSError: it is missing or cannot be read.
    """
    found = sha256_once(path)
    if (path.name != f"{found}{ANCHOR_SUFFIX}") if sha256 is None else (found != sha256):
        raise CorruptFileError(
            str(path),
            "an anchor named by its SHA-256",
            found,
            "It is damaged or renamed: restore it from another checkpoint of the same run, they share it.",
        )
    return found


def sha256_once(path: Path) -> str:
    """Return the SHA-256 of a regular file in hexadecimal; its bytes are read once per process.

    CorruptFileError: it is no regular file; links are not followed.
    """
    status = os.stat(path, follow_symlinks=False)
    # All links of a file have one inode, so that its bytes are read once and not once per checkpoint.
    identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    if identity not in _digests or not stat.S_ISREG(status.st_mode):
        _digests[identity] = file_sha256(path)
    return _digests[identity]


def anchor_paths(sha256: str, recorded_path: Path) -> Iterator[Path]:
    """Yield where an anchor may lie; its recorded path is believed if it is absolute and ends in its name."""
    name = f"{sha256}{ANCHOR_SUFFIX}"
    if recorded_path.is_absolute() and recorded_path.name == name:
        yield recorded_path
    for directory in _directories:
        yield directory / name


def _files_in_runs(name: str) -> Iterator[Path]:
    """Yield what may be a lost anchor: files of its name beside registered checkpoints, then the weights of each.

    The checkpoint that wrote an anchor has it as its weights, and nothing says which one that was.
    """
    runs = dict.fromkeys(directory.parent for directory in _directories)
    for pattern in (name, "*_model.bin"):
        for run in runs:
            yield from sorted(run.glob(f"checkpoint-*/{pattern}"))
