"""Sharded checkpoints between different numbers of ranks, each a process."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint.sharded.states import differing, load, save, sharded, whole_state
from covering import exhaustive
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


def loads_all(rank: int, directory: Path, world_sizes: tuple[int, ...]) -> list[str]:
    return [
        f"{world_size} ranks, save {number}, {reader.__name__}: {name}"
        for world_size in world_sizes
        for number in range(2)
        for reader in (TrainWeightsReader, FileSystemReader)
        for name in differing(load(directory / str(world_size) / str(number), reader), whole_state(number))
    ]


@pytest.fixture(scope="module")
def lossless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lossless")
    for world_size in WORLD_SIZES:
        (directory / str(world_size)).mkdir()
        run_ranks(world_size, saves_full_and_difference, directory / str(world_size))
    return directory


@pytest.mark.parametrize("world_size", [3, *exhaustive(1, 2, 4)])
def test_what_any_number_of_ranks_saved_comes_back_bit_for_bit_on_any_other(lossless: Path, world_size: int) -> None:
    assert run_ranks(world_size, loads_all, lossless, WORLD_SIZES) == [[]] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_byte_is_in_the_manifest(lossless: Path, world_size: int) -> None:
    reports = [verify_checkpoint(lossless / str(world_size) / str(number)) for number in range(2)]
    assert [report.ok for report in reports] == [True, True]
    assert [len(list(report.path.glob("*.anchor"))) for report in reports] == [0, world_size]
