"""Weights outside a run, as the Hub's cache keeps them or in a directory, and checkpoints of a run that began there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from torch import Tensor

from hf_trainweights.checkpoint.encoded import reader

REPOSITORY = "tester/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def weights(step: int = 0) -> dict[str, Tensor]:
    """Return a state dict that has moved a little with every step; at step 0 that of the base."""
    generator = torch.Generator().manual_seed(0)
    begin = {
        "layer.weight": torch.randn(64, 80, generator=generator),
        "layer.bias": torch.randn(80, generator=generator),
    }
    update = torch.Generator().manual_seed(step)
    return {name: each + 1e-4 * step * torch.randn(each.shape, generator=update) for name, each in begin.items()}


def forget_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the process forget where other tests had anchors and bases."""
    for registry in ("_directories", "_base_directories"):
        monkeypatch.setattr(reader, registry, {})


def put_into_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch, state: dict[str, Tensor], name: str = "model.safetensors"
) -> Path:
    """Lay weights where the client of the Hub would, and return the snapshot."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    forget_directories(monkeypatch)
    folder = cache / f"models--{REPOSITORY.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    write(folder / "blobs" / "blob", state, name)
    (snapshot / name).symlink_to(Path("../../blobs/blob"))
    return snapshot


def write(path: Path, state: dict[str, Tensor], name: str = "model.safetensors") -> None:
    """Write weights in the format that a name asks for."""
    if name.endswith(".bin"):
        torch.save(state, path)
    else:
        save_file({key: tensor.contiguous() for key, tensor in state.items()}, path)


def trainer_checkpoint(run: Path, step: int, state: dict[str, Tensor] | None = None) -> Path:
    """Write a checkpoint as a Trainer leaves it, without an optimizer."""
    path = run / f"checkpoint-{step}"
    path.mkdir(parents=True)
    save_file(weights(step) if state is None else state, path / "model.safetensors")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": 0.5, "save_steps": 1}))
    return path
