"""Memory in huge pages: a tensor like any other, advised where Linux takes advice, given back when it is freed."""

from __future__ import annotations

import copy
import io
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_trainweights.huge_pages import empty

HUGE = 1 << 21

linux_with_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(),
    reason="the kernel has no transparent huge pages to ask for",
)


def flags_of(address: int) -> list[str]:
    """Return what Linux says of the mapping that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"no mapping holds {address:#x}")


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no RssAnon")


def round_trips(tensor: Tensor) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return [copy.deepcopy(tensor), torch.load(file, weights_only=True), tensor.clone()]


@pytest.mark.parametrize("shape", [(), (0, 4), (3, 5), (HUGE - 1,), (HUGE,), (3, HUGE // 2 + 1)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_it_is_a_tensor_like_any_other(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = empty(shape, dtype, "cpu")
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert tensor.storage_offset() == 0
    numbers = tensor.view(torch.uint8) if shape else tensor
    numbers.copy_(torch.arange(numbers.numel()).view(numbers.shape) % 100)
    for other in round_trips(tensor):
        assert torch.equal(other.float(), tensor.float())


@pytest.mark.parametrize("shape", [(2, 3), (HUGE, 2)])
def test_other_devices_have_their_own_memory(shape: tuple[int, ...]) -> None:
    assert empty(shape, torch.int8, "meta").is_meta
    assert empty(shape, torch.int8, torch.device("meta")).is_meta


@linux_with_huge_pages
def test_only_pages_that_are_filled_are_asked_for() -> None:
    tensor = empty((2 * HUGE + 5000,), torch.int8, "cpu").fill_(1)
    start = tensor.data_ptr()
    assert start % HUGE == 0
    assert "hg" in flags_of(start)
    assert "hg" in flags_of(start + 2 * HUGE - 1)
    assert "hg" not in flags_of(start + 2 * HUGE)


@linux_with_huge_pages
def test_what_is_freed_goes_back_at_once() -> None:
    before = anonymous_bytes()
    tensor = empty((64 * HUGE,), torch.int8, "cpu").fill_(1)
    view = tensor[5:]
    del tensor
    assert anonymous_bytes() - before > 60 * HUGE
    del view
    assert anonymous_bytes() - before < 4 * HUGE


def test_a_kernel_may_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *args: Any) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    assert empty((2, HUGE), torch.int8, "cpu").fill_(3).sum() == 6 * HUGE


def test_other_systems_take_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    monkeypatch.delattr(mmap, "mmap")
    assert empty((2, HUGE), torch.int8, "cpu").fill_(3).sum() == 6 * HUGE
