"""An error of any rank, wherever it is raised, ends the work on all ranks alike, and the next work goes on."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint.sharded_states import load_stock_trainer, save_as_trainer
from covering import exhaustive
from ranks import run_ranks
from trees import ADAM_SETTINGS, fingerprint

from hf_trainweights.checkpoint import latest, verify_checkpoint
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.run.job import RewriteJob
from hf_trainweights.checkpoint.run.ranks import Ranks, all_ranks
from hf_trainweights.checkpoint.trainer.callback import Backlog
from hf_trainweights.distributed import latest_on_all_ranks
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files import disk

RANKS = 2
PATIENCE_SECONDS = 20


class Meeting:
    """Where ranks that are threads of this process meet; who waits there in vain is told so."""

    def __init__(self):
        self.barrier = threading.Barrier(RANKS)
        self.said: list[Any] = [None] * RANKS

    def exchange(self, rank: int, kind: str, message: Any) -> list[Any]:
        self.said[rank] = kind, message
        self.barrier.wait(PATIENCE_SECONDS)
        kinds, messages = zip(*self.said, strict=True)
        self.barrier.wait(PATIENCE_SECONDS)
        assert set(kinds) == {kind}
        return list(messages)


class ThreadRanks(Ranks):
    """A rank that is a thread."""

    def __init__(self, rank: int, meeting: Meeting):
        super().__init__()
        self.rank, self.size, self.meeting = rank, RANKS, meeting

    def _scatter(self, messages: list[tuple[bool, bytes]]) -> tuple[bool, bytes]:
        return self.meeting.exchange(self.rank, "scatter", messages)[0][self.rank]

    def _gather(self, message: bytes) -> list[bytes]:
        found = self.meeting.exchange(self.rank, "gather", message)
        return found if self.rank == 0 else []


def in_threads(body: Callable[[Ranks], Any]) -> list[str]:
    """Return how a function ended on each rank: what it returned, or its error, as text."""
    meeting, ends = Meeting(), [""] * RANKS

    def run(rank: int) -> None:
        try:
            ends[rank] = repr(body(ThreadRanks(rank, meeting)))
        except Exception as error:
            ends[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


def fail(text: str) -> Any:
    raise CorruptFileError(text, "a whole file", "none", "Restore it.")


def rank_of_thread() -> str:
    return threading.current_thread().name


class TwoPartError(Exception):
    """An error that is pickled, and then cannot be read."""

    def __init__(self, first: str, second: str):
        super().__init__(f"{first} {second}")


def fail_strangely() -> None:
    raise TwoPartError("a", "b")


class Unreadable:
    """What is pickled, and then cannot be read."""

    def __reduce__(self) -> Any:
        return fail, ("read",)

    def __call__(self) -> None:
        return None


WORKS: dict[str, tuple[Callable[[Ranks], Any], str]] = {
    "nothing fails": (lambda ranks: ranks.share([rank_of_thread] * RANKS), "['rank 0', 'rank 1']"),
    "before the ranks take part": (lambda _: fail("early"), "CorruptFileError: early: expected a whole file"),
    "between": (
        lambda ranks: (ranks.share([rank_of_thread] * RANKS), fail("middle"), ranks.share([rank_of_thread] * RANKS)),
        "CorruptFileError: middle",
    ),
    "on the first rank": (lambda ranks: ranks.share([partial(fail, "first"), rank_of_thread]), "CorruptFileError: fir"),
    "on another": (lambda ranks: ranks.share([rank_of_thread, partial(fail, "second")]), "CorruptFileError: second"),
    "on both": (lambda ranks: ranks.share([partial(fail, "a"), partial(fail, "b")]), "CorruptFileError: a: "),
    "a part that is not pickled": (lambda ranks: ranks.share([rank_of_thread, lambda: None]), "local object"),
    "a part that is not read": (lambda ranks: ranks.share([rank_of_thread, Unreadable()]), "CorruptFileError: read"),
    "an error that is not read": (lambda ranks: ranks.share([rank_of_thread, fail_strangely]), "TwoPartError: a b"),
}


@pytest.mark.parametrize("name", WORKS)
def test_wherever_work_fails_all_ranks_end_alike_and_go_on(name: str) -> None:
    work, expected = WORKS[name]
    again: list[Any] = [None] * RANKS

    def body(ranks: Ranks) -> Any:
        try:
            return ranks.decide(lambda: work(ranks))
        finally:
            again[ranks.rank] = ranks.decide(lambda: "again"), ranks.gather(lambda: ranks.rank)

    ends = in_threads(body)
    assert ends[0] == ends[1]
    assert expected in ends[0]
    assert again == [("again", [0, 1]), ("again", [])]


@pytest.mark.parametrize("failing", range(RANKS))
def test_an_error_of_gathering_is_that_of_the_first_rank_that_had_one(failing: int) -> None:
    ends = in_threads(lambda ranks: ranks.gather(lambda: fail(str(ranks.rank)) if ranks.rank >= failing else None))
    assert [end[:20] for end in ends] == [f"CorruptFileError: {failing}:"] * RANKS


class FailsFor(disk.FileSystem):
    """Fails at one call of one rank."""

    def __init__(self, rank: int, fail_at: int):
        self.rank, self.fail_at, self.count = rank, fail_at, 0

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if not callable(method) or threading.current_thread().name != f"rank {self.rank}":
            return method
        self.count += 1
        if self.count == self.fail_at:
            raise OSError(5, os.strerror(5))
        return method


def state(step: int) -> dict[str, Any]:
    noise = torch.randn(64, 80, generator=torch.Generator().manual_seed(step))
    states = {"w": {"exp_avg": noise, "exp_avg_sq": noise.square(), "step": torch.tensor(float(step))}}
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), **ADAM_SETTINGS, "params": ["w"]}]}
    return {"model": {"w": torch.ones(64, 80) + 1e-3 * noise}, "optimizer": optimizer}


def job_of(directory: Path, ranks: Ranks) -> RewriteJob:
    return RewriteJob(directory, Policy("lossless"), 8, ranks=ranks)


def compress(directory: Path, ranks: Ranks) -> str | None:
    return ranks.decide(lambda: Backlog("warn").make_small(job_of(directory, ranks)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of a small checkpoint and a plain one, which becomes a difference to it."""
    for step in (7, 8):
        save_as_trainer(state(step), tmp_path / "run" / f"checkpoint-{step}", RANKS, step)
    assert in_threads(partial(compress, tmp_path / "run" / "checkpoint-7")) == ["None"] * RANKS
    return tmp_path / "run"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*stored without reference")  # what an anchor that cannot be read costs
