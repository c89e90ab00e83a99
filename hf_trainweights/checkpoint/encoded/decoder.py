"""`decode_file`, the one call in an encoded file, and `Anchor` and `BaseWeights`, which files are stored against.

torch.load makes the call, and gets plain tensors. structure.py describes the layout, and encoder.py writes it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file as load_safetensors
from torch import Tensor

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.codecs.base import ALL_DTYPES
from hf_trainweights.checkpoint.encoded.reader import (
    Undecoded,
    find_anchor,
    find_base,
    is_encoded,
    leave_undecoded,
    load_file,
    load_undecoded,
    verify_anchor,
)
from hf_trainweights.checkpoint.encoded.structure import (
    Base,
    anchor_file_name,
    cut_payload,
    decoded_bytes,
    empty_storages,
    open_structure,
    parts_sha256,
    payload_crc32,
    storage_name,
)
from hf_trainweights.checkpoint.encoded.tree import DTYPES, build_tensors, corrupt, unflatten
from hf_trainweights.checkpoint.encoded.workers import default_device_cpu, in_order, worker_count
from hf_trainweights.errors import CorruptFileError

MOST_ANCHORS = 8
"""Most files that reading one anchor may take, itself among them. Writers stay below this."""
# A younger file may change again within one tick of the file system's clock, so that its time does not show the change.
_SETTLED_SECONDS = 2.0

# The anchor that was opened last, and the status of its files at that time.
_last_anchor: tuple[Anchor, list[os.stat_result]] | None = None


def decode_file(payload: Tensor, structure: str) -> Any:
    """Rebuild the tree of an encoded file; `torch.load` calls it, people do not.

    Any pickle may call it, so it trusts no argument and checks sizes before it allocates memory for them.

    Args:
        payload: 1-D uint8 on the device that `map_location` asked for. On "meta", neither the payload nor an anchor is
            read.
        structure: Digest and JSON, see structure.py.

    Returns:
        The tree, its tensors dense and on the payload's device.

    Raises:
        CorruptFileError: Anything is not as `encode_file` wrote it.
        MissingAnchorError: The anchor, or the base, is found nowhere.
    """
    content = open_structure(structure)
    if type(payload) is not Tensor or payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
        kind = f"{payload.dtype}, strides {payload.stride()}" if isinstance(payload, Tensor) else type(payload)
        raise corrupt("the payload", "a contiguous 1-D uint8 tensor", kind)
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
        moment = entries[index].get("exp_avg_sq")
        try:
            # The moment has a lower index, so a thread has begun to decode it, and that thread waits for no later one.
            exp_avg_sq = None if moment is None else done[moment].result()
            done[index].set_result(_decode_storage(structure, index, pieces[index], anchor, exp_avg_sq))
        except BaseException as error:
            done[index].set_exception(error)
        return done[index].result()

    sizes = [decoded_bytes(entry) for entry in entries]
    tasks = ((size_bytes, partial(decode, index)) for index, size_bytes in enumerate(sizes))
    return list(in_order(tasks, worker_count(sum(sizes))))


def _decode_storage(
    structure: Mapping[str, Any],
    index: int,
    pieces: Sequence[Tensor],
    anchor: AnyAnchor | None,
    exp_avg_sq: Tensor | None = None,
) -> Tensor:
    """Decode a storage to a new CPU tensor, given a checked structure, the storage's pieces, and its references.

    CorruptFileError names the tensor: its bytes have another checksum, or do not fit the structure.
    """
    entry = structure["storages"][index]
    if payload_crc32(pieces) != entry["crc32"]:
        start = pieces[0].storage_offset() if pieces else 0
        where = f"{storage_name(structure, index)}, from byte {start} of the payload on"
        raise corrupt(where, f"crc32 {entry['crc32']}", payload_crc32(pieces))
    codec, dtype = CODECS[entry["codec"]], DTYPES[entry["dtype"]]
    references = {}
    if anchor is not None and "anchor" in entry:
        references["anchor"] = anchor.tensor(entry["anchor"]).to(dtype)
    if exp_avg_sq is not None:
        references["exp_avg_sq"] = exp_avg_sq
    # An anchor decodes tensors to new memory, to which a codec may write. A base maps them from files, so it may not.
    is_spare, params = not isinstance(anchor, BaseWeights), entry.get("params", {})
    try:
        decoded = codec.decode(pieces, params, entry["shape"], dtype, references, is_anchor_spare=is_spare)
    except CorruptFileError as error:
        where = f"{storage_name(structure, index)}, {error.where}"
        raise CorruptFileError(where, error.expected, error.found, error.next_step) from error
    # The memory of an anchor's tensor, to which a codec may have decoded, may be a part of a larger one. But the views
    # that `build_tensors` makes begin at the first byte of the memory.
    return decoded if decoded.untyped_storage().nbytes() == decoded.nbytes else decoded.clone()


def open_anchor(entry: Mapping[str, Any]) -> AnyAnchor:
    """Open the anchor or base that a file's structure names in `anchor`, and all files that it refers to in turn.

    The anchor stays open until another anchor is asked for or one of its files changes. Each item of a sharded
    checkpoint asks for the anchor, and opening takes the longer the more weights it has. Meanwhile its bytes stay on
    the disk even if its last link is removed. Windows cannot remove an open file, so there no anchor stays open.
    MissingAnchorError: one of the files is found nowhere. CorruptFileError: one is damaged.
    """
    global _last_anchor
    if "base" in entry:
        return BaseWeights(Base.from_dict("the anchor's base", entry["base"]), Path(entry["path"]).parent)
    if "parts" in entry:
        directory = Path(entry["path"]).parent
        paths = {sha256: find_anchor(sha256, str(directory / anchor_file_name(sha256))) for sha256 in entry["parts"]}
        return AnchorParts([Anchor(path, sha256=sha256) for sha256, path in paths.items()])
    sha256, path = entry["sha256"], find_anchor(entry["sha256"], entry["path"])
    last = _last_anchor  # read once, because another thread may open another anchor meanwhile
    if last is not None and last[0].sha256 == sha256 and all(map(_is_unchanged, last[0].files, last[1])):
        return last[0]
    anchor = Anchor(path, sha256=sha256)
    statuses = [os.stat(file) for file in anchor.files]
    is_settled = time.time() - max(status.st_mtime for status in statuses) > _SETTLED_SECONDS
    _last_anchor = (anchor, statuses) if is_settled and os.name != "nt" else None
    return anchor


def _is_unchanged(path: Path, before: os.stat_result) -> bool:
    now = os.stat(path) if path.exists() else None
    return now is not None and os.path.samestat(now, before) and now.st_mtime_ns == before.st_mtime_ns


class Anchor:
    """An encoded file of weights that other files are stored against; it decodes one tensor at a time.

    An anchor may be a difference to another anchor, which lies beside it. `files` are the paths of both and of any
    further ones. The file stays memory-mapped as long as this object lives. Its digest is compared with its name,
    unless `sha256` says that `find_anchor` has compared it already. CorruptFileError: the digest or the content is
    wrong, or reading takes more than `most_files`. MissingAnchorError: the anchor that it is a difference to is neither
    beside it nor in a registered directory.
    """

    def __init__(self, path: str | Path, *, sha256: str | None = None, most_files: int = MOST_ANCHORS):
        self.path = Path(path).absolute()
        self.directory = self.path.parent
        self.sha256 = sha256 or verify_anchor(self.path)
        loaded = load_undecoded(self.path)
        self._structure = loaded.structure
        self._pieces = cut_payload(loaded.structure, loaded.payload)
        self._views = _views_by_name(loaded.structure, str(self.path))
        self._next = self._open_next(most_files)
        self.files: tuple[Path, ...] = (self.path, *(self._next.files if self._next else ()))

    def __contains__(self, name: object) -> bool:
        return name in self._views

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def stored_name(self, name: str) -> str:
        """Return the name of a tensor in the anchor's file. It is the same; `BaseWeights` may have others."""
        return name

    def tensor(self, name: str) -> Tensor:
        """Decode one tensor to a new CPU tensor; CorruptFileError: it is missing or damaged."""
        if name not in self._views:
            raise corrupt(str(self.path), f"an anchor that holds {name}", "others only")
        view = self._views[name]
        with torch.no_grad(), default_device_cpu():
            index = view["storage"]
            storage = _decode_storage(self._structure, index, self._pieces[index], self._next)
            return build_tensors([{**view, "storage": 0}], [storage])[0].detach()

    def _open_next(self, most_files: int) -> Anchor | None:
        """Open the anchor that this one is a difference to. Each directory that links this one links that one too."""
        if "anchor" not in self._structure:
            return None
        if most_files <= 1:
            raise corrupt(str(self.path), f"an anchor that takes at most {MOST_ANCHORS} files", "one that takes more")
        sha256 = self._structure["anchor"]["sha256"]
        beside = self.path.with_name(anchor_file_name(sha256))
        return Anchor(find_anchor(sha256, str(beside)), sha256=sha256, most_files=most_files - 1)


