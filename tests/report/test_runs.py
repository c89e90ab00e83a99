"""A run's report: bytes of each checkpoint in parts, an anchor once, and the loss wherever it was recorded."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_trainweights import write_report
from hf_trainweights.checkpoint import CheckpointManager
from hf_trainweights.errors import ConfigError
from hf_trainweights.report.runs import PARTS, read_losses, read_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointManager(root, mode="near-lossless", every_steps=2, keep_last=None) as manager:
        for step, batch in manager.steps(torch.randn(6, 4, 256), model, optimizer):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.log(loss=7 - step)
    return root


def anchors_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.anchor"))


@pytest.mark.slow
def test_parts_of_a_checkpoint_add_up_to_its_bytes_and_an_anchor_counts_once(run: Path) -> None:
    checkpoints = read_run(run)
    assert [checkpoint.step for checkpoint in checkpoints] == [2, 4, 6]
    inodes = {file.stat().st_ino: file.stat().st_size for file in run.rglob("*") if file.is_file()}
    assert sum(sum(checkpoint.part_bytes) for checkpoint in checkpoints) == sum(inodes.values())
    # Each of them is the anchor of the next one.
    assert [checkpoint.part_bytes[PARTS.index("anchor")] > 0 for checkpoint in checkpoints] == [True, True, False]
    assert [checkpoint.linked_bytes for checkpoint in checkpoints] == [
        anchors_bytes(run / f"checkpoint-{step}") for step in (2, 4, 6)
    ]
    assert checkpoints[1].linked_bytes < checkpoints[2].linked_bytes
    for checkpoint in checkpoints:
        weights, moments, anchored, _ = checkpoint.part_bytes
        assert 0 < weights + anchored < checkpoint.plain_bytes
        assert 0 < moments < checkpoint.plain_bytes
        # Weights and two moments in float32.
        assert checkpoint.plain_bytes >= 3 * 4 * 2 * (256 * 256 + 256)
        assert checkpoint.mode == "near-lossless"


def test_an_anchor_whose_checkpoint_was_deleted_counts_for_the_next_one(run: Path, tmp_path: Path) -> None:
    kept = tmp_path / "run"
    shutil.copytree(run, kept, copy_function=os.link)
    shutil.rmtree(kept / "checkpoint-2")
    first, second = read_run(kept)
    linked = [anchors_bytes(kept / f"checkpoint-{step}") for step in (4, 6)]
    weights = (kept / "checkpoint-4" / "pytorch_model.bin").stat().st_size  # the anchor of the next one
    assert linked[0] < first.part_bytes[PARTS.index("anchor")] <= linked[0] + weights
    assert first.linked_bytes == 0
    assert (second.part_bytes[PARTS.index("anchor")], second.linked_bytes) == (0, linked[1])


def test_losses_come_from_the_manifests(run: Path) -> None:
    assert read_losses(run, read_run(run)) == {"loss": [(2.0, 5.0), (4.0, 3.0), (6.0, 1.0)]}


def plain_run(root: Path, state: object) -> Path:
    for step in (5, 10):
        (root / f"checkpoint-{step}").mkdir()
        (root / f"checkpoint-{step}" / "model.safetensors").write_bytes(b"w" * 1000)
        (root / f"checkpoint-{step}" / "optimizer.pt").write_bytes(b"m" * 2000)
        (root / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    return root


def test_a_trainers_own_checkpoints_are_split_by_their_files(tmp_path: Path) -> None:
    history = [{"step": 5, "loss": 2.5}, {"step": 10, "eval_loss": 2.0}, {"step": 10, "loss": 1.5}]
    checkpoints = read_run(plain_run(tmp_path, {"log_history": history}))
    assert [checkpoint.part_bytes[:3] for checkpoint in checkpoints] == [(1000, 2000, 0)] * 2
    assert [checkpoint.mode for checkpoint in checkpoints] == ["plain", "plain"]
    assert read_losses(tmp_path, checkpoints) == {"loss": [(5.0, 2.5), (10.0, 1.5)], "eval_loss": [(10.0, 2.0)]}


@pytest.mark.parametrize(
    "state",
    [[], {}, {"log_history": 3}, {"log_history": [3, {"step": "x", "loss": 1}, {"step": 1, "loss": True}]}],
)
def test_a_history_that_makes_no_sense_is_no_loss(state: object, tmp_path: Path) -> None:
    assert read_losses(plain_run(tmp_path, state), []) == {}


def test_the_page_of_a_run_shows_sizes_and_loss(run: Path, tmp_path: Path) -> None:
    report = write_report(run, tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text(encoding="utf-8")
    for part in ("step 2", "step 6", "x smaller", "moments of the optimizer", "<h2>Loss</h2>"):
        assert part in text
    assert report.lines[0].startswith("3 checkpoints, ")


def test_a_damaged_manifest_is_shown_and_its_files_still_count(run: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "trainweights.json").write_text('{"<b>": 1}')
    (saved,) = read_run(tmp_path)
    assert saved.mode.startswith("its manifest cannot be read: ")
    write_report(tmp_path, tmp_path / "run.html")
    assert "<b>" not in (tmp_path / "run.html").read_text(encoding="utf-8")


def test_one_checkpoint_of_a_run_is_reported_as_a_model(run: Path, tmp_path: Path) -> None:
    report = write_report(run / "checkpoint-6", tmp_path / "r.html", against=run / "checkpoint-4")
    assert report.lines[-1].endswith("0 without a counterpart")


def test_a_run_has_no_counterpart(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="against: expected nothing for a run"):
        write_report(run, tmp_path / "r.html", against=run / "checkpoint-4")
