"""Safetensors files: reading their header, and writing a file once, tensor by tensor, with int8 codes aligned.

The weights of a model go into one file, or into shards of limited size and an index.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save
from torch import Tensor

from hf_trainweights.errors import ConfigError, CorruptFileError, SaveError
from hf_trainweights.files.reading import DigestedFile, file_sha256, open_regular_file
from hf_trainweights.files.weight_files import entry_point_rank, is_shard

MAX_SHARD_SIZE = "5GB"

# The limit of the safetensors format for a header.
_MAX_HEADER_BYTES = 100_000_000

# Int8 products read codes at multiples of 16 bytes without copying them. The format lets headers grow by 8 bytes.
_INT8_ALIGNMENT, _HEADER_ALIGNMENT = 16, 8
# Bytes that are digested and written at a time.
_PIECE_BYTES = 1 << 18

# Digits of the SHA-256 in the name of a shard. If by chance an old shard with other content has the same digits, a save
# replaces that shard, too, and not the index alone.
_DIGEST_DIGITS = 8
_NUMBER = re.compile(r"(?:-[0-9a-f]{8})?(-\d{5}-of-\d{5}\.)")

_AGAIN = "Download it again, or save it again from the source."


def safetensors_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file to write; ConfigError: its name does not end in `.safetensors`."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ConfigError(str(path), "a name that ends in .safetensors", repr(path.suffix), "Add it.")
    return path


def read_safetensors_header(file: Path) -> dict[str, dict[str, Any]]:
    """Return the header of a safetensors file, after checking the file's length: name to dtype, shape and offsets."""
    with open_regular_file(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            expected = "a safetensors header of 2 bytes or more inside the file"
            raise CorruptFileError(str(file), expected, f"{length} of {size} bytes", _AGAIN)
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            # The format allows no gaps between tensors, so their sizes add up to the length of the file.
            data_bytes = sum(end - start for entry in header.values() for start, end in [entry["data_offsets"]])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            fault = f"bytes that are none ({error})"
            raise CorruptFileError(str(file), "a safetensors header", fault, _AGAIN) from error
    if 8 + length + data_bytes != size:
        raise CorruptFileError(str(file), f"{8 + length + data_bytes} bytes, as its header says", f"{size}", _AGAIN)
    return header


class TensorToWrite(NamedTuple):
    """A tensor to write: its shape, its dtype, and the function that makes it just before it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorToWrite:
        """Return an entry for a tensor that exists already."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    @property
    def nbytes(self) -> int:
        """The number of its bytes in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    file: Path,
    tensors: Mapping[str, TensorToWrite],
    metadata: Mapping[str, str],
    name_in_file: Callable[[str], str] = str,
) -> str:
    """Write a file like that of `safetensors.torch.save_file`, with one tensor in memory at a time; return its SHA-256.

    The header has 8 more spaces if these let more int8 tensors begin at multiples of 16 bytes, where a product can read
    the mapped file. Equal tensors give equal files. `name_in_file` returns a tensor's name in the file, which must not
    be longer than the old one: the header's length is fixed before names change. The tensor keeps its position.
    ConfigError: the dtype is none of safetensors files.
    """
    header = _header_without_elements(tensors, metadata)
    names, end = [name for name in header if name in tensors], 0
    # Sorted, because safetensors writes the metadata in random order.
    header |= {"__metadata__": dict(sorted(header["__metadata__"].items()))} if metadata else {}
    for name in names:
        start, end = end, end + tensors[name].nbytes
        header[name] |= {"shape": _shape_in_file(tensors[name]), "data_offsets": [start, end]}
    length = _aligned_length(len(_json(header)), [header[name] for name in names if header[name]["dtype"] == "I8"])
    renamed = {name_in_file(name) if name in tensors else name: entry for name, entry in header.items()}
    text = _json(renamed)
    assert len(renamed) == len(header), f"{file}: two tensors have the same new name"
    assert len(text) <= length, f"{file}: a new name is longer than the old one"
    with file.open("wb") as stream:
        digested = DigestedFile(stream)
        digested.write(struct.pack("<Q", length) + text.ljust(length))
        for name in names:
            _write_pieces(_bytes_of(name, tensors[name]), digested)
    return digested.sha256()


def _header_without_elements(tensors: Mapping[str, TensorToWrite], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the header that safetensors writes for empty tensors of these names and dtypes, in its own order."""
    empty = {name: torch.empty(0, dtype=tensor.dtype, device="cpu") for name, tensor in tensors.items()}
    try:
        return json.loads(save(empty, dict(metadata))[8:])
    except KeyError as error:  # raised by the table from dtypes to their names in a file
        name = next((name for name, tensor in tensors.items() if tensor.dtype in error.args), None)
        if name is None:
            raise
        next_step = "Convert it to another dtype, or leave it out."
        dtype = str(tensors[name].dtype)
        raise ConfigError(name, "a dtype that safetensors files hold", dtype, next_step) from error


def _shape_in_file(tensor: TensorToWrite) -> list[int]:
    """Return the shape for a header. PyTorch counts pairs of float4 values, the header counts single values."""
    shape = list(tensor.shape)
    return [*shape[:-1], shape[-1] * 2] if shape and tensor.dtype == torch.float4_e2m1fn_x2 else shape


def _json(header: Mapping[str, Any]) -> bytes:
    return json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()


def _aligned_length(length: int, int8: Sequence[Mapping[str, Any]]) -> int:
    """Return the length of the header with the padding that aligns the most int8 tensors."""
    length += -length % _HEADER_ALIGNMENT
    starts = [entry["data_offsets"][0] for entry in int8]
    aligned, moved = (
        sum((8 + length + padding + start) % _INT8_ALIGNMENT == 0 for start in starts)
        for padding in (0, _HEADER_ALIGNMENT)
    )
    return length + _HEADER_ALIGNMENT * (moved > aligned)


def _write_pieces(data: memoryview, file: DigestedFile) -> None:
    # In pieces, because a piece is still in the cache from taking its digest when it is written.
    for start in range(0, len(data), _PIECE_BYTES):
        file.write(data[start : start + _PIECE_BYTES])


def _bytes_of(name: str, tensor: TensorToWrite) -> memoryview:
    made = tensor.make()
    if (tuple(made.shape), made.dtype) != (tuple(tensor.shape), tensor.dtype):
        expected = f"{tensor.dtype} of shape {tuple(tensor.shape)}, as was said"
        actual = f"{made.dtype} of shape {tuple(made.shape)}"
        raise SaveError(name, expected, actual, "Say shape and dtype of the tensor that is made.")
    return made.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def write_shards(
    tensors: Mapping[str, TensorToWrite], directory: Path, max_shard_size: int | str = MAX_SHARD_SIZE
) -> None:
    """Write one safetensors file, or shards of at most `max_shard_size`, bytes or e.g. `"5GB"`, and their index."""
    try:
        split = split_state_dict_into_shards_factory(
            dict(tensors),
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
    except (ValueError, TypeError, OverflowError) as error:
        expected, actual = 'bytes, or a text such as "5GB"', repr(max_shard_size)
        next_step = "Pass a number of bytes, or a text of a number and KB, MB, GB or TB."
        raise ConfigError("max_shard_size", expected, actual, next_step) from error
    digests = {
        file: write_safetensors(directory / file, {name: tensors[name] for name in names}, {"format": "pt"})
        for file, names in split.filename_to_tensors.items()
    }
    if split.is_sharded:  # `name_shards` writes the index again, with indentation
        text = json.dumps({"metadata": split.metadata, "weight_map": split.tensor_to_filename})
        (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        name_shards(directory, digests)


def name_shards(directory: Path, digests: Mapping[str, str]) -> dict[str, str]:
    """Put the first digits of each shard's SHA-256 into its name and into the index; return all digests by new name.

    So a save never overwrites shards of an earlier save, and replaces only the index. Equal shards have equal names.
    """
    sha256s = dict(digests)
    for path in sorted(path for path in directory.glob("*.index*.json") if entry_point_rank(path.name) is not None):
        index = json.loads(path.read_text(encoding="utf-8"))
        names: dict[str, str] = {}
        for name in sorted(set(filter(is_shard, index["weight_map"].values()))):
            sha256 = sha256s.pop(name, None) or file_sha256(directory / name)
            # `model-0a1b2c3d-00001-of-00002.safetensors` for `model-00001-of-00002.safetensors`.
            names[name] = new_name = _NUMBER.sub(f"-{sha256[:_DIGEST_DIGITS]}\\1", name)
            (directory / name).rename(directory / new_name)
            sha256s[new_name] = sha256
        index["weight_map"] = {tensor: names.get(name, name) for tensor, name in index["weight_map"].items()}
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return sha256s
