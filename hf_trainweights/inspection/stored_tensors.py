"""Reads the names, values and sizes on disk of the tensors in a checkpoint or in one of its files.

A checkpoint has two parts, `weights` and `optimizer`. A part lies in files of safetensors or torch.save, in a DCP
directory, which torch.distributed.checkpoint wrote, or in files of DeepSpeed. Any of these may be encoded: compressed
by this package.

torch.load can read a pickle of protocol 3 or later, as `torch.save(..., pickle_protocol=4)` writes it, only by running
it. This module reads names, shapes and dtypes of such a pickle and executes nothing in it: each name in the pickle
stands for one of the few functions here, which make tensors without values, or for an object that does nothing.
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
from hf_trainweights.checkpoint.encoded.objects import stand_ins
from hf_trainweights.checkpoint.encoded.reader import is_encoded, load_file, register_anchor_directory
from hf_trainweights.checkpoint.encoded.tree import path_text
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, read_manifest
from hf_trainweights.checkpoint.run.checkpoints import OPTIMIZER_NAME
from hf_trainweights.checkpoint.run.file_checks import weights_problem
from hf_trainweights.checkpoint.zero.files import TagFiles, load_states, tag_directories
from hf_trainweights.errors import ConfigError, CorruptFileError
from hf_trainweights.files.reading import open_pickle, open_regular_file
from hf_trainweights.files.weight_files import ENTRY_POINTS, shard_names
from hf_trainweights.tensor.quantized_tensor import QuantizedTensor

# The parts of a checkpoint, each with the function that returns its tensors in a DCP directory: names to stored names.
_NAMES = {"weights": ShardedContents.all_weights, "optimizer": ShardedContents.optimizer_tensors}
# How DeepSpeed's files of weights and of a rank's optimizer end.
_MODEL_ENDING, _STATES_ENDING = "_model_states.pt", "_optim_states.pt"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
# The first bytes of a zip archive, of a pickle of torch before 1.6, and two with which other programs' pickles of
# protocol 0 or 1 may begin.
_TORCH_MAGIC = (b"PK", b"\x80", b"}", b"(")
_LAST_PROTOCOL_OF_TORCH = 2


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file or a model.

    Args:
        name: The weight's name; for a tensor of the optimizer, `optimizer: ` and its key path.
        tensor: The tensor: memory-mapped if the file is plain, on the meta device if its values were not read.
        stored_bytes: Bytes on disk, scales included; None if the tensor is sparse, or if the file is encoded and no
            manifest lists them.
        file: The file or DCP directory; None for a tensor in memory.
        read: A function that reads the values later; None if `tensor` has them, or only sizes were requested.
    """

    name: str
    tensor: Tensor
    stored_bytes: int | None
    file: Path | None = None
    read: Callable[[], Tensor] | None = None

    def values(self) -> Tensor:
        """Return the tensor with its values; if `read` is a function, every call reads the values again."""
        return self.tensor if self.read is None else self.read()

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> StoredTensor:
        """Wrap a tensor of a model in memory."""
        return cls(name, tensor, tensor.stored_bytes if isinstance(tensor, QuantizedTensor) else _bytes_of(tensor))

    @property
    def format(self) -> str:
        """Its quantized format, or its dtype."""
        if isinstance(self.tensor, QuantizedTensor):
            return str(self.tensor.format)
        return str(self.tensor.dtype).removeprefix("torch.")


def find_parts(path: Path) -> dict[str, list[Path]]:
    """Return the files that a loader would open for the parts `weights` and `optimizer`; one part may be missing.

    For a sharded part, return its DCP directory, for one of DeepSpeed the files of all ranks. Raise ConfigError if a
    directory has neither part.
    """
    if not path.is_dir():
        _require_weight_file(path)
        is_optimizer = path.name == OPTIMIZER_NAME or path.name.endswith(_STATES_ENDING)
        return {"optimizer" if is_optimizer else "weights": [path]}
    parts = {**_find_sharded(path), **_find_zero(path)}
    weights = [path / name for name in ENTRY_POINTS if (path / name).is_file()][:1]
    if weights:
        is_index = weights[0].suffix == ".json"
        _require_readable(weights[0])
        parts["weights"] = [path / name for name in shard_names(weights[0])] if is_index else weights
    if (path / OPTIMIZER_NAME).is_file():
        parts["optimizer"] = [path / OPTIMIZER_NAME]
    if not parts:
        raise ConfigError(str(path), "a checkpoint with weights or an optimizer.pt", "neither", "Choose another path.")
    return parts


def _find_sharded(path: Path) -> dict[str, list[Path]]:
    readers = [ShardedContents(directory) for directory in dcp_directories(path)]
    parts = {name: [reader.directory for reader in readers if names_of(reader)] for name, names_of in _NAMES.items()}
    return {name: directories[:1] for name, directories in parts.items() if directories}


