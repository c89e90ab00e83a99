"""Writes encoded files (their layout: structure.py): each storage by the smallest codec that its plan allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import Codec, EncodedTensor, Json
from hf_trainweights.checkpoint.encoded.anchor import Anchor
from hf_trainweights.checkpoint.encoded.anchor_files import anchor_file_name
from hf_trainweights.checkpoint.encoded.base_weights import BaseWeights
from hf_trainweights.checkpoint.encoded.decoder import decode_file
from hf_trainweights.checkpoint.encoded.key_paths import path_text
from hf_trainweights.checkpoint.encoded.payload import FilePayload, Payload
from hf_trainweights.checkpoint.encoded.plan import Plan, TensorPlan
from hf_trainweights.checkpoint.encoded.storage_encoder import (
    anchor_reference,
    decoded_tensor,
    encode_storage,
)
from hf_trainweights.checkpoint.encoded.storages import Storage, default_device_cpu
from hf_trainweights.checkpoint.encoded.structure import VERSION, payload_crc32, seal_structure
from hf_trainweights.checkpoint.encoded.tree import flatten
from hf_trainweights.errors import ConfigError
from hf_trainweights.files.torch_zip_writer import Writable, join_crc32


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
class WrittenFile:
    """What became of a tree.

    Args:
        structure: See structure.py.
        report: One entry per storage.
        anchor_sha256: Digest of the anchor that reading it takes, or None if no tensor refers to one.
    """

    structure: str = field(repr=False)
    report: tuple[TensorReport, ...] = field(repr=False)
    anchor_sha256: str | None


@dataclass(frozen=True)
class EncodedFile:
    """An encoded file in memory; `torch.save` writes it, as one call of `decode_file`.

    Pass torch.save an open file, for it writes the name of a path into the file. Then equal trees and plans give equal
    bytes.

    Args:
        payload: 1-D uint8.
        structure: As in `WrittenFile`.
        report: As there.
        anchor_sha256: As there.

    Examples:
        >>> import io
        >>> file = io.BytesIO()
        >>> torch.save(encode_file({"weight": torch.ones(2)}, {}), file)
        >>> _ = file.seek(0)
        >>> torch.load(file, weights_only=True)
        {'weight': tensor([1., 1.])}
    """

    payload: Tensor = field(repr=False)
    structure: str = field(repr=False)
    report: tuple[TensorReport, ...] = field(repr=False)
    anchor_sha256: str | None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Tensor, str]]:
        return decode_file, (self.payload, self.structure)


def encode_file(
    tree: Any,
    plan: Plan,
    *,
    anchor: Anchor | BaseWeights | None = None,
    anchor_link: Path | None = None,
    second_moments: Mapping[str, Tensor] | None = None,
) -> EncodedFile:
    """Encode a tree in memory, for `torch.save`; arguments and errors are those of `write_file`.

    Examples:
        >>> encoded = encode_file({"weight": torch.zeros(4), "lr": 0.1}, {})
        >>> [(entry.path, entry.codec) for entry in encoded.report]
        [('weight', 'raw')]
    """
    payload = Payload()
    written = _encode(payload, tree, plan, anchor, anchor_link, second_moments or {})
    return EncodedFile(payload.finish(), written.structure, written.report, written.anchor_sha256)


def write_file(
    file: Writable,
    tree: Any,
    plan: Plan,
    *,
    anchor: Anchor | BaseWeights | None = None,
    anchor_link: Path | None = None,
    second_moments: Mapping[str, Tensor] | None = None,
) -> WrittenFile:
    """Encode a tree of tensors and plain values (see tree.py) into a file, which torch.load reads.

    Tensors are read one at a time, and what becomes of each is written at once, so memory beyond the tree is a few
    times the largest one. A tensor without a plan is stored exactly, and without an `anchor` without reference.
    `anchor_link` is the path of the anchor to record (default: its present path); of a base, the directory that may
    hold copies of its files. `second_moments` have by the name in a weight's plan its `exp_avg_sq` in another file, a
    hint. UnstorableError names the key path.

    Examples:
        >>> import io
        >>> file = io.BytesIO()
        >>> _ = write_file(file, {"weight": torch.ones(2)}, {})
        >>> _ = file.seek(0)
        >>> torch.load(file, weights_only=True)
        {'weight': tensor([1., 1.])}
    """
    payload = FilePayload(file, decode_file)
    written = _encode(payload, tree, plan, anchor, anchor_link, second_moments or {})
    payload.complete(written.structure)
    return written


def _encode(
    payload: Payload,
    tree: Any,
    plan: Plan,
    anchor: Anchor | BaseWeights | None,
    anchor_link: Path | None,
    second_moments: Mapping[str, Tensor],
) -> WrittenFile:
    structure, storages = flatten(tree)
    header: dict[str, Json] = {"version": VERSION}
    anchor_entry = _anchor_entry(anchor, anchor_link)
    with torch.no_grad(), default_device_cpu():
        numbers, entries, report = _encode_storages(storages, plan, anchor, second_moments, payload)
    for view in structure["tensors"]:
        view["storage"] = numbers[view["storage"]]
    if anchor_entry and any("anchor" in entry for entry in entries):
        header["anchor"] = anchor_entry
    text = seal_structure({**header, **structure, "storages": entries})
    return WrittenFile(text, tuple(report), anchor.sha256 if anchor and "anchor" in header else None)


def _anchor_entry(anchor: Anchor | BaseWeights | None, link: Path | None) -> dict[str, Json] | None:
    if anchor is None:
        return None
    name = anchor_file_name(anchor.sha256)
    if isinstance(anchor, BaseWeights):
        path = str(link.absolute()) if link else name
        return {"sha256": anchor.sha256, "path": path, "base": anchor.base.to_dict()}
    link = link or anchor.path
    if link.name != name:
        next_step = "Link the anchor under this name: it is looked up by digest."
        raise ConfigError("anchor_link", name, link.name, next_step)
    return {"sha256": anchor.sha256, "path": str(link.absolute())}


def _encode_storages(
    storages: Sequence[Storage],
    plan: Plan,
    anchor: Anchor | BaseWeights | None,
    second_moments: Mapping[str, Tensor],
    payload: Payload,
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
        tensor = storage.read()
        references = anchor_reference(anchor, each.anchor, tensor)
        if moment in decoded:
            references["exp_avg_sq"] = decoded.pop(moment)
        elif each.role == "weight" and each.name in second_moments:
            references["exp_avg_sq"] = second_moments[each.name].detach().cpu()
        codec, encoded = encode_storage(tensor, storage, each, references)
        if index in referred:
            decoded[index] = decoded_tensor(codec, encoded, tensor, references)
        entry = _entry(codec, encoded, tensor, payload)
        if "anchor" in codec.references and "anchor" in references:
            assert anchor is not None  # it is where the reference comes from
            assert each.anchor is not None
            entry["anchor"] = anchor.stored_name(each.anchor)
        if "exp_avg_sq" in codec.references and moment is not None:
            entry["exp_avg_sq"] = numbers[moment]
        numbers[index] = len(entries)
        entries.append(entry)
        report.append(_report(storage, each, codec, encoded))
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


def _entry(codec: Codec, encoded: EncodedTensor, tensor: Tensor, payload: Payload) -> dict[str, Json]:
    checksums = [payload_crc32([piece]) for piece in encoded.payloads]
    for piece, checksum in zip(encoded.payloads, checksums, strict=True):
        payload.append(piece, checksum)
    joined = 0
    for piece, checksum in zip(encoded.payloads, checksums, strict=True):
        joined = join_crc32(joined, checksum, piece.numel())
    entry: dict[str, Json] = {
        "codec": codec.codec_id,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "sizes": [piece.numel() for piece in encoded.payloads],
        "crc32": joined,
    }
    if encoded.params:
        entry["params"] = encoded.params
    return entry


def _report(storage: Storage, plan: TensorPlan, codec: Codec, encoded: EncodedTensor) -> TensorReport:
    return TensorReport(
        path=path_text(storage.paths[0]),
        name=plan.name,
        role=plan.role,
        codec=codec.codec_id,
        params=encoded.params,
        bound=encoded.bound,
        bytes_in=_plain_bytes(storage),
        bytes_out=encoded.payload_bytes,
    )


def _plain_bytes(storage: Storage) -> int:
    return math.prod(storage.shape) * storage.source.itemsize
