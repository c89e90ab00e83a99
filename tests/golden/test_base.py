"""A run of two checkpoints in every mode, stored against weights in the Hub's cache; the second one keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bases import COMMIT, REPOSITORY
from golden.files import golden_directory, recorded, texts_in
from golden.reader import load_checkpoints
from golden.test_checkpoints import weights
from huggingface_hub import constants
from safetensors.torch import save_file

from hf_trainweights.checkpoint import compress_directory
from hf_trainweights.checkpoint.manifest import read_manifest
from hf_trainweights.checkpoint.planning.policy import MODES

STEPS = (2, 3)
SNAPSHOT = Path("cache", f"models--{REPOSITORY.replace('/', '--')}", "snapshots", COMMIT)


def write(directory: Path, mode: str) -> None:
    snapshot = directory / SNAPSHOT
    snapshot.mkdir(parents=True)
    save_file(weights(1), snapshot / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(directory / "cache"))
        for step in STEPS:
            checkpoint = directory / f"checkpoint-{step}"
            checkpoint.mkdir()
            save_file(weights(step), checkpoint / "model.safetensors")
            compress_directory(
                checkpoint, mode=mode, anchor=snapshot, keep_base=step == STEPS[-1], buffers=["running_mean"]
            )


def read(directory: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(directory / "cache"))
        return load_checkpoints(directory)


def golden(mode: str) -> Path:
    return golden_directory(f"base/{mode}", lambda directory: write(directory, mode), lambda directory: read(directory))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_run_against_a_base_holds_what_is_recorded(mode: str, tmp_path: Path) -> None:
    assert read(golden(mode)) == recorded(golden(mode))
    write(tmp_path, mode)
    assert read(tmp_path) == recorded(golden(mode))


@pytest.mark.parametrize("mode", MODES)
def test_file_and_manifest_name_the_base(mode: str) -> None:
    for step in STEPS:
        checkpoint = golden(mode) / f"checkpoint-{step}"
        (text,) = (each for each in texts_in(checkpoint / "pytorch_model.bin") if "storages" in each)
        anchor = json.loads(text[64:].replace("\u00b7", "."))["anchor"]
        base = read_manifest(checkpoint).base
        assert base is not None
        assert anchor["base"] == base.to_dict()
        assert anchor["sha256"] == base.sha256
        assert (base.repository, base.commit, [*base.files]) == (REPOSITORY, COMMIT, ["model.safetensors"])
        kept = [f"{base.files['model.safetensors']}.anchor"] if step == STEPS[-1] else []
        assert [file.name for file in checkpoint.glob("*.anchor")] == kept
