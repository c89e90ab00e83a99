"""Keys or values of a cache as a tensor that a model attends to: attention reads codes, any other op gets floats."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_trainweights.cache.programs import SCHEMAS, ProgramStore
from hf_trainweights.cache.stores import IntegerStore, Store
from hf_trainweights.kernels import compiled
from hf_trainweights.kernels.attention import attend
from hf_trainweights.kernels.cpu_features import most_attention_rows
from hf_trainweights.tensor.traced_modules import let_compilers_cache_programs

_attention = F.scaled_dot_product_attention
_METADATA = {
    *(Tensor.size, Tensor.dim, Tensor.stride, Tensor.numel, Tensor.is_contiguous, Tensor.__len__, Tensor.ndimension),
    *(Tensor.is_floating_point, Tensor.element_size, Tensor.is_complex, Tensor.is_conj, Tensor.is_neg),
    *(Tensor.untyped_storage, Tensor.storage_offset, Tensor.is_inference, Tensor._is_view),
}
_EVERYTHING = slice(None)


class CachedStates(Tensor):
    """Stored keys or values `[batch, heads * repeats, tokens, columns]`, which may not be written to.

    A model without gradients that calls `F.scaled_dot_product_attention` multiplies the codes. Models that first repeat
    the heads of keys, for the query heads that share them, do so without a copy, too.

    Args:
        store: The tokens; a `ProgramStore` while torch.compile traces a program.
        first: The index of the first token to read.
        dtype: The dtype of the tensor, and of the floats that it is dequantized to.
        repeats: How often each head stands in the tensor.
        is_expanded: Whether the repeats are a dimension of their own, behind the heads.
        stop: The index behind the last token to read; by default the number of stored tokens.
    """

    _store: IntegerStore | ProgramStore
    _tokens: slice
    _repeats: int
    _is_expanded: bool

    @staticmethod
    def __new__(
        cls,
        store: IntegerStore | ProgramStore,
        first: int,
        dtype: torch.dtype,
        repeats: int = 1,
        is_expanded: bool = False,
        stop: int | None = None,
    ) -> Any:
        """Make the tensor."""
        batch, heads, columns = store.shape
        if stop is None:
            assert isinstance(store, IntegerStore)
            stop = store.length
        tail = (stop - first, columns)
        shape = (batch, heads, repeats, *tail) if is_expanded else (batch, heads * repeats, *tail)
        states: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=store.device)
        states._store, states._tokens = store, slice(first, stop)
        states._repeats, states._is_expanded = repeats, is_expanded
        return states

    def __repr__(self, **kwargs: Any) -> str:
        return f"CachedStates(shape={tuple(self.shape)}, dtype={self.dtype})"

    def dequantize(self) -> Tensor:
        """Return the floats."""
        dense = self._store.load(self._tokens.start, self.dtype, self._tokens.stop)
        if self._is_expanded:
            return dense[:, :, None].expand(-1, -1, self._repeats, -1, -1)
        return dense.repeat_interleave(self._repeats, 1) if self._repeats > 1 else dense

    def _repeat(self, repeats: int, is_expanded: bool) -> CachedStates:
        tokens, make = self._tokens, cast("type[Any]", type(self))
        return make(self._store, tokens.start, self.dtype, repeats, is_expanded, tokens.stop)

    # Dynamo cannot trace how a tensor of a subclass is made, and warns of it.
    _repeated: Any = torch.compiler.disable(_repeat)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer attention, and questions about the shape; dequantize for all else."""
        if func is _attention:
            return _attend(*args, **(kwargs or {}))
        if func in _METADATA or getattr(func, "__name__", "") == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        states = args[0] if args else None
        if isinstance(states, CachedStates):
            # The three steps by which Transformers repeats heads.
            if func is Tensor.__getitem__ and not states._is_expanded and _inserts_repeats(args[1]):
                return states._repeated(1, True)
            if func is Tensor.expand and states._is_expanded:
                return states._repeated(args[3], True)
            if func is Tensor.reshape and states._is_expanded:
                return states._repeated(states._repeats, False)
        return func(*_dequantized(args), **_dequantized(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Dequantize for an op that PyTorch calls itself."""
        return func(*_dequantized(args), **_dequantized(kwargs or {}))


def _inserts_repeats(index: Any) -> bool:
    """Tell whether an index inserts a dimension behind the heads and keeps all else."""
    if not isinstance(index, tuple) or len(index) != 5 or index[2] is not None:
        return False
    return all(isinstance(step, slice) and step == _EVERYTHING for step in (*index[:2], *index[3:]))


def _dequantized(value: Any) -> Any:
    if isinstance(value, CachedStates):
        return value.dequantize()
    if isinstance(value, tuple | list):
        return type(value)(map(_dequantized, value))
    if isinstance(value, dict):
        return {name: _dequantized(item) for name, item in value.items()}
    return value


def _attend_here(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend as `F.scaled_dot_product_attention` does: by the codes where that takes less time, else by floats."""
    if isinstance(key, CachedStates) and isinstance(value, CachedStates):
        keys, values, heads = key._store, value._store, key._store.shape[1]
        has_gradient = torch.is_grad_enabled() and query.requires_grad
        fits = query.dim() == 4 and query.shape[1] % heads == 0 and key._tokens == value._tokens
        if fits and not (has_gradient or dropout_p):
            scaling = query.shape[-1] ** -0.5 if scale is None else scale
            out = _attend_to_codes(query, keys, values, key._tokens, attn_mask, is_causal, scaling)
            if out is not None:
                return out
        # PyTorch repeats the heads of keys without a copy.
        enable_gqa = enable_gqa or heads != query.shape[1]
        key, value = key._repeated(1, False), value._repeated(1, False)
    dense = _dequantized(query), _dequantized(key), _dequantized(value)
    return _attention(*dense, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


_attend: Any = torch.compiler.disable(_attend_here)


def _attend_to_codes(
    query: Tensor,
    keys: IntegerStore | ProgramStore,
    values: IntegerStore | ProgramStore,
    tokens: slice,
    mask: Tensor | None,
    is_causal: bool,
    scaling: float,
) -> Tensor | None:
    """Attend by the op of programs, or by the compiled library; return None if this call needs floats."""
    if isinstance(keys, ProgramStore):
        if not isinstance(values, ProgramStore) or values.record is not keys.record:
            return None
        return keys.attend(query, values, tokens, mask, is_causal, scaling)
    assert isinstance(values, IntegerStore)
    most_rows = most_attention_rows("" if query.is_cuda else compiled.instructions() or "")
    if is_causal or query.shape[1] // keys.shape[1] * query.shape[2] > most_rows:
        return None
    return attend(query, keys.stored, values.stored, tokens, scaling, mask)


def attend_to_stores(
    query: Tensor,
    keys: Store,
    values: Store,
    tokens: slice,
    mask: Tensor | None,
    is_causal: bool,
    scaling: float,
) -> Tensor:
    """Attend to some tokens of a layer as `F.scaled_dot_product_attention` does.

    Args:
        query: `[batch, query heads, rows, columns]`; the heads of the keys divide the query heads.
        keys: The keys of the layer.
        values: The values of the layer.
        tokens: The tokens to attend to, from `start` to before `stop`.
        mask: The `attn_mask` of PyTorch's function, or None.
        is_causal: The `is_causal` of PyTorch's function.
        scaling: The factor of the scores.

    Returns:
        `[batch, query heads, rows, columns]` in the dtype of the query.
    """
    if isinstance(keys, IntegerStore) and isinstance(values, IntegerStore):
        out = _attend_to_codes(query, keys, values, tokens, mask, is_causal, scaling)
        if out is not None:
            return out
    key, value = (store.load(tokens.start, query.dtype, tokens.stop) for store in (keys, values))
    has_groups = query.shape[1] != keys.shape[1]
    return _attention(query, key, value, mask, is_causal=is_causal, scale=scaling, enable_gqa=has_groups)


class _ProgramStates(CachedStates):
    """Stored keys or values while torch.compile traces a program (`cache/programs.py`).

    Dynamo accepts a tensor of a subclass only if `__tensor_flatten__` splits it into plain tensors: here `order` and
    `record`, the inputs of the ops that read the tokens.
    """

    _store: Any  # a ProgramStore

    @property
    def order(self) -> Tensor:
        """The result of the op that stored the tokens: an op that takes it runs after that op."""
        return self._store.order

    @property
    def record(self) -> Tensor:
        """The record by which ops find the layer."""
        return self._store.record

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Name the attributes that are tensors, and describe the rest but for the sizes."""
        return ["order", "record"], (
            self._store.in_c,
            self._store.is_value,
            self.dtype,
            self._repeats,
            self._is_expanded,
        )

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Tensor], rest: Any, size: Any, stride: Any) -> _ProgramStates:
        """Make the tensor again."""
        del stride
        in_c, is_value, dtype, repeats, is_expanded = rest
        heads = size[1] if is_expanded else size[1] // repeats
        store = ProgramStore(tensors["order"], tensors["record"], in_c, is_value, (size[0], heads, size[-1]))
        return _ProgramStates(store, 0, dtype, repeats, is_expanded, size[-2])


@torch.compiler.allow_in_graph
def states_in_program(
    order: Tensor, record: Tensor, in_c: bool, is_value: bool, shape: tuple[int, int, int], count: int, dtype: str
) -> CachedStates:
    """Return the last tokens of a layer, as a tensor; Dynamo puts the call of this function itself into the program."""
    let_compilers_cache_programs(states_in_program, SCHEMAS)
    store = ProgramStore(order, record, in_c, is_value, shape)
    return _ProgramStates(store, 0, getattr(torch, dtype), stop=count)
