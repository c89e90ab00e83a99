"""The bytes of a GGUF file: each length is checked before anything is made, so hostile files give typed errors."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Number

from hf_trainweights.errors import ConfigError, CorruptFileError, UnsupportedError
from hf_trainweights.imports.gguf.file import KINDS, GgufFile

HUGE = 1 << 60


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str = "w", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file_of(
    *entries: bytes,
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    version: int = 3,
    counts: tuple[int | None, int | None] = (None, None),
    order: str = "<",
) -> bytes:
    tensor_count, entry_count = counts
    header = b"GGUF" + struct.pack(
        f"{order}IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(entries) if entry_count is None else entry_count,
    )
    table = b"".join((header, *entries, *tensors))
    return table + bytes(-len(table) % 32) + data


def nested(depth: int) -> bytes:
    """Return arrays in arrays, the last of which is empty."""
    return b"".join(struct.pack("<IQ", 9, 1) for _ in range(depth)) + struct.pack("<IQ", 0, 0)


CORRUPT = {
    "empty": (b"", r"expected 4 bytes of a header, found 0 bytes left"),
    "another format": (b"PK\x03\x04" + bytes(40), r"expected GGUF in the first four bytes"),
    "half a header": (b"GGUF\x03\0\0\0" + bytes(5), r"bytes of a header"),
    "more entries than bytes": (file_of(counts=(0, HUGE)), rf"expected {HUGE} metadata entries"),
    "more tensors than bytes": (file_of(counts=(HUGE, 0)), rf"expected {HUGE} tensors"),
    "an endless key": (file_of(struct.pack("<Q", HUGE)), r"metadata entries|bytes of a key of the metadata"),
    "a key that is no text": (file_of(text(b"\xff\xfe") + struct.pack("<IB", 0, 1)), r"expected UTF-8 as a key"),
    "an endless text": (file_of(entry("k", 8, struct.pack("<Q", HUGE))), rf"expected {HUGE} bytes of k"),
    "an endless array": (file_of(entry("k", 9, struct.pack("<IQ", 6, HUGE))), rf"expected {HUGE} elements of k"),
    "endless texts": (file_of(entry("k", 9, struct.pack("<IQ", 8, HUGE))), rf"expected {HUGE} elements of k"),
    "endless arrays": (file_of(entry("k", 9, struct.pack("<IQ", 9, HUGE))), rf"expected {HUGE} elements of k"),
    "deep arrays": (file_of(entry("k", 9, nested(1000))), r"found arrays in 4 others"),
    "an unknown type": (file_of(entry("k", 13, bytes(8))), r"expected a type of metadata for k, found type 13"),
    "an array of an unknown type": (file_of(entry("k", 9, struct.pack("<IQ", 99, 1))), r"found type 99"),
    "a key twice": (file_of(entry("k", 0, b"\1"), entry("k", 0, b"\1")), r"expected one value for k, found two"),
    "an alignment of 0": (file_of(entry("general.alignment", 4, bytes(4))), r"expected a power of two"),
    "an alignment of 3": (file_of(entry("general.alignment", 4, b"\3\0\0\0")), r"a power of two .*, found 3"),
    "an alignment that is text": (file_of(entry("general.alignment", 8, text("32"))), r"found '32'"),
    "a tensor behind the end": (file_of(tensors=(tensor(offset=32),), data=bytes(16)), r"expected all bytes of w"),
    "a tensor far behind": (file_of(tensors=(tensor(offset=HUGE),), data=bytes(16)), r"expected all bytes of w"),
    "a tensor of absurd size": (file_of(tensors=(tensor(shape=(HUGE, HUGE)),), data=bytes(16)), r"all bytes of w"),
    "a tensor without data": (file_of(tensors=(tensor(),)), r"expected all bytes of w"),
    "a tensor between the steps": (file_of(tensors=(tensor(offset=4),), data=bytes(64)), r"multiple of 32"),
    "a tensor twice": (file_of(tensors=(tensor(), tensor(offset=32)), data=bytes(64)), r"expected w once"),
    "overlapping tensors": (
        file_of(tensors=(tensor(shape=(16,)), tensor("v", offset=32)), data=bytes(64)),
        r"expected v behind w, found both in the same bytes",
    ),
    "no dimensions": (
        file_of(tensors=(tensor(shape=()),), data=bytes(64)),
        r"expected 1 to 4 dimensions of w, found 0",
    ),
    "many dimensions": (file_of(tensors=(tensor(shape=(1,) * 5),)), r"expected 1 to 4 dimensions of w, found 5"),
    "endless dimensions": (
        file_of(tensors=(text("w") + struct.pack("<I", 2**32 - 1) + bytes(40),)),
        r"dimensions of w, found 4294967295",
    ),
    "a size of 0": (file_of(tensors=(tensor(shape=(4, 0)),)), r"found the shape \(0, 4\)"),
    "a part of a block": (file_of(tensors=(tensor(shape=(33,), kind=8),), data=bytes(64)), r"in blocks of 32 for Q8_0"),
}
UNSUPPORTED = {
    "big-endian": (file_of(version=3, order=">"), r"expected a little-endian file, found a big-endian one"),
    "version 1": (file_of(version=1), r"expected version 2 or 3, found version 1"),
    "a later version": (file_of(version=4), r"found version 4"),
    "an unknown kind": (file_of(tensors=(tensor(kind=99),), data=bytes(64)), r"w: expected a kind .*, found kind 99"),
}


def read(tmp_path: Path, data: bytes) -> GgufFile:
    (tmp_path / "model.gguf").write_bytes(data)
    return GgufFile(tmp_path / "model.gguf")


@pytest.mark.parametrize(("data", "match"), CORRUPT.values(), ids=CORRUPT)
def test_damage_is_a_typed_error_and_takes_no_memory(data: bytes, match: str, tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFileError, match=match):
            read(tmp_path, data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("data", "match"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_files_that_are_read_nowhere_here_are_refused_by_type(data: bytes, match: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=match):
        read(tmp_path, data)


def test_every_beginning_of_a_file_is_refused(tmp_path: Path) -> None:
    values = struct.pack("<IQ", 8, 2) + text("a") + text("b")
    whole = file_of(entry("s", 8, text("x")), entry("a", 9, values), tensors=(tensor(),), data=bytes(16))
    read(tmp_path, whole)
    for length in range(len(whole)):
        with pytest.raises(CorruptFileError, match=r"model\.gguf: expected "):
            read(tmp_path, whole[:length])


@pytest.mark.parametrize("version", [2, 3])
def test_all_types_of_metadata_are_read(version: int, tmp_path: Path) -> None:
    numbers: list[tuple[int, str, Any]] = [(0, "<B", 200), (1, "<b", -3), (2, "<H", 60000), (3, "<h", -300)]
    numbers += [(4, "<I", 2**32 - 1), (5, "<i", -7), (6, "<f", 1e-6), (7, "<?", True), (10, "<Q", 2**63)]
    numbers += [(11, "<q", -(2**40)), (12, "<d", 0.1)]
    entries = [entry(f"k{kind}", kind, struct.pack(layout, value)) for kind, layout, value in numbers]
    entries += [entry("text", 8, text("é")), entry("no utf-8", 8, text(b"\xff"))]
    entries += [
        entry("array", 9, struct.pack("<IQ3h", 3, 3, 1, -2, 3)),
        entry("flags", 9, struct.pack("<IQ2?", 7, 2, 1, 0)),
    ]
    entries += [entry("texts", 9, struct.pack("<IQ", 8, 2) + text("a") + text("bc")), entry("nested", 9, nested(3))]
    metadata = read(tmp_path, file_of(*entries, version=version)).metadata
    assert {key: metadata[key] for key in metadata if key.startswith("k")} == {
        f"k{kind}": value for kind, _, value in numbers
    }
    assert (metadata["text"], metadata["no utf-8"], metadata["texts"]) == ("é", "\ufffd", 2)
    assert (metadata["array"].tolist(), metadata["flags"].tolist()) == ([1, -2, 3], [True, False])


@pytest.mark.parametrize("alignment", [32, 64, 4096])
def test_tensors_lie_where_the_package_gguf_puts_them(alignment: int, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_custom_alignment(alignment)
    arrays = {f"t{size}": np.arange(3 * size, dtype=np.float32).reshape(3, size) for size in (1, 7, 64)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = GgufFile(tmp_path / "model.gguf").tensors
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        name: each.shape for name, each in arrays.items()
    }
    assert all(np.array_equal(tensors[name].data.numpy().view(np.float32), arrays[name]) for name in arrays)


def test_the_kinds_have_the_sizes_of_the_package_gguf() -> None:
    sizes = {int(number): (number.name, *gguf.GGML_QUANT_SIZES[number]) for number in Number}
    assert {number: tuple(kind) for number, kind in KINDS.items()} == sizes


@pytest.mark.parametrize("kind", ["missing", "directory"])
def test_what_is_no_file_is_named(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    if kind == "directory":
        path.mkdir()
    with pytest.raises((ConfigError, CorruptFileError), match=r"model\.gguf: expected a "):
        GgufFile(path)
