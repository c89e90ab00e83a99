"""Reads the tensors of a checkpoint, or of one of its files: their names, values and sizes on disk.

torch.load does not read a pickle of protocol 3 or later without running it; `torch.save(..., pickle_protocol=4)` writes
one. Of these names, shapes and dtypes are read. Nothing in them is executed and no state is set: each name in the
pickle stands for one of the few functions here, which make tensors without values, or for an object that does nothing.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file as load_safetensors
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint
from torch.storage import _storage_type_to_dtype_map

from hf_trainweights.checkpoint.dcp.reader import ShardedContents, dcp_directories
from hf_trainweights.checkpoint.encoded.reader import is_encoded, load_file, register_anchor_directory
from hf_trainweights.checkpoint.encoded.tree import path_text
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, read_manifest
from hf_trainweights.checkpoint.run.checkpoints import OPTIMIZER_NAME, weights_problem
from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.files.reading import open_pickle, open_regular_file
from hf_trainweights.files.weight_files import ENTRY_POINTS, shard_names
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# What a DCP directory has of each part.
_NAMES = {"weights": ShardedContents.all_weights, "optimizer": ShardedContents.optimizer_tensors}
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
# How a zip archive, a pickle of torch before 1.6 and one of protocol 0 or 1 begin.
_TORCH_MAGIC = (b"PK", b"\x80", b"}", b"(")
_LAST_PROTOCOL_OF_TORCH = 2


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file or a model.

    Args:
        name: The weight's name; for a tensor of the optimizer, `optimizer: ` and its key path.
        tensor: The values: memory-mapped if the file is plain, on the meta device if only sizes were asked for.
        stored_bytes: Bytes on disk, scales included; None if the tensor is sparse, or if the file is encoded and no
            manifest lists them.
        file: The file, if it is of one.
        read: Returns the values, where `tensor` has none and a reader may want them later.
    """

    name: str
    tensor: Tensor
    stored_bytes: int | None
    file: Path | None = None
    read: Callable[[], Tensor] | None = None

    def values(self) -> Tensor:
        """Return the tensor with its values; one that `read` tells of is read at each call, and not kept."""
        return self.tensor if self.read is None else self.read()

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> StoredTensor:
        """Return a tensor of a model in memory."""
        return cls(name, tensor, tensor.stored_bytes if isinstance(tensor, QuantizedTensor) else _bytes_of(tensor))

    @property
    def format(self) -> str:
        """Its quantized format, or its dtype."""
        if isinstance(self.tensor, QuantizedTensor):
            return str(self.tensor.format)
        return str(self.tensor.dtype).removeprefix("torch.")


def find_parts(path: Path) -> dict[str, list[Path]]:
    """Return by `weights` and `optimizer`, of which one may be missing, the files that a loader would open.

    Of a sharded part that is its DCP directory. ConfigError: a directory holds neither.
    """
    if not path.is_dir():
        _require_weight_file(path)
        return {"optimizer" if path.name == OPTIMIZER_NAME else "weights": [path]}
    found = _find_sharded(path)
    weights = [path / name for name in ENTRY_POINTS if (path / name).is_file()][:1]
    if weights:
        is_index = weights[0].suffix == ".json"
        _require_readable(weights[0])
        found["weights"] = [path / name for name in shard_names(weights[0])] if is_index else weights
    if (path / OPTIMIZER_NAME).is_file():
        found["optimizer"] = [path / OPTIMIZER_NAME]
    if not found:
        raise ConfigError(str(path), "a checkpoint with weights or an optimizer.pt", "neither", "Choose another path.")
    return found


def _find_sharded(path: Path) -> dict[str, list[Path]]:
    contents = [ShardedContents(each) for each in dcp_directories(path)]
    found = {part: [each.directory for each in contents if names_of(each)] for part, names_of in _NAMES.items()}
    return {part: directories[:1] for part, directories in found.items() if directories}


