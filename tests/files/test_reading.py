import errno
import io
import os
import socket
import zipfile

import pytest
import torch

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files import reading
from hf_trainweights.files.reading import (
    check_member,
    is_torch_zip,
    open_pickle,
    open_regular_file,
    open_zip,
    read_json_object,
    require_regular_file,
)

NOT_REGULAR = {
    "a FIFO": os.mkfifo,
    "a socket": lambda path: bind(path),
    "a character device": lambda path: path.symlink_to("/dev/zero"),
    "a directory": os.mkdir,
    "a symbolic link to nothing": lambda path: path.symlink_to("nowhere"),
    "a symbolic link in a circle": lambda path: path.symlink_to(path.name),
}


def bind(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket has at most 107 bytes
    return tmp_path.joinpath("file").relative_to(tmp_path)


@pytest.mark.parametrize("function", [open_regular_file, require_regular_file])
@pytest.mark.parametrize("kind", NOT_REGULAR)
def test_what_is_no_regular_file_is_named_and_never_opened(kind, function, path):
    NOT_REGULAR[kind](path)
    with pytest.raises(CorruptFileError, match=f"^file: expected a regular file, found {kind}"):
        function(path)


@pytest.mark.parametrize("function", [open_regular_file, require_regular_file])
@pytest.mark.parametrize("name", ["model\0.bin", "model\ud800.bin", "model" * 100])
def test_a_name_that_no_file_can_have_is_shown_as_text(name, function):
    with pytest.raises(CorruptFileError, match=r"^'model.*: expected a regular file, found a name that no file"):
        function(name)


@pytest.mark.parametrize("function", [open_regular_file, require_regular_file])
def test_a_missing_file_is_missing(function, path):
    with pytest.raises(FileNotFoundError, match="No such file"):
        function(path)


def test_a_regular_file_is_read_and_so_is_a_link_to_it(path):
    path.write_bytes(b"content")
    link = path.with_name("link")
    link.symlink_to(path.name)
    for each in (path, link):
        with open_regular_file(each) as file:
            assert file.read() == b"content"


@pytest.mark.parametrize("function", [open_regular_file, require_regular_file])
def test_a_link_is_refused_where_links_are_not_followed(function, path):
    path.write_bytes(b"content")
    link = path.with_name("link")
    link.symlink_to(path.name)
    with pytest.raises(CorruptFileError, match="expected a regular file, found a symbolic link"):
        function(link, follow_links=False)


def test_a_fifo_that_appears_between_the_look_and_the_opening_is_refused_at_once(path, monkeypatch):
    os.mkfifo(path)
    descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(reading, "require_regular_file", lambda path, follow_links: None)
    with pytest.raises(CorruptFileError, match="found a FIFO"):
        open_regular_file(path)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_the_pickle_of_a_torch_file_is_read(tmp_path):
    torch.save([1, 2], tmp_path / "file.pt")
    with open_pickle(tmp_path / "file.pt") as pickle:
        assert pickle.read().startswith(b"\x80\x02]")


@pytest.mark.parametrize("names", [[], ["a/data.pkl", "b/data.pkl"]])
def test_an_archive_that_torch_did_not_write_is_refused(tmp_path, names):
    with zipfile.ZipFile(tmp_path / "file.pt", "w") as archive:
        for name in names:
            archive.writestr(name, b"")
    expected = rf"file\.pt: expected a whole zip archive.*{len(names)} members"
    with pytest.raises(CorruptFileError, match=expected), open_pickle(tmp_path / "file.pt"):
        pass


def test_a_changed_member_is_found_by_its_checksum(tmp_path):
    torch.save([1, 2], tmp_path / "file.pt")
    content = (tmp_path / "file.pt").read_bytes()
    (tmp_path / "file.pt").write_bytes(content.replace(b"\x80\x02]", b"\x80\x02}"))
    with pytest.raises(CorruptFileError, match=r"file\.pt: .* Bad CRC-32"), open_pickle(tmp_path / "file.pt") as pickle:
        pickle.read()


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_each_member_is_compared_with_its_checksum(tmp_path, compression):
    path = tmp_path / "file.pt"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("a", bytes(3 << 20))
        archive.writestr("b", b"fine")
    with open_zip(path) as archive:
        for member in archive.infolist():
            check_member(archive, member)
        first, second = archive.infolist()
        first.CRC ^= 1
        check_member(archive, second)
        with pytest.raises(zipfile.BadZipFile, match="Bad CRC-32 for file 'a'"):
            check_member(archive, first)
        first.CRC = 0  # as torch writes it where its checksums are off
        check_member(archive, first)


def test_what_the_disk_refuses_is_no_damage(tmp_path, monkeypatch):
    class Refusing(io.BytesIO):
        def seek(self, *_):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(reading, "open_regular_file", lambda path: Refusing())
    with pytest.raises(OSError, match="Input/output error"), open_zip(tmp_path / "file.pt"):
        pass


@pytest.mark.parametrize(("content", "found"), [(b"{", "JSONDecodeError"), (b"[1]", "a list"), (b"[" * 9999, "Recurs")])
def test_a_file_that_holds_no_json_object_is_refused(tmp_path, content, found):
    (tmp_path / "object").write_bytes(b'{"a": [1]}')
    assert read_json_object(tmp_path / "object") == {"a": [1]}
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(CorruptFileError, match=rf"other: expected a JSON object, found .*{found}.* Use a copy\."):
        read_json_object(tmp_path / "other", "Use a copy.")


def test_a_torch_zip_is_told_by_how_it_begins(tmp_path):
    torch.save([1], tmp_path / "zip")
    (tmp_path / "text").write_bytes(b"PK\x03")
    assert is_torch_zip(tmp_path / "zip")
    assert not is_torch_zip(tmp_path / "text")
