"""Reads encoded files: `decode_file`, which torch.load calls, and what looks into a file without decoding it.

The layout is described in structure.py; encoder.py writes it.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.encoded.anchor_files import MissingAnchorError, find_anchor, verify_anchor
from hf_trainweights.checkpoint.encoded.storages import DTYPES, KeyPath, corrupt, default_device_cpu, path_text
from hf_trainweights.checkpoint.encoded.structure import cut_payload, open_structure, payload_crc32
from hf_trainweights.checkpoint.encoded.tree import storage_name, storage_paths, unflatten
from hf_trainweights.errors import CorruptFileError

_leave_undecoded: ContextVar[bool] = ContextVar("leave_undecoded", default=False)


@dataclass(frozen=True)
class _Undecoded:
    structure: dict[str, Any]
    payload: Tensor


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
        MissingAnchorError: The anchor is found nowhere.
    """
    content = open_structure(structure)
    if type(payload) is not Tensor or payload.dtype != torch.uint8 or payload.dim() != 1:
        raise corrupt("the payload", "a 1-D uint8 tensor", getattr(payload, "dtype", type(payload)))
    if _leave_undecoded.get():
        return _Undecoded(content, payload)
    with torch.no_grad(), default_device_cpu():
        if payload.is_meta:
            storages = _empty_storages(content)
        else:
            storages = [storage.to(payload.device) for storage in _decode_storages(content, payload.cpu())]
        return unflatten(content, storages)


def load_file(path: str | Path, *, map_location: Any = None, mmap: bool = False) -> Any:
    """Load a plain or an encoded torch file like `torch.load(path, weights_only=True)`; errors name it.

    Args:
        path: The file.
        map_location: As in `torch.load`.
        mmap: As in `torch.load`, for a plain file. An encoded one is always mapped: decoding copies it.

    Returns:
        What was saved.

    Raises:
        CorruptFileError: The content is damaged, is not a torch file or holds more than data.
        MissingAnchorError: The anchor it needs is found nowhere.
        OSError: It cannot be read.
    """
    try:
        is_mapped = mmap or is_encoded(path)
        return torch.load(os.fspath(path), map_location=map_location, mmap=is_mapped, weights_only=True)
    except (CorruptFileError, MissingAnchorError) as error:
        raise type(error)(f"{path}, {error.where}", error.expected, error.found, error.next_step) from error
    except (OSError, MemoryError):
        raise
    except Exception as error:  # damage surfaces as whatever torch's reader stumbles over
        found = f"{type(error).__name__}: {error}"[:300]
        next_step = "Restore it from a copy, unless it was never a torch file."
        raise CorruptFileError(str(path), "a file that torch.load reads", found, next_step) from error


def is_encoded(path: str | Path) -> bool:
    """Say whether a file claims to be an encoded one; its content is not checked.

    Args:
        path: Any file.

    Returns:
        True for what `save_encoded` writes, False for every other file.

    Raises:
        OSError: It cannot be read.
    """
    call = b"\x80\x02c%s\n%s\n" % (decode_file.__module__.encode(), decode_file.__qualname__.encode())
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(pickles) != 1:
                return False
            with archive.open(pickles[0]) as pickle:
                return pickle.read(len(call)) == call
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError):  # what damage looks like
        return False


def read_structure(path: str | Path) -> dict[str, Any]:
    """Read what an encoded file holds without decoding it, or needing its anchor.

    Args:
        path: An encoded file.

    Returns:
        The checked JSON object, as in structure.py.

    Raises:
        CorruptFileError: It is damaged, or not an encoded file.
        OSError: It cannot be read.
    """
    return _load_undecoded(path).structure


def read_report(path: str | Path) -> dict[str, Any]:
    """Read from an encoded file what a manifest reports of it, where the manifest is lost.

    Args:
        path: An encoded file.

    Returns:
        The digest of its `anchor` or None, and `tensors`, one dict a storage as in `TensorReport`; what only the plan
        knew is guessed: a name is the key path, and a role follows from that.

    Raises:
        CorruptFileError: It is damaged, or not an encoded file.
        OSError: It cannot be read.
    """
    structure = read_structure(path)
    paths = storage_paths(structure)
    tensors = [_stored_report(paths.get(i, ()), entry) for i, entry in enumerate(structure["storages"])]
    return {"anchor": structure.get("anchor", {}).get("sha256"), "tensors": tensors}


def _stored_report(path: KeyPath, entry: Mapping[str, Any]) -> dict[str, Any]:
    role = str(path[-1]) if path and path[-1] in ("exp_avg", "exp_avg_sq") else "weight" if len(path) == 1 else "other"
    return {
        "path": path_text(path),
        "name": path_text(path),
        "role": role,
        "codec": entry["codec"],
        "params": entry.get("params", {}),
        "bound": entry.get("bound"),
        "bytes_in": math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize,
        "bytes_out": sum(entry["sizes"]),
    }


