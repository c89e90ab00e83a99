import os

import pytest
import torch

from hf_trainweights.checkpoint.directory.garbage import collect_garbage, remove_checkpoint
from hf_trainweights.checkpoint.directory.manifest import read_manifest
from hf_trainweights.checkpoint.directory.verification import verify_checkpoint
from hf_trainweights.checkpoint.directory.weights_encoder import Weights
from hf_trainweights.checkpoint.directory.writer import save_new_directory
from hf_trainweights.checkpoint.encoded.key_paths import UnstorableError
from hf_trainweights.checkpoint.encoded.reader import is_encoded
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.errors import ConfigError, SaveError


def save(path, state=None, trees=None, **fields):
    weights = Weights({"w": torch.arange(5000.0)} if state is None else state)
    return save_new_directory(path, Policy(), weights, trees or {}, **fields)


def a_dead_process():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return child


def test_a_saved_directory_verifies_and_is_what_the_manifest_says(tmp_path):
    path = tmp_path / "a" / "b"
    manifest = save(path, trees={"optimizer.pt": ({"lr": 0.1}, {})}, step=3, epoch=0.5, metrics={"loss": 1.5})
    assert verify_checkpoint(path).ok
    assert read_manifest(path) == manifest
    assert set(manifest.files) == {"pytorch_model.bin", "optimizer.pt"}
    assert (manifest.step, manifest.epoch, manifest.metrics, manifest.mode) == (3, 0.5, {"loss": 1.5}, "lossless")
    (report,) = manifest.files["pytorch_model.bin"].report["tensors"]
    assert (report["name"], report["role"], report["bound"]) == ("w", "weight", None)
    assert report["bytes_out"] < report["bytes_in"] == 20000
    assert manifest.files["pytorch_model.bin"].size_bytes == (path / "pytorch_model.bin").stat().st_size


def test_the_files_are_torch_files(tmp_path):
    save(tmp_path / "a", trees={"optimizer.pt": ({"lr": 0.1}, {})})
    assert is_encoded(tmp_path / "a" / "pytorch_model.bin")
    loaded = torch.load(tmp_path / "a" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(loaded["w"], torch.arange(5000.0))


def test_equal_checkpoints_give_equal_files(tmp_path):
    for name in "ab":
        save(tmp_path / name, trees={"optimizer.pt": ({"lr": 0.1}, {})})
    for file in ("pytorch_model.bin", "optimizer.pt"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize(
    ("state", "trees", "key"),
    [
        ({"w": torch.ones(2), "bad": {1, 2}}, {}, r"pytorch_model\.bin: bad"),
        (None, {"optimizer.pt": ({"state": {0: {"f": print}}}, {})}, r"optimizer\.pt: state\.0\.f"),
    ],
)
def test_what_cannot_be_stored_is_named_by_file_and_key(tmp_path, state, trees, key):
    with pytest.raises(UnstorableError, match=key):
        save(tmp_path / "a", state, trees)
    assert os.listdir(tmp_path) == []


def test_metrics_that_json_cannot_hold_leave_nothing_behind(tmp_path):
    with pytest.raises(ConfigError, match=r"metrics\['loss'\]"):
        save(tmp_path / "a", metrics={"loss": torch.ones(1)})
    assert os.listdir(tmp_path) == []


def test_a_directory_that_cannot_be_written_is_a_save_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SaveError, match="file"):
        save(tmp_path / "file" / "a")


def test_a_removed_checkpoint_leaves_nothing(tmp_path):
    save(tmp_path / "checkpoint-1")
    remove_checkpoint(tmp_path / "checkpoint-1")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("dry_run", [True, False])
def test_garbage_is_what_dead_processes_left_and_anchors_nobody_needs(tmp_path, dry_run):
    save(tmp_path / "checkpoint-1")
    before = sorted(tmp_path.rglob("*"))
    pid = a_dead_process()
    garbage = [
        tmp_path / f"_trainweights-{pid}-aa",
        tmp_path / "checkpoint-1" / f"_trainweights-{pid}-bb",
        tmp_path / "checkpoint-1" / ("0" * 64 + ".anchor"),
        tmp_path / "_trainweights-of-nobody",
    ]
    garbage[0].mkdir()
    for path in (garbage[0] / "file", *garbage[1:]):
        path.write_bytes(b"x")
    assert collect_garbage(tmp_path, dry_run=dry_run) == sorted(garbage)
    assert garbage[0].exists() == dry_run
    assert (sorted(tmp_path.rglob("*")) == before) != dry_run


def test_what_a_living_process_writes_is_no_garbage(tmp_path):
    for pid in (os.getpid(), 1):
        (tmp_path / f"_trainweights-{pid}-aa").mkdir()
    assert collect_garbage(tmp_path) == []


def test_beside_a_file_of_a_newer_version_no_anchor_is_garbage(tmp_path, monkeypatch):
    save(tmp_path / "checkpoint-1")
    anchor = tmp_path / "checkpoint-1" / ("0" * 64 + ".anchor")
    anchor.write_bytes(b"x")
    monkeypatch.setattr("hf_trainweights.checkpoint.encoded.structure.VERSION", 99)
    assert collect_garbage(tmp_path) == []
    monkeypatch.undo()
    assert collect_garbage(tmp_path) == [anchor]


def test_garbage_that_is_a_link_goes_without_its_target(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(b"precious")
    (tmp_path / "run").mkdir()
    link = tmp_path / "run" / f"_trainweights-{a_dead_process()}-aa"
    link.symlink_to(tmp_path / "outside")
    assert collect_garbage(tmp_path / "run") == [link]
    assert (tmp_path / "outside" / "file").read_bytes() == b"precious"
