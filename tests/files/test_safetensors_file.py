"""A file that is written tensor by tensor is, byte for byte, the file that safetensors writes at once."""

from __future__ import annotations

import hashlib
import struct
import weakref
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_trainweights.errors import SaveError
from hf_trainweights.files.safetensors_file import TensorToWrite, read_safetensors_header, write_safetensors

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
    return {name: TensorToWrite.of(tensor) for name, tensor in tensors.items()}


def assert_same_file(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    write_safetensors(tmp_path / "ours", lazily(tensors), METADATA)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs", METADATA)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_tensors_of_all_dtypes_lie_as_in_the_file_of_safetensors(tmp_path: Path) -> None:
    tensors = {f"{name}.{dtype}": random_tensor(3, 5, dtype=dtype) for dtype in DTYPES for name in "zma"}
    assert_same_file(tensors, tmp_path)


@pytest.mark.skipif(torch.float4_e2m1fn_x2 not in safetensors.torch._SIZE, reason="an older safetensors has no float4")
def test_pairs_of_float4_lie_as_in_the_file_of_safetensors(tmp_path: Path) -> None:
    assert_same_file({"weight": random_tensor(3, 4, dtype=torch.float4_e2m1fn_x2)}, tmp_path)


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


@pytest.mark.parametrize("names", [{}, {"layer.a": "a", "layer.b": "b"}], ids=["as they are", "renamed"])
def test_the_digest_is_that_of_the_file(names: dict[str, str], tmp_path: Path) -> None:
    tensors = {f"layer.{name}": torch.arange(5.0) for name in "ab"} | {"large": torch.zeros(300_001)}
    sha256 = write_safetensors(tmp_path / "file", lazily(tensors), METADATA, lambda name: names.get(name, name))
    assert sha256 == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()


def test_renamed_tensors_lie_where_they_lay_under_their_old_names(tmp_path: Path) -> None:
    tensors = {f"layer.{dtype}": random_tensor(3, 5, dtype=dtype) for dtype in DTYPES} | {"\u00e9": torch.ones(2)}
    write_safetensors(tmp_path / "old", lazily(tensors), METADATA)
    write_safetensors(tmp_path / "new", lazily(tensors), METADATA, lambda name: name.removeprefix("layer."))
    old, new = (read_safetensors_header(tmp_path / name) for name in ("old", "new"))
    assert new == {name.removeprefix("layer."): entry for name, entry in old.items()}
    assert (tmp_path / "old").stat().st_size == (tmp_path / "new").stat().st_size
    renamed = load_file(tmp_path / "new")
    for name, tensor in tensors.items():
        assert torch.equal(renamed[name.removeprefix("layer.")].view(torch.uint8), tensor.view(torch.uint8))
    with safe_open(tmp_path / "new", framework="pt") as file:
        assert file.metadata() == METADATA


@pytest.mark.parametrize(("new", "found"), [("a much longer one", "longer"), ("b", "same new name")])
def test_a_name_that_does_not_fit_is_refused_before_a_byte_is_written(new: str, found: str, tmp_path: Path) -> None:
    tensors = lazily({"aa": torch.ones(2), "b": torch.ones(2)})
    with pytest.raises(AssertionError, match=found):
        write_safetensors(tmp_path / "file", tensors, METADATA, lambda name: new if name == "aa" else name)
    assert not (tmp_path / "file").exists()


def int8_starts(file: Path) -> list[int]:
    """Return the addresses of the int8 tensors within the page-aligned memory that a file is mapped to."""
    data = 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]
    entries = read_safetensors_header(file).values()
    return sorted(data + entry["data_offsets"][0] for entry in entries if entry["dtype"] == "I8")


@pytest.mark.slow
@pytest.mark.parametrize("length", range(1, 17))
def test_int8_tensors_are_aligned_whatever_the_length_of_the_header(tmp_path: Path, length: int) -> None:
    codes = (torch.arange(9000) % 251 - 125).to(torch.int8)[:8992]
    # Sorted behind wider dtypes.
    tensors = {"x" * length: codes, "y": codes[:32].clone(), "head.bias": torch.arange(4, dtype=torch.bfloat16)}
    write_safetensors(tmp_path / "model.safetensors", lazily(tensors), METADATA)
    assert {start % 16 for start in int8_starts(tmp_path / "model.safetensors")} == {0}
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())


def test_a_file_whose_int8_tensors_cannot_be_aligned_is_that_of_safetensors(tmp_path: Path) -> None:
    tensors = {"codes": torch.ones(32, dtype=torch.int8), "head.bias": torch.zeros(3, dtype=torch.bfloat16)}
    assert_same_file(tensors, tmp_path)
    assert [start % 8 for start in int8_starts(tmp_path / "ours")] == [6]
