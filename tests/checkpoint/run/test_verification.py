import json
import os

import pytest
import torch
from checkpoint.runs import cut, save
from safetensors.torch import save_file
from trees import each_flipped_bit

from hf_trainweights.checkpoint.directory import compress_directory, latest, restore_directory
from hf_trainweights.checkpoint.encoded import reader
from hf_trainweights.checkpoint.encoded.reader import load_file
from hf_trainweights.checkpoint.manifest import (
    MANIFEST_NAME,
    read_manifest,
)
from hf_trainweights.checkpoint.run import file_checks
from hf_trainweights.checkpoint.run.checkpoints import intact_manifest, verify_checkpoint
from hf_trainweights.errors import CorruptFileError, MissingAnchorError


def test_an_untouched_checkpoint_verifies(checkpoint):
    report = verify_checkpoint(checkpoint)
    assert report.ok
    assert report.intact
    assert report.manifest == read_manifest(checkpoint)
    assert intact_manifest(checkpoint) == report.manifest


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
        intact_manifest(checkpoint)


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


@pytest.mark.parametrize("name", ["_trainweights-1-abc", ".nfs0001", "sub/.fuse_hidden1"])
def test_what_is_being_written_or_still_shown_after_its_removal_is_not_foreign(checkpoint, name):
    (checkpoint / name).write_bytes(b"x")
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


def remove(name):
    return lambda path: (path / name).unlink()


def write(name, content):
    return lambda path: (path / name).write_bytes(content)


DEBRIS = {
    "no trainer state": (remove("trainer_state.json"), "trainer_state.json cannot be read"),
    "half a trainer state": (lambda path: cut(path / "trainer_state.json"), "trainer_state.json cannot be read"),
    "no object": (write("trainer_state.json", b"[]"), "expected a JSON object, found a list"),
    "no weights": (remove("model.safetensors"), "no weight file"),
    "half the weights": (lambda path: cut(path / "model.safetensors"), "model.safetensors cannot be read"),
    "half the optimizer": (lambda path: cut(path / "optimizer.pt"), "optimizer.pt cannot be read"),
    "an empty optimizer": (write("optimizer.pt", b""), "optimizer.pt cannot be read"),
}


@pytest.mark.parametrize("kind", DEBRIS)
def test_debris_of_an_interrupted_trainer_is_passed_over(tmp_path, kind):
    damage, reason = DEBRIS[kind]
    save(tmp_path, 1, manifest=False)
    damage(save(tmp_path, 2, manifest=False))
    with pytest.warns(UserWarning, match=reason):
        assert latest(tmp_path) == str(tmp_path / "checkpoint-1")


def test_a_plain_directory_needs_no_optimizer(tmp_path):
    path = save(tmp_path, 1, manifest=False)
    (path / "optimizer.pt").unlink()
    assert latest(tmp_path) == str(path)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_flipped_byte_in_a_plain_torch_file_is_seen_by_its_checksum(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(file_checks, "worker_count", lambda _: workers)
    path = save(tmp_path, 1, manifest=False) / "optimizer.pt"
    torch.save({"v": torch.ones(1000), "w": torch.zeros(1000), "x": torch.ones(1000)}, path)
    content = bytearray(path.read_bytes())
    content[content.index(bytes(1000)) + 500] ^= 1
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=r"optimizer\.pt cannot be read"):
        assert latest(tmp_path) is None


def test_torch_files_written_without_checksums_count_as_whole(tmp_path, monkeypatch):
    path = save(tmp_path, 1, manifest=False)
    compute = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(1000)}, path / "optimizer.pt")
    finally:
        torch.serialization.set_crc32_options(compute)
    assert latest(tmp_path) == str(path)


