"""`decode_file`, the one call in an encoded file, and the weights that a file may be stored against, one at a time.

torch.load makes the call, and gets plain tensors. The layout is described in structure.py; encoder.py writes it.
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
from hf_trainweights.checkpoint.codecs.base import ALL_DTYPES, OwnAnchor
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
    payload_crc32,
    storage_name,
)
from hf_trainweights.checkpoint.encoded.tree import DTYPES, build_tensors, corrupt, unflatten
from hf_trainweights.checkpoint.encoded.workers import default_device_cpu, in_order, worker_count
from hf_trainweights.errors import CorruptFileError

MOST_ANCHORS = 8
"""How many files reading one anchor may take, itself among them; writers are content with fewer."""
# A file that was written just now may change again within one tick of the file system's clock.
_SETTLED_SECONDS = 2.0

_kept: tuple[Anchor, list[os.stat_result]] | None = None


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
        moment = entries[index].get("exp_avg_sq")
        try:
            # Of a lower index, so another thread has begun it and waits for none that comes later.
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
    anchor: Anchor | BaseWeights | None,
    exp_avg_sq: Tensor | None = None,
) -> Tensor:
    """Decode a storage of what `open_structure` returned, given its pieces and references, to a new CPU tensor.

    CorruptFileError names the tensor: its bytes have another checksum, or do not fit the structure.
    """
    entry = structure["storages"][index]
    if payload_crc32(pieces) != entry["crc32"]:
        start = pieces[0].storage_offset() if pieces else 0
        where = f"{storage_name(structure, index)}, from byte {start} of the payload on"
        raise corrupt(where, f"crc32 {entry['crc32']}", payload_crc32(pieces))
    codec, dtype = CODECS[entry["codec"]], DTYPES[entry["dtype"]]
    # A tensor of a base may be mapped from its file, so no codec may write to its memory.
    references = OwnAnchor() if isinstance(anchor, Anchor) else {}
    if anchor is not None and "anchor" in entry:
        references["anchor"] = anchor.tensor(entry["anchor"]).to(dtype)
    if exp_avg_sq is not None:
        references["exp_avg_sq"] = exp_avg_sq
    try:
        decoded = codec.decode(pieces, entry.get("params", {}), entry["shape"], dtype, references)
    except CorruptFileError as error:
        where = f"{storage_name(structure, index)}, {error.where}"
        raise CorruptFileError(where, error.expected, error.found, error.next_step) from error
    # A codec may decode to memory of the anchor, which may be a part of a larger one. Views begin at the first byte.
    return decoded if decoded.untyped_storage().nbytes() == decoded.nbytes else decoded.clone()


def open_anchor(entry: Mapping[str, Any]) -> Anchor | BaseWeights:
    """Open what a file is stored against, given the `anchor` in its structure, and all files that reading that takes.

    An anchor is kept open until another one is asked for or a file changes: each item of a sharded checkpoint asks for
    it, and opening one takes the longer the more weights it has. Meanwhile its bytes stay on the disk even if its last
    link goes. Windows removes no open file, so none is kept there.
    MissingAnchorError: one of the files is found nowhere. CorruptFileError: one is damaged.
    """
    global _kept
    if "base" in entry:
        return BaseWeights(Base.from_dict("the anchor's base", entry["base"]), Path(entry["path"]).parent)
    sha256, path = entry["sha256"], find_anchor(entry["sha256"], entry["path"])
    kept = _kept  # another thread may keep another one meanwhile
    if kept is not None and kept[0].sha256 == sha256 and all(map(_is_unchanged, kept[0].files, kept[1])):
        return kept[0]
    anchor = Anchor(path, sha256=sha256)
    found = [os.stat(each) for each in anchor.files]
    is_settled = time.time() - max(each.st_mtime for each in found) > _SETTLED_SECONDS
    _kept = (anchor, found) if is_settled and os.name != "nt" else None
    return anchor


def _is_unchanged(path: Path, before: os.stat_result) -> bool:
    now = os.stat(path) if path.exists() else None
    return now is not None and os.path.samestat(now, before) and now.st_mtime_ns == before.st_mtime_ns


class Anchor:
    """The weights that files are stored against, decoded one at a time; `files` are all that reading them takes.

    An anchor may be a difference to another one, which lies beside it. Its file stays memory-mapped as long as this
    object lives. Its digest is compared with its name, unless `sha256` is one that `find_anchor` has compared already.
    CorruptFileError: that or its content is wrong, or it takes more than `most_files`. MissingAnchorError: the anchor
    that it is a difference to is not beside it, nor in a registered directory.
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
        """Return the name that a tensor has in the file: its own."""
        return name

    def tensor(self, name: str) -> Tensor:
        """Decode one tensor to a new CPU tensor; CorruptFileError: there is none of that name, or it is damaged."""
        if name not in self._views:
            raise corrupt(str(self.path), f"an anchor that holds {name}", "others only")
        view = self._views[name]
        with torch.no_grad(), default_device_cpu():
            index = view["storage"]
            storage = _decode_storage(self._structure, index, self._pieces[index], self._next)
            return build_tensors([{**view, "storage": 0}], [storage])[0].detach()

    def _open_next(self, most_files: int) -> Anchor | None:
        """Open the anchor that this one is a difference to: each directory with a link to this one has a link to it."""
        if "anchor" not in self._structure:
            return None
        if most_files <= 1:
            raise corrupt(str(self.path), f"an anchor that takes at most {MOST_ANCHORS} files", "one that takes more")
        sha256 = self._structure["anchor"]["sha256"]
        beside = self.path.with_name(anchor_file_name(sha256))
        return Anchor(find_anchor(sha256, str(beside)), sha256=sha256, most_files=most_files - 1)