class _ShardedTensors(Mapping[str, StoredTensor]):
    """One part of a DCP directory, plain or encoded, by the names of its tensors; none stays in memory.

    Without `values` the tensors are on the meta device.
    """

    def __init__(self, directory: Path, part: str, values: bool):
        self._contents = ShardedContents(directory)
        prefix = "" if part == "weights" else f"{part}: "
        self._names = {f"{prefix}{name}": stored for name, stored in _NAMES[part](self._contents).items()}
        self._values = values

    def __getitem__(self, key: str) -> StoredTensor:
        name = self._names[key]
        entry = self._contents.tensors[name]
        place = (self._contents.stored_bytes(name), self._contents.directory)
        if self._values:
            return StoredTensor(key, self._contents.read_tensor(name), *place)
        meta = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        return StoredTensor(key, meta, *place, read=partial(self._contents.read_tensor, name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_part(files: Sequence[Path], part: str, *, values: bool = True) -> Mapping[str, StoredTensor]:
    """Return the tensors of one part of a checkpoint by name, `values` as for `read_tensors`.

    Those of a DCP directory are read at each access, or are on the meta device.
    """
    if files and files[0].is_dir():
        return _ShardedTensors(files[0], part, values)
    return {stored.name: stored for file in files for stored in read_tensors(file, part, values=values)}


def read_tensors(file: Path, part: str, *, values: bool = True) -> Iterator[StoredTensor]:
    """Yield the tensors of a file of weights or of the optimizer, plain or encoded.

    Without `values` an encoded file is not decoded, and one of a pickle protocol that torch does not read is listed;
    with them that is a CorruptFileError. Plain files are memory-mapped in any case.
    """
    for path, tensor, stored_bytes in _read(file, values):
        yield StoredTensor(path if part == "weights" else f"{part}: {path}", tensor, stored_bytes, file)


def _read(file: Path, values: bool) -> Iterator[tuple[str, Tensor, int | None]]:
    if file.suffix == ".safetensors":
        _require_readable(file)
        yield from ((name, tensor, tensor.nbytes) for name, tensor in load_safetensors(file).items())
        return
    if _has_newer_pickle(file):
        if values:
            next_step = "Save it again by torch.save, without pickle_protocol."
            raise CorruptFileError(
                str(file), "a pickle of protocol 2, as torch.load reads it", "a later one", next_step
            )
        tree, _ = _list_newer_pickle(file)
        yield from ((path, each, _bytes_of(each)) for path, each in _leaves_of(file, tree))
        return
    register_anchor_directory(file.parent)
    if not is_encoded(file):
        yield from ((path, each, _bytes_of(each)) for path, each in _leaves_of(file, load_file(file, mmap=True)))
        return
    stored_bytes = _reported_bytes(file)
    for path, tensor in _leaves_of(file, load_file(file, map_location="cpu" if values else "meta")):
        # The report counts tied tensors once, under the name of the first.
        yield path, tensor, stored_bytes.get(path, 0) if stored_bytes else None


def _bytes_of(tensor: Tensor) -> int | None:
    """Return the bytes of a tensor; None for a sparse one, of which PyTorch does not tell them."""
    return tensor.nbytes if tensor.layout is torch.strided else None


def _leaves_of(file: Path, tree: Any) -> Iterator[tuple[str, Tensor]]:
    try:
        yield from _leaves(tree, ())
    except RecursionError as error:
        found = "values nested a thousand deep, or within themselves"
        raise CorruptFileError(str(file), "tensors in dicts and lists", found, "Use another checkpoint.") from error


def _leaves(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield path_text(path), tree
    elif isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(value, (*path, key))


def _reported_bytes(file: Path) -> dict[str, int]:
    if not (file.parent / MANIFEST_NAME).exists():
        return {}
    entry = read_manifest(file.parent).files.get(file.name)
    return {each["path"]: each["bytes_out"] for each in entry.report.get("tensors", ())} if entry else {}


def _require_weight_file(path: Path) -> None:
    with open_regular_file(path) as file:
        looks_like_one = file.read(2).startswith(_TORCH_MAGIC)
    if path.suffix not in _WEIGHT_SUFFIXES and not looks_like_one:
        next_step = "Name a model's directory, or one of its weight files."
        raise CorruptFileError(str(path), f"a weight file ({', '.join(_WEIGHT_SUFFIXES)})", "another file", next_step)


def _require_readable(path: Path) -> None:
    problem = weights_problem(path)
    if problem:
        next_step = "Use another checkpoint, or restore this one from a copy."
        raise CorruptFileError(str(path), "a whole file", problem, next_step)


def unsafe_calls(file: Path) -> tuple[str, ...]:
    """Return the functions that torch does not allow, sorted, which unpickling a file would call."""
    if file.suffix == ".safetensors":
        return ()
    if _has_newer_pickle(file):
        _, calls = _list_newer_pickle(file)
        return calls
    try:
        with open_pickle(file):
            return tuple(sorted(get_unsafe_globals_in_checkpoint(file)))
    except CorruptFileError:  # it is damaged or another file, and reading it will say so
        return ()


def _has_newer_pickle(file: Path) -> bool:
    """Return whether a file is a zip archive of torch.save in a pickle protocol of 3 or later."""
    try:
        with open_pickle(file) as pickled:
            head = pickled.read(2)
    except CorruptFileError:  # it is damaged or another file, and reading it will say so
        return False
    return head[:1] == pickle.PROTO and head[1:] > bytes([_LAST_PROTOCOL_OF_TORCH])


def _list_newer_pickle(file: Path) -> tuple[Any, tuple[str, ...]]:
    """Return what was saved in a file that `_has_newer_pickle`, its tensors on the meta device, and what it would call.

    These are the functions and classes that unpickling it would call, beyond those that make tensors; sorted.
    """
    size_bytes = file.stat().st_size
    with open_pickle(file) as pickled:
        # torch.save does not compress: what is larger than its archive is no pickle of torch.
        unpickler = _Lister(io.BytesIO(pickled.read(size_bytes)))
        tree = unpickler.load()
    return tree, tuple(sorted(unpickler.calls))


class _Nothing:
    """Stands for what is not called; takes whatever a pickle does to an object."""

    def __init__(self, *arguments: object):
        pass

    def __call__(self, *arguments: object) -> _Nothing:
        return self

    append = extend = add = __setitem__ = __call__


def _leave_out_state(unpickler: Any) -> None:
    """Take a state from the stack: no attribute of anything is set."""
    unpickler.stack.pop()


class _Lister(pickle._Unpickler):
    # Python's own unpickler, not the one in C: that one reserves as much memory as a single number in the file says.
    dispatch: ClassVar = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _leave_out_state}

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.calls: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get(f"{module}.{name}") or (_dtype(name) if module == "torch" else None)
        if known is None:
            self.calls.add(f"{module}.{name}")
        return known or _Nothing

    def persistent_load(self, pid: Any) -> torch.dtype:
        """Return the dtype of a storage."""
        return pid[1]


def _dtype(name: str) -> torch.dtype | None:
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def _tensor(storage: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int], *rest: Any) -> Tensor:
    """Return what `_rebuild_tensor_v2` describes, without values; a third version names the dtype after two others."""
    dtype = rest[2] if len(rest) > 2 and isinstance(rest[2], torch.dtype) else storage
    return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device="meta")


_KNOWN = {
    **{f"torch.{name}": dtype for name, dtype in _storage_type_to_dtype_map().items()},
    "torch.storage.UntypedStorage": torch.uint8,
    "builtins.set": set,
    "collections.OrderedDict": dict,
    "torch.Size": tuple,
    "torch.device": _Nothing,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
}
