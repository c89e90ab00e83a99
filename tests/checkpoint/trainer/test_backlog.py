"""A checkpoint that cannot be made small costs a training run nothing but disk space."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from checkpoint.runs import save
from checkpoint.trainers import STEPS, build, trainer_of
from transformers import TrainerCallback

from hf_trainweights import TrainWeightsCheckpointCallback, latest
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.run.checkpoints import verify_checkpoint
from hf_trainweights.checkpoint.run.job import ANCHOR_EVERY_SAVES, RewriteJob
from hf_trainweights.checkpoint.trainer import callback as callback_module
from hf_trainweights.checkpoint.trainer.callback import Backlog
from hf_trainweights.checkpoint.whole.rewriting import WholeLayout
from hf_trainweights.errors import SaveError

pytestmark = pytest.mark.slow  # each trains

REAL = WholeLayout.compress


def run(root: Path, *callbacks: Any, model: str = "llama", **options: Any) -> int:
    """Train with the callback and others, and return how many steps that did."""
    own = TrainWeightsCheckpointCallback(**options)
    trainer, _ = trainer_of(root, own, *callbacks, model=build(model))
    trainer.train()
    return trainer.state.global_step


def fail_for(monkeypatch: pytest.MonkeyPatch, error: Exception, *names: str, times: int = 100) -> list[str]:
    """Let the first calls for some checkpoints fail, and return the list of all calls that are made."""
    calls: list[str] = []

    def compress(layout: WholeLayout, job: RewriteJob) -> Any:
        calls.append(job.path.name)
        if job.path.name in names and calls.count(job.path.name) <= times:
            raise error
        return REAL(layout, job)

    monkeypatch.setattr(WholeLayout, "compress", compress)
    return calls


def waiting(path: Path) -> RewriteJob:
    return RewriteJob(path, Policy(), ANCHOR_EVERY_SAVES)


TRANSIENT = OSError(5, "Input/output error")


def test_a_passing_error_is_said_once_and_the_checkpoint_made_small_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = fail_for(monkeypatch, TRANSIENT, "checkpoint-2", times=1)
    assert run(tmp_path) == STEPS
    assert calls == ["checkpoint-2", "checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-8"]
    assert all(verify_checkpoint(path).ok for path in tmp_path.glob("checkpoint-*"))
    assert caplog.text.count("checkpoint-2 stays as it is, plain") == 1
    assert "Input/output error" in caplog.text
    assert "4 checkpoints made small" in caplog.text
    assert "stayed plain" not in caplog.text


def test_a_lasting_error_is_said_once_and_tried_once_with_each_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = fail_for(monkeypatch, TRANSIENT, "checkpoint-2")
    assert run(tmp_path) == STEPS
    assert calls.count("checkpoint-2") == 4
    assert (tmp_path / "checkpoint-2" / "model.safetensors").exists()
    assert caplog.text.count("checkpoint-2 stays as it is, plain") == 1
    assert "3 checkpoints made small" in caplog.text
    assert "1 stayed plain, checkpoint-2; reason of the last: [Errno 5] Input/output error" in caplog.text


def test_asked_to_raise_an_error_ends_the_training_and_leaves_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = SaveError("checkpoint-2", "a disk that takes the checkpoint", "a full one", "Free space.")
    fail_for(monkeypatch, error, "checkpoint-2")
    with pytest.raises(SaveError, match="Free space"):
        run(tmp_path, on_error="raise")
    assert (tmp_path / "checkpoint-2" / "model.safetensors").exists()


def test_what_is_no_matter_of_one_checkpoint_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_for(monkeypatch, MemoryError("full"), "checkpoint-2")
    with pytest.raises(MemoryError, match="full"):
        run(tmp_path)


class Break(TrainerCallback):
    """Damages some checkpoints right after they are saved."""

    def __init__(self, *steps: int):
        self.steps = steps

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in self.steps:
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / "optimizer.pt").write_bytes(b"garbage")


def test_a_file_that_someone_damages_is_named_and_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run(tmp_path, Break(4)) == STEPS
    assert (tmp_path / "checkpoint-4" / "optimizer.pt").read_bytes() == b"garbage"
    assert (tmp_path / "checkpoint-4" / "model.safetensors").exists()
    assert caplog.text.count("checkpoint-4 stays as it is, plain") == 1
    assert "optimizer.pt cannot be read" in caplog.text
    assert verify_checkpoint(tmp_path / "checkpoint-8").ok


def test_where_nothing_whole_is_left_the_training_ends(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"optimizer\.pt cannot be read"):
        run(tmp_path, Break(2))


class Remove(TrainerCallback):
    """Uploads a checkpoint, as it were, and removes it; raises if anyone else writes in it."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        working = [thread.name for thread in threading.enumerate() if thread.name == "trainweights-checkpoint"]
        assert not working
        shutil.rmtree(Path(args.output_dir) / f"checkpoint-{state.global_step}")


@pytest.mark.covering(1)
@pytest.mark.parametrize("model", ["llama", "gpt_neox"])
@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_callback_that_removes_each_checkpoint_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model: str, on_error: str
) -> None:
    assert run(tmp_path, Remove(), model=model, on_error=on_error) == STEPS
    assert not list(tmp_path.glob("checkpoint-*"))
    assert "stays" not in caplog.text
    assert "stayed" not in caplog.text


def test_weights_that_cannot_be_replaced_are_said_and_their_checkpoint_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = callback_module.replace_weights

    def full(path: Path, weights: Any) -> Any:
        if path.name == "checkpoint-8":
            raise SaveError(str(path), "enough free disk space", "a full disk", "Free some space.")
        return real(path, weights)

    monkeypatch.setattr(callback_module, "replace_weights", full)
    assert run(tmp_path, model="gpt_neox") == STEPS
    assert "checkpoint-8 stays as the Trainer wrote it" in caplog.text
    with pytest.warns(UserWarning, match="checkpoint-8 is passed over"):
        assert latest(tmp_path) == str(tmp_path / "checkpoint-6")


def test_an_error_that_ends_the_training_keeps_what_became_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: WholeLayout, job: RewriteJob) -> Any:
        raise MemoryError("full") if job.path.name == "checkpoint-1" else TRANSIENT

    monkeypatch.setattr(WholeLayout, "compress", fail)
    backlog = Backlog("raise")
    for step in (1, 2, 3):
        save(tmp_path, step, manifest=False)
        backlog.add(waiting(tmp_path / f"checkpoint-{step}"))
    with pytest.raises(MemoryError, match="full"):
        backlog.finish()
    calls = fail_for(monkeypatch, TRANSIENT)
    save(tmp_path, 4, manifest=False)
    backlog.add(waiting(tmp_path / "checkpoint-4"))
    backlog.finish()
    assert sorted(calls) == [f"checkpoint-{step}" for step in (1, 2, 3, 4)]
