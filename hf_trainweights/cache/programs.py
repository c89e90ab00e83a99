"""Ops by which programs of torch.compile store the tokens of a layer and attend to them.

A program is the graph of ops that torch.compile makes of a model's code. It never holds the stored codes, because they
move whenever they need more room. It holds the record of the layer, a tensor of the layer's number and of the addresses
and sizes of its codes, so that a program serves the next cache, too. A store writes its part of the record anew when
its codes move.

Each op is there twice. `store_tokens` and `attend` run in Python, find the layer by its number, and serve all layers.
`store_codes` and `attend_to_codes` are C (`native/ops/cache.c`), read the record, and serve layers of integers.

An op that stores returns `order`, the number of tokens that the layer has then. The ops that read tokens take it as an
input, for two reasons. It tells them where the tokens end. And it makes the compiler run them after the op that stores,
because nothing else shows the compiler that they depend on it.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.errors import UnsupportedError
from hf_trainweights.kernels import compiled, native_ops
from hf_trainweights.kernels.tokens import DESCRIPTION

_LAYERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def new_record(layer: object) -> Tensor:
    """Return a record for a layer, without addresses: int64, on the CPU. Ops find the layer as long as it lives."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    # A tensor that is made in inference mode could not be an input of programs outside it.
    with torch.inference_mode(False):
        # `Layer` of native/ops/cache.c: the number, the keys and the values.
        record = torch.zeros(1 + 2 * len(DESCRIPTION), dtype=torch.int64, device="cpu")
        record[0] = number
    # Codes are freed with their layer, so no op may read addresses afterwards. numpy clears them: a layer may be freed
    # while a compiler traces, which would put an op of PyTorch into its program.
    weakref.finalize(layer, record.numpy()[1:].fill, 0).atexit = False
    return record


def parts_of(record: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the parts of a record that describe the keys and the values, int64: they share its memory."""
    keys, values = np.split(record.numpy()[1:], 2)
    return keys, values


def ops_in_c() -> bool:
    """Return whether `store_codes` and `attend_to_codes` are compiled and serve this CPU."""
    library = compiled.loaded_library()
    return library is not None and native_ops.serve(library, ("store_codes", "attend_to_codes"))


def _find_layer(record: Tensor) -> Any:
    layer = _LAYERS.get(int(record[0]))
    if layer is None:
        next_step = "Keep the cache as long as the program runs."
        raise UnsupportedError("KVCache", "a cache that the program was called with", "one that was freed", next_step)
    return layer


@dataclass(frozen=True)
class ProgramStore:
    """The last keys or values of a layer in a program: a store that only ops can read.

    Args:
        order: int64, how many tokens the layer has, these included: the result of the op that stored them.
        record: The record of the layer.
        in_c: Whether the ops in C serve the layer.
        is_value: Whether these are values.
        shape: Batch, heads and columns.
    """

    order: Tensor
    record: Tensor
    in_c: bool
    is_value: bool
    shape: tuple[int, int, int]

    @property
    def device(self) -> torch.device:
        """The device of the tokens."""
        return self.record.device

    def load(self, first: int, dtype: torch.dtype, stop: int) -> Tensor:
        """Return the last `stop - first` tokens as floats: the op counts back from `order` and needs their number."""
        return LOAD_TOKENS(self.order, self.record, self.is_value, list(self.shape), stop - first, dtype)

    def attend(
        self, query: Tensor, values: ProgramStore, tokens: slice, mask: Tensor | None, is_causal: bool, scale: float
    ) -> Tensor:
        """Return the attention of the query to the last `tokens.stop - tokens.start` keys and values of the layer."""
        count = tokens.stop - tokens.start
        op = ATTEND_TO_CODES if self.in_c else ATTEND
        return op(query, self.order, self.record, values.shape[2], count, mask, is_causal, scale)


def _store_tokens(keys: Tensor, values: Tensor, record: Tensor, dropped: int, at: int) -> Tensor:
    """Drop the layer's first `dropped` tokens, store new ones behind the `at` that are left, and return the order."""
    _find_layer(record).store_at(dropped, at, keys, values)
    return record.new_full((), at + keys.shape[2])


def _load_tokens(
    order: Tensor, record: Tensor, is_value: bool, shape: list[int], count: int, dtype: torch.dtype
) -> Tensor:
    del shape
    stop = int(order)
    return _find_layer(record).load(is_value, slice(stop - count, stop), dtype)


def _attend(
    query: Tensor,
    order: Tensor,
    record: Tensor,
    columns: int,
    count: int,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Tensor:
    del columns
    stop = int(order)
    out = _find_layer(record).attend(query, slice(stop - count, stop), mask, is_causal, scale)
    return out.contiguous()  # as `_fake_attention` promises


_STORE = "(Tensor keys, Tensor values, Tensor record, SymInt dropped, SymInt at) -> Tensor"
_ATTEND = (
    "(Tensor query, Tensor order, Tensor record, SymInt columns, SymInt count, Tensor? mask, bool is_causal, "
    "float scale) -> Tensor"
)
_LOAD = "(Tensor order, Tensor record, bool is_value, SymInt[] shape, SymInt count, ScalarType dtype) -> Tensor"
# The schema of each op, and its function if it runs in Python.
_OPS: dict[str, tuple[str, Any]] = {
    "store_tokens": (_STORE, _store_tokens),
    "store_codes": (_STORE, None),
    "load_tokens": (_LOAD, _load_tokens),
    "attend": (_ATTEND, _attend),
    "attend_to_codes": (_ATTEND, None),
}
SCHEMAS = ", ".join(name + schema for name, (schema, _) in _OPS.items())
_LIBRARY = torch.library.Library("hf_trainweights", "FRAGMENT")
# On the CPU alone: for a cache on another device Dynamo interrupts the program, and the layer stores without these ops.
for _name, (_schema, _function) in _OPS.items():
    _LIBRARY.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    if _function is not None:
        _LIBRARY.impl(_name, _function, "CPU")
STORE_TOKENS = torch.ops.hf_trainweights.store_tokens.default
STORE_CODES = torch.ops.hf_trainweights.store_codes.default
LOAD_TOKENS = torch.ops.hf_trainweights.load_tokens.default
ATTEND = torch.ops.hf_trainweights.attend.default
ATTEND_TO_CODES = torch.ops.hf_trainweights.attend_to_codes.default


@torch.library.register_fake("hf_trainweights::store_tokens", lib=_LIBRARY)
@torch.library.register_fake("hf_trainweights::store_codes", lib=_LIBRARY)
def _fake_order(keys: Tensor, values: Tensor, record: Tensor, *_: object) -> Tensor:
    del keys, values
    return record.new_empty(())


@torch.library.register_fake("hf_trainweights::load_tokens", lib=_LIBRARY)
def _fake_tokens(
    order: Tensor, record: Tensor, is_value: bool, shape: list[int], count: int, dtype: torch.dtype
) -> Tensor:
    del record, is_value
    batch, heads, columns = shape
    return order.new_empty((batch, heads, count, columns), dtype=dtype)


@torch.library.register_fake("hf_trainweights::attend", lib=_LIBRARY)
@torch.library.register_fake("hf_trainweights::attend_to_codes", lib=_LIBRARY)
def _fake_attention(query: Tensor, order: Tensor, record: Tensor, columns: int, *_: object) -> Tensor:
    del order, record
    return query.new_empty((*query.shape[:-1], columns))
