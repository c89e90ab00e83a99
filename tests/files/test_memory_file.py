"""An array as a binary file does what BytesIO does within its length."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest

from hf_trainweights.files.torch_zip import MemoryFile


def test_it_reads_and_writes_as_bytes_in_memory_do() -> None:
    pick, memory = random.Random(0), np.frombuffer(random.Random(1).randbytes(100), np.uint8).copy()
    file, expected = MemoryFile(memory), io.BytesIO(memory.tobytes())
    for _ in range(300):
        place, length = pick.randrange(120), pick.randrange(30)
        assert file.seek(place) == expected.seek(place)
        assert file.read(length) == expected.read(length)
        assert file.tell() == expected.tell()
        place = pick.randrange(100 - length)
        assert file.seek(place - 100, io.SEEK_END) == expected.seek(place - 100, io.SEEK_END)
        data = pick.randbytes(length)
        assert file.write(data) == expected.write(data)
    assert memory.tobytes() == expected.getvalue()


def test_a_place_before_the_first_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="negative position -1"):
        MemoryFile(np.zeros(3, np.uint8)).seek(-1)


def test_bytes_beyond_the_last_one_are_refused() -> None:
    with pytest.raises(ValueError, match="could not broadcast"):
        MemoryFile(np.zeros(3, np.uint8)).write(b"four")