def _views_by_name(structure: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Return the views of a flat state dict, every one of them checked by building it on "meta"."""
    tree = unflatten(structure, empty_storages(structure))
    is_flat = isinstance(tree, dict) and all(isinstance(value, Tensor) for value in tree.values())
    if not is_flat or any("exp_avg_sq" in each for each in structure["storages"]):
        raise corrupt(where, "an anchor: one flat state dict of weights", "another file")
    items = next(iter(structure["tree"].values()))
    return {name: structure["tensors"][node["tensor"]] for name, node in items}


class BaseWeights:
    """The weights of a base, read one at a time; they serve as an `Anchor` does, and `files` are paths by name.

    A checkpoint directory may keep the files. CorruptFileError: one has changed, or holds something else than plain
    tensors. MissingAnchorError: one is nowhere.
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
        """Return the name that a tensor has in the base's files."""
        return self._stored_names[name]

    def tensor(self, name: str) -> Tensor:
        """Return one tensor as stored, contiguous on the CPU, not to be written to: it may be mapped from a file."""
        if name not in self._stored_names:
            raise corrupt(str(self.base), f"a base that holds {name}", "others only")
        return self._tensors[self._stored_names[name]].detach().contiguous()

    def named_as(self, weights: Mapping[str, Any]) -> Self:
        """Give the tensors the names that they have in a checkpoint's flat state dict; the others go.

        A model with a head has the weights of its base model under a prefix, and the other way round. A name goes
        before a name without or with the prefix, and a shape must fit. Of tied weights one is enough.
        """
        shapes = {name: tuple(each.shape) for name, each in weights.items() if isinstance(each, Tensor)}
        stored_shapes = {name: tuple(each.shape) for name, each in self._tensors.items()}
        names = matching_names(shapes, stored_shapes)
        places = {weights[name].data_ptr(): stored for name, stored in names.items() if weights[name].data_ptr()}
        tied = {name: places[weights[name].data_ptr()] for name in shapes if weights[name].data_ptr() in places}
        self._stored_names = {name: stored for name, stored in tied.items() if shapes[name] == stored_shapes[stored]}
        self._stored_names |= names
        return self

    def _mapped(self, name: str, path: Path) -> dict[Any, Any]:
        """Return what a file of the base holds; its tensors are mapped, so none is read before it is needed."""
        if name.endswith(".safetensors"):
            try:
                return load_safetensors(path)
            except SafetensorError as error:
                raise corrupt(f"{name} of {self.base}", "a safetensors file", error) from error
        state = None if is_encoded(path) else load_file(path, mmap=True)
        if not isinstance(state, dict):
            raise corrupt(f"{path} of {self.base}", "a plain state dict", type(state).__name__)
        return state


def matching_names(weights: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return which weights of a checkpoint other files have, by shape and name, which may differ by one prefix.

    Both arguments are shapes by name; the result is the name in the other files by that in the checkpoint.
    """
    # One prefix for all: a name that happens to end like another would be a bad reference.
    (more, added), (less, removed) = _commonest_prefix(weights, stored), _commonest_prefix(stored, weights)
    found = {}
    for name, shape in weights.items():
        renamed = name.removeprefix(added) if more > less else removed + name
        stored_name = name if stored.get(name) == shape else renamed
        if stored.get(stored_name) == shape:
            found[name] = stored_name
    return found


def _commonest_prefix(longer: Mapping[str, tuple[int, ...]], shorter: Mapping[str, tuple[int, ...]]) -> tuple[int, str]:
    """Return the prefix that most names in `longer` have before a name in `shorter`, and how many have it."""
    prefixes: Counter[str] = Counter()
    for name, shape in longer.items():
        parts = name.split(".")
        for count in range(1, len(parts)):
            if shorter.get(".".join(parts[count:])) == shape:
                prefixes[".".join(parts[:count]) + "."] += 1
    return max(((count, prefix) for prefix, count in prefixes.items()), default=(0, ""))
