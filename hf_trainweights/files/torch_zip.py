"""The zip archives that torch.save writes, opened by Python's zipfile; damage is an error that names the file."""

from __future__ import annotations

import contextlib
import errno
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.regular_files import open_regular_file

TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


@contextlib.contextmanager
def open_zip(path: str | Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive for a block that only reads from it; CorruptFileError, also in the block: it is damaged."""
    with open_regular_file(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                yield archive
        except Exception as error:
            # On a damaged archive zipfile raises BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError,
            # OverflowError, struct.error, errors of zlib, bz2 and lzma, or EINVAL after a seek to a wrong place.
            # Where the disk refuses, it says BadZipFile while it handles the OSError.
            refusal = error if isinstance(error, OSError) else error.__context__
            if isinstance(refusal, OSError) and refusal.errno not in (None, errno.EINVAL):
                raise refusal from None
            found = f"{type(error).__name__}: {error}"[:200]
            next_step = "Restore it from a copy, unless it was never a zip archive."
            raise CorruptFileError(str(path), "a whole zip archive", found, next_step) from error


@contextlib.contextmanager
def open_pickle(path: str | Path) -> Iterator[IO[bytes]]:
    """Open the pickle of a torch.save file for a block that only reads from it; at its end its checksum is compared."""
    with open_zip(path) as archive:
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise zipfile.BadZipFile(f"{len(pickles)} members called data.pkl")
        with archive.open(pickles[0]) as pickle:
            yield pickle


def is_torch_file(path: Path) -> bool:
    """Return whether a path is a file that torch.save may have written, by its name."""
    return path.suffix in TORCH_SUFFIXES and path.is_file()
