"""Tensors whose memory is a file without a name."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from pathlib import Path

import pytest
import torch
from fork_server import exit_code_of_fork

from hf_trainweights.errors import SaveError
from hf_trainweights.files.spill import Spill

LARGE = (512, 512)
M_MMAP_THRESHOLD = -3  # of mallopt(3)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [LARGE, (3, 128, 257), (4,), ()], ids=str)
def test_a_kept_tensor_has_the_same_values_in_memory_of_its_own(
    shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    tensor = torch.randint(256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).view(shape)
    kept = Spill(tmp_path).keep(tensor)
    assert (kept.shape, kept.dtype, kept.is_contiguous()) == (tensor.shape, dtype, True)
    assert torch.equal(kept.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
    assert kept.untyped_storage().nbytes() == tensor.nbytes
    assert list(tmp_path.iterdir()) == []


def test_a_transposed_tensor_is_kept_row_by_row(tmp_path: Path) -> None:
    tensor = torch.arange(512 * 512).view(512, 512).t()
    kept = Spill(tmp_path).keep(tensor)
    assert torch.equal(kept, tensor)
    assert kept.is_contiguous()


def test_tensors_can_be_written_to_and_live_apart(tmp_path: Path) -> None:
    spill = Spill(tmp_path)
    one, other = (spill.empty(LARGE, torch.int8) for _ in range(2))
    assert not one.any()
    one[3] = 7
    assert int(one.sum()) == 7 * 512
    assert not other.any()


def test_what_is_small_or_elsewhere_stays_where_it_is(tmp_path: Path) -> None:
    for tensor in (torch.ones(4), torch.empty(LARGE, device="meta")):
        assert Spill(tmp_path).keep(tensor) is tensor


def test_files_lie_beside_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    assert Spill(tmp_path / "new" / "model").empty(LARGE, torch.int8).shape == LARGE
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_fallocate", [True, False])
def test_a_disk_without_room_is_an_error_before_a_page_is_written(
    has_fallocate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_fallocate:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
        assert not Spill(tmp_path).empty(LARGE, torch.int8).any()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(SaveError, match=r"expected enough free disk space, found .*File too large"):
            Spill(tmp_path).empty(LARGE, torch.int8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def keep_many(directory: Path) -> None:
    """Keep 160 MB in 40 files with 32 descriptors and 96 MB of memory that no file backs."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)  # what is freed counts no more
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    lines = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + (96 << 20), used + (96 << 20)))
    torch.set_num_threads(1)
    spill = Spill(directory)
    kept = [spill.keep(torch.full((1 << 22,), number % 100, dtype=torch.int8)) for number in range(40)]
    assert [int(each[-1]) for each in kept] == [number % 100 for number in range(40)]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit the memory that no file backs")
def test_tensors_take_neither_memory_nor_descriptors(tmp_path: Path) -> None:
    assert exit_code_of_fork(keep_many, tmp_path) == 0
