"""Items of a `.distcp` file: each one a torch zip file of one call of `decode_file`, which lies inside another file.

DCP's reader cuts the bytes of one item out of a file and passes them to `torch.load`. Items stand one after the other,
or inside the payload of another encoded file (encoded/structure.py). There the outer structure lists the storages of
the inner file as its own, so both read the same bytes, and nothing is stored twice:

    | outer zip ... payload: | inner zip: head | pieces of the inner payload | tail | the next inner zip ... |

Head and tail, the bytes of the inner zip around its pieces, count as storages of bytes that no tensor views. `join`
makes of many items one encoded file of a flat state dict, which can be an anchor. `pair` puts the zip of exp_avg_sq
into that of exp_avg, which takes it to be decoded.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.checkpoint.encoded.encoder import EncodedFile, FilePayload, Payload, pickled
from hf_trainweights.checkpoint.encoded.structure import (
    ALIGNMENT_BYTES,
    VERSION,
    cut_payload,
    open_structure,
    payload_crc32,
    seal_structure,
)
from hf_trainweights.files.torch_zip import FIRST_RECORD_START, MemoryFile, Writable

_UNIX = 3
# Three records with short names take half as many.
_MOST_HEADER_BYTES = 1024


@dataclass(frozen=True)
class Item:
    """An encoded file of one tensor, 1-D uint8, its structure, and where its payload begins."""

    data: Tensor
    payload_start: int
    structure: dict[str, Any]

    @classmethod
    def of(cls, encoded: EncodedFile) -> Item:
        """Return an encoded file as a zip file of what torch.load needs; what else torch.save writes takes 1 kB."""
        payload = encoded.payload.numpy().data
        records = {"data.pkl": pickled(len(payload), encoded.structure), "data/0": payload, "version": b"3\n"}
        memory, starts = np.empty(sum(map(len, records.values())) + _MOST_HEADER_BYTES, np.uint8), {}
        file = MemoryFile(memory)
        with zipfile.ZipFile(file, "w") as target:
            for name, content in records.items():
                record = zipfile.ZipInfo(f"a/{name}")  # of 1980, so that equal tensors give equal bytes
                record.create_system, record.file_size = _UNIX, len(content)
                with target.open(record, "w") as member:
                    starts[name] = file.tell()
                    member.write(content)
        data = torch.from_numpy(memory[: file.tell()])
        return cls(data, starts["data/0"], open_structure(encoded.structure))

    @property
    def lead(self) -> int:
        """Zeros before the item in another payload, so that its own payload is aligned there."""
        return -self.payload_start % ALIGNMENT_BYTES

    @property
    def content(self) -> memoryview:
        """The zip file."""
        return self.data.numpy().data


class Joiner:
    """Writes items as one encoded file of their flat state dict, to a binary file at its beginning."""

    def __init__(self, file: Writable):
        self._payload = FilePayload(file)
        self._storages: list[dict[str, Any]] = []
        self._tensors: list[dict[str, Any]] = []
        self._numbers: dict[str, int] = {}

    def add(self, name: str, item: Item) -> int:
        """Append an item of one tensor under its key in the state dict, and return where it begins in the file."""
        nested, storages = _nest(item)
        self._payload.append(nested)
        (view,) = item.structure["tensors"]
        self._numbers[name] = len(self._tensors)
        self._tensors.append({**view, "storage": view["storage"] + len(self._storages) + 1})
        self._storages += storages
        return FIRST_RECORD_START + self._payload.size_bytes - len(item.data)

    def finish(self) -> None:
        """Complete the file."""
        tree = {"dict": [[name, {"tensor": number}] for name, number in self._numbers.items()]}
        structure = {"version": VERSION, "tree": tree, "tensors": self._tensors, "storages": self._storages}
        self._payload.complete(seal_structure(structure))


def split_moments(moments: EncodedFile) -> tuple[Item, Item, int | None]:
    """Make items of exp_avg and exp_avg_sq out of an encoded file of both.

    The third value is where the item of exp_avg_sq begins in that of exp_avg; None if that one does not take it.
    """
    structure = open_structure(moments.structure)
    square, mean = structure["storages"]
    pieces = cut_payload(structure, moments.payload)
    inner = _item([square], pieces[0])
    if "exp_avg_sq" not in mean:
        return _item([mean], pieces[1]), inner, None
    nested, storages = _nest(inner)
    outer = _item([*storages, {**mean, "exp_avg_sq": 1}], [nested, *pieces[1]])
    return outer, inner, outer.payload_start + inner.lead


def _item(storages: list[dict[str, Any]], pieces: Iterable[Tensor]) -> Item:
    """Make an item whose tensor is the last storage."""
    payload = Payload()
    for piece in pieces:
        payload.append(piece)
    view = {"storage": len(storages) - 1}
    content = {"version": VERSION, "tree": {"tensor": 0}, "tensors": [view], "storages": storages}
    return Item.of(EncodedFile(seal_structure(content), (), None, payload.finish()))


def _nest(item: Item) -> tuple[Tensor, list[dict[str, Any]]]:
    """Return an item's bytes as a part of another payload, and the storages that lie there, head and tail included."""
    nested = torch.from_numpy(np.zeros(item.lead + len(item.data), np.uint8))
    nested[item.lead :] = item.data
    start = stop = item.lead + item.payload_start
    for entry in item.structure["storages"]:
        for size in entry["sizes"]:
            stop += -stop % ALIGNMENT_BYTES + size
    head, tail = nested[:start], nested[stop + -stop % ALIGNMENT_BYTES :]
    return nested, [_bytes_entry(head), *item.structure["storages"], _bytes_entry(tail)]


def _bytes_entry(data: Tensor) -> dict[str, Any]:
    length = len(data)
    return {"codec": "raw", "dtype": "uint8", "shape": [length], "sizes": [length], "crc32": payload_crc32([data])}
