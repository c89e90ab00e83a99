"""Lists the tensors of torch files in a pickle protocol that torch.load does not read without running it: 3 and later.

`torch.save(..., pickle_protocol=4)` writes them. Nothing in them is executed and no state is set: each name in the
pickle stands for one of the few functions here, which make tensors without values, or for an object that does nothing.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.storage import _storage_type_to_dtype_map

from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.reading import open_pickle

_LAST_PROTOCOL_OF_TORCH = 2


def has_newer_pickle(file: Path) -> bool:
    """Return whether a file is a zip archive of torch.save in a pickle protocol of 3 or later."""
    try:
        with open_pickle(file) as pickled:
            head = pickled.read(2)
    except CorruptFileError:  # it is damaged or another file, and reading it will say so
        return False
    return head[:1] == pickle.PROTO and head[1:] > bytes([_LAST_PROTOCOL_OF_TORCH])


def list_newer_pickle(file: Path) -> tuple[Any, tuple[str, ...]]:
    """Return what was saved in a file that `has_newer_pickle`, its tensors on the meta device, and what it would call.

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
