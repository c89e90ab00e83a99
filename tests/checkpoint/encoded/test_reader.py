from __future__ import annotations

import errno
import os
import threading
import tracemalloc
import warnings
import zipfile

import pytest
import torch
from trees import fingerprint, write_encoded

from hf_trainweights.checkpoint.encoded import decoder as encoded
from hf_trainweights.checkpoint.encoded.decoder import Anchor
from hf_trainweights.checkpoint.encoded.reader import is_encoded, load_file, read_structure
from hf_trainweights.errors import CorruptFileError, MissingAnchorError


@pytest.mark.parametrize(
    "write_other",
    [
        lambda path: torch.save({"a": torch.ones(2)}, path),
        lambda path: torch.save([], path),
        lambda path: torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"PK\x03\x04 no zip file"),
        lambda path: path.write_text("text"),
        lambda path: zipfile.ZipFile(path, "w").close(),
    ],
)
def test_other_files_are_not_taken_for_encoded_ones(write_other, tmp_path):
    path = tmp_path / "file.pt"
    write_other(path)
    assert not is_encoded(path)
    with pytest.raises(CorruptFileError, match=r"file\.pt: expected an encoded file"):
        read_structure(path)


def test_missing_file_is_an_os_error(tmp_path):
    for read in (is_encoded, read_structure, load_file, Anchor):
        with pytest.raises(FileNotFoundError, match="gone"):
            read(tmp_path / "gone")


def test_structure_is_read_without_anchor_or_decoding(delta, monkeypatch):
    path, anchor, _ = delta
    anchor.unlink()
    monkeypatch.setattr(encoded, "_decode_storage", None)
    structure = read_structure(path)
    assert is_encoded(path)
    assert structure["anchor"] == {"sha256": anchor.stem, "path": str(anchor)}
    assert [(entry["codec"], entry["anchor"]) for entry in structure["storages"]] == [
        ("planes-delta", name) for name in "wb"
    ]


def test_reading_a_structure_leaves_loading_in_other_threads_alone(tmp_path, state, monkeypatch):
    path = write_encoded(tmp_path / "optimizer.pt", state)
    inside, loaded = threading.Event(), threading.Event()
    results = []

    def load_meanwhile():
        inside.wait(10)
        results.append(torch.load(path, weights_only=True))
        loaded.set()

    def parse(*arguments, parse=encoded.open_structure):
        if threading.current_thread() is threading.main_thread():
            inside.set()
            loaded.wait(10)
        return parse(*arguments)

    monkeypatch.setattr(encoded, "open_structure", parse)
    thread = threading.Thread(target=load_meanwhile)
    thread.start()
    assert read_structure(path)["version"] == 1
    thread.join()
    assert fingerprint(results[0]) == fingerprint(state)
    assert fingerprint(torch.load(path, weights_only=True)) == fingerprint(state)


def test_load_file_reads_plain_files_as_well(tmp_path, state):
    torch.save(state, tmp_path / "plain.pt")
    assert fingerprint(load_file(tmp_path / "plain.pt", mmap=True)) == fingerprint(state)
    assert load_file(write_encoded(tmp_path / "small.pt", state), map_location="meta")["state"][0]["exp_avg"].is_meta


@pytest.mark.parametrize("is_zip", [True, False])
def test_what_was_saved_on_a_gpu_is_loaded_where_there_is_none(tmp_path, monkeypatch, is_zip):
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save({"w": torch.ones(2)}, tmp_path / "file.pt", _use_new_zipfile_serialization=is_zip)
    for mmap in (True, False):
        assert torch.equal(load_file(tmp_path / "file.pt", mmap=mmap)["w"], torch.ones(2))


def test_load_file_names_the_file(tmp_path, state, delta):
    path = write_encoded(tmp_path / "optimizer.pt", state)
    data = path.read_bytes()
    for damaged in (data[: len(data) // 2], data[:-1], b"", b"text", data.replace(b"SHA", b"SHB")[:-3]):
        path.write_bytes(damaged)
        with pytest.raises(CorruptFileError, match=r"optimizer\.pt"):
            load_file(path)
    delta[1].unlink()
    with pytest.raises(MissingAnchorError, match=r"pytorch_model\.bin, anchor .*latest"):
        load_file(delta[0])


def test_load_file_runs_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (tmp_path / "ran").touch, ()

    torch.save(Evil(), tmp_path / "evil.pt")
    with pytest.raises(CorruptFileError, match=r"evil\.pt: expected a file that torch.load reads"):
        load_file(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()


def test_nobody_is_told_to_load_a_file_that_may_run_code(tmp_path):
    torch.save({"object": slice(1, 2)}, tmp_path / "file.pt")
    with pytest.raises(
        CorruptFileError, match=r"file\.pt: expected .*found one that is damaged or holds more"
    ) as caught:
        load_file(tmp_path / "file.pt")
    assert "weights_only" not in str(caught.value)
    assert "weights_only" in str(caught.value.__cause__)


def test_a_file_of_old_torch_versions_is_read_although_it_cannot_be_mapped(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "file.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(load_file(tmp_path / "file.pt", mmap=True)["w"], torch.ones(2))


def refuse(number):
    raise OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("load", "kind", "text"),
    [
        (lambda: refuse(errno.EINVAL), CorruptFileError, os.strerror(errno.EINVAL)),
        (lambda: refuse(errno.EIO), OSError, os.strerror(errno.EIO)),
        (lambda: torch.empty(1 << 50, dtype=torch.uint8), RuntimeError, "tried to allocate"),
    ],
    ids=["seek", "disk", "memory"],
)
def test_a_seek_to_a_wrong_place_is_damage_and_what_the_system_refuses_is_not(load, kind, text, tmp_path, monkeypatch):
    torch.save({"w": torch.ones(2)}, tmp_path / "file.pt")
    monkeypatch.setattr(torch, "load", lambda *_, **__: load())
    with pytest.raises(kind, match=text):
        load_file(tmp_path / "file.pt")


def test_an_old_file_that_claims_more_values_than_there_is_memory_is_damaged(tmp_path):
    path = tmp_path / "file.pt"
    torch.save(torch.ones(0x12345), path, _use_new_zipfile_serialization=False)
    length = b"J\x45\x23\x01\x00"
    assert path.read_bytes().count(length) == 2  # of the storage, and the shape
    path.write_bytes(path.read_bytes().replace(length, b"\x8a\x07\x00\x00\x00\x00\x00\x00\x01"))
    with pytest.raises(CorruptFileError, match=r"file\.pt: expected a file that torch\.load reads"):
        load_file(path)


def test_an_old_file_that_claims_a_text_of_4_gigabytes_takes_no_more_memory_than_it_has_bytes(tmp_path):
    path = tmp_path / "file.pt"
    torch.save({"weight": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    name = b"X\x06\x00\x00\x00weight"
    assert name in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(name, b"X\xff\xff\xff\xffweight"))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFileError, match=r"file\.pt: expected a file that torch\.load reads"):
            load_file(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_warning_of_torch_is_raised_as_it_is_where_the_caller_raises_warnings(tmp_path, monkeypatch):
    def load(*_, **__):
        warnings.warn("this may be slow", UserWarning, stacklevel=1)
        return {}

    torch.save({}, tmp_path / "file.pt")
    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(UserWarning, match="this may be slow"):  # the tests have such filters
        load_file(tmp_path / "file.pt")
    with pytest.warns(UserWarning, match="this may be slow"):
        assert load_file(tmp_path / "file.pt") == {}
