"""Sharded checkpoints between different numbers of ranks, each a process."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint.sharded.states import differing, load, save, sharded, whole_state
from covering import by_default
from ranks import run_ranks
from torch.distributed.checkpoint.filesystem import FileSystemReader

from hf_trainweights.checkpoint import verify_checkpoint
from hf_trainweights.distributed import TrainWeightsReader

pytestmark = pytest.mark.slow

WORLD_SIZES = (1, 2, 3, 4)


def saves_full_and_difference(rank: int, directory: Path) -> None:
    for number in range(2):
        anchor = directory / str(number - 1) if number else None
        save(directory / str(number), sharded(whole_state(number)), anchor=anchor)


def loads_all(rank: int, directory: Path) -> list[str]:
    return [
        f"save {number}, {reader.__name__}: {name}"
        for number in range(2)
        for reader in (TrainWeightsReader, FileSystemReader)
        for name in differing(load(directory / str(number), reader), whole_state(number))
    ]


@pytest.fixture(scope="module", params=by_default((2,), WORLD_SIZES))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """Return a number of ranks, and the directory of what they have saved."""
    directory = tmp_path_factory.mktemp("lossless")
    run_ranks(request.param, saves_full_and_difference, directory)
    return request.param, directory


@pytest.mark.parametrize("world_size", by_default((3,), WORLD_SIZES))
def test_what_any_number_of_ranks_saved_comes_back_bit_for_bit_on_any_other(
    saved: tuple[int, Path], world_size: int
) -> None:
    assert run_ranks(world_size, loads_all, saved[1]) == [[]] * world_size


def test_every_byte_is_in_the_manifest(saved: tuple[int, Path]) -> None:
    world_size, directory = saved
    reports = [verify_checkpoint(directory / str(number)) for number in range(2)]
    assert [report.ok for report in reports] == [True, True]
    assert [len(list(report.path.glob("*.anchor"))) for report in reports] == [0, world_size]
