"""What a sharded save leaves when a rank is killed, the power fails or the disk is full, at every single call."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint.sharded.states import differing, failures, load, save, sharded, whole_state
from covering import by_default, exhaustive
from ranks import outcomes_of_ranks, run_ranks
from simulated_disk import OUTCOMES, FailingDisk, replay
from torch.distributed.checkpoint.filesystem import FileSystemReader

from hf_trainweights.checkpoint import verify_checkpoint
from hf_trainweights.distributed import TrainWeightsReader
from hf_trainweights.errors import CorruptFileError, SaveError
from hf_trainweights.files import disk

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]


def small_state(number: int) -> dict[str, Any]:
    """Return a state of one weight, its moments and an object."""
    noise = torch.randn(64, 80, generator=torch.Generator().manual_seed(number))
    weight = torch.randn(64, 80, generator=torch.Generator().manual_seed(99)) + 1e-3 * noise
    states = {"w": {"exp_avg": noise, "exp_avg_sq": noise.square(), "step": torch.tensor(float(number))}}
    return {"model": {"w": weight}, "optim": {"state": states, "param_groups": [{"lr": 0.1, "params": ["w"]}]}}


def found_number(path: Path, reader: type) -> int | None:
    """Return the number of the state that a checkpoint holds, whole; None if it says that it is none."""
    loaded: dict[str, Any] = {}
    errors = failures(lambda: loaded.update(load(path, reader, small_state(-1))))
    assert reader is not TrainWeightsReader or all(isinstance(error, CorruptFileError) for error in errors.values())
    if errors:
        return None
    number = int(loaded["optim"]["state"]["w"]["step"])
    assert differing(loaded, small_state(number)) == []
    return number


@pytest.mark.parametrize("reader", [TrainWeightsReader, FileSystemReader])
def test_a_save_to_a_new_directory_is_whole_or_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: type
) -> None:
    root = tmp_path / "run"
    save(root / "1", small_state(1))
    found = []
    for when in replay(root, lambda: save(root / "2", small_state(2), anchor=root / "1"), monkeypatch):
        assert found_number(root / "1", reader) == 1, when
        found.append(found_number(root / "2", reader))
    assert set(found) == {None, 2}
    assert set(found[-len(OUTCOMES) :]) == {2}


@pytest.mark.parametrize(
    "anchored", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["full", "against itself"]
)
def test_a_save_over_a_checkpoint_leaves_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anchored: bool
) -> None:
    root = tmp_path / "run"
    save(root / "1", small_state(1))
    found = []
    anchor = root / "1" if anchored else None
    for when in replay(root, lambda: save(root / "1", small_state(2), anchor=anchor), monkeypatch):
        numbers = [found_number(root / "1", reader) for reader in (TrainWeightsReader, FileSystemReader)]
        assert set(numbers) <= {1, 2}, when
        found.append(numbers)
    assert found[0] == [1, 1]
    assert found[-1] == [2, 2]
    save(root / "1", small_state(2), anchor=anchor)
    assert verify_checkpoint(root / "1").ok


def test_a_save_over_a_killed_one_removes_what_that_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "run"
    save(root / "1", small_state(1))
    for _ in replay(root, lambda: save(root / "1", small_state(2)), monkeypatch):
        if len(list((root / "1").glob("__*.distcp"))) == 4:
            break
    save(root / "1", small_state(3))
    assert found_number(root / "1", TrainWeightsReader) == 3
    assert len(list((root / "1").glob("__*.distcp"))) == 2
    assert verify_checkpoint(root / "1").problems == {}


@pytest.mark.parametrize("number", [errno.ENOSPC, *exhaustive(errno.EIO)], ids=["disk full", "input/output error"])
def test_a_failing_disk_costs_nothing_but_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    root = tmp_path / "run"
    save(root / "1", small_state(1))
    fail_at = 0
    for fail_at in range(1, 1000):
        failing = FailingDisk(fail_at, number, for_good=True)
        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*stored without reference")
            patch.setattr(disk, "file_system", failing)
            errors = failures(lambda: save(root / "2", small_state(2), anchor=root / "1"))
        if failing.count < fail_at:
            break
        assert all(isinstance(error, SaveError) and os.strerror(number) in str(error) for error in errors.values())
        assert found_number(root / "1", TrainWeightsReader) == 1
        assert found_number(root / "2", TrainWeightsReader) in (None, 2)
        shutil.rmtree(root / "2", ignore_errors=True)
    assert fail_at > 20
    assert found_number(root / "2", TrainWeightsReader) == 2


class DyingDisk(disk.FileSystem):
    """Ends the process, as kill -9 does, at one of its renames: `before` it happens or after it."""

    def __init__(self, die_at: int, before: bool):
        self.die_at, self.before, self.count = die_at, before, 0

    def rename(self, source: Path, target: Path) -> None:
        self.count += 1
        if self.count == self.die_at and self.before:
            os._exit(9)
        super().rename(source, target)
        if self.count == self.die_at:
            os._exit(9)


def saves_and_dies(rank: int, path: Path, dying: int, die_at: int, before: bool) -> None:
    if rank == dying:
        disk.file_system = DyingDisk(die_at, before)
    dist.barrier()
    save(path, sharded(whole_state(2)), anchor=path)


def saves(rank: int, path: Path, number: int) -> None:
    save(path, sharded(whole_state(number)))


def loads_one(rank: int, path: Path) -> int:
    loaded = load(path)
    number = loaded["progress"]["save"]
    assert differing(loaded, whole_state(number)) == []
    return number


# Rank 1 renames its two files; the coordinator its two, the manifest and `.metadata`.
@pytest.mark.parametrize(
    ("dying", "die_at", "before", "left"),
    [
        (0, 3, False, 2),
        *exhaustive((1, 2, False, 1), (1, 1, True, 1), (0, 2, True, 1), (0, 3, True, 1), (0, 4, False, 2)),
    ],
)
def test_a_rank_that_is_killed_leaves_all_ranks_the_old_or_the_new_checkpoint(
    tmp_path: Path, dying: int, die_at: int, before: bool, left: int
) -> None:
    path = tmp_path / "checkpoint"
    run_ranks(2, saves, path, 1)
    outcomes = outcomes_of_ranks(2, saves_and_dies, path, dying, die_at, before, timeout_seconds=30)
    assert outcomes[dying].text == "it ended with exit code 9"
    assert run_ranks(2, loads_one, path) == [left, left]
    run_ranks(2, saves, path, 3)
    assert run_ranks(2, loads_one, path) == [3, 3]
    assert verify_checkpoint(path).problems == {}


def save_on_a_full_disk(rank: int, path: Path, full: int) -> str:
    if rank == full:
        disk.file_system = FailingDisk(4, errno.ENOSPC, for_good=True)
    ((failed, error),) = failures(lambda: save(path, sharded(whole_state(2)))).items()
    assert failed == full
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("full", by_default((1,), (0, 1)))
def test_a_rank_without_disk_space_is_an_error_on_every_rank(tmp_path: Path, full: int) -> None:
    path = tmp_path / "checkpoint"
    run_ranks(2, saves, path, 1)
    texts = run_ranks(2, save_on_a_full_disk, path, full)
    assert texts[0] == texts[1]
    assert "SaveError" in texts[0]
    assert "enough free disk space" in texts[0]
    assert run_ranks(2, loads_one, path) == [1, 1]
