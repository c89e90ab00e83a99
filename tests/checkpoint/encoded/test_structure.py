from __future__ import annotations

import hashlib
import io
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trees import encoded_bytes, fingerprint

from hf_trainweights.checkpoint.encoded.decoder import decode_file
from hf_trainweights.checkpoint.encoded.encoder import encode_file
from hf_trainweights.checkpoint.encoded.structure import (
    cut_payload,
    open_structure,
    padded_length,
    payload_crc32,
    seal_structure,
    storage_name,
)
from hf_trainweights.checkpoint.encoded.tree import flatten
from hf_trainweights.errors import CorruptFileError

# Written down once, to be read for ever.
TREE = {
    "step": torch.tensor(3, dtype=torch.int32),
    "layers.0.weight": torch.tensor([[1.0, -2.0], [0.5, 4.0]]),
    "lr": 0.5,
}
TREE["tied"] = TREE["layers.0.weight"].t()
PAYLOAD = bytes.fromhex("03000000 000000000000000000000000 0000803f 000000c0 0000003f 00008040")
STRUCTURE = (
    "{digest}"
    '{"version":1,"tree":{"dict":[["step",{"tensor":0}],["layers·0·weight",{"tensor":1}],["lr",0·5],["tied",{"tensor":2}]]},'
    '"tensors":[{"storage":0},{"storage":1,"shape":[2,2]},{"storage":1,"shape":[2,2],"stride":[1,2]}],'
    '"storages":[{"codec":"raw","dtype":"int32","shape":[],"sizes":[4],"crc32":871461106},'
    '{"codec":"raw","dtype":"float32","shape":[4],"sizes":[16],"crc32":2569562473}]}'
)
STRUCTURE = STRUCTURE.replace("{digest}", hashlib.sha256(STRUCTURE.removeprefix("{digest}").encode()).hexdigest())


def test_file_written_down_here_is_read_for_ever():
    payload = torch.tensor(list(PAYLOAD), dtype=torch.uint8)
    back = decode_file(payload, STRUCTURE)
    assert fingerprint(back) == fingerprint(TREE)
    back["layers.0.weight"][0, 1] = 9
    assert back["tied"][1, 0] == 9


def test_file_is_written_as_it_is_written_down_here():
    encoded = encode_file(TREE, {})
    assert encoded.structure == STRUCTURE
    assert bytes(encoded.payload.tolist()) == PAYLOAD


def test_pickle_is_one_call_with_payload_and_structure():
    data = encoded_bytes(encode_file(TREE, {}))
    assert b"\x80\x02chf_trainweights\ndecode_file\n" in data
    assert data.count(b"decode_file") == 1
    assert STRUCTURE.encode() + b"q\x0d\x86q\x0eRq\x0f." in data


def test_structure_survives_its_text():
    content = {
        "version": 1,
        "storages": [],
        "tree": ["a.b", "\u00b7", 0.1, 1e-9, "\\u002e", {"x.y": None}],
        "tensors": [],
    }
    text = seal_structure(content)
    assert "." not in text
    assert open_structure(text) == content


@pytest.mark.slow
@given(st.text(), st.floats(allow_nan=False, allow_infinity=False))
def test_any_text_and_number_survive_without_a_full_stop(text, number):
    content = {"version": 1, "storages": [], "tree": [text, number]}
    sealed = seal_structure(content)
    assert "." not in sealed
    assert sealed[64:].isascii() is ("·" not in sealed[64:])
    assert json.dumps(open_structure(sealed)) == json.dumps(content)


def test_not_a_number_is_never_written_as_one():
    with pytest.raises(ValueError, match="not JSON compliant"):
        seal_structure({"tree": float("nan")})


@given(st.integers(0, 1 << 40))
def test_padded_length_is_the_smallest_without_the_byte_46(length):
    padded = padded_length(length)
    assert padded >= length
    assert b"." not in padded.to_bytes(8, "little")
    assert padded == length or b"." in length.to_bytes(8, "little")
    assert padded - length <= 1 + length // 46


def test_pieces_lie_at_multiples_of_sixteen():
    payload = torch.arange(40, dtype=torch.uint8)
    first, second = cut_payload({"storages": [{"sizes": [3, 0, 5]}, {"sizes": [8]}], "tensors": []}, payload)
    assert [piece.tolist() for piece in first] == [[0, 1, 2], [], list(range(16, 21))]
    assert [piece.tolist() for piece in second] == [list(range(32, 40))]
    with pytest.raises(
        CorruptFileError, match=r"storage 1, from byte 32 of the payload on: expected 9 bytes, found 8 bytes"
    ):
        cut_payload({"storages": [{"sizes": [3, 0, 5]}, {"sizes": [9]}], "tensors": []}, payload)
    with pytest.raises(CorruptFileError, match=r"the payload: expected 37 bytes, found 40 bytes"):
        cut_payload({"storages": [{"sizes": [3, 0, 5]}, {"sizes": [5]}], "tensors": []}, payload)


def test_crc_is_that_of_the_joined_pieces():
    payload = torch.arange(100, dtype=torch.uint8)
    assert payload_crc32([payload]) == payload_crc32([payload[:31], payload[31:31], payload[31:]])
    assert payload_crc32([]) == 0


def test_loading_twice_gives_separate_memory():
    data = encoded_bytes(encode_file(TREE, {}))
    first, second = (torch.load(io.BytesIO(data), weights_only=True) for _ in range(2))
    first["tied"].zero_()
    assert fingerprint(second) == fingerprint(TREE)


def test_storage_is_called_by_the_key_path_of_its_first_tensor():
    weight = torch.zeros(4)
    structure, _ = flatten({"lr": torch.tensor(1.0), "tied": [weight, weight[1:]], "state": {0: {"x": weight[:2]}}})
    assert storage_name(structure, 1) == "tensor tied.0"
    assert storage_name(structure, 7) == "storage 7"
    for index in (1.0, True, None, [], -1, 99):
        assert storage_name({"tree": {"tensor": index}, "tensors": [{"storage": 0}] * 2}, 0) == "storage 0"
