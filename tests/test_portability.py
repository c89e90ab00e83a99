"""What only Linux offers is taken away: models and checkpoints are written and read all the same."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from torch import nn
from transformers import AutoModelForCausalLM

from hf_trainweights import TrainWeightsConfig, quantize_, verify_model
from hf_trainweights.checkpoint import CheckpointManager, collect_garbage, latest, restore_directory, verify_checkpoint
from hf_trainweights.files import disk
from hf_trainweights.models.loading import conversion


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave what Windows has too: no locks, no hard links, no descriptors of directories, no limits of processes."""
    del tmp_path  # which is made before anything is taken away, and so removed when all is back

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    for name in ("O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "posix_fallocate", "posix_fadvise"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(disk, "fcntl", None)
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr(conversion, "sys", type("System", (), {"platform": "win32"}))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"safe_serialization": False}, {"max_shard_size": "50KB"}], ids=str)
def test_a_model_is_saved_loaded_and_saved_over(options: dict[str, Any], tmp_path: Path) -> None:
    model = ARCHITECTURES["llama"].build()
    config = TrainWeightsConfig("int8", overrides={"re:.*q_proj": "int4"})
    quantize_(model, config)
    for _ in range(2):
        model.save_pretrained(tmp_path, **options)
        assert verify_model(tmp_path).problems == {}
        reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        ids = torch.arange(8).view(1, -1)
        assert torch.equal(reloaded(ids).logits, model(ids).logits)
        model = reloaded
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(disk.TEMPORARY_PREFIX)] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The disk of .* has no hard links")
@pytest.mark.parametrize("mode", ["lossless", "near-lossless"])
def test_checkpoints_are_written_resumed_cleaned_and_restored(mode: Any, tmp_path: Path) -> None:
    trained = [train(mode, steps, tmp_path) for steps in (4, 2)]
    newest = tmp_path / "checkpoint-6"
    assert latest(tmp_path) == str(newest)
    assert verify_checkpoint(newest).problems == {}
    collect_garbage(tmp_path)
    assert restore_directory(newest).mode == "plain"
    weight = torch.load(newest / "pytorch_model.bin")["weight"]
    torch.testing.assert_close(weight, trained[-1].weight.detach(), rtol=0, atol=0 if mode == "lossless" else 1e-3)


def train(mode: Any, steps: int, root: Path) -> nn.Linear:
    """Train so many steps on from the newest checkpoint, and save every second."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointManager(root, mode=mode, every_steps=2) as manager:
        for _, batch in manager.steps(torch.ones(6, 1, 64), model, optimizer):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps -= 1
            if not steps:
                break
    return model


def test_new_files_are_written_byte_for_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "O_BINARY", 1 << 28, raising=False)
    flags: list[int] = []
    monkeypatch.setattr(os, "open", lambda path, flag, mode: flags.append(flag) or 0)
    disk.file_system.create(tmp_path / "file")
    assert flags[0] & os.O_BINARY  # type: ignore[attr-defined]
