"""The keys or the values of a layer, in the order of their tokens: appended at the end, read from any token on.

Both stores have the same methods. Room grows by half, so that appending a token copies nothing most of the time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.kernels.tokens import BLOCK_TOKENS, StoredTokens, TokenFormat

# A tensor that is made in inference mode can never be written to outside it, so methods that make tensors leave it.
_writable = torch.inference_mode(False)

# Keys are divided by the magnitude of their channel, but by no less than this part of the median channel's magnitude.
_SMALLEST_CHANNEL = 1 / 16
_SMALLEST_MAGNITUDE = 1e-6


class FloatStore:
    """Tokens as floats.

    Args:
        like: A tensor `[batch, heads, tokens, columns]` of the sizes and the device to store.
        dtype: The dtype to store.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype):
        self.length = 0
        self._rows = _new_empty(like, (*like.shape[:2], 0, like.shape[3]), dtype)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch, heads and columns."""
        batch, heads, _, columns = self._rows.shape
        return batch, heads, columns

    @property
    def device(self) -> torch.device:
        """The device of the tokens."""
        return self._rows.device

    @property
    def stored_bytes(self) -> int:
        """The bytes of all room, used or not."""
        return self._rows.nbytes

    @_writable
    def move(self, device: torch.device) -> None:
        """Move the tokens to a device."""
        self._rows = self._rows.to(device)

    def append(self, x: Tensor) -> None:
        """Write tokens `[batch, heads, n, columns]` behind the last."""
        end, room = self.length + x.shape[2], self._rows.shape[2]
        if end > room:
            batch, heads, columns = self.shape
            rows = _new_empty(self._rows, (batch, heads, max(end, room + room // 2), columns), self._rows.dtype)
            rows[:, :, : self.length] = self._rows[:, :, : self.length]
            self._rows = rows
        self._rows[:, :, self.length : end] = x
        self.length = end

    def load(self, first: int, dtype: torch.dtype, stop: int | None = None) -> Tensor:
        """Return the tokens from `first` on, or up to `stop`: a view where they have this dtype."""
        return self._rows[:, :, first : self.length if stop is None else stop].to(dtype)

    @_writable
    def select(self, index: Tensor) -> None:
        """Make the sequences at these positions of the batch the new batch; a position may occur twice."""
        self._rows = self._rows[:, :, : self.length].index_select(0, index.to(self._rows.device))

    def describe_in(self, record: np.ndarray) -> None:
        """Write nothing: ops in C read no floats."""

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        self.length = length

    @_writable
    def drop(self, first: int) -> None:
        """Forget the tokens before `first`."""
        self._rows = self._rows[:, :, first : self.length].clone()
        self.length -= first

    def tensors(self) -> dict[str, Tensor]:
        """Return the stored tensors by name, without the room behind them."""
        return {"rows": self._rows[:, :, : self.length].contiguous()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], length: int, form: TokenFormat) -> FloatStore:
        """Make a store of the tensors that `tensors` returned."""
        rows = tensors["rows"]
        store = cls(rows, rows.dtype)
        store.append(rows)
        return store


class IntegerStore:
    """Tokens of 8 or 4 bits. Keys are equalized: each column, less its mean, is divided by its magnitude.

    Mean and magnitude are those of the tokens that the store begins with.
    """

    def __init__(self, stored: StoredTokens):
        self.length = 0
        self._record: np.ndarray | None = None
        self.stored = stored

    @property
    def stored(self) -> StoredTokens:
        """The codes."""
        return self._stored

    @stored.setter
    def stored(self, stored: StoredTokens) -> None:
        self._stored = stored
        if self._record is not None:
            self._record[:] = stored.describe()

    def describe_in(self, record: np.ndarray) -> None:
        """Write into a record, int64, where the codes are, now and whenever they move (`cache/programs.py`)."""
        self._record = record
        self.stored = self._stored

    @classmethod
    def of(cls, x: Tensor, bits: int, is_key: bool, counted: Tensor) -> IntegerStore:
        """Store tokens x `[batch, heads, n, columns]`.

        `counted`, bool `[batch, n]`, says which tokens give means and magnitudes: `distinct_tokens` returns it.
        """
        batch, heads, _, columns = x.shape
        stored = StoredTokens.empty(TokenFormat(bits, is_key, columns), batch, heads, device=x.device)
        stored.channels = _channels(x, counted) if is_key else None
        store = cls(stored)
        store.append(x)
        return store

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch, heads and columns."""
        return self.stored.codes.shape[0], self.stored.codes.shape[1], self.stored.form.columns

    @property
    def device(self) -> torch.device:
        """The device of the codes."""
        return self.stored.codes.device

    @property
    def stored_bytes(self) -> int:
        """The bytes of all room, used or not."""
        stored = self.stored
        return stored.codes.nbytes + stored.scale.nbytes + (0 if stored.channels is None else stored.channels.nbytes)

    @_writable
    def move(self, device: torch.device) -> None:
        """Move the tokens to a device."""
        stored = self.stored
        channels = None if stored.channels is None else stored.channels.to(device)
        self.stored = StoredTokens(stored.form, stored.codes.to(device), stored.scale.to(device), channels)

    def append(self, x: Tensor) -> None:
        """Write tokens `[batch, heads, n, columns]` behind the last."""
        blocks = -(-(self.length + x.shape[2]) // BLOCK_TOKENS)
        if blocks > self.stored.capacity:
            self._resize(slice(0, self._used_blocks), max(blocks, self.stored.capacity * 3 // 2))
        self.stored.store(x, self.length)
        self.length += x.shape[2]

    def load(self, first: int, dtype: torch.dtype, stop: int | None = None) -> Tensor:
        """Return the tokens from `first` on, or up to `stop`, as floats."""
        return self.stored.load(first, (self.length if stop is None else stop) - first, dtype)

    @_writable
    def select(self, index: Tensor) -> None:
        """Make the sequences at these positions of the batch the new batch; a position may occur twice."""
        stored, index = self.stored, index.to(self.stored.codes.device)
        channels = None if stored.channels is None else stored.channels.index_select(0, index)
        codes, scale = (x[:, :, : self._used_blocks].index_select(0, index) for x in (stored.codes, stored.scale))
        self.stored = StoredTokens(stored.form, codes, scale, channels)

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        # Room behind the last token must be as `StoredTokens.empty` makes it.
        self.stored.clear(length, self.length)
        self.length = length

    @_writable
    def drop(self, first: int) -> None:
        """Forget the tokens before `first`, a multiple of 16."""
        start = first // BLOCK_TOKENS
        self._resize(slice(start, self._used_blocks), self._used_blocks - start)
        self.length -= first

    def tensors(self) -> dict[str, Tensor]:
        """Return the stored tensors by name, without the room behind them."""
        stored = self.stored
        named = {"codes": stored.codes, "scale": stored.scale}
        used = {name: tensor[:, :, : self._used_blocks].contiguous() for name, tensor in named.items()}
        return used if stored.channels is None else {**used, "channels": stored.channels}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], length: int, form: TokenFormat) -> IntegerStore:
        """Make a store of the tensors that `tensors` returned."""
        store = cls(StoredTokens(form, tensors["codes"], tensors["scale"], tensors.get("channels")))
        store.length = length
        return store

    @property
    def _used_blocks(self) -> int:
        return -(-self.length // BLOCK_TOKENS)

    def _resize(self, used: slice, blocks: int) -> None:
        """Move to new memory for `blocks` blocks, and copy the `used` blocks to its front."""
        old, (batch, heads, _) = self.stored, self.shape
        new = StoredTokens.empty(old.form, batch, heads, blocks, device=old.codes.device)
        new.codes[:, :, : used.stop - used.start] = old.codes[:, :, used]
        new.scale[:, :, : used.stop - used.start] = old.scale[:, :, used]
        new.channels = old.channels
        self.stored = new


Store = FloatStore | IntegerStore


def distinct_tokens(values: Tensor) -> Tensor:
    """Return for values `[batch, heads, n, columns]` a bool `[batch, n]`: whether a token differs from the one before.

    Tokens that pad a prompt on the left attend to nothing but each other, so all have the values of the first.
    """
    differs = (values[:, :, 1:] != values[:, :, :-1]).any(-1).any(1)
    return torch.nn.functional.pad(differs, (1, 0), value=True)


def _channels(keys: Tensor, counted: Tensor) -> Tensor:
    """Return float32 `[batch, heads, 2, columns]`: the mean and the standard deviation of each column."""
    weight = counted[:, None, :, None].to(torch.float32)
    count, keys = weight.sum(2, keepdim=True), keys.float()
    mean = (keys * weight).sum(2, keepdim=True) / count
    rms = ((keys - mean).square() * weight).sum(2, keepdim=True).div(count).sqrt()
    smallest = (rms.median(-1, keepdim=True).values * _SMALLEST_CHANNEL).clamp(min=_SMALLEST_MAGNITUDE)
    channels = torch.cat([mean, torch.maximum(rms, smallest)], 2)
    # One key that is not finite would spoil the mean, and so all tokens. Then keys are stored as they are.
    unchanged = torch.cat([torch.zeros_like(mean), torch.ones_like(rms)], 2)
    return torch.where(channels.isfinite().all(), channels, unchanged).contiguous()


def _new_empty(like: Tensor, shape: tuple[int, ...], dtype: Any) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=like.device)
