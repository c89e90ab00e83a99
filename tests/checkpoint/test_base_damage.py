"""Checkpoints that are stored against a base: interrupted at every call, and with flipped bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from bases import trainer_checkpoint, weights
from huggingface_hub import constants
from simulated_disk import replay

from hf_trainweights.checkpoint.directory import compress_directory, latest, restore_directory
from hf_trainweights.checkpoint.run.checkpoints import verify_checkpoint
from hf_trainweights.checkpoint.run.weight_files import read_weights, weight_files


def holds(path: Path, step: int) -> bool:
    loaded = read_weights(weight_files(path)[0])
    return all(torch.equal(loaded[name], weight) for name, weight in weights(step).items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is passed over")
@pytest.mark.parametrize("keep_base", [False, True])
def test_an_interrupted_compression_leaves_whole_files(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_base: bool
) -> None:
    run = tmp_path / "run"
    path = trainer_checkpoint(run, 1)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(shutil.move(tmp_path / "cache", run)))
    snapshot = run / snapshot.relative_to(tmp_path)

    def action() -> None:
        compress_directory(path, anchor=snapshot, keep_base=keep_base, buffers=())

    for when in replay(run, action, monkeypatch):
        assert latest(run) == str(path), when
        assert holds(path, 1), when
        is_small = verify_checkpoint(path).ok
    assert is_small


@pytest.mark.filterwarnings("ignore:.*is passed over")
def test_an_interrupted_restore_leaves_whole_files(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    path = trainer_checkpoint(run, 1)
    compress_directory(path, anchor=snapshot, keep_base=True, buffers=())
    for when in replay(run, lambda: restore_directory(path), monkeypatch):
        assert holds(path, 1), when


@pytest.mark.slow
def test_a_flipped_bit_of_the_file_or_its_base_is_an_error_or_harmless(snapshot: Path, tmp_path: Path) -> None:
    path = trainer_checkpoint(tmp_path / "run", 1)
    compress_directory(path, anchor=snapshot, buffers=())
    good, expected = path / "pytorch_model.bin", weights(1)
    blob = (snapshot / "model.safetensors").resolve()
    for target in (good, blob):
        content = target.read_bytes()
        errors = 0
        for position in range(0, len(content) * 8, max(1, len(content) * 8 // 150)):
            damaged = bytearray(content)
            damaged[position // 8] ^= 1 << position % 8
            target.write_bytes(damaged)
            try:
                loaded = torch.load(good, weights_only=True)
            except Exception:
                errors += 1
            else:
                assert all(torch.equal(loaded[name], each) for name, each in expected.items()), position
        target.write_bytes(content)
        assert errors > 50
