from __future__ import annotations

import hashlib
import os

import pytest
import torch
from trees import write_anchor, write_encoded

from hf_trainweights.checkpoint import compress_directory, latest
from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.encoded import decoder, reader
from hf_trainweights.checkpoint.encoded.decoder import Anchor
from hf_trainweights.checkpoint.encoded.reader import find_anchor, register_anchor_directory, verify_anchor
from hf_trainweights.checkpoint.encoded.storage_tasks import TensorPlan
from hf_trainweights.checkpoint.encoded.structure import ANCHOR_SUFFIX
from hf_trainweights.errors import CorruptFileError, MissingAnchorError, TrainWeightsError
from hf_trainweights.files import reading


def test_anchor_decodes_one_tensor_at_a_time(tmp_path):
    torch.manual_seed(0)
    tied = torch.randn(80, 64)
    weights = {"a": tied, "tied": tied, "view": tied[3:5].t(), "buffer": torch.arange(3)}
    anchor = Anchor(write_anchor(tmp_path, weights))
    assert list(anchor) == list(weights)
    assert "a" in anchor
    assert "b" not in anchor
    for name, tensor in weights.items():
        assert torch.equal(anchor.tensor(name), tensor)
        assert anchor.tensor(name).data_ptr() != anchor.tensor(name).data_ptr()
    with pytest.raises(CorruptFileError, match=f"{anchor.path.name}: expected an anchor that holds b"):
        anchor.tensor("b")


def as_anchor(path):
    return path.rename(path.with_name(f"{reading.file_sha256(path)}{ANCHOR_SUFFIX}"))


def chain(directory, length):
    """Anchors each of which is a difference to the one before: the last one's path, and its weights."""
    directory.mkdir(exist_ok=True)
    weights = {"w": torch.randn(80, 64)}
    path = write_anchor(directory, weights)
    for _ in range(length - 1):
        weights = {"w": weights["w"] + 1e-3}
        plan = {("w",): TensorPlan("weight", "w", (CODECS["planes-delta"](),), anchor="w")}
        path = as_anchor(write_encoded(directory / "w.bin", weights, plan, anchor=Anchor(path)))
    return path, weights


def test_anchor_may_be_a_difference_to_another_one_beside_it(tmp_path):
    path, weights = chain(tmp_path / "a", 4)
    (tmp_path / "a").rename(tmp_path / "moved")
    anchor = Anchor(tmp_path / "moved" / path.name)
    assert torch.equal(anchor.tensor("w"), weights["w"])
    assert len(set(anchor.files)) == 4
    assert set(anchor.files) == set((tmp_path / "moved").iterdir())


@pytest.mark.parametrize("codec", ["planes-delta", "delta-uniform"])
def test_differences_to_parts_of_one_memory_are_decoded_to_memory_of_their_own(codec, tmp_path):
    torch.manual_seed(0)
    fused = torch.randn(3, 80, 64)
    anchor = Anchor(write_anchor(tmp_path, dict(zip("qkv", fused, strict=True))))
    apart = {name: part + 1e-3 for name, part in zip("qkv", fused, strict=True)}
    chosen = CODECS["planes-delta"]() if codec == "planes-delta" else CODECS[codec](step=1e-4)
    plan = {(name,): TensorPlan("weight", name, (chosen,), anchor=name) for name in apart}
    path = write_encoded(tmp_path / "w.bin", apart, plan, anchor=anchor, anchor_directory=tmp_path)
    loaded = torch.load(path, weights_only=True)
    for name, tensor in apart.items():
        assert torch.allclose(loaded[name], tensor, rtol=0, atol=1e-4)
        assert loaded[name].untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.slow
def test_anchor_that_takes_too_many_files_is_refused(tmp_path):
    path, _ = chain(tmp_path, 8)
    assert len(Anchor(path).files) == 8
    plan = {("w",): TensorPlan("weight", "w", (CODECS["planes-delta"](),), anchor="w")}
    ninth = as_anchor(write_encoded(tmp_path / "w.bin", {"w": torch.zeros(80, 64)}, plan, anchor=Anchor(path)))
    with pytest.raises(CorruptFileError, match="expected an anchor that takes at most 8 files"):
        Anchor(ninth)


def test_anchor_whose_own_anchor_is_gone_or_damaged_is_refused(tmp_path):
    path, _ = chain(tmp_path, 3)
    first = Anchor(path).files[-1]
    content = first.read_bytes()
    first.write_bytes(content[:-100] + bytes(100))
    with pytest.raises(CorruptFileError, match="expected an anchor named by its SHA-256"):
        Anchor(path)
    first.unlink()
    with pytest.raises(reader.MissingAnchorError, match=first.name):
        Anchor(path)


@pytest.mark.parametrize(
    "tree",
    [[torch.ones(2)], {"a": {"b": torch.ones(2)}}, {"a": 1}, torch.ones(2)],
    ids=["list", "nested", "int", "tensor"],
)
def test_anchor_that_is_no_flat_state_dict_is_refused(tree, tmp_path):
    with pytest.raises(CorruptFileError, match="expected an anchor: one flat state dict"):
        Anchor(write_anchor(tmp_path, tree))


def test_anchor_under_a_wrong_name_is_refused(tmp_path):
    path = write_anchor(tmp_path, {"a": torch.ones(2)})
    with pytest.raises(CorruptFileError, match="expected an anchor named by its SHA-256"):
        Anchor(path.rename(tmp_path / f"{'0' * 64}.anchor"))


CONTENT = b"weights"
SHA256 = hashlib.sha256(CONTENT).hexdigest()
NAME = f"{SHA256}{ANCHOR_SUFFIX}"


