"""Ops by which compiled programs store the tokens of a layer and attend to them, without leaving the program.

A program never holds the stored codes, because they move whenever they need more room. It holds the number of the
layer as a tensor, so that a program serves the next cache, too. `store_tokens` returns an empty tensor, which the ops
that read the tokens take: this keeps their order.
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
    """Return the number of a layer, by which ops find it as long as it lives: int64, on the CPU."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    # A tensor that is made in inference mode could not be an input of programs outside it.
    with torch.inference_mode(False):
        return torch.tensor(number)


def _find_layer(number: Tensor) -> Any:
    layer = _LAYERS.get(int(number))
    if layer is None:
        next_step = "Keep the cache as long as the program runs."
        raise UnsupportedError("KVCache", "a cache that the program was called with", "one that was freed", next_step)
    return layer


@dataclass(frozen=True)
class ProgramStore:
    """The keys or the values of a layer while a program is traced: an `IntegerStore` that only ops can read.

    Args:
        order: The result of `STORE_TOKENS`, or of an earlier one.
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
        """The device of the codes."""
        return self.number.device

    def load(self, first: int, dtype: torch.dtype, stop: int) -> Tensor:
        """Return the tokens from `first` to `stop` as floats."""
        return LOAD_TOKENS(self.order, self.number, self.is_value, list(self.shape), first, stop, dtype)

    def attend(
        self, query: Tensor, values: ProgramStore, tokens: slice, mask: Tensor | None, is_causal: bool, scale: float
    ) -> Tensor:
        """Return the attention to these keys and to values of the same layer."""
        columns = values.shape[2]
        return ATTEND(query, self.order, self.number, columns, tokens.start, tokens.stop, mask, is_causal, scale)


def _store_tokens(keys: Tensor, values: Tensor, number: Tensor, at: int) -> Tensor:
    _find_layer(number).store_at(at, keys, values)
    return keys.new_empty(0)


def _load_tokens(
    order: Tensor, number: Tensor, is_value: bool, shape: list[int], first: int, stop: int, dtype: torch.dtype
) -> Tensor:
    del order, shape
    return _find_layer(number).stores[is_value].load(first, dtype, stop).contiguous()


def _attend(
    query: Tensor,
    order: Tensor,
    number: Tensor,
    columns: int,
    first: int,
    stop: int,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Tensor:
    del order, columns
    return _find_layer(number).attend(query, slice(first, stop), mask, is_causal, scale).contiguous()


_LIBRARY = torch.library.Library("hf_trainweights", "FRAGMENT")
_TOKENS = "SymInt first, SymInt stop"
for _schema, _function in (
    ("store_tokens(Tensor keys, Tensor values, Tensor number, SymInt at) -> Tensor", _store_tokens),
    (
        f"load_tokens(Tensor order, Tensor number, bool is_value, SymInt[] shape, {_TOKENS}, ScalarType dtype) -> Tensor",
        _load_tokens,
    ),
    (
        f"attend(Tensor query, Tensor order, Tensor number, SymInt columns, {_TOKENS}, Tensor? mask, bool is_causal, "
        "float scale) -> Tensor",
        _attend,
    ),
):
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_schema.partition("(")[0], _function, "CPU")
STORE_TOKENS = torch.ops.hf_trainweights.store_tokens.default
LOAD_TOKENS = torch.ops.hf_trainweights.load_tokens.default
ATTEND = torch.ops.hf_trainweights.attend.default


@torch.library.register_fake("hf_trainweights::store_tokens", lib=_LIBRARY)
def _fake_order(keys: Tensor, *_: object) -> Tensor:
    return keys.new_empty(0)


@torch.library.register_fake("hf_trainweights::load_tokens", lib=_LIBRARY)
def _fake_tokens(
    order: Tensor, number: Tensor, is_value: bool, shape: list[int], first: int, stop: int, dtype: torch.dtype
) -> Tensor:
    batch, heads, columns = shape
    return order.new_empty((batch, heads, stop - first, columns), dtype=dtype)


@torch.library.register_fake("hf_trainweights::attend", lib=_LIBRARY)
def _fake_attention(query: Tensor, order: Tensor, number: Tensor, columns: int, *_: object) -> Tensor:
    return query.new_empty((*query.shape[:-1], columns))
