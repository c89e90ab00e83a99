"""The compiled ops that PyTorch's dispatcher calls without a line of Python: `native/ops`.

PyTorch exports the functions that they need from version 2.8 on. Each module that defines an op names
the function that serves if the op is not compiled.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hf_trainweights.kernels import compiled
from hf_trainweights.kernels.cpu_features import most_attention_rows
from hf_trainweights.kernels.thresholds import THRESHOLDS
from hf_trainweights.kernels.tokens import THREADED_NUMBERS
from hf_trainweights.native_library import load_library

# As OP_ABI in native/ops/torch.h.
_ABI = 4
_PATH = Path(__file__).parent / "native" / "op.so"
_SHIM = (
    *("get_dtype", "get_dim", "get_sizes", "get_strides", "get_numel", "is_contiguous", "get_data_ptr"),
    *("delete_tensor_object", "empty_strided", "library_init_impl", "library_impl", "call_dispatcher"),
)
# The first fields of `Torch` in native/ops/torch.h: names that libtorch and the libraries below it export.
_EXPORTED = (
    *(f"aoti_torch_{name}" for name in _SHIM),
    "_ZN2at15get_num_threadsEv",  # at::get_num_threads
    "_ZN3c106detail14torchCheckFailEPKcS2_jS2_",  # c10::detail::torchCheckFail
    "_ZdlPv",  # operator delete
)
# The next fields: functions of a library of products.
_OF_PRODUCTS = ("product", "product_bytes", "store_tokens", "attention_bytes", "attend")


def serve(library: ctypes.CDLL, names: Sequence[str]) -> bool:
    """Let compiled ops call a library of products, and return whether they do.

    Args:
        library: The library. It is another one than before only where a test takes the place of another CPU.
        names: The ops, whose schemas are defined. They are registered once in a process.
    """
    ops, exported = _library(), _exported()
    if ops is None or exported is None:
        return False
    if _SERVING.get("library") is not library:
        own = [_address(getattr(library, name)) for name in _OF_PRODUCTS]
        fields = [*exported, *own, *_numbers()]
        ops.set_functions((ctypes.c_void_p * len(fields))(*fields))
        _SERVING["library"] = library
    return all(_register(name) for name in names)


_SERVING: dict[str, ctypes.CDLL] = {}


@functools.cache
def _register(name: str) -> bool:
    library = _library()
    return library is not None and library.register_op(name.encode()) == 0


def _numbers() -> tuple[int, ...]:
    """Return the last fields of `Torch`."""
    names = [str(dtype).removeprefix("torch.") for dtype in compiled.DTYPES]
    dtypes = (getattr(_torch_library(), f"aoti_torch_dtype_{name}")() for name in (*names, "int64", "bool"))
    rows = most_attention_rows(compiled.instructions() or "")
    return (*dtypes, THRESHOLDS["THREADED"], THREADED_NUMBERS, rows)


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_library(_PATH, {"set_functions": "-p", "register_op": "is"}, _ABI)


@functools.cache
def _exported() -> tuple[int, ...] | None:
    """Return the addresses of `_EXPORTED`; None if a name is missing."""
    try:
        torch_library = _torch_library()
        return tuple(_address(getattr(torch_library, name)) for name in _EXPORTED)
    except (OSError, AttributeError):
        return None


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def _torch_library() -> ctypes.CDLL:
    folder = Path(torch.__file__).parent / "lib"
    return ctypes.CDLL(str(next(folder.glob("libtorch_cpu.*"))))
