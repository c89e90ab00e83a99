import errno
import hashlib
import os
import threading

import pytest
from simulated_disk import RecordingDisk

from hf_trainweights.errors import CorruptFileError, SaveError
from hf_trainweights.files import atomic, disk
from hf_trainweights.files.disk import TEMPORARY_PREFIX
from hf_trainweights.files.reading import DigestedFile, file_sha256


class NoLinks(disk.FileSystem):
    def __init__(self, number):
        self.number = number

    def link(self, source, target):
        raise OSError(self.number, os.strerror(self.number))


def test_created_file_holds_what_was_written(tmp_path):
    with atomic.create_file(tmp_path / "a") as file:
        file.write(b"one")
        file.write(b"two")
    assert (tmp_path / "a").read_bytes() == b"onetwo"


def test_the_disk_begins_with_each_part_before_the_file_ends(tmp_path, monkeypatch):
    class Started(disk.FileSystem):
        def __init__(self):
            self.parts = []

        def start_writing(self, descriptor, start, size_bytes):
            super().start_writing(descriptor, start, size_bytes)
            self.parts.append((start, os.fstat(descriptor).st_size - start == size_bytes, size_bytes >= 1000))

    monkeypatch.setattr(atomic, "_STARTED_BYTES", 1000)
    monkeypatch.setattr(atomic, "_BUFFER_BYTES", 100)
    monkeypatch.setattr(disk, "file_system", Started())
    content = bytes(range(250)) * 13
    with atomic.create_file(tmp_path / "a") as file:
        for start in range(0, len(content), 250):
            file.write(content[start : start + 250])
    assert disk.file_system.parts == [(0, True, True), (1000, True, True), (2000, True, True)]
    assert (tmp_path / "a").read_bytes() == content


