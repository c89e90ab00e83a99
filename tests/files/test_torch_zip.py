from __future__ import annotations

import io
import struct
import zipfile
import zlib

import numpy as np

from hf_trainweights.files.torch_zip import TorchZipWriter


class Pretended(io.BytesIO):
    """Keeps of long writes the first bytes only."""

    def write(self, data):
        super().write(data[:100])
        return len(data)


class Longer(bytes):
    """Says that it is 5 GB long."""

    def __len__(self):
        return 5_000_000_000


def test_python_reads_what_is_written_in_pieces_with_and_without_their_checksums():
    file = io.BytesIO()
    archive = TorchZipWriter(file)
    data = np.random.default_rng(0).bytes(300_001)
    archive.begin("data/0")
    for start in range(0, len(data), 100_000):
        piece = data[start : start + 100_000]
        archive.write(piece, zlib.crc32(piece) if start else None)
    archive.end()
    archive.add("version", b"3\n")
    archive.finish()
    with zipfile.ZipFile(file) as found:
        assert found.testzip() is None
        assert {(info.create_system, info.create_version, info.extract_version) for info in found.infolist()} == {
            (3, 45, 45)
        }
        # No time of day: what is equal is written as equal files.
        assert {info.date_time for info in found.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert {name: found.read(name) for name in found.namelist()} == {
            "archive/data/0": data,
            "archive/version": b"3\n",
        }
    assert file.getvalue()[64:].startswith(data)


def test_records_beyond_four_gigabytes_have_their_lengths_and_places_in_64_bits():
    file = Pretended()
    archive = TorchZipWriter(file)
    archive.begin("data/0")
    archive.write(Longer(bytes(10)), zlib.crc32(b""))
    archive.end()
    archive.add("version", b"3\n")
    before = file.tell()
    archive.finish()
    directory = file.getvalue()[before:]
    sizes_and_place = struct.pack("<QQ", 5_000_000_000, 5_000_000_000), struct.pack("<Q", 5_000_000_000 + 64 + 24)
    assert directory.index(sizes_and_place[0]) < directory.index(b"version") < directory.index(sizes_and_place[1])
    assert struct.pack("<II", 0xFFFFFFFF, 0xFFFFFFFF) in directory
