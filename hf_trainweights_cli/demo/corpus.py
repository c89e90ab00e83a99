"""Reads the demo's text, the sources of Python's standard library: every machine has them, so no download is needed."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_trainweights.errors import UnsupportedError

# Every 20th file is never trained on: some 600,000 characters.
_HELD_OUT_EVERY = 20
# Installed packages and tests are not the library itself.
_OTHER_DIRECTORIES = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Corpus:
    """Texts to train on and held-out texts to measure perplexity on; each text is a file."""

    name: str
    train: tuple[str, ...]
    held_out: tuple[str, ...]


def read_corpus(root: Path | None = None) -> Corpus:
    """Read the Python files of the standard library, or below `root`, in sorted order; hold out every 20th file."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(_python_files(root))
    if len(files) < _HELD_OUT_EVERY:
        raise UnsupportedError(
            str(root),
            "the Python sources of the standard library",
            f"{len(files)} files",
            "Use a Python that has them, or give a model of your own with --model.",
        )
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    return Corpus(
        f"Python {platform.python_version()} standard library",
        tuple(text for i, text in enumerate(texts) if i % _HELD_OUT_EVERY),
        tuple(texts[::_HELD_OUT_EVERY]),
    )


def _python_files(root: Path) -> Iterator[Path]:
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = set(subdirectories) - _OTHER_DIRECTORIES
        yield from (Path(directory, name) for name in names if name.endswith(".py"))
