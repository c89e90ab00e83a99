"""The cache of one attention layer, of all tokens or of a sliding window, with the methods that Transformers calls.

In a program of torch.compile an op stores the tokens; else Python does. `cache/programs.py` says how ops find a layer
by its record, and why the ops that read tokens take `order`, the result of the op that stored them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_trainweights.cache.programs import STORE_CODES, STORE_TOKENS, new_record, ops_in_c, parts_of
from hf_trainweights.cache.states import CachedStates, attend_to_stores, states_in_program
from hf_trainweights.cache.stores import FloatStore, IntegerStore, Store, distinct_tokens
from hf_trainweights.errors import ConfigError
from hf_trainweights.kernels.tokens import BLOCK_TOKENS
from hf_trainweights.models.host.caches import CacheLayerMixin

BITS = {"bf16": 16, "int8": 8, "int4": 4}
# This many tokens show how large each channel of the keys is; fewer are held as floats. docs/kv_cache.md measures it.
LEAST_TOKENS = 64
# Tokens before a window that stay. Assisted generation removes the last tokens again if they were guessed wrong. For
# each token that it removes, the window reaches one token further back.
_SLACK_TOKENS = 128


class KVLayer(CacheLayerMixin):
    """The keys and values of one layer.

    Args:
        key_kind: One of `BITS`.
        value_kind: One of `BITS`.
        window: The tokens that a query attends to, itself included; None for all.
    """

    is_croppable = True

    def __init__(self, key_kind: str, value_kind: str, window: int | None = None):
        self.kinds = key_kind, value_kind
        self.window = self.sliding_window = window
        self.is_sliding = window is not None
        # Transformers sets it while it may remove the last tokens. Then `crop` drops tokens before the window, and not
        # `update`. Transformers also resets it.
        self.record_past = False
        self._clear()
        super().__init__()

    def _clear(self) -> None:
        # Keys, then values; nothing before the first token.
        self.stores = ()
        self.dropped = 0
        self.dtype = torch.float32
        self.is_initialized = False

    @property
    def stores(self) -> tuple[Store, ...]:
        """The keys, then the values; nothing before the first token."""
        return self._stores

    @stores.setter
    def stores(self, stores: tuple[Store, ...]) -> None:
        self._stores = stores
        # The record by which ops in programs find this layer. It is None while tokens are floats that will be integers,
        # and on other devices than a CPU: then Dynamo interrupts the program to call `_update_now`.
        on_cpu = [store.device.type == "cpu" for store in stores]
        self._record = new_record(self) if on_cpu and all(on_cpu) and not self._waits else None
        # A program is compiled for these sizes. If it asked the stores, it would be compiled again when tensors grow.
        self._shapes = [store.shape for store in stores]
        self._has_codes = bool(stores) and all(isinstance(store, IntegerStore) for store in stores) and ops_in_c()
        if self._record is not None:
            for store, description in zip(stores, parts_of(self._record), strict=True):
                store.describe_in(description)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # A copy is another layer, to which the setter gives a record of its own.
        self.stores = self._stores

    @property
    def length(self) -> int:
        """The tokens that are stored."""
        return self.stores[0].length if self.stores else 0

    # Transformers reads keys and values of cross-attention, and sets them to None at first.
    @property
    def keys(self) -> Tensor | None:
        """All stored keys."""
        return self._states(0)[0] if self.stores else None

    @keys.setter
    def keys(self, value: None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]  (an attribute)
        pass

    @property
    def values(self) -> Tensor | None:
        """All stored values."""
        return self._states(0)[1] if self.stores else None

    @values.setter
    def values(self, value: None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]  (an attribute)
        pass

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make room for tokens of the sizes and dtype of these keys and values."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.stores = tuple(
            FloatStore(states, _float_dtype(states.dtype) if kind == "bf16" else states.dtype)
            for kind, states in zip(self.kinds, (key_states, value_states), strict=True)
        )
        self.is_initialized = True

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store tokens `[batch, heads, n, columns]`.

        Returns:
            The keys and values that these tokens may attend to. The first tokens of a sequence get their own, exactly.
            Gradients reach these tokens and none of an earlier call.

        Raises:
            ConfigError: The batch, the heads or the columns are others than those of the stored tokens.
        """
        if torch.compiler.is_dynamo_compiling() and self._is_in_programs() and key_states.device.type == "cpu":
            return self._update_in_program(key_states, value_states)
        return self._update_now(key_states, value_states)

    def _is_in_programs(self) -> bool:
        return self._record is not None and not torch.is_grad_enabled()

    def _update_in_program(self, *states: Tensor) -> tuple[Tensor, Tensor]:
        """Put the op that stores tokens into the program that Dynamo traces.

        When the program runs, the op calls `store_at`, and Dynamo repeats the assignments to `dropped` and `length`.
        """
        dropped = 0 if self.record_past else self._tokens_to_drop()
        before = self.length - dropped
        shapes = [(x.shape[0], x.shape[1], x.shape[3]) for x in states]
        # Tokens of other sizes are refused by Python, which knows the error to raise.
        store_op = STORE_CODES if self._has_codes and shapes == self._shapes else STORE_TOKENS
        order = store_op(*states, self._record, dropped, before)
        self.dropped += dropped
        for store in self._stores:
            store.length = before + states[0].shape[2]
        return self._states_in_program(order, shapes, self._first_of(before))

    def _states_in_program(
        self, order: Tensor, shapes: list[tuple[int, int, int]], first: int
    ) -> tuple[Tensor, Tensor]:
        record, dtype = self._record, str(self.dtype).removeprefix("torch.")
        assert record is not None
        keys, values = (
            states_in_program(order, record, self._has_codes, index == 1, shape, self.length - first, dtype)
            for index, shape in enumerate(shapes)
        )
        return keys, values

    def store_at(self, dropped: int, at: int, *states: Tensor) -> None:
        """Drop the first `dropped` tokens, and store new ones behind the `at` that are left; an op calls this."""
        self._require_same_sizes(*states)
        self._drop(dropped)
        for store, x in zip(self._stores, states, strict=True):
            store.length = at  # Dynamo repeats a crop within the program only at its end, so it is not done yet
            store.append(x)

    def attend(self, query: Tensor, tokens: slice, mask: Tensor | None, is_causal: bool, scaling: float) -> Tensor:
        """Attend to some tokens; an op of a program calls this."""
        keys, values = self._stores
        return attend_to_stores(query, keys, values, tokens, mask, is_causal, scaling)

    def load(self, is_value: bool, tokens: slice, dtype: torch.dtype) -> Tensor:
        """Return a copy of the keys or values of some tokens; an op of a program calls this."""
        store = self._stores[is_value]
        states = store.load(tokens.start, dtype, tokens.stop)
        # A program may write to the result of an op.
        return states.clone() if isinstance(store, FloatStore) else states

    def _update_here(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        if self.length == 0:
            self._clear()
            self.lazy_initialization(key_states, value_states)
        self._require_same_sizes(key_states, value_states)
        if self.stores[0].device != key_states.device:
            self._move(key_states.device)
        if not self.record_past:
            self._drop_before_window()
        count, before = key_states.shape[2], self.length
        first = self._first_of(before)
        if self._waits and before + count >= LEAST_TOKENS:
            return self._quantize(first, key_states, value_states)
        both = list(zip(self.stores, (key_states, value_states), strict=True))
        has_gradient = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        earlier = [store.load(first, x.dtype) for store, x in both] if has_gradient and before else []
        for store, states in both:
            store.append(states.detach())
        if before == 0:
            return key_states, value_states
        if has_gradient:
            keys, values = (torch.cat([old, x], 2) for old, (_, x) in zip(earlier, both, strict=True))
            return keys, values
        return self._states(first)

    # Not as a decorator, which has no type for its result.
    _update_now: Any = torch.compiler.disable(_update_here)

    @property
    def _waits(self) -> bool:
        """Whether tokens that are to be integers are still floats."""
        pairs = zip(self.stores, self.kinds, strict=True)
        return any(isinstance(store, FloatStore) and kind != "bf16" for store, kind in pairs)

    def _require_same_sizes(self, *states: Tensor) -> None:
        for store, x in zip(self.stores, states, strict=True):
            sizes = x.shape[0], x.shape[1], x.shape[3]
            if sizes != store.shape:
                expected = "keys and values of the batch, heads and columns {}, {}, {}".format(*store.shape)
                next_step = "Make a new cache for another batch or another model."
                raise ConfigError("KVCache", expected, "{}, {}, {}".format(*sizes), next_step)

    def _move(self, device: torch.device) -> None:
        """Move all tokens to the device of a model, for which a file was loaded."""
        for store in self.stores:
            store.move(device)
        # The setter gives the layer another record, or none.
        self.device, self.stores = device, self.stores

    def _quantize(self, first: int, *states: Tensor) -> tuple[Tensor, Tensor]:
        """Store all tokens so far and these as integers, and return them as they were."""
        keys, values = (
            x if store.length == 0 else torch.cat([store.load(0, x.dtype), x], 2)
            for store, x in zip(self.stores, states, strict=True)
        )
        counted, stores = distinct_tokens(values), list(self.stores)
        for index, (kind, x) in enumerate(zip(self.kinds, (keys.detach(), values.detach()), strict=True)):
            if kind == "bf16":
                stores[index].append(x[:, :, stores[index].length :])
            else:
                stores[index] = IntegerStore.of(x, BITS[kind], index == 0, counted)
        self.stores = tuple(stores)
        return keys[:, :, first:], values[:, :, first:]

    def _states(self, first: int) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_dynamo_compiling() and self._is_in_programs():
            assert self._record is not None
            # No op of this program stored the tokens: their number is `order`, and there is no op to wait for.
            order = self._record.new_full((), self.length)
            return self._states_in_program(order, [store.shape for store in self._stores], first)
        keys, values = (
            CachedStates(store, first, self.dtype) if isinstance(store, IntegerStore) else store.load(first, self.dtype)
            for store in self.stores
        )
        return keys, values

    def _first_of(self, before: int) -> int:
        """Return the index of the first stored token to which a token attends that `before` tokens precede."""
        return 0 if self.window is None else max(0, before - self.window + 1)

    def _tokens_to_drop(self) -> int:
        """Return how many tokens before the window to drop: 0 until `window + 2 * _SLACK_TOKENS` are exceeded there."""
        if self.window is None or self.length <= 2 * (self.window + _SLACK_TOKENS):
            return 0
        # A multiple of 16, because codes lie in blocks of 16 tokens.
        return (self.length - self.window - _SLACK_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS

    def _drop(self, count: int) -> None:
        """Forget the first tokens of the stores; `dropped` is left to the caller."""
        for store in self._stores if count else ():
            store.drop(count)

    def _drop_before_window(self) -> None:
        count = self._tokens_to_drop()
        self._drop(count)
        self.dropped += count

    def activate_past_recording(self) -> None:
        """Let `crop` drop tokens before the window from now on, and no longer `update`."""
        self.record_past = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens `query_length` new ones attend to, these included, and the position of the first."""
        length = self.get_seq_length()
        if self.window is None:
            return length + query_length, 0
        return min(length, self.window - 1) + query_length, max(length - self.window + 1, 0)

    def get_seq_length(self) -> int:
        """Return how many tokens were stored, those before a window included."""
        return self.length + self.dropped

    def get_max_length(self) -> int:
        """Return the window; -1 where there is none."""
        return -1 if self.window is None else self.window

    def count_to_remove(self, number: int) -> int:
        """Return how many tokens `crop(number)` removes.

        -3 removes three tokens. A positive `number`, which Transformers 5.17 passes, is the length that is left.
        ConfigError: fewer tokens are stored, or the window of the last token that is left is no longer stored.
        """
        number = int(number)  # Transformers 5.17 may pass a tensor
        count = -number if number <= 0 else max(0, self.get_seq_length() - number)
        most = self.length if self.window is None or not self.dropped else self.length - self.window + 1
        if count > most and self.is_initialized:
            next_step = "Make a new cache and process the sequence again."
            raise ConfigError("crop", f"at most {most} tokens to remove", str(count), next_step)
        return count

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, and drop those that lie far before the window. -3 removes three tokens."""
        count = self.count_to_remove(tokens_to_remove)
        for store in self.stores:
            store.truncate(store.length - count)
        self._drop_before_window()

    def reset(self) -> None:
        """Forget all tokens, and the means and magnitudes of the keys' channels."""
        self._clear()

    def select(self, index: Tensor) -> None:
        """Make the sequences at these positions of the batch the new batch; a position may occur twice."""
        for store in self.stores:
            store.select(index)
        self._shapes = [store.shape for store in self.stores]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Do as `select`: Transformers' name for it in a search with beams."""
        self.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Do as `select`: Transformers' name for it in contrastive search."""
        self.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Put `repeats` copies of each sequence in its place."""
        if self.stores:
            store = self.stores[0]
            self.select(torch.arange(store.shape[0], device=store.device).repeat_interleave(repeats))

    def offload(self) -> None:
        """Do nothing: the cache stays where its model computes."""

    def prefetch(self) -> None:
        """Do nothing: the cache stays where its model computes."""


def _float_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of 16 bits in which `"bf16"` stores states of a dtype."""
    return dtype if dtype.itemsize == 2 else torch.bfloat16
