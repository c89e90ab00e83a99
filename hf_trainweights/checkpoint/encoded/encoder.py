"""Writes encoded files (their layout: structure.py): each storage by the smallest codec that its plan allows."""

from __future__ import annotations

import math
import mmap
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs import get_codec
from hf_trainweights.checkpoint.codecs.base import Codec, EncodedTensor, Json, References
from hf_trainweights.checkpoint.codecs.memory import ByteBuffer
from hf_trainweights.checkpoint.encoded.anchor_files import anchor_file_name
from hf_trainweights.checkpoint.encoded.decoder import Anchor, decode_file
from hf_trainweights.checkpoint.encoded.storages import KeyPath, Storage, default_device_cpu, path_text
from hf_trainweights.checkpoint.encoded.structure import (
    ALIGNMENT_BYTES,
    VERSION,
    padded_length,
    payload_crc32,
    seal_structure,
)
from hf_trainweights.checkpoint.encoded.tree import flatten
from hf_trainweights.errors import ConfigError, QuantizationError, UnsupportedError

# Payloads up to this size wait in memory, larger ones in a temporary file.
_MEMORY_BYTES = 96 << 20
_ZEROS_BYTES = 1 << 20
# Below the first number of elements a coder's headers always outweigh what it saves, above the second never.
_RAW_ELEMENTS = (64, 4096)


@dataclass(frozen=True)
class TensorPlan:
    """How to encode one tensor.

    Args:
        role: What it is, for the report.
        name: Its parameter's name, for the report.
        candidates: Codecs to try: the smallest result wins, the earlier one in a tie. A codec drops out if a
            reference named below is missing, if it refuses the tensor, or if it is lossy and the tensor is not
            contiguous or shares its memory. If none is left the tensor is stored exactly.
        anchor: Name of its reference in the anchor.
        exp_avg_sq: Path of its second moment in the same tree.
        round_to: Round the values to this dtype first and keep them in their own; not where one overflows.
    """

    role: str
    name: str
    candidates: tuple[Codec, ...]
    anchor: str | None = None
    exp_avg_sq: KeyPath | None = None
    round_to: torch.dtype | None = None


Plan = Mapping[KeyPath, TensorPlan]


@dataclass(frozen=True)
class TensorReport:
    """What became of one stored tensor; tied tensors and views of the same memory count as one.

    Args:
        path: Key path of the first tensor, e.g. `state.0.exp_avg`.
        name: Its parameter's name where the plan knows it, else the path.
        role: As in the plan, else `other`.
        codec: Name of the codec that won.
        params: The codec's parameters.
        bound: Largest error of a decoded element in the codec's unit; None if it is exact.
        bytes_in: Decoded bytes.
        bytes_out: Stored bytes.
    """

    path: str
    name: str
    role: str
    codec: str
    params: dict[str, Json]
    bound: float | None
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True)
class AnchorRef:
    """Which anchor a file needs.

    Args:
        sha256: Digest of the anchor file, hexadecimal.
        path_hint: Absolute path of its link in the file's own directory.
    """

    sha256: str
    path_hint: str


@dataclass(frozen=True)
class EncodedFile:
    """An encoded file that is not yet on disk; it pickles as one call of `decode_file`.

    Args:
        payload: 1-D uint8. Beyond 96 MiB it lies in an unlinked temporary file, not in memory.
        structure: See structure.py.
        report: One entry per storage.
        anchor: The anchor that reading it takes, or None if no tensor refers to one.
    """

    payload: Tensor = field(repr=False)
    structure: str = field(repr=False)
    report: tuple[TensorReport, ...] = field(repr=False)
    anchor: AnchorRef | None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Tensor, str]]:
        return decode_file, (self.payload, self.structure)


def encode_file(
    tree: Any,
    plan: Plan,
    *,
    anchor: Anchor | None = None,
    anchor_link: Path | None = None,
    spool_directory: Path | None = None,
) -> EncodedFile:
    """Encode a tree of tensors and plain values.

    Tensors are read one at a time, so memory beyond the tree is a few times the largest one.

    Args:
        tree: What `torch.load` of the file is to return; only read. See tree.py for what it may hold.
        plan: How to encode which tensor, by key path; a tensor without a plan is stored exactly. Of tied
            tensors the first one that has a plan decides.
        anchor: What plans with an `anchor` refer to; without it those tensors are stored without reference.
        anchor_link: Where the anchor will lie beside this file, to be recorded. Default: where it lies now.
        spool_directory: Where payloads beyond 96 MiB wait, in an unlinked file. Default: the system's choice.

    Returns:
        The file, for `save_encoded`.

    Raises:
        UnstorableError: The tree holds a value that cannot be stored; the error names its key path.
        ConfigError: `anchor_link` does not carry the anchor's name.
        OSError: The temporary file cannot be written.

    Example:
        >>> encoded = encode_file({"weight": torch.zeros(4), "lr": 0.1}, {})
        >>> [(entry.path, entry.codec) for entry in encoded.report]
        [('weight', 'raw')]
    """
    structure, storages = flatten(tree)
    reference = _anchor_reference(anchor, anchor_link)
    plain_bytes = sum(map(_plain_bytes, storages))
    with _Spool(spool_directory, plain_bytes) as spool, torch.no_grad(), default_device_cpu():
        numbers, entries, report = _encode_storages(storages, plan, anchor, spool)
        payload = spool.finish()
    for view in structure["tensors"]:
        view["storage"] = numbers[view["storage"]]
    if not any("anchor" in entry for entry in entries):
        reference = None
    header: dict[str, Json] = {"version": VERSION}
    if reference:
        header["anchor"] = {"sha256": reference.sha256, "path": reference.path_hint}
    text = seal_structure({**header, **structure, "storages": entries})
    return EncodedFile(payload, text, tuple(report), reference)


