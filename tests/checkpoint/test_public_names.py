import pytest
import torch

from hf_trainweights import checkpoint, distributed


@pytest.mark.parametrize("package", [checkpoint, distributed])
def test_every_public_name_is_there(package):
    assert all(hasattr(package, name) for name in package.__all__)
    assert package.__all__ == sorted(package.__all__)


@pytest.mark.parametrize("mode", ["lossless", "compact"])
def test_a_run_can_be_rewritten_listed_and_cleaned_by_public_names_alone(tmp_path, mode):
    path = tmp_path / "checkpoint-3"
    path.mkdir()
    torch.save({"w": torch.ones(64, 80)}, path / "pytorch_model.bin")
    (path / "trainer_state.json").write_text('{"global_step": 3}')
    assert checkpoint.compress_directory(path, mode=mode).mode == checkpoint.Policy(mode).mode
    assert [found.verified for found in checkpoint.find_checkpoints(tmp_path)] == [True]
    assert checkpoint.restore_directory(path).mode == "plain"
    assert checkpoint.collect_garbage(tmp_path) == []
