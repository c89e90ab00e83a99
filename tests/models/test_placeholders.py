"""What is filled in is what would have been written at once, whatever the files call it; anything else is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from weights import LAYOUTS, same_bytes, same_stored

from hf_trainweights import QuantizedTensor
from hf_trainweights.errors import CorruptFileError, SaveError
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.kernels.int4_tiles import Int4Tiles
from hf_trainweights.models.placeholders import Placeholders

DTYPES = [torch.uint8, torch.int8, torch.int32, torch.bfloat16, torch.float32, torch.float8_e4m3fn]


def random_bytes(*shape: int, dtype: torch.dtype = torch.uint8, seed: int = 0) -> Tensor:
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).view(dtype)


def put(placeholders: Placeholders, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return placeholders.put("weight", {key: tensor.to("meta") for key, tensor in tensors.items()}, lambda: tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_filled_file_is_the_file_of_the_tensors(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {name: random_bytes(5, size, dtype=dtype, seed=size) for name, size in {"b": 16, "a": 33, "c": 7}.items()}
    others = {"bias": random_bytes(16), "empty": torch.empty(0), "flag": torch.tensor(True)}
    placeholders = Placeholders()
    save_file(put(placeholders, tensors) | others, tmp_path / "filled", metadata={"format": "pt"})
    placeholders.fill([tmp_path / "filled"])
    save_file(tensors | others, tmp_path / "at_once", metadata={"format": "pt"})
    assert (tmp_path / "filled").read_bytes() == (tmp_path / "at_once").read_bytes()


def test_names_and_files_may_be_others(tmp_path: Path) -> None:
    tensors = {"qdata": random_bytes(4, 8), "scale": random_bytes(4, 8, seed=1)}
    placeholders = Placeholders()
    stand_ins = put(placeholders, tensors)
    save_file({"renamed": stand_ins["scale"]}, tmp_path / "first")
    save_file({"other": stand_ins["qdata"]}, tmp_path / "second")
    placeholders.fill([tmp_path / "first", tmp_path / "second"])
    assert torch.equal(load_file(tmp_path / "first")["renamed"], tensors["scale"])
    assert torch.equal(load_file(tmp_path / "second")["other"], tensors["qdata"])


def test_tensors_without_room_for_a_mark_are_made_at_once() -> None:
    tensors = {"qdata": random_bytes(4, 8), "scale": random_bytes(3)}
    assert put(Placeholders(), tensors) == tensors


def test_groups_are_made_one_after_the_other(tmp_path: Path) -> None:
    made: list[str] = []

    def make(name: str) -> dict[str, Tensor]:
        made.append(name)
        return {name: random_bytes(32, seed=len(made))}

    placeholders, stand_ins = Placeholders(), {}
    for name in ("a", "b", "c"):
        like = {name: torch.empty(32, dtype=torch.uint8, device="meta")}
        stand_ins |= placeholders.put(name, like, lambda name=name: make(name))
    save_file(stand_ins, tmp_path / "file")
    assert made == []
    placeholders.fill([tmp_path / "file"])
    assert made == ["a", "b", "c"]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(64, 128), (2, 64, 128)], ids=["matrix", "experts"])
def test_a_weight_in_a_private_layout_is_written_in_its_canonical_one(
    shape: tuple[int, ...], transposed: bool, tmp_path: Path
) -> None:
    form, weight = Int4(32), torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    canonical = QuantizedTensor(form.quantize(weight), form, shape, weight.dtype, transposed)
    placeholders = Placeholders()
    stand_in = placeholders.stand_in("w", canonical.in_layout(Int4Tiles(32, 32)))
    assert (stand_in.format, stand_in.shape, stand_in.dtype) == (form, canonical.shape, weight.dtype)
    save_file(stand_in.tensors, tmp_path / "file")
    placeholders.fill([tmp_path / "file"])
    found = load_file(tmp_path / "file")
    assert same_stored(QuantizedTensor(found, form, shape, weight.dtype, transposed), canonical)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_weight_in_its_canonical_layout_stands_for_itself(layout: str) -> None:
    shape, transposed = LAYOUTS[layout]
    weight = QuantizedTensor.quantize(torch.ones(shape), Int4(32), transposed)
    assert Placeholders().stand_in("w", weight) is weight


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda stand_in: stand_in.view(8, 4), r"32 bytes of shape \(8, 4\)"),
        (lambda stand_in: stand_in[:2].clone(), r"16 bytes of shape \(2, 8\)"),
        (lambda stand_in: stand_in.short(), "nothing in the files"),
    ],
    ids=["reshaped", "split", "cast"],
)
def test_a_placeholder_that_was_changed_is_refused(change: object, found: str, tmp_path: Path) -> None:
    assert callable(change)
    placeholders = Placeholders()
    stand_in = put(placeholders, {"qdata": random_bytes(4, 8)})["qdata"]
    save_file({"qdata": change(stand_in)}, tmp_path / "file")
    with pytest.raises(SaveError, match=rf"weight, qdata: expected torch\.uint8 of shape \(4, 8\).*found {found}"):
        placeholders.fill([tmp_path / "file"])


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    placeholders = Placeholders()
    put(placeholders, {"qdata": random_bytes(4, 8)})
    (tmp_path / "file").write_bytes(b"none")
    with pytest.raises(CorruptFileError, match="safetensors header"):
        placeholders.fill([tmp_path / "file"])


def test_without_placeholders_no_file_is_read(tmp_path: Path) -> None:
    Placeholders().fill([tmp_path / "missing"])


def test_a_placeholder_equals_no_other_bytes() -> None:
    stand_ins = put(Placeholders(), {"a": random_bytes(32), "b": random_bytes(32)})
    assert not same_bytes(stand_ins["a"], stand_ins["b"])
    assert stand_ins["a"].untyped_storage().data_ptr() != stand_ins["b"].untyped_storage().data_ptr()
