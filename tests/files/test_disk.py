"""An error of the disk is one of the save, but for what a file system does not offer.

Whoever writes under a temporary name is known by a lock, which ends with the process.
"""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hf_trainweights.files import disk
from hf_trainweights.files.disk import (
    TEMPORARY_PREFIX,
    claim_directory,
    claim_file,
    lock_directory,
    move_aside,
    take_over,
    temporary_path,
)


def is_abandoned(path):
    with take_over(path) as abandoned:
        return abandoned


def claim(directory, kind):
    if kind == "directory":
        return claim_directory(directory)
    claimed, descriptor = claim_file(directory)
    os.close(descriptor)
    return claimed


KINDS = ["file", "directory"]


def test_temporary_names_are_fresh_and_marked(tmp_path):
    names = {temporary_path(tmp_path).name for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith(TEMPORARY_PREFIX) for name in names)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_claimed_is_not_abandoned_until_it_is_released(tmp_path, kind):
    claimed = claim(tmp_path, kind)
    assert not is_abandoned(claimed.path)
    claimed.release()
    assert is_abandoned(claimed.path)
    claimed.release()  # once more does nothing


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_killed_process_claimed_is_abandoned_whatever_its_number(tmp_path, kind):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        kept = claim(tmp_path, kind)
        os.write(writing, kept.path.name.encode())
        signal.pause()
    path = tmp_path / os.read(reading, 100).decode()
    assert not is_abandoned(path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert is_abandoned(path)
    for descriptor in (reading, writing):
        os.close(descriptor)


def test_a_forked_worker_does_not_keep_what_its_parent_released(tmp_path):
    claimed = claim_directory(tmp_path)
    child = os.fork()
    if child == 0:
        signal.pause()
    claimed.release()
    abandoned = is_abandoned(claimed.path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert abandoned


def test_a_program_that_is_started_does_not_keep_what_its_parent_claimed(tmp_path):
    claimed, descriptor = claim_file(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as program:
        os.close(descriptor)
        # As a kill would: the descriptor is closed and nobody says that the lock is released.
        os.close(claimed._descriptor)
        abandoned = is_abandoned(claimed.path)
        program.communicate(b"\n")
    assert abandoned


@pytest.mark.parametrize(("kind", "moment"), [("file", "_lock"), ("directory", "_lock"), ("directory", "_open")])
def test_a_cleaner_that_comes_before_the_lock_costs_a_new_name_and_no_more(tmp_path, monkeypatch, kind, moment):
    original, removed = getattr(disk, moment), []

    def late(*arguments, **options):
        if not removed:
            (path,) = tmp_path.iterdir()
            removed.append(path)
            path.rmdir() if path.is_dir() else path.unlink()
        return original(*arguments, **options)

    monkeypatch.setattr(disk, moment, late)
    claimed = claim(tmp_path, kind)
    assert list(tmp_path.iterdir()) == [claimed.path] != removed
    claimed.release()


def test_a_link_to_what_was_created_is_not_what_was_created(tmp_path, monkeypatch):
    original, moved = disk._lock, tmp_path / "moved"

    def late(*arguments, **options):
        if not moved.exists():
            (path,) = tmp_path.iterdir()
            path.rename(moved)
            path.symlink_to(moved)
        return original(*arguments, **options)

    monkeypatch.setattr(disk, "_lock", late)
    claimed = claim(tmp_path, "file")
    assert not claimed.path.is_symlink()
    claimed.release()


def test_a_link_is_abandoned_and_is_not_followed(tmp_path):
    link = tmp_path / f"{TEMPORARY_PREFIX}a"
    link.symlink_to(tmp_path / "elsewhere")
    assert is_abandoned(link)


@pytest.fixture(params=["no module", "refused"])
def no_locks(request, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    if request.param == "no module":
        monkeypatch.setattr(disk, "fcntl", None)
    else:
        monkeypatch.setattr(disk.fcntl, "flock", refuse)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("no_locks")
def test_where_nothing_can_be_locked_a_day_makes_it_abandoned(tmp_path, kind, monkeypatch):
    claimed = claim(tmp_path, kind)
    assert not is_abandoned(claimed.path)
    day_after_tomorrow = claimed.path.stat().st_ctime + 2 * 24 * 3600
    monkeypatch.setattr(disk.time, "time", lambda: day_after_tomorrow)
    assert is_abandoned(claimed.path)
    claimed.release()
    assert not is_abandoned(tmp_path / f"{TEMPORARY_PREFIX}gone")


@pytest.mark.usefixtures("no_locks")
def test_where_nothing_can_be_locked_every_directory_is_free(tmp_path):
    with lock_directory(tmp_path) as first, lock_directory(tmp_path) as second:
        assert (first, second) == (True, True)


def test_a_directory_is_held_by_one(tmp_path):
    with lock_directory(tmp_path) as first, lock_directory(tmp_path) as second:
        assert (first, second) == (True, False)
    with lock_directory(tmp_path) as third:
        assert third


def test_who_waits_for_a_directory_gets_it_when_it_is_free(tmp_path):
    holds, got = threading.Event(), threading.Event()

    def wait():
        holds.wait()
        with lock_directory(tmp_path, wait=True) as free:
            assert free
            got.set()

    thread = threading.Thread(target=wait)
    thread.start()
    with lock_directory(tmp_path):
        holds.set()
        assert not got.wait(0.05)
    assert got.wait(10)
    thread.join()


def test_what_is_moved_aside_is_claimed(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"x")
    claimed = move_aside(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    assert (claimed.path / "file").read_bytes() == b"x"
    assert not is_abandoned(claimed.path)
    claimed.release()
    assert is_abandoned(claimed.path)


def test_what_cannot_be_moved_aside_stays(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, "no")

    (tmp_path / "a").mkdir()
    monkeypatch.setattr(disk.file_system, "rename", refuse, raising=False)
    with pytest.raises(OSError, match="no"):
        move_aside(tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]


@pytest.fixture(params=[errno.EIO, errno.ENOSPC, errno.EINVAL, errno.ENOTSUP], ids=errno.errorcode.get)
def number(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the number of the error that every attempt to force something to the disk ends with."""

    def fsync(descriptor: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(os, "fsync", fsync)
    return request.param


def test_only_a_file_system_that_cannot_force_directories_to_the_disk_need_not(tmp_path: Path, number: int) -> None:
    if number in (errno.EINVAL, errno.ENOTSUP):
        disk.file_system.sync_directory(tmp_path)
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            disk.file_system.sync_directory(tmp_path)
