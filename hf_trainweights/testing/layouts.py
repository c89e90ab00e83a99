"""The contract of a layout of checkpoints. Subclass it where pytest collects, and say how to write and load one."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_trainweights.checkpoint.directory import compress_directory, latest, restore_directory
from hf_trainweights.checkpoint.encoded import reader
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, PLAIN_MODE, total_rounding
from hf_trainweights.checkpoint.planning.policy import LOSSY_MODES, ModeName
from hf_trainweights.checkpoint.run.checkpoints import list_files, size_bytes, verify_checkpoint
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.testing.values import stored_bits

lossy = pytest.mark.parametrize("mode", LOSSY_MODES)


class LayoutContract:
    """The promises of `compress_directory`, `restore_directory` and `latest` to checkpoints of one layout.

    A subclass overrides `write` and `load`. Its checkpoints have weights of at least 4096 elements, and states of Adam.

    Examples:
        >>> class TestFilesOfTorch(LayoutContract):
        ...     def write(self, checkpoint, step):
        ...         checkpoint.mkdir(parents=True)
        ...         torch.save(my_weights(step), checkpoint / "pytorch_model.bin")
        ...         (checkpoint / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
        ...     def load(self, checkpoint):
        ...         return torch.load(checkpoint / "pytorch_model.bin", weights_only=True)
    """

    def write(self, checkpoint: Path, step: int) -> None:
        """Write a plain checkpoint; weights move by about a thousandth from step to step."""
        raise NotImplementedError

    def load(self, checkpoint: Path) -> Mapping[str, Tensor]:
        """Return all tensors of a checkpoint by name, read by a program that knows nothing of this package."""
        raise NotImplementedError

    @pytest.fixture
    def run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Return the directory of a run of three checkpoints; no anchor of another run is known."""
        monkeypatch.setattr(reader, "_directories", {})
        for step in (1, 2, 3):
            self.write(tmp_path / "run" / f"checkpoint-{step}", step)
        return tmp_path / "run"

    def test_a_lossless_run_loads_as_it_was_and_is_smaller(self, run: Path) -> None:
        """Each tensor has the same bits; the manifest has the step, and every file verifies."""
        for step in (1, 2, 3):
            path = run / f"checkpoint-{step}"
            before, plain_bytes = self.load(path), size_bytes(path)
            manifest = compress_directory(path)
            assert (manifest.step, manifest.mode, total_rounding(manifest)) == (step, "lossless", {})
            assert_equal(self.load(path), before)
            assert size_bytes(path) < plain_bytes
            assert verify_checkpoint(path).ok
        assert latest(run) == str(path)

    @lossy
    def test_a_lossy_run_is_off_by_no_more_than_its_manifests_state(self, run: Path, mode: ModeName) -> None:
        """The bound of weights is that of the largest error."""
        for step in (1, 2, 3):
            path = run / f"checkpoint-{step}"
            before = self.load(path)
            bound = total_rounding(compress_directory(path, mode=mode)).get("weight", 0.0)
            after = self.load(path)
            assert after.keys() == before.keys()
            for name in self.weights(before):
                eps = torch.finfo(before[name].dtype).eps
                allowed = bound * 1.0001 + eps * before[name].double().abs()
                assert ((after[name].double() - before[name].double()).abs() <= allowed).all(), name
            assert verify_checkpoint(path).ok

    def weights(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the weights among all tensors; by default those without `exp_avg` in their name."""
        return [name for name, x in tensors.items() if "exp_avg" not in name and x.is_floating_point()]

    @pytest.mark.parametrize("mode", ["lossless", *LOSSY_MODES])
    def test_a_second_call_changes_nothing(self, run: Path, mode: ModeName) -> None:
        """Whoever compresses all checkpoints of a run again waits for their digests alone."""
        path = run / "checkpoint-1"
        first, statuses = compress_directory(path, mode=mode, metrics={"loss": 2.0}), status_of(path)
        assert compress_directory(path, mode=mode) == first
        assert status_of(path) == statuses

    def test_rounded_tensors_are_not_rounded_again(self, run: Path) -> None:
        """A second rounding would add an error that no bound states."""
        path = run / "checkpoint-1"
        compress_directory(path, mode="compact")
        before = self.load(path)
        assert compress_directory(path, mode="near-lossless").mode == "compact"
        assert_equal(self.load(path), before)

    @pytest.mark.parametrize("mode", ["lossless", *LOSSY_MODES])
    def test_restored_files_are_plain_and_their_manifest_states_what_was_rounded(
        self, run: Path, mode: ModeName
    ) -> None:
        """The files need no others, and nobody takes rounded values for exact ones, even after another compression."""
        for step in (1, 2):
            compress_directory(run / f"checkpoint-{step}", mode=mode)
        path = run / "checkpoint-2"
        before = self.load(path)
        manifest = restore_directory(path)
        assert manifest.mode == PLAIN_MODE
        assert bool(manifest.rounded_before) == (mode != "lossless")
        assert not list(path.rglob("*.anchor"))
        assert_equal(self.load(path), before)
        assert verify_checkpoint(path).ok
        assert bool(compress_directory(path).rounded_before) == (mode != "lossless")
        assert_equal(self.load(path), before)

    @pytest.mark.parametrize("mode", ["lossless", "compact"])
    def test_any_checkpoint_may_be_deleted_and_the_run_be_moved(self, run: Path, mode: ModeName) -> None:
        """Every directory has all files that it needs."""
        for step in (1, 2, 3):
            compress_directory(run / f"checkpoint-{step}", mode=mode)
        before = self.load(run / "checkpoint-3")
        for step in (1, 2):
            shutil.rmtree(run / f"checkpoint-{step}")
        moved = run.rename(run.with_name("elsewhere"))
        assert latest(moved) == str(moved / "checkpoint-3")
        assert_equal(self.load(moved / "checkpoint-3"), before)

    @pytest.mark.parametrize("is_compressed", [False, True])
    def test_damage_in_any_file_of_tensors_is_an_error_before_anything_changes(
        self, run: Path, is_compressed: bool
    ) -> None:
        """A digest of damaged bytes would call them intact for ever."""
        path = run / "checkpoint-3"
        if is_compressed:
            compress_directory(path)
        for name in self.damaged_names(path):
            content = (path / name).read_bytes()
            flipped = bytearray(content)
            flipped[len(content) // 3] ^= 4
            (path / name).write_bytes(flipped)
            before = status_of(path)
            for rewrite in (partial(compress_directory, mode="compact"), restore_directory):
                with pytest.raises(CorruptFileError, match=r"expected .*, found .*"):
                    rewrite(path)
                assert before.items() <= status_of(path).items(), f"{name} is damaged, and other files have changed"
            (path / name).write_bytes(content[: len(content) // 3])
            with pytest.warns(UserWarning, match=f"{path.name} is passed over"):
                assert latest(run) == str(run / "checkpoint-2")
            (path / name).write_bytes(content)
        assert latest(run) == str(path)

    def damaged_names(self, checkpoint: Path) -> list[str]:
        """Return the names of the files that the test of damage changes: all large ones."""
        return [name for name, status in list_files(checkpoint).items() if status.st_size > 4096]

    def test_an_interrupted_rewriting_is_taken_up_again(self, run: Path) -> None:
        """An interruption leaves no manifest, and some files encoded; here all are."""
        for step in (1, 2):
            compress_directory(run / f"checkpoint-{step}", mode="near-lossless")
        path = run / "checkpoint-2"
        before = self.load(path)
        (path / MANIFEST_NAME).unlink(missing_ok=True)
        again = compress_directory(path, mode="near-lossless")
        assert total_rounding(again)
        assert_equal(self.load(path), before)
        assert verify_checkpoint(path).ok


def status_of(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Return device, inode and size of each file by its name: a file that is written anew has another inode."""
    return {name: (s.st_dev, s.st_ino, s.st_size) for name, s in list_files(directory).items()}


def assert_equal(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check that two state dicts have the same tensors in every bit, dtype and shape."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].shape, actual[name].dtype) == (tensor.shape, tensor.dtype), name
        assert torch.equal(actual[name], tensor) or stored_bits(actual[name]) == stored_bits(tensor), name


def tensors_in(tree: Any, name: str = "") -> dict[str, Tensor]:
    """Return the tensors of nested dicts and lists by key path, for `LayoutContract.load`."""
    if isinstance(tree, Tensor):
        return {name: tree.detach()}
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    return {path: tensor for key, x in items for path, tensor in tensors_in(x, f"{name}.{key}").items()}
