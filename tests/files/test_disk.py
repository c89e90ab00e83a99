"""The disk as it is: an error of the disk is one of the save, but for what a file system does not offer."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hf_trainweights.files import disk


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
