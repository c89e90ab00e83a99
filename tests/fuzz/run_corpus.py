"""Runs with small checkpoints in every mode, and the ways in which their files are changed."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_trainweights.checkpoint import CheckpointManager
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME
from hf_trainweights.checkpoint.planning.policy import MODES
from hf_trainweights.files.reading import sign_json
from tests.fuzz.directories import Content, Tree, put_special, read_tree
from tests.fuzz.mutate_bytes import damage
from tests.fuzz.mutate_json import change_json

STEPS = 3
_KEYS = [
    *("files", "report", "tensors", "anchor", "sha256", "size_bytes", "mode", "step", "epoch", "metrics", "metadata"),
    *("codec", "params", "bound", "bytes_in", "bytes_out", "path", "role", "delta_rms", "saves", "interval_steps"),
    *("../pytorch_model.bin", "/etc/passwd", "pytorch_model.bin", "optimizer.pt", "x.anchor", "model.safetensors"),
]
_VALUES: list[Any] = [
    *("lossless", "compact", "plain", "0" * 64, "planes", "weight", "2026-01-01T00:00:00+00:00", {"tensors": [{}]}),
    *({"tensors": None}, {"tensors": [{"codec": "x"}]}, {"sha256": "0" * 64, "saves": 3, "delta_rms": {"w": 1e308}}),
    *({"sha256": "0" * 64}, {"size_bytes": 1, "sha256": "0" * 64, "report": {}}),
]


def train(root: Path, mode: str, steps: int) -> list[torch.Tensor]:
    """Train a little model with a `CheckpointManager`, from where it stopped, and return its weights."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = torch.randn(steps, 4, 64, generator=torch.Generator().manual_seed(1))
    with CheckpointManager(root, mode=mode, every_steps=1, keep_last=3) as manager:
        for _, batch in manager.steps(batches, model, optimizer):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@functools.cache
def saved_runs() -> dict[str, dict[str, Content]]:
    """Return the files of a run in each mode: `checkpoint-1` to `checkpoint-3`."""
    runs = {}
    for mode in MODES:
        with tempfile.TemporaryDirectory() as directory:
            train(Path(directory), mode, STEPS)
            runs[mode] = read_tree(Path(directory))
    return runs


def change_run(rng: random.Random, saved: Tree, tree: dict[str, Content]) -> str:
    """Change one of the files of a run in `tree`, and return how: by damage, or on purpose."""
    name = rng.choice(sorted(saved))
    manifest = f"{name.partition('/')[0]}/{MANIFEST_NAME}"
    kind = rng.choice(("manifest", "manifest", "manifest", "damage", "damage", "special", "without manifest"))
    if kind == "manifest":
        tree[manifest] = change_manifest(rng, saved[manifest])
    elif kind == "special":
        put_special(rng, tree, name)
    else:
        content = saved[name]
        tree[name] = damage(rng, content if isinstance(content, bytes) else b"", b"x" * 100)
        if kind == "without manifest":
            tree[manifest] = "missing"
    return kind


def change_manifest(rng: random.Random, manifest: Content) -> bytes:
    """Return another manifest, with a right digest where it is an object that can have one."""
    value = change_json(rng, json.loads(manifest), _KEYS, _VALUES)
    try:
        return sign_json(value)
    except ValueError:  # a text that UTF-8 cannot hold
        return json.dumps(value).encode()