def shard(path, names=("a.safetensors", "b.safetensors")):
    (path / "model.safetensors").unlink()
    for name in names:
        save_file({"w": torch.zeros(2)}, path / name)
    index = {"weight_map": {f"w{i}": name for i, name in enumerate(names)}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_sharded_checkpoint_needs_every_shard(tmp_path):
    path = save(tmp_path, 1, manifest=False)
    shard(path)
    assert latest(tmp_path) == str(path)
    (path / "b.safetensors").unlink()
    with pytest.warns(UserWarning, match=r"b\.safetensors cannot be read"):
        assert latest(tmp_path) is None


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "x.index.json", 5])
def test_an_index_that_points_elsewhere_is_refused(tmp_path, name):
    path = save(tmp_path, 1, manifest=False)
    shard(path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.warns(UserWarning, match=r"index\.json cannot be read"):
        assert latest(tmp_path) is None


def test_weights_that_loaders_prefer_decide(tmp_path):
    path = save(tmp_path, 1, manifest=False)
    torch.save({"w": torch.zeros(2)}, path / "pytorch_model.bin")
    cut(path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"model\.safetensors cannot be read"):
        assert latest(tmp_path) is None
    (path / "model.safetensors").unlink()
    assert latest(tmp_path) == str(path)


def test_adapters_in_folders_of_their_own_count_as_weights(tmp_path):
    path = save(tmp_path, 1, manifest=False)
    (path / "other").mkdir()
    (path / "model.safetensors").rename(path / "other" / "adapter_model.safetensors")
    assert latest(tmp_path) == str(path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize("name", ["trainer_state.json", "optimizer.pt", "a.safetensors"])
def test_what_is_no_file_is_passed_over_and_not_waited_for(tmp_path, name, make):
    path = save(tmp_path, 1, manifest=False)
    shard(path)
    (path / name).unlink()
    make(path / name)
    with pytest.warns(UserWarning, match=f"{name} cannot be read: .*expected a regular file, found a"):
        assert latest(tmp_path) is None


@pytest.fixture
def small_run(tmp_path, monkeypatch):
    """Two small checkpoints without manifests, the second stored against the first; seen by a fresh process."""
    for step in (1, 2):
        path = save(tmp_path, step, manifest=False)
        weight = torch.randn(64, 80, generator=torch.Generator().manual_seed(0)) + step * 1e-4
        save_file({"w": weight}, path / "model.safetensors")
        compress_directory(path)
    for path in tmp_path.rglob("trainweights.json"):
        path.unlink()
    monkeypatch.setattr(reader, "_directories", {})
    return tmp_path


def test_a_checkpoint_whose_anchor_is_gone_is_passed_over(small_run):
    assert latest(small_run) == str(small_run / "checkpoint-2")
    next((small_run / "checkpoint-2").glob("*.anchor")).unlink()
    save_file({"w": torch.ones(2)}, small_run / "checkpoint-1" / "model.safetensors")
    (small_run / "checkpoint-1" / "pytorch_model.bin").unlink()
    with pytest.warns(UserWarning, match=r"pytorch_model\.bin needs its .*anchor: none there, nor in"):
        assert latest(small_run) == str(small_run / "checkpoint-1")


def test_a_checkpoint_whose_anchor_is_damaged_is_passed_over(small_run):
    anchor = next((small_run / "checkpoint-2").glob("*.anchor"))
    content = anchor.read_bytes()
    anchor.unlink()
    anchor.write_bytes(content[:-1] + b"?")
    save_file({"w": torch.ones(2)}, small_run / "checkpoint-1" / "model.safetensors")
    (small_run / "checkpoint-1" / "pytorch_model.bin").unlink()
    with pytest.warns(UserWarning, match=r"pytorch_model\.bin cannot be decoded: .*an anchor named by its SHA-256"):
        assert latest(small_run) == str(small_run / "checkpoint-1")


def test_an_anchor_is_found_under_its_own_name_in_the_checkpoint_that_wrote_it(small_run, monkeypatch):
    path = small_run / "checkpoint-2"
    expected = load_file(path / "pytorch_model.bin")["w"]
    next(path.glob("*.anchor")).unlink()
    with pytest.raises(MissingAnchorError, match=r"Call hf_trainweights\.latest\(run\) first"):
        load_file(path / "pytorch_model.bin")
    assert latest(small_run) == str(path)
    assert torch.equal(load_file(path / "pytorch_model.bin")["w"], expected)
    monkeypatch.setattr(reader, "_directories", {})
    restore_directory(path)
    assert torch.equal(load_file(path / "pytorch_model.bin")["w"], expected)


def test_a_checkpoint_whose_base_is_gone_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "_base_directories", {})  # other tests have registered theirs in this process
    base = tmp_path / "base"
    base.mkdir()
    weight = torch.randn(64, 80, generator=torch.Generator().manual_seed(0))
    save_file({"w": weight}, base / "model.safetensors")
    path = save(tmp_path / "run", 2, manifest=False)
    save_file({"w": weight + 1e-4}, path / "model.safetensors")
    compress_directory(path, anchor=base)
    (path / "trainweights.json").unlink()
    save(tmp_path / "run", 1, manifest=False)
    assert latest(tmp_path / "run") == str(path)
    (base / "model.safetensors").unlink()
    with pytest.warns(UserWarning, match=r"pytorch_model\.bin needs its base .*: none in the checkpoint"):
        assert latest(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-1")