class Anchor:
    """The weights that files are stored against, decoded one at a time; `open_anchor` makes one.

    Attributes:
        path: The file; it stays memory-mapped as long as this object lives.
        sha256: Its digest.
    """

    def __init__(self, path: Path):
        self.path = path
        self.sha256 = verify_anchor(path)
        loaded = _load_undecoded(path)
        self._structure = loaded.structure
        self._pieces = cut_payload(loaded.structure, loaded.payload)
        self._views = _views_by_name(loaded.structure, str(path))

    def __contains__(self, name: object) -> bool:
        return name in self._views

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def tensor(self, name: str) -> Tensor:
        """Decode one tensor.

        Args:
            name: The parameter's name in its module.

        Returns:
            A new CPU tensor, of the dtype and shape it was stored with.

        Raises:
            CorruptFileError: There is no such tensor, or it is damaged.
        """
        if name not in self._views:
            raise corrupt(str(self.path), f"an anchor that holds {name}", "others only")
        view = self._views[name]
        index = view["storage"]
        with torch.no_grad(), default_device_cpu():
            storage = _decode_storage(self._structure, index, self._pieces[index], {})
            structure = {"tree": {"tensor": 0}, "tensors": [{**view, "storage": 0}]}
            return unflatten(structure, [storage]).detach()


def open_anchor(path: str | Path) -> Anchor:
    """Open an anchor file after checking that its digest is the one in its name.

    Args:
        path: A regular file called `anchor_file_name(sha256)`.

    Returns:
        Its weights, by name.

    Raises:
        CorruptFileError: Its digest or its content is wrong, or it refers to another anchor.
        OSError: It cannot be read.
    """
    return Anchor(Path(path).absolute())


def _load_undecoded(path: str | Path) -> _Undecoded:
    token = _leave_undecoded.set(True)
    try:
        loaded = load_file(path, mmap=True) if is_encoded(path) else None
    finally:
        _leave_undecoded.reset(token)
    if type(loaded) is not _Undecoded:
        raise corrupt(str(path), "an encoded file", "another file")
    return loaded


def _empty_storages(structure: Mapping[str, Any]) -> list[Tensor]:
    entries = structure["storages"]
    return [torch.empty(each["shape"], dtype=DTYPES[each["dtype"]], device="meta") for each in entries]


def _decode_storages(structure: Mapping[str, Any], payload: Tensor) -> list[Tensor]:
    pieces = cut_payload(structure, payload)
    anchor = None
    storages: list[Tensor] = []
    for index, entry in enumerate(structure["storages"]):
        references = {}
        if "anchor" in entry:
            anchor = anchor or open_anchor(find_anchor(structure["anchor"]["sha256"], structure["anchor"]["path"]))
            references["anchor"] = anchor.tensor(entry["anchor"]).to(DTYPES[entry["dtype"]])
        if "exp_avg_sq" in entry:
            references["exp_avg_sq"] = storages[entry["exp_avg_sq"]]
        storages.append(_decode_storage(structure, index, pieces[index], references))
    return storages


def _decode_storage(
    structure: Mapping[str, Any], index: int, pieces: Sequence[Tensor], references: Mapping[str, Tensor]
) -> Tensor:
    entry = structure["storages"][index]
    if payload_crc32(pieces) != entry["crc32"]:
        start = pieces[0].storage_offset() if pieces else 0
        where = f"{storage_name(structure, index)}, from byte {start} of the payload on"
        raise corrupt(where, f"crc32 {entry['crc32']}", payload_crc32(pieces))
    codec, dtype = CODECS[entry["codec"]], DTYPES[entry["dtype"]]
    try:
        return codec.decode(pieces, entry.get("params", {}), entry["shape"], dtype, references)
    except CorruptFileError as error:
        where = f"{storage_name(structure, index)}, {error.where}"
        raise CorruptFileError(where, error.expected, error.found, error.next_step) from error


def _views_by_name(structure: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Return the views of a flat state dict, every one of them checked by building it on "meta"."""
    tree = unflatten(structure, _empty_storages(structure))
    is_flat = isinstance(tree, dict) and all(isinstance(value, Tensor) for value in tree.values())
    if not is_flat or "anchor" in structure or any("exp_avg_sq" in each for each in structure["storages"]):
        raise corrupt(where, "an anchor: one flat state dict that refers to no other file", "another file")
    items = next(iter(structure["tree"].values()))
    return {name: structure["tensors"][node["tensor"]] for name, node in items}
