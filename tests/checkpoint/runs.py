"""Checkpoints of a run as a Trainer writes them, whole and cut off."""

import json
import os

import torch
from safetensors.torch import save_file

from hf_trainweights.checkpoint.manifest import FileEntry, Manifest, write_manifest
from hf_trainweights.files.reading import file_sha256


def save(directory, step, *, manifest):
    """A checkpoint as a Trainer leaves it, with or without our manifest."""
    path = directory / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    save_file({"w": torch.full((4,), float(step))}, path / "model.safetensors")
    torch.save({"state": {}, "param_groups": []}, path / "optimizer.pt")
    if manifest:
        entries = {file.name: FileEntry(file.stat().st_size, file_sha256(file)) for file in path.iterdir()}
        write_manifest(path, Manifest(entries, "lossless", step=step))
    return path


def cut(path):
    os.truncate(path, path.stat().st_size // 2)
