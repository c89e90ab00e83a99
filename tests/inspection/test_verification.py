"""verify_model says no where a load would not find the model's weights, and says what it could not compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_trainweights import TrainWeightsConfig, quantize_, verify_model
from hf_trainweights.files.digests import write_digests

NAMES = ("llama_tied", "mixtral", "gpt2", "t5", "whisper", "clip", "vit", "mamba")


def saved(name: str, directory: Path, **options: Any) -> Path:
    model = ARCHITECTURES[name].build()
    quantize_(model, TrainWeightsConfig("int8", include_embeddings=True))
    model.save_pretrained(directory, **options)
    return directory


def change(directory: Path, **tensors: Tensor | None) -> Path:
    """Replace tensors of a saved model, leave out those that are None, and make the digests fit."""
    file = directory / "model.safetensors"
    changed = load_file(file) | tensors
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, file, {"format": "pt"})
    write_digests(directory, [file.name])
    return directory


@pytest.mark.parametrize("options", [{}, {"safe_serialization": False, "max_shard_size": "40KB"}], ids=["one", "bin"])
@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_has_exactly_the_names_of_its_class(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    report = verify_model(saved(name, tmp_path, **options))
    assert (report.ok, dict(report.problems), report.unchecked) == (True, {}, "")


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"model.norm.weight": None}, "model.norm.weight is missing"),
        ({"model.extra.weight": torch.ones(2)}, "model.extra.weight is none of the model's"),
        ({"model.norm.weight": torch.ones(65)}, "model.norm.weight has another shape"),
        ({"lm_head._weight_scale": None}, "expected lm_head._weight_scale beside the other tensors"),
        (
            {f"lm_head._weight_{suffix}": None for suffix in ("qdata", "scale", "format")},
            "lm_head.weight has another shape",  # its guard's
        ),
    ],
)
def test_what_a_load_would_get_wrong_is_a_problem_of_the_file(
    tensors: dict[str, Tensor | None], problem: str, tmp_path: Path
) -> None:
    report = verify_model(change(saved("llama", tmp_path), **tensors))
    assert not report.ok
    assert problem in report.problems["model.safetensors"]


def test_damaged_files_are_not_compared_with_the_model(tmp_path: Path) -> None:
    (saved("llama", tmp_path) / "model.safetensors").write_bytes(b"")
    assert verify_model(tmp_path).unchecked == "the files are not those that were saved"


@pytest.mark.parametrize("change_to", [{"architectures": ["OwnModel"]}, {"model_type": "own"}], ids=str)
def test_a_class_that_nobody_knows_is_told(change_to: dict[str, object], tmp_path: Path) -> None:
    file = saved("llama", tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change_to))
    report = verify_model(tmp_path)
    assert report.ok
    assert report.unchecked


def test_a_configuration_that_files_cannot_fill_builds_no_model(tmp_path: Path) -> None:
    file = saved("llama", tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 10**9}))
    assert "a number of modules that" in verify_model(tmp_path).problems["model.safetensors"]