def _find_zero(path: Path) -> dict[str, list[Path]]:
    """Return the files of DeepSpeed, which writes each save into a directory that it calls a tag.

    The weights are in the model files whose names have no rank of data parallelism, such as
    `mp_rank_00_model_states.pt`, which has one of tensor parallelism. Under ZeRO 3 there is no such file: model files
    name a rank and hold no weights, and the files of the optimizer hold the weights in float32.
    """
    tags = [TagFiles(tag) for tag in tag_directories(path)][:1]
    models = [tag.directory / name for tag in tags for name, (rank, _) in tag.models.items() if rank is None]
    states = [tag.directory / name for tag in tags for name in tag.states]
    parts = {"weights": models, "optimizer": states}
    return {name: files for name, files in parts.items() if files}


class _ShardedTensors(Mapping[str, StoredTensor]):
    """The tensors of one part of a DCP directory, plain or encoded, by name. Each access reads the tensor again.

    If `values` is false, the tensors are on the meta device.
    """

    def __init__(self, directory: Path, part: str, values: bool):
        self._contents = ShardedContents(directory)
        prefix = "" if part == "weights" else f"{part}: "
        self._names = {f"{prefix}{name}": stored for name, stored in _NAMES[part](self._contents).items()}
        self._values = values

    def __getitem__(self, key: str) -> StoredTensor:
        name = self._names[key]
        entry = self._contents.tensors[name]
        location = (self._contents.stored_bytes(name), self._contents.directory)
        if self._values:
            return StoredTensor(key, self._contents.read_tensor(name), *location)
        meta = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        return StoredTensor(key, meta, *location, read=partial(self._contents.read_tensor, name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_part(files: Sequence[Path], part: str, *, values: bool = True) -> Mapping[str, StoredTensor]:
    """Return the tensors of one part of a checkpoint by name; see `read_tensors` for `values`.

    In a DCP directory, each access reads a tensor again, or makes one on the meta device.
    """
    if files and files[0].is_dir():
        return _ShardedTensors(files[0], part, values)
    return {stored.name: stored for file in files for stored in read_tensors(file, part, values=values)}


def read_tensors(file: Path, part: str, *, values: bool = True) -> Iterator[StoredTensor]:
    """Yield the tensors in a plain or encoded file of weights or of the optimizer.

    If `values` is false, do not decode an encoded file, and list a pickle of a protocol that torch does not read. If it
    is true, raise CorruptFileError for such a pickle. Plain files are memory-mapped in any case.
    """
    for path, tensor, stored_bytes in _read(file, values):
        yield StoredTensor(path if part == "weights" else f"{part}: {path}", tensor, stored_bytes, file)


def _read(file: Path, values: bool) -> Iterator[tuple[str, Tensor, int | None]]:
    if file.suffix == ".safetensors":
        _require_readable(file)
        yield from ((name, tensor, tensor.nbytes) for name, tensor in load_safetensors(file).items())
        return
    if file.name.endswith((_STATES_ENDING, _MODEL_ENDING)):
        yield from _read_zero(file, values)
        return
    if _has_newer_pickle(file):
        if values:
            next_step = "Save it again by torch.save, without pickle_protocol."
            raise CorruptFileError(
                str(file), "a pickle of protocol 2, as torch.load reads it", "a later one", next_step
            )
        tree, _ = _list_newer_pickle(file)
        yield from ((path, leaf, _bytes_of(leaf)) for path, leaf in _leaves_of(file, tree))
        return
    # Weights may be stored as differences from an anchor, another file of the run, which lies beside them.
    register_anchor_directory(file.parent)
    if not is_encoded(file):
        yield from ((path, leaf, _bytes_of(leaf)) for path, leaf in _leaves_of(file, load_file(file, mmap=True)))
        return
    stored_bytes = _reported_bytes(file)
    for path, tensor in _leaves_of(file, load_file(file, map_location="cpu" if values else "meta")):
        # The report in the manifest counts tied tensors once, under the name of the first.
        yield path, tensor, stored_bytes.get(path, 0) if stored_bytes else None


def _read_zero(file: Path, values: bool) -> Iterator[tuple[str, Tensor, int | None]]:
    """Yield the tensors in a file of DeepSpeed: the weights by their names, or the flat partitions of one rank.

    The name of a partition begins with that of its file, because all ranks give theirs the same names.
    """
    register_anchor_directory(file.parent)
    tree, encoded = load_states(file, map_location="cpu" if values else "meta"), is_encoded(file)
    if file.name.endswith(_MODEL_ENDING):
        tree = tree.get("module", {}) if isinstance(tree, dict) else {}
        prefix, start = "", "module."
    else:
        prefix, start = f"{file.name}: ", ""
    # Only the manifest knows the bytes of tensors in an encoded file.
    stored_bytes = _reported_bytes(file) if encoded else {}
    for path, tensor in _leaves_of(file, tree):
        own = f"{start}{path}"
        # The report in the manifest has a row for each piece of a tensor that was encoded in pieces.
        pieces = [size for row, size in stored_bytes.items() if row == own or row.startswith(f"{own}.")]
        encoded_bytes = sum(pieces) if stored_bytes else None
        yield f"{prefix}{path}", tensor, encoded_bytes if encoded else _bytes_of(tensor)


def _bytes_of(tensor: Tensor) -> int | None:
    """Return the bytes of a tensor; None for a sparse tensor, whose `nbytes` PyTorch does not define."""
    return tensor.nbytes if tensor.layout is torch.strided else None


def _leaves_of(file: Path, tree: Any) -> Iterator[tuple[str, Tensor]]:
    try:
        yield from _leaves(tree, ())
    except RecursionError as error:
        problem = "values nested a thousand deep, or within themselves"
        raise CorruptFileError(str(file), "tensors in dicts and lists", problem, "Use another checkpoint.") from error


def _leaves(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield path_text(path), tree
    elif isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(value, (*path, key))


def _reported_bytes(file: Path) -> dict[str, int]:
    # The manifest of a Trainer's checkpoint lies beside the directory that DeepSpeed wrote.
    directory = next((parent for parent in file.parents[:2] if (parent / MANIFEST_NAME).exists()), None)
    if directory is None:
        return {}
    entry = read_manifest(directory).files.get(file.relative_to(directory).as_posix())
    return {tensor["path"]: tensor["bytes_out"] for tensor in entry.report.get("tensors", ())} if entry else {}


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
    """Return the sorted names of functions that unpickling a file would call and torch does not allow."""
    if file.suffix == ".safetensors":
        return ()
    if _has_newer_pickle(file):
        _, calls = _list_newer_pickle(file)
        return calls
    is_of_deepspeed = file.name.endswith((_MODEL_ENDING, _STATES_ENDING))
    # Classes of DeepSpeed do not count: `load_states` puts stand-ins in their place, which run none of its code.
    try:
        with open_pickle(file), torch.serialization.safe_globals(stand_ins() if is_of_deepspeed else []):
            return tuple(sorted(get_unsafe_globals_in_checkpoint(file)))
    except CorruptFileError:  # reading the file will raise a better error
        return ()


def _has_newer_pickle(file: Path) -> bool:
    """Return True if torch.save wrote a file with pickle protocol 3 or later."""
    try:
        with open_pickle(file) as pickled:
            head = pickled.read(2)
    except CorruptFileError:  # reading the file will raise a better error
        return False
    return head[:1] == pickle.PROTO and head[1:] > bytes([_LAST_PROTOCOL_OF_TORCH])


def _list_newer_pickle(file: Path) -> tuple[Any, tuple[str, ...]]:
    """Return the object in a file that has a newer pickle, with its tensors on the meta device, and a list of calls.

    The calls are the sorted names of functions and classes that unpickling would call, except ones that make tensors.
    """
    size_bytes = file.stat().st_size
    with open_pickle(file) as pickled:
        # torch.save does not compress, so a pickle that is larger than its archive is not torch's: read no more of it.
        unpickler = _Lister(io.BytesIO(pickled.read(size_bytes)))
        tree = unpickler.load()
    return tree, tuple(sorted(unpickler.calls))


class _Inert:
    """Stands in a pickle for every function and class that is not to run: its calls and methods do nothing."""

    def __init__(self, *arguments: object):
        pass

    def __call__(self, *arguments: object) -> _Inert:
        return self

    append = extend = add = __setitem__ = __call__


def _leave_out_state(unpickler: Any) -> None:
    """Drop a state from the stack, so that no attribute of any object is set."""
    unpickler.stack.pop()


class _Lister(pickle._Unpickler):
    # The unpickler in Python, because the one in C reserves as much memory as a single number in the file demands.
    dispatch: ClassVar = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _leave_out_state}

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.calls: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        replacement = _REPLACEMENTS.get(f"{module}.{name}") or (_dtype(name) if module == "torch" else None)
        if replacement is None:
            self.calls.add(f"{module}.{name}")
        return replacement or _Inert

    def persistent_load(self, pid: Any) -> torch.dtype:
        """Return the dtype of a storage in place of the storage."""
        return pid[1]


def _dtype(name: str) -> torch.dtype | None:
    value = getattr(torch, name, None)
    return value if isinstance(value, torch.dtype) else None


def _tensor(storage: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int], *rest: Any) -> Tensor:
    """Return the tensor of `_rebuild_tensor_v2` or v3 on the meta device; only v3 has a dtype, its third of `rest`."""
    dtype = rest[2] if len(rest) > 2 and isinstance(rest[2], torch.dtype) else storage
    return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device="meta")


_REPLACEMENTS = {
    **{f"torch.{name}": dtype for name, dtype in _storage_type_to_dtype_map().items()},
    "torch.storage.UntypedStorage": torch.uint8,
    "builtins.set": set,
    "collections.OrderedDict": dict,
    "torch.Size": tuple,
    "torch.device": _Inert,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
}