def _views_by_name(structure: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Return the views of a flat state dict by name, and check each view by building its tensor on "meta"."""
    tree = unflatten(structure, empty_storages(structure))
    is_flat = isinstance(tree, dict) and all(isinstance(value, Tensor) for value in tree.values())
    if not is_flat or any("exp_avg_sq" in entry for entry in structure["storages"]):
        raise corrupt(where, "an anchor: one flat state dict of weights", "another file")
    items = next(iter(structure["tree"].values()))
    return {name: structure["tensors"][node["tensor"]] for name, node in items}


class BaseWeights:
    """The weights of a base, read one at a time, with the methods of an `Anchor`; `files` has each file's path by name.

    `directory` is a checkpoint's, which may keep copies of the files. CorruptFileError: a file has changed, or holds
    something else than plain tensors. MissingAnchorError: a file is found nowhere.
    """

    def __init__(self, base: Base, directory: Path):
        self.base, self.sha256, self.directory = base, base.sha256, directory
        self.files = find_base(base, directory)
        self._tensors: dict[str, Tensor] = {}
        for file_name, path in self.files.items():
            for name, tensor in self._mapped(file_name, path).items():
                if type(name) is str and type(tensor) in (Tensor, torch.nn.Parameter) and tensor.dtype in ALL_DTYPES:
                    self._tensors[name] = tensor
        self._stored_names = {name: name for name in self._tensors}

    def __contains__(self, name: object) -> bool:
        return name in self._stored_names

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored_names)

    def stored_name(self, name: str) -> str:
        """Return the name of a tensor in the base's files."""
        return self._stored_names[name]

    def tensor(self, name: str) -> Tensor:
        """Return one tensor as stored, contiguous on the CPU, read-only because it may be mapped from a file."""
        if name not in self._stored_names:
            raise corrupt(str(self.base), f"a base that holds {name}", "others only")
        return self._tensors[self._stored_names[name]].detach().contiguous()

    def named_as(self, weights: Mapping[str, Any]) -> Self:
        """Give each tensor its name in a checkpoint's flat state dict, and drop tensors that the checkpoint lacks.

        A model with a head has the weights of its base model under a prefix, and the other way round. The same name is
        preferred to a name that differs by the prefix, and the shape must be the same. If the base holds one of several
        tied weights, it serves all of them.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items() if isinstance(tensor, Tensor)}
        stored_shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        names = matching_names(shapes, stored_shapes)
        by_address = {weights[name].data_ptr(): stored for name, stored in names.items() if weights[name].data_ptr()}
        tied = {name: by_address[weights[name].data_ptr()] for name in shapes if weights[name].data_ptr() in by_address}
        self._stored_names = {name: stored for name, stored in tied.items() if shapes[name] == stored_shapes[stored]}
        self._stored_names |= names
        return self

    def _mapped(self, name: str, path: Path) -> dict[Any, Any]:
        """Return the tensors of a file of the base by name. They are mapped, so bytes are read when they are needed."""
        if name.endswith(".safetensors"):
            try:
                return load_safetensors(path)
            except SafetensorError as error:
                raise corrupt(f"{name} of {self.base}", "a safetensors file", error) from error
        state = None if is_encoded(path) else load_file(path, mmap=True)
        if not isinstance(state, dict):
            raise corrupt(f"{path} of {self.base}", "a plain state dict", type(state).__name__)
        return state


class AnchorParts:
    """The anchors of several ranks, `parts`, as one. If two have a tensor of one name, the first one counts."""

    def __init__(self, parts: Sequence[Anchor]):
        self.parts = tuple(parts)
        self.directory = parts[0].directory
        self.sha256 = parts_sha256(anchor.sha256 for anchor in parts)
        self.files = tuple(file for anchor in parts for file in anchor.files)
        self._by_name = {name: anchor for anchor in reversed(parts) for name in anchor}

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def stored_name(self, name: str) -> str:
        """Return the name of a tensor in the anchors' files, which is the same."""
        return name

    def tensor(self, name: str) -> Tensor:
        """Decode one tensor to a new CPU tensor; CorruptFileError: it is missing or damaged."""
        if name not in self._by_name:
            raise corrupt(str(self.directory), f"anchors that hold {name}", "others only")
        return self._by_name[name].tensor(name)


# Everything that an encoded file may refer to.
AnyAnchor = Anchor | BaseWeights | AnchorParts


def matching_names(weights: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Match the weights of a checkpoint with those of other files by shape and name; names may differ by one prefix.

    Both arguments are shapes by name. Returns for each matched name in the checkpoint the name in the other files.
    """
    # All names share one prefix, because a weight whose name happens to end like another would be a bad reference.
    (more, added), (less, removed) = _commonest_prefix(weights, stored), _commonest_prefix(stored, weights)
    matches = {}
    for name, shape in weights.items():
        renamed = name.removeprefix(added) if more > less else removed + name
        stored_name = name if stored.get(name) == shape else renamed
        if stored.get(stored_name) == shape:
            matches[name] = stored_name
    return matches


def _commonest_prefix(longer: Mapping[str, tuple[int, ...]], shorter: Mapping[str, tuple[int, ...]]) -> tuple[int, str]:
    """Return the prefix that most names in `longer` have before a name in `shorter`, after the number of such names."""
    prefixes: Counter[str] = Counter()
    for name, shape in longer.items():
        parts = name.split(".")
        for count in range(1, len(parts)):
            if shorter.get(".".join(parts[count:])) == shape:
                prefixes[".".join(parts[:count]) + "."] += 1
    return max(((count, prefix) for prefix, count in prefixes.items()), default=(0, ""))