def anchor_in(directory, content=CONTENT):
    directory.mkdir(exist_ok=True)
    (directory / NAME).write_bytes(content)
    return directory / NAME


def test_anchor_is_found_where_it_was(tmp_path):
    path = anchor_in(tmp_path)
    assert find_anchor(SHA256, str(path)) == path
    assert verify_anchor(path) == SHA256


def test_moved_anchor_is_found_in_a_registered_directory(tmp_path):
    path = anchor_in(tmp_path / "new")
    register_anchor_directory(tmp_path / "missing")
    register_anchor_directory(str(tmp_path / "new"))
    assert find_anchor(SHA256, f"/old/run/{NAME}") == path


def test_registered_directory_may_be_relative(tmp_path, monkeypatch):
    path = anchor_in(tmp_path / "new")
    monkeypatch.chdir(tmp_path)
    register_anchor_directory("new")
    monkeypatch.chdir("/")
    assert find_anchor(SHA256, f"/old/run/{NAME}") == path


def test_only_the_directory_itself_is_looked_in(tmp_path):
    anchor_in(tmp_path / "below")
    register_anchor_directory(tmp_path)
    with pytest.raises(MissingAnchorError, match="none there, nor in a registered directory"):
        find_anchor(SHA256, f"/old/run/{NAME}")


@pytest.mark.parametrize(
    "recorded", [f"/old/run/{NAME}", rf"C:\old\run\{NAME}", NAME], ids=["posix", "windows", "bare"]
)
def test_missing_anchor_says_what_to_call(recorded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingAnchorError) as caught:
        find_anchor(SHA256, recorded)
    assert "hf_trainweights.latest(run)" in str(caught.value)
    assert "trainweights checkpoint restore PATH" in str(caught.value)
    assert SHA256 in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)
    assert isinstance(caught.value, TrainWeightsError)


def test_relative_path_is_not_looked_up_in_the_working_directory(tmp_path, monkeypatch):
    anchor_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingAnchorError, match="a file at"):
        find_anchor(SHA256, NAME)


def test_path_to_another_host_is_not_opened(tmp_path):
    path = f"/{anchor_in(tmp_path)}"
    assert path.startswith("//")
    with pytest.raises(MissingAnchorError, match=f"a file at {path}"):
        find_anchor(SHA256, path)


def test_damaged_anchor_is_passed_over_for_a_whole_one(tmp_path):
    damaged, whole = anchor_in(tmp_path / "a", b"w0ights"), anchor_in(tmp_path / "b")
    register_anchor_directory(tmp_path / "b")
    assert find_anchor(SHA256, str(damaged)) == whole


def test_damaged_anchor_is_an_error_when_there_is_no_other(tmp_path):
    damaged = anchor_in(tmp_path / "a", b"w0ights")
    register_anchor_directory(tmp_path / "nothing")
    with pytest.raises(CorruptFileError, match=f"{NAME}: expected an anchor named by its SHA-256"):
        find_anchor(SHA256, str(damaged))


def test_file_of_another_name_is_no_anchor(tmp_path):
    (tmp_path / "other.bin").write_bytes(CONTENT)
    with pytest.raises(MissingAnchorError, match="expected a file at"):
        find_anchor(SHA256, str(tmp_path / "other.bin"))
    with pytest.raises(CorruptFileError, match="expected an anchor named by its SHA-256"):
        verify_anchor(tmp_path / "other.bin")


def test_link_directory_and_pipe_are_not_opened(tmp_path):
    target = anchor_in(tmp_path / "target")
    (tmp_path / NAME).symlink_to(target)
    with pytest.raises(CorruptFileError, match="expected a regular file, found a symbolic link"):
        find_anchor(SHA256, str(tmp_path / NAME))
    for make, found in ((os.mkdir, "a directory"), (os.mkfifo, "a FIFO")):
        directory = tmp_path / make.__name__
        directory.mkdir()
        make(directory / NAME)
        with pytest.raises(CorruptFileError, match=f"expected a regular file, found {found}"):
            find_anchor(SHA256, str(directory / NAME))


def test_bytes_are_read_once_for_all_links(tmp_path, monkeypatch):
    read, read_chunks = [], reading.read_chunks
    monkeypatch.setattr(reading, "read_chunks", lambda path: read.append(path) or read_chunks(path))
    first = anchor_in(tmp_path / "a")
    (tmp_path / "b").mkdir()
    os.link(first, tmp_path / "b" / NAME)
    for _ in range(3):
        verify_anchor(first)
        verify_anchor(tmp_path / "b" / NAME)
    assert read == [first]


def test_a_resume_reads_an_anchor_once_for_its_digest(tmp_path, monkeypatch):
    for step in (1, 2):
        path = tmp_path / f"checkpoint-{step}"
        path.mkdir()
        torch.save({"w": torch.arange(8192.0).view(64, 128) + step}, path / "pytorch_model.bin")
        compress_directory(path)
    (anchor,) = path.glob("*.anchor")
    reading._digests.clear()
    monkeypatch.setattr(decoder, "_last_anchor", None)
    read, read_chunks = [], reading.read_chunks
    monkeypatch.setattr(reading, "read_chunks", lambda path: read.append(path) or read_chunks(path))
    torch.load(f"{latest(tmp_path)}/pytorch_model.bin")
    assert read.count(anchor) == 1


def test_changed_file_is_read_again(tmp_path):
    path = anchor_in(tmp_path)
    verify_anchor(path)
    path.write_bytes(b"w0ights")
    os.utime(path, ns=(0, 10**18))
    with pytest.raises(CorruptFileError, match="expected an anchor named by its SHA-256"):
        verify_anchor(path)
