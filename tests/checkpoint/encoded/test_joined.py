"""A tensor in pieces: each piece is a storage of its own, and a reader gets one tensor, or a typed error."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_trainweights.checkpoint.codecs.exact import PlanesDelta
from hf_trainweights.checkpoint.encoded.decoder import Anchor, AnchorParts, decode_file, open_anchor
from hf_trainweights.checkpoint.encoded.encoder import encode_file
from hf_trainweights.checkpoint.encoded.objects import build_object, stand_ins
from hf_trainweights.checkpoint.encoded.storage_tasks import TensorPlan
from hf_trainweights.checkpoint.encoded.storages import Joined, unshared
from hf_trainweights.checkpoint.encoded.structure import anchor_file_name, seal_structure
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.reading import file_sha256

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.complex128)


def joined_of(flat: torch.Tensor, *sizes: int) -> Joined:
    pieces = {f"w[{i}]": unshared(piece) for i, piece in enumerate(flat.split(list(sizes)))}
    return Joined(pieces, tuple(flat.shape), flat.requires_grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_come_back_as_one_tensor_of_its_own_memory(dtype: torch.dtype) -> None:
    flat = torch.arange(5000).to(dtype)
    joined = joined_of(flat, 3000, 0, 2000)
    encoded = encode_file({"flat": joined, "tied": joined, "other": flat}, {})
    tree = decode_file(encoded.payload, encoded.structure)
    assert torch.equal(tree["flat"], flat)
    assert tree["tied"] is tree["flat"]
    assert tree["flat"].untyped_storage().nbytes() == flat.nbytes
    assert [row.path for row in encoded.report] == ["flat.w[0]", "flat.w[1]", "flat.w[2]", "other"]


def test_a_joined_tensor_has_its_shape_and_needs_its_gradient() -> None:
    joined = Joined({"a": torch.zeros(2, 3), "b": torch.ones(3)}, (3, 3), requires_grad=True)
    encoded = encode_file([joined], {})
    (tensor,) = decode_file(encoded.payload, encoded.structure)
    assert tensor.shape == (3, 3)
    assert tensor.requires_grad
    (empty,) = decode_file(encoded.payload.to("meta"), encoded.structure)
    assert empty.shape == (3, 3)


def changed(change: Callable[[dict[str, Any]], None]) -> tuple[torch.Tensor, str]:
    encoded = encode_file({"flat": joined_of(torch.arange(100.0), 60, 40), "other": torch.ones(7)}, {})
    structure = json.loads(encoded.structure[64:].replace("\u00b7", "."))
    change(structure)
    return encoded.payload, seal_structure(structure)


def views(structure: dict[str, Any]) -> Any:
    return structure["tensors"]


@pytest.mark.parametrize(
    "change",
    [
        lambda s: views(s)[0].update(joined=[]),
        lambda s: views(s)[0].update(joined=7),
        lambda s: views(s)[0].update(joined=[0, 99]),
        lambda s: views(s)[0].update(joined=[0, "1"]),
        lambda s: views(s)[0].update(joined=[0, -1]),
        lambda s: views(s)[0].update(joined=[0, 0]),
        lambda s: views(s)[0].update(joined=[0]),
        lambda s: views(s)[0].update(shape=[101]),
        lambda s: views(s)[0].update(shape="x"),
        lambda s: views(s)[0].pop("shape"),
        lambda s: views(s).append({**views(s)[0]}),
        lambda s: s["storages"][1].update(dtype="int32"),
        lambda s: s.update(tree={"object": ["os.system", {"dict": []}]}),
        lambda s: s.update(tree={"object": ["deepspeed.runtime.zero.config.ZeroStageEnum", "1"]}),
        lambda s: s.update(tree={"object": ["deepspeed.utils.tensor_fragment.fragment_address", 3]}),
        lambda s: s.update(tree={"object": [["x"], {"dict": []}]}),
        lambda s: s.update(tree={"object": "deepspeed"}),
        lambda s: s.update(anchor={"sha256": "0" * 64, "path": f"/{'0' * 64}.anchor", "parts": ["0" * 64]}),
        lambda s: s.update(anchor={"sha256": "0" * 64, "path": f"/{'0' * 64}.anchor", "parts": 3}),
    ],
)
def test_a_structure_that_lies_is_a_typed_error(change: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(CorruptFileError, match="expected"):
        decode_file(*changed(change))


@pytest.mark.parametrize("name", [name for _, name in stand_ins()])
def test_objects_of_known_classes_come_back(name: str) -> None:
    state: Any = 2 if name.endswith("Enum") else {"start": 3, "dtype": torch.float16}
    encoded = encode_file({"object": build_object(name, state)}, {})
    value = decode_file(encoded.payload, encoded.structure)["object"]
    assert f"{type(value).__module__}.{type(value).__qualname__}" == name
    assert value == 2 if name.endswith("Enum") else vars(value) == state


def test_several_anchors_serve_as_one(tmp_path) -> None:
    paths = []
    for number in range(2):
        path = tmp_path / f"{number}.pt"
        with path.open("wb") as file:
            encode_file({f"w{number}": torch.full((5000,), number + 0.5)}, {}, file)
        paths.append(path.rename(tmp_path / anchor_file_name(file_sha256(path))))
    parts = AnchorParts([Anchor(path) for path in paths])
    weights = {f"w{number}": torch.full((5000,), number + 0.5).bfloat16() for number in range(2)}
    plan = {(name,): TensorPlan("weight", name, (PlanesDelta(),), anchor=name) for name in weights}
    encoded = encode_file(weights, plan, anchor=parts, anchor_directory=tmp_path)
    assert sum(row.bytes_out for row in encoded.report) < 200
    decoded = decode_file(encoded.payload, encoded.structure)
    assert all(torch.equal(decoded[name], weights[name]) for name in weights)
    entry = json.loads(encoded.structure[64:].replace("\u00b7", "."))["anchor"]
    assert entry["sha256"] == hashlib.sha256("".join(f"{part}\n" for part in entry["parts"]).encode()).hexdigest()
    assert set(open_anchor(entry).files) == set(paths)
    with pytest.raises(CorruptFileError, match="w7"):
        parts.tensor("w7")
