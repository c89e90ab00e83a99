import os

import pytest
import torch

from hf_trainweights.checkpoint.encoded.reader import is_encoded
from hf_trainweights.checkpoint.manifest import read_manifest
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.run.checkpoints import verify_checkpoint
from hf_trainweights.checkpoint.run.job import SaveJob
from hf_trainweights.checkpoint.run.weights import Weights
from hf_trainweights.checkpoint.whole.writer import save_new_directory
from hf_trainweights.errors import ConfigError, SaveError, UnstorableError


def save(path, state=None, trees=None, **fields):
    weights = Weights({"w": torch.arange(5000.0)} if state is None else state)
    return save_new_directory(SaveJob(path, Policy()), weights, trees or {}, **fields)


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