def save_encoded(encoded: EncodedFile, file: BinaryIO) -> None:
    """Write an encoded file with `torch.save`; equal trees and plans give equal bytes.

    Args:
        encoded: What `encode_file` returned.
        file: A binary file open for writing. Not a path: torch writes a path's name into the file.

    Raises:
        OSError: The disk is full or refuses.

    Example:
        >>> import io
        >>> file = io.BytesIO()
        >>> save_encoded(encode_file({"weight": torch.ones(2)}, {}), file)
        >>> _ = file.seek(0)
        >>> torch.load(file, weights_only=True)
        {'weight': tensor([1., 1.])}
    """
    torch.save(encoded, file)


def _anchor_reference(anchor: Anchor | None, link: Path | None) -> AnchorRef | None:
    if anchor is None:
        return None
    link = link or anchor.path
    if link.name != anchor_file_name(anchor.sha256):
        next_step = "Link the anchor under this name: it is looked up by digest."
        raise ConfigError("anchor_link", anchor_file_name(anchor.sha256), link.name, next_step)
    return AnchorRef(anchor.sha256, str(link.absolute()))


def _encode_storages(
    storages: Sequence[Storage], plan: Plan, anchor: Anchor | None, spool: _Spool
) -> tuple[dict[int, int], list[dict[str, Json]], list[TensorReport]]:
    """Return each storage's number in the file by its index, the entries in the file, and the report."""
    plans = [_plan_of(storage, plan) for storage in storages]
    owners = {path: index for index, storage in enumerate(storages) for path in storage.paths}
    moments = {i: owners.get(each.exp_avg_sq) for i, each in enumerate(plans) if each.exp_avg_sq is not None}
    referred = set(moments.values())
    numbers: dict[int, int] = {}
    entries: list[dict[str, Json]] = []
    report: list[TensorReport] = []
    decoded: dict[int, Tensor] = {}
    for index in _moments_first(len(storages), moments):
        storage, each, moment = storages[index], plans[index], moments.get(index)
        tensor, rounding_error = _read(storage, each)
        references = _anchor_tensor(anchor, each.anchor, tensor)
        if moment in decoded:
            references["exp_avg_sq"] = decoded.pop(moment)
        codec, encoded = _encode_tensor(tensor, storage, each, references)
        if index in referred:
            decoded[index] = _decoded(codec, encoded, tensor, references)
        entry = _entry(codec, encoded, tensor, spool)
        if "anchor" in codec.references and "anchor" in references:
            entry["anchor"] = each.anchor
        if "exp_avg_sq" in codec.references and moment is not None:
            entry["exp_avg_sq"] = numbers[moment]
        numbers[index] = len(entries)
        entries.append(entry)
        report.append(_report(storage, each, codec, encoded, rounding_error))
        if report[-1].bound is not None:
            entry["bound"] = report[-1].bound
    return numbers, entries, report


def _plan_of(storage: Storage, plan: Plan) -> TensorPlan:
    for path in storage.paths:
        if path in plan:
            return plan[path]
    return TensorPlan("other", path_text(storage.paths[0]), ())


def _moments_first(count: int, moments: Mapping[int, int | None]) -> Iterator[int]:
    """Yield every index once, a second moment right before the first user of it."""
    done: set[int] = set()
    for index in range(count):
        for each in (moments.get(index), index):
            if each is not None and each not in done:
                done.add(each)
                yield each


def _read(storage: Storage, plan: TensorPlan) -> tuple[Tensor, float | None]:
    """Return the tensor to encode and the error of rounding it, None if it is as it was."""
    tensor = storage.read()
    if plan.round_to is None or not storage.exclusive:
        return tensor, None
    rounded = tensor.to(plan.round_to).to(tensor.dtype)
    error = (rounded - tensor).abs().amax().item() if tensor.numel() else 0.0
    return (rounded, error) if math.isfinite(error) else (tensor, None)