def test_create_file_refuses_an_existing_name(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(FileExistsError, match="a"), atomic.create_file(tmp_path / "a"):
        pass
    assert (tmp_path / "a").read_bytes() == b"old"


@pytest.mark.parametrize("opener", [atomic.create_file, atomic.replace_file])
def test_an_error_while_writing_leaves_no_file(tmp_path, opener):
    def write():
        with opener(tmp_path / "a") as file:
            file.write(b"half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write()
    assert os.listdir(tmp_path) == []


def test_replaced_file_is_the_old_one_until_the_block_ends(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with atomic.replace_file(path) as file:
        file.write(b"new" * 1_000_000)
        assert path.read_bytes() == b"old"
        (temporary,) = set(os.listdir(tmp_path)) - {"a"}
        assert temporary.startswith(TEMPORARY_PREFIX)
    assert path.read_bytes() == b"new" * 1_000_000
    assert os.listdir(tmp_path) == ["a"]


def test_replacing_keeps_readers_of_the_old_file_unharmed(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with open(path, "rb") as reader:
        with atomic.replace_file(path) as file:
            file.write(b"new")
        assert reader.read() == b"old"


def test_a_moved_file_is_on_the_disk_before_its_name_and_its_name_before_the_call_returns(tmp_path, monkeypatch):
    recorded = RecordingDisk()
    monkeypatch.setattr(disk, "file_system", recorded)
    source, target = tmp_path / "aside", tmp_path / "file"
    source.write_bytes(b"new")
    atomic.move_file(source, target)
    assert recorded.calls == [("sync_file", source, b"new"), ("rename", source, target), ("sync_directory", tmp_path)]


def test_a_tree_is_on_the_disk_with_the_data_of_each_file_and_every_name(tmp_path, monkeypatch):
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    inner = tree / "a" / "b"
    for directory in (outside, inner):
        directory.mkdir(parents=True)
        (directory / "file").write_bytes(b"data")
    (tree / "link").symlink_to(outside)
    recorded = RecordingDisk()
    monkeypatch.setattr(disk, "file_system", recorded)
    atomic.sync_tree(tree)
    directories = [("sync_directory", path) for path in (inner, inner.parent, tree)]
    assert recorded.calls == [("sync_file", inner / "file", b"data"), *directories]


@pytest.mark.parametrize("exists", [False, True])
def test_directory_appears_when_the_block_ends(tmp_path, exists):
    path = tmp_path / "parent" / "a"
    if exists:
        path.mkdir(parents=True)
    with atomic.create_directory(path) as temporary:
        assert temporary.parent.parent == path.parent
        assert temporary.parent.name.startswith(TEMPORARY_PREFIX)
        (temporary / "file").write_bytes(b"x")
        assert path.exists() == exists
    assert os.listdir(path) == ["file"]
    assert os.listdir(path.parent) == ["a"]


def test_an_error_while_filling_a_directory_leaves_nothing(tmp_path):
    def fill():
        with atomic.create_directory(tmp_path / "a") as temporary:
            (temporary / "sub").mkdir()
            (temporary / "sub" / "file").write_bytes(b"x")
            raise KeyboardInterrupt("stop")

    with pytest.raises(KeyboardInterrupt, match="stop"):
        fill()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["full directory", "file", "link", "dangling link"])
def test_nothing_that_exists_is_overwritten_by_a_directory(tmp_path, kind):
    path = tmp_path / "a"
    (tmp_path / "elsewhere").mkdir()
    if kind == "full directory":
        path.mkdir()
        (path / "file").write_bytes(b"precious")
    elif kind == "file":
        path.write_bytes(b"precious")
    else:
        path.symlink_to(tmp_path / ("elsewhere" if kind == "link" else "nowhere"))
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(SaveError, match="missing or empty directory"), atomic.create_directory(path):
        pass
    assert sorted(os.listdir(tmp_path)) == before


def test_a_directory_filled_meanwhile_is_not_overwritten(tmp_path):
    path = tmp_path / "a"

    def race():
        with atomic.create_directory(path):
            path.mkdir()
            (path / "file").write_bytes(b"precious")

    with pytest.raises(SaveError, match="missing or empty directory"):
        race()
    assert (path / "file").read_bytes() == b"precious"
    assert os.listdir(tmp_path) == ["a"]


def test_links_share_one_file(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    atomic.link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").stat().st_ino == (tmp_path / "b").stat().st_ino


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK])
def test_where_links_fail_a_copy_is_made(tmp_path, monkeypatch, number):
    monkeypatch.setattr(disk, "file_system", NoLinks(number))
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    atomic.link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"x" * 3_000_000
    assert (tmp_path / "a").stat().st_ino != (tmp_path / "b").stat().st_ino
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_link_that_fails_for_want_of_space_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "file_system", NoLinks(errno.ENOSPC))
    (tmp_path / "a").write_bytes(b"x")
    with pytest.raises(OSError, match="No space left"):
        atomic.link_or_copy(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("kind", ["link", "directory", "fifo"])
def test_only_regular_files_are_read(tmp_path, kind):
    path = tmp_path / "a"
    if kind == "link":
        (tmp_path / "b").write_bytes(b"x")
        path.symlink_to(tmp_path / "b")
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(CorruptFileError, match=r"expected a regular file, found a (symbolic link|directory|FIFO)"):
        file_sha256(path)


def test_digest_is_sha256_of_the_content(tmp_path):
    content = os.urandom(2_500_000)
    (tmp_path / "a").write_bytes(content)
    assert file_sha256(tmp_path / "a") == hashlib.sha256(content).hexdigest()


def test_removing_a_tree_does_not_follow_links(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(b"precious")
    (tmp_path / "a" / "sub").mkdir(parents=True)
    (tmp_path / "a" / "sub" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "a" / "file").write_bytes(b"x")
    atomic.remove_tree(tmp_path / "a")
    assert os.listdir(tmp_path) == ["outside"]
    assert (tmp_path / "outside" / "file").read_bytes() == b"precious"


class ShowsOpenFiles(disk.FileSystem):
    """A disk that shows a file which is removed while it is open under another name, as NFS does."""

    def unlink(self, path):
        if path.name.startswith(".nfs"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        path.rename(path.with_name(".nfs0001")) if path.name == "open" else super().unlink(path)


def test_of_a_tree_that_is_removed_only_what_the_disk_shows_of_open_files_stays(tmp_path, monkeypatch):
    (tmp_path / "a" / "sub").mkdir(parents=True)
    for name in ("file", "sub/file", "sub/open"):
        (tmp_path / "a" / name).touch()
    for times in range(3):
        monkeypatch.setattr(disk, "file_system", ShowsOpenFiles() if times < 2 else disk.FileSystem())
        atomic.remove_tree(tmp_path / "a")
        found = [path.name for path in tmp_path.rglob("*") if path.is_file()]
        assert found == [".nfs0001"] * (times < 2)
    assert not (tmp_path / "a").exists()


def test_missing_parents_are_created(tmp_path):
    atomic.make_directories(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()


def test_a_file_in_place_of_a_parent_is_an_error(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    with pytest.raises(OSError, match="a"):
        atomic.make_directories(tmp_path / "a" / "b")


def test_what_is_written_is_digested_on_the_way(tmp_path):
    with atomic.create_file(tmp_path / "a") as file:
        digested = DigestedFile(file)
        for data in (b"abc", memoryview(b"x" * 3_000_000), b""):
            assert digested.write(data) == len(data)
        digested.flush()
    assert digested.size_bytes == 3_000_003
    assert digested.sha256() == file_sha256(tmp_path / "a")


def threads_that_close(monkeypatch, file):
    """Lists the thread of each close of a file's descriptor from now on."""
    inode, threads, close = file.stat().st_ino, [], os.close

    def recorded(descriptor):
        if os.fstat(descriptor).st_ino == inode:
            threads.append(threading.current_thread().name)
        close(descriptor)

    monkeypatch.setattr(atomic.os, "close", recorded)
    return threads


@pytest.mark.skipif(os.name != "posix", reason="Windows replaces no file that is open, so none is held")
@pytest.mark.parametrize("shown", [None, ".nfs0001", ".fuse_hidden1"])
def test_a_large_file_that_was_replaced_is_freed_by_a_thread_unless_the_disk_shows_it(tmp_path, monkeypatch, shown):
    monkeypatch.setattr(atomic, "_LARGE_BYTES", 100)
    (tmp_path / "large").write_bytes(bytes(100))
    threads = threads_that_close(monkeypatch, tmp_path / "large")
    with atomic.freeing_in_background(tmp_path):
        with atomic.replace_file(tmp_path / "large") as file:
            file.write(b"new")
        assert threads == []
        if shown:
            (tmp_path / shown).touch()
    for thread in threading.enumerate():
        if thread.name == atomic.FREEING_THREAD:
            thread.join(timeout=60)
    assert threads == [threading.current_thread().name if shown else atomic.FREEING_THREAD]
    assert (tmp_path / "large").read_bytes() == b"new"


@pytest.mark.parametrize("size_bytes", [99, 100])
def test_no_file_is_held_after_an_error_nor_a_small_one_or_a_link_at_all(tmp_path, monkeypatch, size_bytes):
    monkeypatch.setattr(atomic, "_LARGE_BYTES", 100)
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").write_bytes(bytes(200))
    (tmp_path / "run" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run" / "file").write_bytes(bytes(size_bytes))
    held, linked = (threads_that_close(monkeypatch, tmp_path / name) for name in ("run/file", "elsewhere"))
    with pytest.raises(ArithmeticError, match="now"), atomic.freeing_in_background(tmp_path / "run"):
        raise ArithmeticError("now")
    assert held == [threading.current_thread().name] * (size_bytes >= 100 and os.name == "posix")
    assert linked == []
