import pytest

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
