from __future__ import annotations

import io
import shutil
import zipfile

import pytest
import torch
from fresh_process import run_fresh
from helpers import default_dtype, flip_a_bit
from trees import fingerprint, write_encoded, written_bytes

from hf_trainweights.checkpoint.encoded.reader import register_anchor_directory
from hf_trainweights.checkpoint.planning.policy import MODES, Policy
from hf_trainweights.errors import CorruptFileError, MissingAnchorError
from hf_trainweights.files import reading


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("as_source", [str, lambda path: path, lambda path: io.BytesIO(path.read_bytes())])
def test_plain_torch_load_gives_plain_tensors(mode, as_source, tmp_path, state):
    path = write_encoded(tmp_path / "optimizer.pt", state, Policy(mode).plan_optimizer(state))
    back = torch.load(as_source(path), weights_only=True)
    for index, values in state["state"].items():
        for key, tensor in values.items():
            found = back["state"][index][key]
            assert type(found) is torch.Tensor
            assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
            assert found.untyped_storage().nbytes() == tensor.nbytes
    assert fingerprint(back["param_groups"]) == fingerprint(state["param_groups"])
    assert (fingerprint(back) == fingerprint(state)) is (mode == "lossless")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"mmap": True}, {"weights_only": False}, {"map_location": "cpu"}, {"map_location": torch.device("cpu")},
        {"map_location": {"cuda:0": "cpu"}}, {"map_location": lambda storage, location: storage},
    ],
    ids=["mmap", "unsafe", "name", "device", "dict", "function"],
)  # fmt: skip
def test_every_way_to_call_torch_load_gives_the_same(options, tmp_path, state):
    path = write_encoded(tmp_path / "optimizer.pt", state)
    assert fingerprint(torch.load(path, **{"weights_only": True, **options})) == fingerprint(state)


def test_what_was_loaded_does_not_need_the_file(tmp_path, state):
    path = write_encoded(tmp_path / "optimizer.pt", state)
    back = torch.load(path, mmap=True, weights_only=True)
    with open(path, "r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert fingerprint(back) == fingerprint(state)


def test_on_meta_neither_payload_nor_anchor_is_read(delta):
    path, anchor, weights = delta
    data = bytearray(path.read_bytes())
    payload_at = max(data.rfind(b"data/0", 0, len(data) // 2), 0) + 200
    data[payload_at] ^= 1
    path.write_bytes(data)
    anchor.unlink()
    back = torch.load(path, map_location="meta", weights_only=True)
    assert {name: (tensor.device.type, tensor.shape, tensor.dtype) for name, tensor in back.items()} == {
        name: ("meta", tensor.shape, tensor.dtype) for name, tensor in weights.items()
    }
    with pytest.raises((CorruptFileError, MissingAnchorError), match="expected"):
        torch.load(path, weights_only=True)


def test_ties_and_strides_hold_on_meta(tmp_path):
    weight = torch.randn(6, 4)
    path = write_encoded(tmp_path / "x.bin", {"a": weight, "b": weight.t()[1:3], "empty": torch.empty(0)})
    back = torch.load(path, map_location="meta", weights_only=True)
    assert back["b"].stride() == (1, 4)
    assert back["a"].untyped_storage()._cdata == back["b"].untyped_storage()._cdata


@pytest.mark.slow
def test_default_dtype_and_device_of_the_caller_change_nothing(tmp_path, state):
    paths = {mode: write_encoded(tmp_path / f"{mode}.pt", state, Policy(mode).plan_optimizer(state)) for mode in MODES}
    expected = {mode: fingerprint(torch.load(path, weights_only=True)) for mode, path in paths.items()}
    for dtype in (torch.bfloat16, torch.float64):
        with default_dtype(dtype):
            for mode, path in paths.items():
                assert written_bytes(state, Policy(mode).plan_optimizer(state)) == path.read_bytes()
                assert fingerprint(torch.load(path, weights_only=True)) == expected[mode]
    for mode, path in paths.items():
        with torch.device("meta"):
            back = torch.load(path, weights_only=True, map_location="cpu")
            again = written_bytes(state, Policy(mode).plan_optimizer(state))
        assert fingerprint(back) == expected[mode]
        assert path.read_bytes() == again


@pytest.mark.slow  # an interpreter of its own
@pytest.mark.parametrize("weights_only", [True, False])
def test_without_our_import_loading_fails_and_names_the_package(weights_only, tmp_path, state):
    path = write_encoded(tmp_path / "optimizer.pt", state)
    script = (
        "import sys; sys.modules['hf_trainweights'] = None; import torch\n"
        f"torch.load({str(path)!r}, weights_only={weights_only})"
    )
    done = run_fresh(script)
    assert done.returncode != 0
    assert "hf_trainweights" in done.stderr


@pytest.mark.slow  # an interpreter of its own
def test_another_process_reads_the_file_with_our_import_alone_and_writes_the_same_bytes(tmp_path, state):
    path, again = write_encoded(tmp_path / "optimizer.pt", state), tmp_path / "another-name.bin"
    script = (
        "import sys, torch; from hf_trainweights.checkpoint.encoded.encoder import encode_file\n"
        "state = torch.load(sys.argv[1], weights_only=True)\n"
        "with open(sys.argv[2], 'wb') as file: encode_file(state, {}, file)"
    )
    run_fresh(script, path, again).check_returncode()
    assert again.read_bytes() == path.read_bytes()


def test_file_is_a_zip_with_two_records_of_ours(tmp_path, state):
    with zipfile.ZipFile(write_encoded(tmp_path / "optimizer.pt", state)) as archive:
        names = {name.split("/", 1)[1] for name in archive.namelist()}
        assert archive.testzip() is None
    assert names - {".format_version", ".storage_alignment", "byteorder", "version", ".data/serialization_id"} == {
        "data.pkl",
        "data/0",
    }


def test_delta_comes_back_exactly(delta):
    path, _, weights = delta
    for options in ({}, {"mmap": True}):
        assert fingerprint(torch.load(path, weights_only=True, **options)) == fingerprint(weights)


def test_moved_delta_says_what_to_call_and_loads_once_the_directory_is_registered(delta, tmp_path):
    path, _, weights = delta
    moved = shutil.move(path.parent, tmp_path / "moved") / path.name
    with pytest.raises(MissingAnchorError, match=r"hf_trainweights\.latest\(run\)"):
        torch.load(moved, weights_only=True)
    register_anchor_directory(moved.parent)
    assert fingerprint(torch.load(moved, weights_only=True)) == fingerprint(weights)


def test_damaged_anchor_is_an_error_even_if_its_digest_was_checked_before(delta):
    path, anchor, _ = delta
    torch.load(path, weights_only=True)
    flip_a_bit(anchor)
    with pytest.raises(CorruptFileError, match="expected"):
        torch.load(path, weights_only=True)
    # Not even a file system whose clock stands still hides it.
    reading._digests.update(dict.fromkeys(reading._digests, anchor.stem))
    with pytest.raises(CorruptFileError, match="expected"):
        torch.load(path, weights_only=True)
