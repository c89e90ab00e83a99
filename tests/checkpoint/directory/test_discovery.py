import json
import os
import warnings

import pytest
import torch
from safetensors.torch import save_file

from hf_trainweights.checkpoint.directory.discovery import checkpoint_directories, find_checkpoints, latest
from hf_trainweights.checkpoint.directory.manifest import FileEntry, Manifest, write_manifest


def save(directory, step, *, manifest):
    """A checkpoint as a Trainer leaves it, with or without our manifest."""
    path = directory / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    save_file({"w": torch.full((4,), float(step))}, path / "model.safetensors")
    torch.save({"state": {}, "param_groups": []}, path / "optimizer.pt")
    if manifest:
        entries = {file.name: FileEntry.of(file) for file in path.iterdir()}
        write_manifest(path, Manifest(entries, "lossless", step=step))
    return path


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def test_a_missing_or_empty_root_has_no_checkpoint(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "missing") is None


@pytest.mark.parametrize("manifest", [False, True])
def test_the_newest_by_step_is_found(tmp_path, manifest):
    for step in (9, 100, 20):
        save(tmp_path, step, manifest=manifest)
    assert latest(tmp_path) == str(tmp_path / "checkpoint-100")


def test_of_two_names_for_one_step_the_later_one_is_found(tmp_path):
    save(tmp_path, "007", manifest=False)
    save(tmp_path, "7", manifest=False)
    os.utime(tmp_path / "checkpoint-7", (1, 1))
    assert latest(tmp_path) == str(tmp_path / "checkpoint-007")


def test_only_directories_of_the_right_name_count(tmp_path):
    good = save(tmp_path, 1, manifest=False)
    for name in ("checkpoint-3.tmp", "checkpoint-", "checkpoint-x", "_trainweights-1-checkpoint-4", "best"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-5").write_bytes(b"")
    (tmp_path / "checkpoint-6").symlink_to(good)
    assert checkpoint_directories(tmp_path) == [good]
    assert latest(tmp_path) == str(good)


def test_a_damaged_newest_is_passed_over_with_the_reason(tmp_path):
    save(tmp_path, 1, manifest=True)
    cut(save(tmp_path, 2, manifest=True) / "optimizer.pt")
    with pytest.warns(UserWarning, match=r"checkpoint-2 is passed over: optimizer\.pt has \d+ bytes instead of"):
        assert latest(tmp_path) == str(tmp_path / "checkpoint-1")


def test_a_damaged_manifest_disqualifies(tmp_path):
    save(tmp_path, 1, manifest=False)
    cut(save(tmp_path, 2, manifest=True) / "trainweights.json")
    with pytest.warns(UserWarning, match="checkpoint-2 is passed over: trainweights"):
        assert latest(tmp_path) == str(tmp_path / "checkpoint-1")


def test_every_directory_passed_over_has_its_own_warning(tmp_path):
    for step in (1, 2):
        cut(save(tmp_path, step, manifest=True) / "optimizer.pt")
    with pytest.warns(UserWarning, match="checkpoint-") as record:
        assert latest(tmp_path) is None
    assert [f"checkpoint-{step}" in str(each.message) for step, each in zip((2, 1), record, strict=True)] == [
        True,
        True,
    ]


def test_a_foreign_file_does_not_disqualify(tmp_path):
    path = save(tmp_path, 1, manifest=True)
    (path / "rng_state_3.pth").write_bytes(b"another rank was late")
    assert latest(tmp_path) == str(path)


def test_a_plain_directory_is_marked_unverified(tmp_path):
    save(tmp_path, 1, manifest=False)
    save(tmp_path, 2, manifest=True)
    assert [(found.step, found.verified, found.problem) for found in find_checkpoints(tmp_path)] == [
        (2, True, None),
        (1, False, None),
    ]


def remove(name):
    return lambda path: (path / name).unlink()


def write(name, content):
    return lambda path: (path / name).write_bytes(content)


DEBRIS = {
    "no trainer state": (remove("trainer_state.json"), "trainer_state.json cannot be read"),
    "half a trainer state": (lambda path: cut(path / "trainer_state.json"), "trainer_state.json cannot be read"),
    "no object": (write("trainer_state.json", b"[]"), "not a JSON object"),
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


def test_a_flipped_byte_in_a_plain_torch_file_is_seen_by_its_checksum(tmp_path):
    path = save(tmp_path, 1, manifest=False) / "optimizer.pt"
    torch.save({"w": torch.zeros(1000)}, path)
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


def test_finding_the_newest_does_not_warn(tmp_path):
    save(tmp_path, 1, manifest=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latest(tmp_path) is not None
