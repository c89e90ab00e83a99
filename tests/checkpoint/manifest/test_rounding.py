"""Values that a checkpoint has lost stay known, whatever is done to it afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_trainweights.checkpoint.directory.layout import compress_directory, restore_directory
from hf_trainweights.checkpoint.manifest.manifest import FileEntry, Manifest, read_manifest
from hf_trainweights.checkpoint.manifest.rounding import shown_mode, total_rounding
from hf_trainweights.checkpoint.run.job import rewriting

INT8 = {"weight": "int8"}


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def path(tmp_path: Path, weight: torch.Tensor) -> Path:
    torch.save({"w": weight}, tmp_path / "pytorch_model.bin")
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optimizer.pt")
    return tmp_path


def error(path: Path, weight: torch.Tensor) -> float:
    stored = torch.load(path / "pytorch_model.bin", weights_only=True)["w"]
    return (stored - weight).abs().max().item()


def test_exact_weights_are_called_lossless_and_the_manifest_has_no_further_key(path: Path) -> None:
    assert shown_mode(compress_directory(path)) == "lossless"
    assert shown_mode(restore_directory(path)) == "plain"
    assert "rounded_before" not in json.loads((path / "trainweights.json").read_bytes())


def test_what_a_mode_has_rounded_is_called_by_it_also_after_a_finer_mode_left_it_alone(path: Path) -> None:
    (path / "pytorch_model.bin").unlink()
    lossy = compress_lossy(path, mode="compact")
    assert total_rounding(lossy)
    again = compress_directory(path, mode="lossless")
    assert (shown_mode(again), total_rounding(again)) == ("compact", total_rounding(lossy))
    assert read_manifest(path) == again
    assert compress_directory(path, mode="near-lossless").mode == "compact"


def compress_lossy(path: Path, mode: str) -> Manifest:
    """Compress two moments of Adam, which a lossy mode rounds at the first save already."""
    moments = {"step": torch.tensor(3.0), "exp_avg": torch.randn(64, 64), "exp_avg_sq": torch.rand(64, 64)}
    group = {"params": [0], "lr": 1e-3, "betas": (0.9, 0.999)}
    torch.save({"state": {0: moments}, "param_groups": [group]}, path / "optimizer.pt")
    return compress_directory(path, mode=mode)


def test_restored_weights_are_not_called_exact_afterwards(path: Path, weight: torch.Tensor) -> None:
    int8 = compress_directory(path, rules=INT8)
    bound = total_rounding(int8)["weight"]
    off = error(path, weight)
    assert 0 < off <= bound
    note = f"(weights off by up to {bound:.1e})"
    assert shown_mode(int8) == f"lossless {note}"
    assert shown_mode(restore_directory(path)) == f"plain {note}"
    assert shown_mode(compress_directory(path)) == f"lossless {note}"
    assert shown_mode(restore_directory(path)) == f"plain {note}"
    assert error(path, weight) == off


def test_errors_of_weights_that_are_rounded_twice_add_up(path: Path, weight: torch.Tensor) -> None:
    first = total_rounding(compress_directory(path, rules=INT8))["weight"]
    restore_directory(path)
    second = compress_directory(path, rules={"weight": "float8_e4m3"})
    assert total_rounding(second)["weight"] > first
    assert error(path, weight) <= total_rounding(second)["weight"]


def test_without_a_manifest_the_files_themselves_say_what_they_have_lost(path: Path) -> None:
    bound = total_rounding(compress_directory(path, rules=INT8))["weight"]
    with rewriting(path):
        pass  # it was interrupted before the manifest came back
    assert shown_mode(compress_directory(path)) == f"lossless (weights off by up to {bound:.1e})"
    with rewriting(path):
        pass
    assert shown_mode(restore_directory(path)) == f"plain (weights off by up to {bound:.1e})"


def test_only_the_optimizer_may_be_rounded() -> None:
    files, lost = {"optimizer.pt": FileEntry(1, "0" * 64)}, {"optimizer.pt": {"exp_avg": 0.1}}
    manifest = Manifest(files, "lossless", rounded_before=lost)
    assert shown_mode(manifest) == "lossless (optimizer states rounded)"
