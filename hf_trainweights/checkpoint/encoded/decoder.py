"""`decode_file`, the one call in an encoded file: torch.load makes it, and gets plain tensors.

The layout is described in structure.py; encoder.py writes it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.checkpoint.encoded.anchor import Anchor, find_anchor, keep_open
from hf_trainweights.checkpoint.encoded.base_identity import Base
from hf_trainweights.checkpoint.encoded.base_weights import BaseWeights
from hf_trainweights.checkpoint.encoded.reader import Undecoded, leave_undecoded
from hf_trainweights.checkpoint.encoded.storages import DTYPES, corrupt
from hf_trainweights.checkpoint.encoded.structure import cut_payload, decode_storage, empty_storages, open_structure
from hf_trainweights.checkpoint.encoded.tree import unflatten
from hf_trainweights.checkpoint.encoded.workers import default_device_cpu, in_order, worker_count


def decode_file(payload: Tensor, structure: str) -> Any:
    """Rebuild the tree of an encoded file; `torch.load` calls it, people do not.

    Any pickle may call it, so it believes nothing and checks sizes before it allocates memory for them.

    Args:
        payload: 1-D uint8 on the device that `map_location` asked for. On "meta" neither it nor an anchor is
            read.
        structure: Digest and JSON, see structure.py.

    Returns:
        The tree, its tensors dense and on the payload's device.

    Raises:
        CorruptFileError: Anything is not as `encode_file` leaves it.
        MissingAnchorError: The anchor, or the base, is found nowhere.
    """
    content = open_structure(structure)
    if type(payload) is not Tensor or payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
        found = f"{payload.dtype}, strides {payload.stride()}" if isinstance(payload, Tensor) else type(payload)
        raise corrupt("the payload", "a contiguous 1-D uint8 tensor", found)
    if leave_undecoded.get():
        return Undecoded(content, payload)
    with torch.no_grad(), default_device_cpu():
        if payload.is_meta:
            storages = empty_storages(content)
        else:
            storages = [storage.to(payload.device) for storage in _decode_storages(content, payload.cpu())]
        return unflatten(content, storages)


def _decode_storages(structure: Mapping[str, Any], payload: Tensor) -> list[Tensor]:
    pieces, entries = cut_payload(structure, payload), structure["storages"]
    anchor = open_anchor(structure["anchor"]) if any("anchor" in entry for entry in entries) else None
    done: list[Future[Tensor]] = [Future() for _ in entries]

    def decode(index: int) -> Tensor:
        entry = entries[index]
        references = anchor.references(entry) if anchor is not None and "anchor" in entry else {}
        if "exp_avg_sq" in entry:
            # Of a lower index, so another thread has begun it and waits for none that comes later.
            references["exp_avg_sq"] = done[entry["exp_avg_sq"]].result()
        return decode_storage(structure, index, pieces[index], references)

    def settle(index: int) -> Tensor:
        try:
            done[index].set_result(decode(index))
        except BaseException as error:
            done[index].set_exception(error)
        return done[index].result()

    sizes = [math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize for entry in entries]
    tasks = ((size_bytes, partial(settle, index)) for index, size_bytes in enumerate(sizes))
    with contextlib.closing(in_order(tasks, worker_count(sum(sizes)))) as results:
        return list(results)


def open_anchor(entry: Mapping[str, Any]) -> Anchor | BaseWeights:
    """Open what a file is stored against, given the `anchor` in its structure, and all files that reading that takes.

    MissingAnchorError: one of them is found nowhere. CorruptFileError: one is damaged.
    """
    if "base" in entry:
        return BaseWeights(Base.from_dict("the anchor's base", entry["base"]), Path(entry["path"]).parent)
    return keep_open(find_anchor(entry["sha256"], entry["path"]), entry["sha256"])
