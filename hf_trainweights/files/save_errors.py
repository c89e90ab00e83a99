"""What the operating system refuses while files are written, as an error that says what to do."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator
from pathlib import Path

from hf_trainweights.errors import SaveError

# Error numbers to what was expected, and what to do next.
_ADVICE = {
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG): (
        "enough free disk space",
        "Free some space, or choose another directory.",
    ),
    (errno.EEXIST, errno.ENOTDIR, errno.EISDIR): (
        "a directory of files",
        "Choose another name, or remove what is in the way.",
    ),
    (errno.EACCES, errno.EPERM, errno.EROFS): (
        "a directory that can be written to",
        "Check its permissions, or choose another one.",
    ),
    (errno.EIO,): (
        "a disk that works",
        "The disk reports an error: look into the system's log, and save to another one.",
    ),
    (errno.ENOENT,): (
        "a directory that is there and stays there",
        "Create it, or check its path; if it was there, another process has removed or renamed it, or a file in it.",
    ),
}
# How Rust writes error numbers: "(os error 28)", or "Os { code: 28, ...".
_OS_ERROR = re.compile(r"(?:os error|code:) (\d+)")
_OTHERWISE = "a disk that takes the files", "Check the disk, or choose another directory."


@contextlib.contextmanager
def save_errors(path: Path, outcome: str) -> Iterator[None]:
    """Turn what the operating system refuses while `path` is written into a `SaveError` that tells the outcome."""
    try:
        yield
    except SaveError:
        raise
    except OSError as error:
        raise _save_error(path, outcome, error, error.errno) from error
    except Exception as error:
        # safetensors reports failed writes as its own SafetensorError, with the error number in the text alone.
        if type(error).__module__.startswith("safetensors"):
            number = _OS_ERROR.search(str(error))
            raise _save_error(path, outcome, error, int(number[1]) if number else None) from error
        raise


def _save_error(path: Path, outcome: str, error: Exception, number: int | None) -> SaveError:
    advice = (advice for numbers, advice in _ADVICE.items() if number in numbers)
    expected, next_step = next(advice, _OTHERWISE)
    return SaveError(str(path), expected, str(error), f"{outcome} {next_step}")
