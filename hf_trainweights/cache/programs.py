"""Ops by which programs of torch.compile store the tokens of a layer and attend to them.

A program is the graph of ops that torch.compile makes of a model's code. It never holds the stored codes, because they
move whenever they need more room. It holds the number of the layer as a tensor, so that a program serves the next
cache, too.

`store_tokens` returns `order`, the number of tokens that the layer has then. The ops that read tokens take it as an
input, for two reasons. It tells them where the tokens end. And it makes the compiler run them after the op that stores,
because nothing else shows the compiler that they depend on it.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.errors import UnsupportedError

_LAYERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def number_layer(layer: object) -> Tensor:
    """Give a layer a number, by which ops find it as long as it lives, and return it: int64, on the CPU."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    # A tensor that is made in inference mode could not be an input of programs outside it.
    with torch.inference_mode(False):
        return torch.tensor(number, device="cpu")


def _find_layer(number: Tensor) -> Any:
    layer = _LAYERS.get(int(number))
    if layer is None:
        next_step = "Keep the cache as long as the program runs."
        raise UnsupportedError("KVCache", "a cache that the program was called with", "one that was freed", next_step)
    return layer


@dataclass(frozen=True)
class ProgramStore:
    """The last keys or values of a layer in a program: a store that only ops can read.

    Args:
        order: int64, how many tokens the layer has, these included: the result of `STORE_TOKENS`.
        number: The number of the layer.
        is_value: Whether these are values.
        shape: Batch, heads and columns.
    """

    order: Tensor
    number: Tensor
    is_value: bool
    shape: tuple[int, int, int]

    @property
    def device(self) -> torch.device:
        """The device of the tokens."""
        return self.number.device

    def load(self, first: int, dtype: torch.dtype, stop: int) -> Tensor:
        """Return the last `stop - first` tokens as floats: the op counts back from `order` and needs their number."""
        return LOAD_TOKENS(self.order, self.number, self.is_value, list(self.shape), stop - first, dtype)

    def attend(
        self, query: Tensor, values: ProgramStore, tokens: slice, mask: Tensor | None, is_causal: bool, scale: float
    ) -> Tensor:
        """Return the attention of the query to the last `tokens.stop - tokens.start` keys and values of the layer."""
        count = tokens.stop - tokens.start
        return ATTEND(query, self.order, self.number, values.shape[2], count, mask, is_causal, scale)


def _store_tokens(keys: Tensor, values: Tensor, number: Tensor, dropped: int, at: int) -> Tensor:
    """Drop the layer's first `dropped` tokens, store new ones behind the `at` that are left, and return the order."""
    _find_layer(number).store_at(dropped, at, keys, values)
    return number.new_full((), at + keys.shape[2])


def _load_tokens(
    order: Tensor, number: Tensor, is_value: bool, shape: list[int], count: int, dtype: torch.dtype
) -> Tensor:
    del shape
    stop = int(order)
    return _find_layer(number).load(is_value, slice(stop - count, stop), dtype)


def _attend(
    query: Tensor,
    order: Tensor,
    number: Tensor,
    columns: int,
    count: int,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Tensor:
    del columns
    stop = int(order)
    out = _find_layer(number).attend(query, slice(stop - count, stop), mask, is_causal, scale)
    return out.contiguous()  # as `_fake_attention` promises


_OPS = {
    "store_tokens(Tensor keys, Tensor values, Tensor number, SymInt dropped, SymInt at) -> Tensor": _store_tokens,
    "load_tokens(Tensor order, Tensor number, bool is_value, SymInt[] shape, SymInt count, ScalarType dtype) "
    "-> Tensor": _load_tokens,
    "attend(Tensor query, Tensor order, Tensor number, SymInt columns, SymInt count, Tensor? mask, bool is_causal, "
    "float scale) -> Tensor": _attend,
}
SCHEMAS = ", ".join(_OPS)
_LIBRARY = torch.library.Library("hf_trainweights", "FRAGMENT")
# On the CPU alone: for a cache on another device Dynamo interrupts the program, and the layer stores without these ops.
for _schema, _function in _OPS.items():
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_schema.partition("(")[0], _function, "CPU")
STORE_TOKENS = torch.ops.hf_trainweights.store_tokens.default
LOAD_TOKENS = torch.ops.hf_trainweights.load_tokens.default
ATTEND = torch.ops.hf_trainweights.attend.default


@torch.library.register_fake("hf_trainweights::store_tokens", lib=_LIBRARY)
def _fake_order(keys: Tensor, values: Tensor, number: Tensor, *_: object) -> Tensor:
    del keys, values
    return torch.empty_like(number)


@torch.library.register_fake("hf_trainweights::load_tokens", lib=_LIBRARY)
def _fake_tokens(
    order: Tensor, number: Tensor, is_value: bool, shape: list[int], count: int, dtype: torch.dtype
) -> Tensor:
    del number, is_value
    batch, heads, columns = shape
    return order.new_empty((batch, heads, count, columns), dtype=dtype)


@torch.library.register_fake("hf_trainweights::attend", lib=_LIBRARY)
def _fake_attention(query: Tensor, order: Tensor, number: Tensor, columns: int, *_: object) -> Tensor:
    del order, number
    return query.new_empty((*query.shape[:-1], columns))