@pytest.mark.covering(1)
@pytest.mark.parametrize("step", [5, *exhaustive(1)])
@pytest.mark.parametrize("failing", range(RANKS))
def test_whichever_call_of_a_rank_fails_all_ranks_say_the_same_and_the_checkpoint_becomes_small_later(
    run: Path, tmp_path: Path, failing: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at = errors = 0
    for fail_at in range(1, 1000, step):
        path = Path(shutil.copytree(run, tmp_path / str(fail_at))) / "checkpoint-8"
        system = FailsFor(failing, fail_at)
        with monkeypatch.context() as patch:
            patch.setattr(disk, "file_system", system)
            ends = in_threads(partial(compress, path))
        if system.count < fail_at:
            break
        assert ends[0] == ends[1]
        assert "SaveError" in ends[0] or ends[0] == "None"
        errors += "SaveError" in ends[0]
        assert fingerprint(load_stock_trainer(state(8), path)) == fingerprint(state(8))
        assert in_threads(partial(compress, path)) == ["None"] * RANKS
        assert verify_checkpoint(path).ok
        shutil.rmtree(path.parent)
    assert errors > (20 if failing == 0 else 5) // step


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["ShardedContents", "TrainWeightsWriter", "_rank_tasks"])
def test_whatever_fails_on_the_coordinator_alone_is_an_error_of_all_ranks(
    run: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = "hf_trainweights.checkpoint.sharded.rewriting"
    with monkeypatch.context() as patch:
        patch.setattr(f"{where}.{lost}", lambda *_, **__: fail(lost))
        assert [end[:40] for end in in_threads(partial(compress, run / "checkpoint-8"))] == [
            f"CorruptFileError: {lost}: expected a whole file"[:40]
        ] * RANKS
    assert in_threads(partial(compress, run / "checkpoint-8")) == ["None"] * RANKS


class RefusesNames(disk.FileSystem):
    """A disk on which the first rank may not rename."""

    def rename(self, source: Path, target: Path) -> None:
        raise PermissionError(1, os.strerror(1))


def trains(rank: int, root: Path) -> list[tuple[list[str], int]]:
    """Have two checkpoints made small, the first while the disk refuses; return the errors, and what is small."""
    ranks, backlog, found = Ranks(dist.new_group(backend="gloo")), Backlog("warn"), []
    for step in (7, 8):
        disk.file_system = RefusesNames() if step == 7 and rank == 0 else disk.FileSystem()
        backlog.add(job_of(root / f"checkpoint-{step}", ranks))
        backlog.finish()
        dist.barrier()
        found.append((sorted(path.name for path in backlog._failed), len(list(root.glob("*/*/trainweights.json")))))
        dist.barrier()
    return found


@pytest.mark.slow
def test_an_error_of_the_first_rank_alone_costs_a_run_no_later_checkpoint(tmp_path: Path) -> None:
    for step in (7, 8):
        save_as_trainer(state(step), tmp_path / f"checkpoint-{step}", RANKS, step)
    results = run_ranks(RANKS, trains, tmp_path, timeout_seconds=60)
    assert results[0] == results[1]
    assert [failed for failed, _ in results[0]] == [["checkpoint-7"], []]
    assert all(verify_checkpoint(tmp_path / f"checkpoint-{step}").ok for step in (7, 8))


def test_ranks_wait_a_day_for_one_that_reads_a_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    for name, value in {"is_initialized": True, "get_world_size": RANKS, "get_rank": 1}.items():
        monkeypatch.setattr(dist, name, lambda *_, value=value: value)
    monkeypatch.setattr(dist, "new_group", lambda **options: asked.append(options) or "a group")
    assert all_ranks().size == RANKS
    assert asked == [{"backend": "gloo", "timeout": timedelta(days=1)}]


def looks_alone(rank: int, root: Path) -> str | None:
    group = dist.new_group([1])
    return latest_on_all_ranks(root, group) if rank == 1 else None


@pytest.mark.slow
def test_a_group_without_the_first_of_all_ranks_finds_the_newest_checkpoint(tmp_path: Path) -> None:
    save_as_trainer(state(7), tmp_path / "checkpoint-7", RANKS)
    assert run_ranks(RANKS, looks_alone, tmp_path) == [None, latest(tmp_path)]
    assert latest(tmp_path) is not None