def _anchor_tensor(anchor: Anchor | None, name: str | None, tensor: Tensor) -> dict[str, Tensor]:
    if anchor is None or name is None or name not in anchor:
        return {}
    reference = anchor.tensor(name)
    # What a float out of range becomes as an integer depends on the machine.
    if reference.dtype != tensor.dtype and not (reference.is_floating_point() and tensor.is_floating_point()):
        return {}
    return {"anchor": reference.to(tensor.dtype)}


def _encode_tensor(
    tensor: Tensor, storage: Storage, plan: TensorPlan, references: References
) -> tuple[Codec, EncodedTensor]:
    """Return the codec with the smallest result, and that result."""
    missing = {name for name in ("anchor", "exp_avg_sq") if getattr(plan, name) is not None} - references.keys()
    missing |= {name for name, reference in references.items() if reference.shape != tensor.shape}
    usable = [
        codec
        for codec in plan.candidates
        if not missing.intersection(codec.references) and (storage.exclusive or codec.lossless)
    ]
    exact = [get_codec("raw")()] if tensor.numel() < _RAW_ELEMENTS[1] else []
    if tensor.numel() >= _RAW_ELEMENTS[0]:
        exact.append(get_codec("planes")())
    best = _smallest(tensor, usable, references) or _smallest(tensor, exact, {})
    if best is None:
        raise UnsupportedError(path_text(storage.paths[0]), "a dtype that planes takes", str(tensor.dtype), "Cast it.")
    return best


def _smallest(tensor: Tensor, codecs: Sequence[Codec], references: References) -> tuple[Codec, EncodedTensor] | None:
    best: tuple[Codec, EncodedTensor] | None = None
    for codec in codecs:
        try:
            encoded = codec.encode(tensor, references)
        except (QuantizationError, UnsupportedError):
            continue
        if best is None or encoded.payload_bytes < best[1].payload_bytes:
            best = codec, encoded
    return best


def _decoded(codec: Codec, encoded: EncodedTensor, tensor: Tensor, references: References) -> Tensor:
    if codec.lossless:
        return tensor
    if encoded.decoded is not None:
        return encoded.decoded
    return codec.decode(encoded.payloads, encoded.params, tensor.shape, tensor.dtype, references)


def _entry(codec: Codec, encoded: EncodedTensor, tensor: Tensor, spool: _Spool) -> dict[str, Json]:
    for payload in encoded.payloads:
        spool.append(payload)
    entry: dict[str, Json] = {
        "codec": codec.codec_id,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "sizes": [payload.numel() for payload in encoded.payloads],
        "crc32": payload_crc32(encoded.payloads),
    }
    if encoded.params:
        entry["params"] = encoded.params
    return entry


def _report(
    storage: Storage, plan: TensorPlan, codec: Codec, encoded: EncodedTensor, rounding_error: float | None
) -> TensorReport:
    bounds = [bound for bound in (encoded.bound, rounding_error) if bound is not None]
    return TensorReport(
        path=path_text(storage.paths[0]),
        name=plan.name,
        role=plan.role,
        codec=codec.codec_id,
        params=encoded.params,
        bound=sum(bounds) if bounds else None,
        bytes_in=_plain_bytes(storage),
        bytes_out=encoded.payload_bytes,
    )


def _plain_bytes(storage: Storage) -> int:
    return math.prod(storage.shape) * storage.source.itemsize


class _Spool:
    """Collects pieces at multiples of `ALIGNMENT_BYTES`: in memory, and what gets too large in an unlinked file."""

    def __init__(self, directory: Path | None, expected_bytes: int):
        self._directory = directory
        self._memory = ByteBuffer(min(expected_bytes, _MEMORY_BYTES))
        self._file: BinaryIO | None = None
        self._bytes = 0

    def __enter__(self) -> _Spool:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()

    def append(self, payload: Tensor) -> None:
        self._add(np.zeros(-self._bytes % ALIGNMENT_BYTES, np.uint8))
        self._add(payload.numpy())

    def finish(self) -> Tensor:
        padding = padded_length(self._bytes) - self._bytes
        for start in range(0, padding, _ZEROS_BYTES):
            self._add(np.zeros(min(padding - start, _ZEROS_BYTES), np.uint8))
        if self._file is None:
            return torch.from_numpy(self._memory.view())
        self._file.flush()
        mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)  # lives on when the file is closed
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def _add(self, piece: np.ndarray) -> None:
        self._bytes += len(piece)
        if self._file is None and self._bytes > _MEMORY_BYTES:
            self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115
            self._file.write(self._memory.view().data)
            self._memory = ByteBuffer()
        if self._file is None:
            self._memory.append(piece)
        else:
            self._file.write(piece.data)
