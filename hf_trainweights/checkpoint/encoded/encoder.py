"""Writes encoded files (their layout: structure.py): each storage by the codec of its plan with the smallest result.

A file begins with its payload. The structure comes last, because it holds the lengths of the encoded storages.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2

from hf_trainweights.checkpoint.codecs.base import Json
from hf_trainweights.checkpoint.codecs.coding.blocks import ByteBuffer
from hf_trainweights.checkpoint.encoded.decoder import AnchorParts, AnyAnchor, BaseWeights, decode_file
from hf_trainweights.checkpoint.encoded.storage_tasks import Plan, StorageEncoder
from hf_trainweights.checkpoint.encoded.structure import (
    ALIGNMENT_BYTES,
    VERSION,
    TensorReport,
    anchor_file_name,
    padded_length,
    seal_structure,
)
from hf_trainweights.checkpoint.encoded.tree import flatten
from hf_trainweights.checkpoint.encoded.workers import default_device_cpu
from hf_trainweights.files.torch_zip import TorchZipWriter, Writable

_ZEROS = bytes(1 << 20)


@dataclass(frozen=True)
class EncodedFile:
    """An encoded tree: its structure (see structure.py), a report on each storage, and the digest of its anchor.

    `payload` is empty if it was written to a file.
    """

    structure: str = field(repr=False)
    report: tuple[TensorReport, ...] = field(repr=False)
    anchor_sha256: str | None
    payload: Tensor = field(repr=False)


def encode_file(
    tree: Any,
    plan: Plan,
    file: Writable | None = None,
    *,
    anchor: AnyAnchor | None = None,
    anchor_directory: Path | None = None,
    second_moments: Mapping[str, Tensor] | None = None,
) -> EncodedFile:
    """Encode a tree of tensors and plain values (see tree.py) into a file, which torch.load reads, or in memory.

    Tensors are read one at a time, and the result of each is written at once, so memory beyond the tree is a few times
    the largest tensor. A tensor without a plan is stored exactly. If there is no `anchor`, no tensor is stored as a
    difference.

    `anchor_directory` is where readers look first for the anchor (default: where it is now), or for copies of the files
    of a base. `second_moments` are hints for weights: `exp_avg_sq` tensors from another file, by the weight's name in
    the plan. UnstorableError names the key path.
    """
    structure, storages = flatten(tree)
    payload, encoder = Payload(file), StorageEncoder(storages, plan, anchor, second_moments or {})
    with torch.no_grad(), default_device_cpu(), contextlib.closing(encoder.pieces()) as pieces:
        for piece, crc32, continues in pieces:
            payload.append(piece, crc32, continues=continues)
    for view in structure["tensors"]:
        if "joined" in view:
            view["joined"] = [encoder.numbers[number] for number in view["joined"]]
        else:
            view["storage"] = encoder.numbers[view["storage"]]
    used = anchor if any("anchor" in entry for entry in encoder.entries) else None
    header = {"anchor": _anchor_entry(used, anchor_directory)} if used else {}
    text = seal_structure({"version": VERSION, **header, **structure, "storages": encoder.entries})
    return EncodedFile(text, tuple(encoder.report), used and used.sha256, payload.complete(text))


def _anchor_entry(anchor: AnyAnchor, directory: Path | None) -> dict[str, Json]:
    path = (directory or anchor.directory).absolute() / anchor_file_name(anchor.sha256)
    more: dict[str, Json] = {"base": anchor.base.to_dict()} if isinstance(anchor, BaseWeights) else {}
    if isinstance(anchor, AnchorParts):
        more = {"parts": [rank_anchor.sha256 for rank_anchor in anchor.parts]}
    return {"sha256": anchor.sha256, "path": str(path), **more}


class Payload:
    """Collects pieces at multiples of `ALIGNMENT_BYTES`, in memory or in a binary file.

    A file must be at its beginning and need not be seekable. Each piece is written to it at once, and `complete` makes
    it an encoded file, one call of `decode_file`. Equal contents give equal bytes.
    """

    def __init__(self, file: Writable | None = None):
        self._memory = ByteBuffer()
        self._archive = None if file is None else TorchZipWriter(file)
        self.size_bytes = 0
        if self._archive is not None:
            self._archive.begin("data/0")

    def append(self, piece: Tensor, crc32: int | None = None, *, continues: bool = False) -> None:
        """Append a 1-D uint8 CPU tensor and maybe its checksum. It is a new piece, or `continues` the last one."""
        if not continues:
            self._pad(-self.size_bytes % ALIGNMENT_BYTES)
        self._put(piece.numpy().data, crc32)

    def finish(self) -> Tensor:
        """Append the padding after the last piece, and return the payload, 1-D uint8, empty if a file has it."""
        self._pad(padded_length(self.size_bytes) - self.size_bytes)
        return torch.from_numpy(self._memory.finish())

    def complete(self, structure: str) -> Tensor:
        """Finish, write the rest of the file (the structure, and entries that torch.load needs), return as `finish`."""
        payload = self.finish()
        if self._archive is not None:
            self._archive.end()
            self._archive.add("data.pkl", pickled(self.size_bytes, structure))
            self._archive.add("byteorder", b"little")
            self._archive.add("version", b"3\n")
            self._archive.finish()
        return payload

    def _pad(self, count: int) -> None:
        for start in range(0, count, len(_ZEROS)):
            self._put(memoryview(_ZEROS)[: count - start], None)

    def _put(self, data: memoryview, crc32: int | None) -> None:
        if self._archive is None:
            self._memory.append(np.frombuffer(data, np.uint8))
        else:
            self._archive.write(data, crc32)
        self.size_bytes += len(data)


class _Pickler(pickle.Pickler):
    """Pickles a partial function as a call that the reader makes, and a range as a storage of its length in data/0."""

    def reducer_override(self, obj: Any) -> Any:
        return (obj.func, obj.args) if type(obj) is partial else NotImplemented

    def persistent_id(self, obj: Any) -> Any:
        return ("storage", torch.ByteStorage, "0", "cpu", len(obj)) if type(obj) is range else None


def pickled(length: int, structure: str) -> bytes:
    """Return the pickle that torch.save would write for a call of `decode_file`, given the payload's length."""
    # The call by which torch rebuilds a tensor of one dimension. An empty tensor from numpy has a stride of 0.
    payload: Any = partial(_rebuild_tensor_v2, range(length), 0, (length,), (min(length, 1),), False, OrderedDict())
    written = io.BytesIO()
    _Pickler(written, protocol=2).dump(partial(decode_file, payload, structure))
    return written.getvalue()
