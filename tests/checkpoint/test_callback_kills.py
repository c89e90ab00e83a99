"""A model whose files name its weights otherwise: killed at any time, its training never resumes wrongly."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.trainers import assert_equal, build, trainer_of, weights
from covering import exhaustive
from forks import exit_code_of, fork
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_trainweights import TrainWeightsCheckpointCallback, latest
from hf_trainweights.checkpoint.run.checkpoints import MARK_NAME
from hf_trainweights.errors import ConfigError
from hf_trainweights.files import disk

pytestmark = pytest.mark.slow  # most train a second or two

KILLED = 137
# Where a process dies: at the Trainer's save of this step, or at what the callback does about it.
STEP = 4


class DyingDisk(disk.FileSystem):
    """Ends the process at one of the calls that change something, counted from when it is told to."""

    METHODS = ("create", "write", "fsync", "sync_file", "sync_directory", "link", "rename", "unlink", "set_times")

    def __init__(self, die_at: int | None):
        self.die_at = die_at
        self.count = 0
        self.counts = False

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name not in DyingDisk.METHODS or not self.counts:
            return method
        self.count += 1
        if self.count == self.die_at:
            os._exit(KILLED)
        return method


class Arm(TrainerCallback):
    """Starts the count when the Trainer has written the checkpoint of a step, and stops it before the next one."""

    def __init__(self, system: DyingDisk):
        self.system = system

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.system.counts = state.global_step == STEP
        if state.global_step == STEP and self.system.die_at == 0:
            os._exit(KILLED)


def changed(name: str) -> nn.Module:
    """Return a model that starts from other weights, so that a resume that leaves one alone shows."""
    model = build(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    return model


def train(root: Path, name: str, die_at: int | None) -> int:
    """Train in a process that dies at a call; return how many calls there were if it lives, else 0."""
    reader, writer = os.pipe()

    def work() -> None:
        torch.set_num_threads(1)
        system = DyingDisk(die_at)
        disk.file_system = system
        own = TrainWeightsCheckpointCallback()
        trainer, _ = trainer_of(root, Arm(system), own, model=build(name))
        trainer.train()
        os.write(writer, str(system.count).encode())

    child = fork(work)
    os.close(writer)
    status = exit_code_of(child)
    with os.fdopen(reader) as file:
        count = int(file.read() or 0)
    assert status == (KILLED if die_at is not None else 0)
    return count


@pytest.fixture(scope="module", params=["gpt_neox", *exhaustive("qwen3_moe")])
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Tensor]]:
    trainer, _ = trainer_of(tmp_path_factory.mktemp("whole"), model=build(request.param), save_strategy="no")
    trainer.train()
    return request.param, weights(trainer)


def states(root: Path, name: str, kills: int) -> Iterator[tuple[int, Path]]:
    """Yield what lies there after a death at the first two calls, and at about so many others."""
    calls = train(root / "whole", name, None)
    assert calls > 20
    for die_at in sorted({0, 1, *range(2, calls, max(1, calls // kills))}):
        run = root / f"killed-{die_at}"
        train(run, name, die_at)
        yield die_at, run


def resume(root: Path, name: str, checkpoint: str | None) -> dict[str, Tensor]:
    trainer, _ = trainer_of(root, TrainWeightsCheckpointCallback(), model=changed(name) if checkpoint else build(name))
    trainer.train(resume_from_checkpoint=checkpoint)
    return weights(trainer)


@pytest.mark.parametrize("kills", [2, *exhaustive(8)])
@pytest.mark.filterwarnings("ignore:.*is passed over")
def test_a_run_that_is_killed_in_a_save_ends_as_if_it_had_not_been(
    tmp_path: Path, expected: tuple[str, dict[str, Tensor]], kills: int
) -> None:
    name, final = expected
    offered = []
    for die_at, run in states(tmp_path, name, kills):
        checkpoint = latest(run)
        assert checkpoint is not None
        offered.append(Path(checkpoint).name)
        assert_equal(resume(run, name, checkpoint), final)
        assert not list(run.rglob("_trainweights-*")), die_at
        shutil.rmtree(run)
    assert offered[0] == "checkpoint-2"
    assert offered[-1] == "checkpoint-4"
    assert offered == sorted(offered)


def interrupted(root: Path) -> Path:
    """Return a checkpoint of a run that died right after the Trainer's save."""
    train(root, "gpt_neox", 0)
    return root / f"checkpoint-{STEP}"


def by_true(trainer: Any, checkpoint: Path) -> None:
    trainer.train(resume_from_checkpoint=True)


def by_name(trainer: Any, checkpoint: Path) -> None:
    trainer.train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize("start", [by_name, *exhaustive(by_true)])
def test_a_resume_that_does_not_ask_latest_is_stopped(tmp_path: Path, start: Callable[[Any, Path], None]) -> None:
    checkpoint = interrupted(tmp_path)
    trainer, _ = trainer_of(tmp_path, TrainWeightsCheckpointCallback(), model=build("gpt_neox"))
    with pytest.raises(ConfigError, match=r"checkpoint-4: .*starting values.*latest\(output_dir\)"):
        start(trainer, checkpoint)


def test_a_run_that_began_without_the_callback_is_stopped_too(tmp_path: Path) -> None:
    trainer_of(tmp_path, model=build("gpt_neox"))[0].train()
    assert latest(tmp_path) == str(tmp_path / "checkpoint-8")  # nobody knows yet
    trainer, _ = trainer_of(tmp_path, TrainWeightsCheckpointCallback(), model=build("gpt_neox"), max_steps=10)
    with pytest.raises(ConfigError, match=r"checkpoint-8: .*starting values"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.warns(UserWarning, match="is passed over"):
        assert latest(tmp_path) is None


@pytest.mark.filterwarnings("ignore:.*is passed over")
def test_a_run_that_was_moved_is_known_where_it_lies(tmp_path: Path) -> None:
    interrupted(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    assert latest(tmp_path / "there") == str(tmp_path / "there" / "checkpoint-2")


@pytest.mark.filterwarnings("ignore:.*is passed over")
def test_a_model_without_other_names_trains_on_in_a_marked_run(tmp_path: Path) -> None:
    interrupted(tmp_path)
    shutil.rmtree(tmp_path / "checkpoint-2")
    assert latest(tmp_path) is None
    trainer, _ = trainer_of(tmp_path, max_steps=2)  # without the callback, so that the checkpoints stay plain
    trainer.train()
    assert latest(tmp_path) == str(tmp_path / "checkpoint-2")
    resumed, _ = trainer_of(tmp_path, TrainWeightsCheckpointCallback())
    resumed.train(resume_from_checkpoint=latest(tmp_path))


def test_only_a_model_with_other_names_marks_its_run(tmp_path: Path) -> None:
    for name in ("llama", "gpt_neox"):
        trainer, _ = trainer_of(tmp_path / name, TrainWeightsCheckpointCallback(), model=build(name))
        trainer.train()
    assert not (tmp_path / "llama" / MARK_NAME).exists()
    assert (tmp_path / "gpt_neox" / MARK_NAME).exists()
