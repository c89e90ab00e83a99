"""A file that is written tensor by tensor is, byte for byte, the file that safetensors writes at once."""

from __future__ import annotations

import struct
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_trainweights.errors import SaveError
from hf_trainweights.files.safetensors_file import (
    TensorToWrite,
    align_int8,
    read_safetensors_header,
    rename_tensors,
    write_safetensors,
)

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn),
    *(torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
]
METADATA = {"format": "pt"}


def random_tensor(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    numbers = torch.randint(
        2, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return numbers.view(dtype).view(shape)


def lazily(tensors: dict[str, Tensor]) -> dict[str, TensorToWrite]:
    return {name: TensorToWrite(tuple(t.shape), t.dtype, lambda t=t: t) for name, t in tensors.items()}


def assert_same_file(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    write_safetensors(tmp_path / "ours", lazily(tensors), METADATA)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs", METADATA)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_tensors_of_all_dtypes_lie_as_in_the_file_of_safetensors(tmp_path: Path) -> None:
    tensors = {f"{name}.{dtype}": random_tensor(3, 5, dtype=dtype) for dtype in DTYPES for name in "zma"}
    assert_same_file(tensors, tmp_path)


@pytest.mark.parametrize("length", range(8))
def test_the_header_is_padded_as_in_the_file_of_safetensors(length: int, tmp_path: Path) -> None:
    assert_same_file({"w" * (length + 1): torch.ones(2)}, tmp_path)


@pytest.mark.parametrize(
    "tensors",
    [
        {"empty": torch.empty(0, 3), "scalar": torch.tensor(1.5), "last": torch.ones(1)},
        {"transposed": torch.arange(6.0).view(2, 3).t(), "every_other": torch.arange(8)[::2]},
        {'quote" \\ \n\u00e9\u2028\x01': torch.ones(2), "format": torch.zeros(1)},
        {},
    ],
    ids=["shapes", "strides", "names", "nothing"],
)
def test_unusual_tensors_lie_as_in_the_file_of_safetensors(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    assert_same_file(tensors, tmp_path)


def test_tensors_are_made_one_after_the_other(tmp_path: Path) -> None:
    made: list[weakref.ref[Tensor]] = []

    def make() -> Tensor:
        assert all(earlier() is None for earlier in made), "an earlier tensor is still there"
        made.append(weakref.ref(tensor := torch.full((4,), float(len(made)))))
        return tensor

    write_safetensors(tmp_path / "file", {name: TensorToWrite((4,), torch.float32, make) for name in "cab"}, METADATA)
    assert {name: tensor[0].item() for name, tensor in load_file(tmp_path / "file").items()} == {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize("made", [torch.ones(3), torch.ones(2, dtype=torch.float16)], ids=["shape", "dtype"])
def test_a_tensor_that_is_not_the_one_that_was_announced_is_refused(made: Tensor, tmp_path: Path) -> None:
    announced = {"w": TensorToWrite((2,), torch.float32, lambda: made)}
    with pytest.raises(SaveError, match=r"w: expected torch\.float32 of shape \(2,\), as was said, found torch\."):
        write_safetensors(tmp_path / "file", announced, METADATA)


def test_renamed_tensors_keep_their_bytes_and_the_length_of_the_file(tmp_path: Path) -> None:
    tensors = {f"layer.{dtype}": random_tensor(3, 5, dtype=dtype) for dtype in DTYPES} | {"\u00e9": torch.ones(2)}
    save_file(tensors, tmp_path / "file", METADATA)
    size = (tmp_path / "file").stat().st_size
    rename_tensors(tmp_path / "file", lambda name: name.removeprefix("layer."))
    renamed = load_file(tmp_path / "file")
    assert renamed.keys() == {name.removeprefix("layer.") for name in tensors}
    for name, tensor in tensors.items():
        assert torch.equal(renamed[name.removeprefix("layer.")].view(torch.uint8), tensor.view(torch.uint8))
    assert (tmp_path / "file").stat().st_size == size
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert file.metadata() == METADATA


def test_a_file_without_names_to_change_is_not_written(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "file", METADATA)
    before = (tmp_path / "file").stat().st_mtime_ns
    rename_tensors(tmp_path / "file", lambda name: name)
    assert (tmp_path / "file").stat().st_mtime_ns == before


@pytest.mark.parametrize(("new", "found"), [("a longer one", "longer"), ("b", "same new name")])
def test_a_name_that_does_not_fit_is_refused_before_a_byte_is_written(new: str, found: str, tmp_path: Path) -> None:
    save_file({"aa": torch.ones(2), "b": torch.ones(2)}, tmp_path / "file", METADATA)
    before = (tmp_path / "file").read_bytes()
    with pytest.raises(AssertionError, match=found):
        rename_tensors(tmp_path / "file", lambda name: new if name == "aa" else name)
    assert (tmp_path / "file").read_bytes() == before


def int8_starts(file: Path) -> list[int]:
    """Return the addresses of the int8 tensors within the page-aligned memory that a file is mapped to."""
    data = 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]
    entries = read_safetensors_header(file).values()
    return sorted(data + entry["data_offsets"][0] for entry in entries if entry["dtype"] == "I8")


@pytest.mark.covering(1)
@pytest.mark.parametrize("length", range(1, 17))
@pytest.mark.parametrize("columns", [32, 9_000_000])
def test_int8_tensors_are_aligned_whatever_the_length_of_the_header(tmp_path: Path, length: int, columns: int) -> None:
    codes = (torch.arange(columns) % 251 - 125).to(torch.int8)
    # Sorted behind wider dtypes; 9 MB is more than is moved at a time.
    tensors = {"x" * length: codes, "y": codes[:32].clone(), "head.bias": torch.arange(4, dtype=torch.bfloat16)}
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    align_int8(file)
    assert {start % 16 for start in int8_starts(file)} == {0}
    once = file.read_bytes()
    align_int8(file)
    assert file.read_bytes() == once
    stored = load_file(file)
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())


def test_a_file_whose_int8_tensors_cannot_be_aligned_stays_as_it_is(tmp_path: Path) -> None:
    tensors = {"codes": torch.ones(32, dtype=torch.int8), "head.bias": torch.zeros(3, dtype=torch.bfloat16)}
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    before = file.read_bytes()
    align_int8(file)
    assert file.read_bytes() == before
    assert [start % 8 for start in int8_starts(file)] == [6]
