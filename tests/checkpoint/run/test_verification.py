import os

import pytest
from trees import each_flipped_bit

from hf_trainweights.checkpoint.manifest.manifest import (
    MANIFEST_NAME,
    read_manifest,
)
from hf_trainweights.checkpoint.run.verification import require_intact, verify_checkpoint
from hf_trainweights.errors import CorruptFileError


def test_an_untouched_checkpoint_verifies(checkpoint):
    report = verify_checkpoint(checkpoint)
    assert report.ok
    assert report.intact
    assert report.manifest == read_manifest(checkpoint)
    assert require_intact(checkpoint) == report.manifest


@pytest.mark.parametrize("name", ["pytorch_model.bin", "optimizer.pt", "sub/more.bin"])
def test_any_flipped_bit_of_a_file_is_found(checkpoint, name):
    for _ in each_flipped_bit(checkpoint / name):
        report = verify_checkpoint(checkpoint)
        assert list(report.problems) == [name]
        assert not report.intact
    assert verify_checkpoint(checkpoint).ok


def test_what_is_damaged_is_refused_by_name(checkpoint):
    name = "optimizer.pt"
    (checkpoint / name).write_bytes(b"Moments")
    with pytest.raises(CorruptFileError, match=f"{name}.*other content"):
        require_intact(checkpoint)


def test_a_missing_file_is_found(checkpoint):
    (checkpoint / "optimizer.pt").unlink()
    assert verify_checkpoint(checkpoint).problems == {"optimizer.pt": "is missing"}


def test_a_file_of_another_length_is_found(checkpoint):
    (checkpoint / "optimizer.pt").write_bytes(b"moment")
    assert verify_checkpoint(checkpoint).problems == {"optimizer.pt": "has 6 bytes instead of 7"}


def test_a_foreign_file_is_reported_and_does_no_harm(checkpoint):
    (checkpoint / "sub" / "notes.txt").write_bytes(b"x")
    report = verify_checkpoint(checkpoint)
    assert report.foreign == ("sub/notes.txt",)
    assert not report.ok
    assert report.intact


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"])
def test_a_foreign_file_that_loaders_prefer_is_a_problem(checkpoint, name):
    (checkpoint / name).write_bytes(b"x")
    assert not verify_checkpoint(checkpoint).intact


def test_what_is_being_written_is_not_foreign(checkpoint):
    (checkpoint / "_trainweights-1-abc").write_bytes(b"x")
    assert verify_checkpoint(checkpoint).ok


@pytest.mark.parametrize("target", ["same content", "nowhere"])
def test_a_link_in_place_of_a_file_is_not_followed(checkpoint, target):
    path = checkpoint / "optimizer.pt"
    outside = checkpoint.parent / "outside"
    path.rename(outside)
    path.symlink_to(outside if target == "same content" else checkpoint.parent / "nowhere")
    assert verify_checkpoint(checkpoint).problems == {"optimizer.pt": "is a link or a special file"}


def test_a_linked_folder_is_not_followed(checkpoint):
    (checkpoint / "sub").rename(checkpoint.parent / "outside")
    (checkpoint / "sub").symlink_to(checkpoint.parent / "outside")
    report = verify_checkpoint(checkpoint)
    assert report.problems == {"sub/more.bin": "is missing"}
    assert report.foreign == ("sub",)


def test_a_fifo_in_place_of_a_file_does_not_block(checkpoint):
    (checkpoint / "optimizer.pt").unlink()
    os.mkfifo(checkpoint / "optimizer.pt")
    assert verify_checkpoint(checkpoint).problems == {"optimizer.pt": "is a link or a special file"}


def test_a_directory_without_manifest_is_a_problem(tmp_path):
    report = verify_checkpoint(tmp_path)
    assert list(report.problems) == [MANIFEST_NAME]
    assert report.manifest is None
