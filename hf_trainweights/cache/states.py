"""Keys or values of a cache as a tensor that a model attends to: attention reads codes, any other op gets floats."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_trainweights.cache.stores import IntegerStore
from hf_trainweights.kernels import compiled
from hf_trainweights.kernels.attention import attend
from hf_trainweights.kernels.cpu_features import most_attention_rows

_attention = F.scaled_dot_product_attention
_METADATA = {
    *(Tensor.size, Tensor.dim, Tensor.stride, Tensor.numel, Tensor.is_contiguous, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.element_size, Tensor.ndimension),
}
_EVERYTHING = slice(None)


class CachedStates(Tensor):
    """Stored keys or values `[batch, heads * repeats, tokens, columns]`, which may not be written to.

    A model without gradients that calls `F.scaled_dot_product_attention` multiplies the codes. Models
    that repeat the heads of keys for their query heads first do so without a copy, too.

    Args:
        store: The tokens.
        first: The first of them that counts.
        dtype: The dtype that the tensor shows.
        repeats: How often each head stands in the tensor.
        is_expanded: Whether the repeats are a dimension of their own, behind the heads.
    """

    _store: IntegerStore
    _tokens: slice
    _repeats: int
    _is_expanded: bool

    @staticmethod
    def __new__(
        cls,
        store: IntegerStore,
        first: int,
        dtype: torch.dtype,
        repeats: int = 1,
        is_expanded: bool = False,
        stop: int | None = None,
    ) -> CachedStates:
        """Make the tensor."""
        (batch, heads, columns), stop = store.shape, store.length if stop is None else stop
        tail = (stop - first, columns)
        shape = (batch, heads, repeats, *tail) if is_expanded else (batch, heads * repeats, *tail)
        device = store.stored.codes.device
        states: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        states._store, states._tokens = store, slice(first, stop)
        states._repeats, states._is_expanded = repeats, is_expanded
        return states

    def __repr__(self, **kwargs: Any) -> str:
        bits = self._store.stored.form.bits
        return f"CachedStates(shape={tuple(self.shape)}, dtype={self.dtype}, {bits} bits)"

    def dequantize(self) -> Tensor:
        """Return the floats."""
        tokens = self._tokens
        dense = self._store.stored.load(tokens.start, tokens.stop - tokens.start, self.dtype)
        if self._is_expanded:
            return dense[:, :, None].expand(-1, -1, self._repeats, -1, -1)
        return dense.repeat_interleave(self._repeats, 1) if self._repeats > 1 else dense

    def _repeated(self, repeats: int, is_expanded: bool) -> CachedStates:
        tokens = self._tokens
        return CachedStates(self._store, tokens.start, self.dtype, repeats, is_expanded, tokens.stop)

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


@torch.compiler.disable
def _attend(
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
        has_gradient, heads = torch.is_grad_enabled() and query.requires_grad, key._store.shape[1]
        fits = query.dim() == 4 and query.shape[1] % heads == 0 and key._tokens == value._tokens
        most_rows = most_attention_rows(compiled.instructions() or "")
        is_short = fits and query.shape[1] // heads * query.shape[2] <= most_rows
        if is_short and not (has_gradient or dropout_p or is_causal):
            scaling = query.shape[-1] ** -0.5 if scale is None else scale
            out = attend(query, key._store.stored, value._store.stored, key._tokens, scaling, attn_mask)
            if out is not None:
                return out
        # PyTorch repeats the heads of keys without a copy.
        enable_gqa = enable_gqa or heads != query.shape[1]
        key, value = key._repeated(1, False), value._repeated(1, False)
    dense = _dequantized(query), _dequantized(key), _dequantized(value)
    return _attention(*dense, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
