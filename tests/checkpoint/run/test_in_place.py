"""A rewriting reads each file once before it changes any, and does not rely on an answer once the file has changed."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.sharded_states import sample_state, save_as_trainer
from checkpoint.trainers import trainer_of
from checkpoint.whole.test_rewriting import trainer_directory

from hf_trainweights import TrainWeightsCheckpointCallback
from hf_trainweights.checkpoint.directory import compress_directory, restore_directory
from hf_trainweights.checkpoint.encoded.reader import is_encoded
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from hf_trainweights.checkpoint.run.checkpoints import verify_checkpoint
from hf_trainweights.checkpoint.run.in_place import Listing, rewriting
from hf_trainweights.errors import CorruptFileError


@functools.cache  # Python never removes an audit hook
def opened_paths() -> list[Path]:
    """Return a list to which every file is added that Python opens for reading from now on."""
    paths: list[Path] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | Path) and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            paths.append(Path(arguments[0]))

    sys.addaudithook(note)
    return paths


@contextmanager
def openings_for_reading(directory: Path) -> Iterator[list[str]]:
    """Collect the names of the files below a directory that Python opens for reading within the block."""
    names: list[str] = []
    opened_paths().clear()
    yield names
    # Directories have no suffix; they are opened to be locked and forced to the disk.
    names += [path.name for path in opened_paths() if path.is_relative_to(directory) and path.suffix]


@pytest.mark.slow
def test_two_saves_of_a_trainer_open_files_few_times(tmp_path: Path) -> None:
    trainer, _ = trainer_of(tmp_path, TrainWeightsCheckpointCallback(), max_steps=4)
    with openings_for_reading(tmp_path) as names:
        trainer.train()
    assert (tmp_path / "checkpoint-4" / MANIFEST_NAME).exists()
    assert len(names) <= 30, sorted(names)


def test_files_that_stay_are_opened_once(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    with openings_for_reading(path) as names:
        compress_directory(path)
    assert [names.count(name) for name in ("scheduler.pt", "rng_state.pth", "config.json")] == [1, 1, 1]


def test_a_listing_cannot_be_changed(tmp_path: Path) -> None:
    trainer_directory(tmp_path / "checkpoint-500")
    listing = Listing.read(tmp_path / "checkpoint-500")
    with pytest.raises(dataclasses.FrozenInstanceError, match="files"):
        listing.files = {}  # type: ignore[misc]


CHANGES: dict[str, Callable[[Path], object]] = {
    "other content of the same size": lambda file: file.write_text("[]"),
    "another file of the same content": lambda file: file.unlink() or file.write_text("{}"),
    "more content": lambda file: file.write_text("{ }"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_after_the_listing_is_read_again(tmp_path: Path, change: str) -> None:
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    listing = Listing.read(path)
    os.utime(path / "config.json", ns=(1, 1))
    CHANGES[change](path / "config.json")
    with rewriting(path):
        listing.write_manifest(Manifest({}, "plain"))
    assert verify_checkpoint(path).ok


def test_a_file_that_another_program_damages_meanwhile_gets_no_digest(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    listing = Listing.read(path)
    (path / "scheduler.pt").write_bytes((path / "scheduler.pt").read_bytes()[:-9])
    with (
        pytest.raises(CorruptFileError, match=r"scheduler\.pt cannot be read.*Every other file is whole"),
        rewriting(path),
    ):
        listing.write_manifest(Manifest({}, "plain"))
    assert not (path / MANIFEST_NAME).exists()


@pytest.mark.parametrize("name", ["copy.bin", "copy.of_the_weights"])
def test_an_anchor_stays_as_long_as_any_encoded_file_needs_it(tmp_path: Path, name: str) -> None:
    for step in (1, 2):
        trainer_directory(tmp_path / f"checkpoint-{step}", seed=step)
        compress_directory(tmp_path / f"checkpoint-{step}")
    path = tmp_path / "checkpoint-2"
    shutil.copy(path / "pytorch_model.bin", path / name)
    (anchor,) = path.glob("*.anchor")
    compress_directory(path, rules={"re:.*": "raw"}, buffers=[])
    assert anchor.exists()
    assert verify_checkpoint(path).ok
    (path / name).unlink()
    (path / MANIFEST_NAME).unlink()
    compress_directory(path, keep_weights=True)
    assert not anchor.exists()


def test_restored_files_get_the_digests_of_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-500"
    trainer_directory(path)
    compress_directory(path)
    with openings_for_reading(path) as names:
        restore_directory(path)
    assert not is_encoded(path / "optimizer.pt")
    assert verify_checkpoint(path).ok
    assert read_manifest(path).files["optimizer.pt"].report == {}
    assert names.count("scheduler.pt") == 2  # compared with the manifest, and asked whether it is encoded


@pytest.mark.slow
def test_damage_beside_a_sharded_state_gets_no_digest(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-7"
    save_as_trainer(sample_state(), path, 1, step=7)
    torch.save({"last_epoch": 7}, path / "scheduler.pt")
    (path / "scheduler.pt").write_bytes((path / "scheduler.pt").read_bytes()[:-9])
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    for rewrite in (compress_directory, restore_directory):
        with pytest.raises(CorruptFileError, match=r"scheduler\.pt cannot be read.*Nothing was changed"):
            rewrite(path)
        assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
