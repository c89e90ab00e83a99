"""What the operating system refuses while files are written, as an error that says what to do."""

from __future__ import annotations

import contextlib
import errno
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
}
_OTHERWISE = "a disk that takes the files", "Check the disk, or choose another directory."


@contextlib.contextmanager
def save_errors(path: Path, outcome: str) -> Iterator[None]:
    """Turn what the operating system refuses while `path` is written into a `SaveError`.

    Args:
        path: The file or directory that is written.
        outcome: What is true of it after an error, a sentence.

    Raises:
        SaveError: The block raised an OSError.
    """
    try:
        yield
    except SaveError:
        raise
    except OSError as error:
        advice = (advice for numbers, advice in _ADVICE.items() if error.errno in numbers)
        expected, next_step = next(advice, _OTHERWISE)
        raise SaveError(str(path), expected, str(error), f"{outcome} {next_step}") from error
    except Exception as error:
        # safetensors reports failed writes as its own SafetensorError, with the reason in the text alone.
        if type(error).__module__.startswith("safetensors"):
            next_step = f"{outcome} Check the free space."
            raise SaveError(str(path), "to write the weights", str(error), next_step) from error
        raise
