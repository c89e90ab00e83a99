"""Where anchors are found: by the digest in their name, at a recorded path or in a registered directory.

An anchor is a file of weights that other files are stored against. It is hard-linked into every checkpoint
directory that needs it as `<sha256 of the file>.anchor`, so any link is as good as another.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from hf_trainweights.errors import CorruptFileError, TrainWeightsError
from hf_trainweights.files.sha256 import file_sha256

_directories: dict[Path, None] = {}  # in the order of registration
_digests: dict[tuple[int, int, int, int], str] = {}


class MissingAnchorError(TrainWeightsError, FileNotFoundError):
    """A file needs an anchor that is not where it was when the file was written."""


def anchor_file_name(sha256: str) -> str:
    """Return the name that an anchor file must have.

    Args:
        sha256: Digest of the file, 64 hexadecimal digits.

    Returns:
        The file name, without a directory.
    """
    return f"{sha256}.anchor"


def register_anchor_directory(path: str | Path) -> None:
    """Add a directory in which anchors are looked for when they are not where they were, for this process.

    Args:
        path: The directory itself is looked in, not what lies below. It need not exist.

    Examples:
        >>> register_anchor_directory("runs/a/checkpoint-500")
    """
    _directories[Path(path).absolute()] = None


def find_anchor(sha256: str, recorded_path: str) -> Path:
    """Return the path of a verified anchor file.

    Args:
        sha256: Digest of the file, 64 hexadecimal digits.
        recorded_path: Absolute path where it lay when it was last seen, perhaps one of another system.

    Returns:
        A regular file with this digest.

    Raises:
        CorruptFileError: Every file of that name has another content, or is no regular file.
        MissingAnchorError: There is no file of that name.
    """
    damaged: CorruptFileError | None = None
    for path in anchor_paths(sha256, Path(recorded_path)):
        try:
            verify_anchor(path)
        except OSError:
            continue
        except CorruptFileError as error:
            damaged = error
            continue
        return path
    if damaged is not None:
        raise damaged
    raise MissingAnchorError(
        f"anchor {anchor_file_name(sha256)}",
        f"a file at {recorded_path}",
        "none there, nor in a registered directory",
        "Call hf_trainweights.latest(run) first if the file is in the run's newest checkpoint; else run "
        "`trainweights checkpoint restore PATH`.",
    )


def verify_anchor(path: Path) -> str:
    """Check that a file is the anchor its name says; its bytes are read once per process.

    Args:
        path: A regular file; a link is an error.

    Returns:
        Its digest, 64 hexadecimal digits.

    Raises:
        CorruptFileError: Its digest is not the one in its name, or it is no regular file.
        OSError: It is missing or cannot be read.
    """
    sha256 = sha256_once(path)
    if path.name != anchor_file_name(sha256):
        raise CorruptFileError(
            str(path),
            "an anchor named by its SHA-256",
            sha256,
            "It is damaged or renamed: restore it from another checkpoint of the same run, they share it.",
        )
    return sha256


def sha256_once(path: Path) -> str:
    """Return the SHA-256 of a file; its bytes are read once per process.

    Args:
        path: A regular file; a link is an error.

    Returns:
        64 hexadecimal digits.

    Raises:
        CorruptFileError: It is no regular file.
        OSError: It is missing or cannot be read.
    """
    status = os.stat(path, follow_symlinks=False)
    # All links of a file have one inode, so that its bytes are read once and not once per checkpoint.
    identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    if identity not in _digests or not stat.S_ISREG(status.st_mode):
        _digests[identity] = file_sha256(path)
    return _digests[identity]


def anchor_paths(sha256: str, recorded_path: Path) -> Iterator[Path]:
    """Yield where an anchor file may lie.

    Args:
        sha256: Its digest.
        recorded_path: Where it was last seen; believed if it is absolute and ends in the name of this anchor.
    """
    name = anchor_file_name(sha256)
    if recorded_path.is_absolute() and recorded_path.name == name:
        yield recorded_path
    for directory in _directories:
        yield directory / name
