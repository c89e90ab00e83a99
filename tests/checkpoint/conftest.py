from __future__ import annotations

from pathlib import Path

import pytest
from bases import put_into_cache, weights

from hf_trainweights.checkpoint.manifest import (
    FileEntry,
    Manifest,
    write_manifest,
)
from hf_trainweights.files.reading import file_sha256


@pytest.fixture
def checkpoint(tmp_path):
    """A directory of three files with a manifest over them."""
    directory = tmp_path / "checkpoint-7"
    (directory / "sub").mkdir(parents=True)
    contents = {"pytorch_model.bin": b"weights", "optimizer.pt": b"moments", "sub/more.bin": b"more"}
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    entries = {name: FileEntry(len(content), file_sha256(directory / name)) for name, content in contents.items()}
    write_manifest(directory, Manifest(entries, "lossless", step=7, metrics={"loss": 2.5}))
    return directory


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return weights in the Hub's cache that checkpoints may have as their base."""
    return put_into_cache(tmp_path / "cache", monkeypatch, weights())
