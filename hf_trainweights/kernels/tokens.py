"""Keys and values of attention as integers: one row for each token, stored in blocks of 16 tokens.

A token of 8 bits has one scale, the largest magnitude of its columns divided by 127. A token of 4 bits has a scale for
each 32 columns, with a sign: the longer side of the group's range gets the code -8, the shorter one at most 7. Scales
are rounded to bfloat16 before the codes are found. The order of codes in a block is that of `native/attention.c`, which
multiplies them as they lie; where nothing is compiled the same codes are packed and unpacked by ops of PyTorch.

Columns of keys may be equalized: `channels` holds a mean and a magnitude for each column of each head, and
`(key - mean) / magnitude` is stored. Channels whose values are far larger than the others' then take no bits from them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_trainweights.kernels import compiled
from hf_trainweights.kernels.compiled import DTYPES
from hf_trainweights.native_library import address_of

BLOCK_TOKENS = 16
# The fields of `Stored` in native/ops/cache.c.
DESCRIPTION = ("codes", "scale", "channels", "batch", "heads", "capacity", "columns", "bits")
_GROUP_COLUMNS = 32
# As in native/product.h: a smaller largest magnitude counts as this one.
_SMALLEST_TOP = 2.0**-103
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-126, 2.0**126
# From this many numbers on a second thread saves time.
THREADED_NUMBERS = 1 << 16


@dataclass(frozen=True)
class TokenFormat:
    """How the keys or the values of a head are stored.

    Args:
        bits: 8 or 4.
        is_key: Whether they are keys, whose codes have another order than those of values.
        columns: The head size D of the model; blocks hold zeros up to the next multiple of 32.
    """

    bits: int
    is_key: bool
    columns: int

    @property
    def stored_columns(self) -> int:
        """The columns of a block, with the zeros behind those of the model."""
        return -(-self.columns // _GROUP_COLUMNS) * _GROUP_COLUMNS

    @property
    def groups(self) -> int:
        """The scales of a token."""
        return self.stored_columns // _GROUP_COLUMNS if self.bits == 4 else 1

    @property
    def block_bytes(self) -> int:
        """The bytes of the codes of 16 tokens."""
        return BLOCK_TOKENS * self.stored_columns * self.bits // 8


@dataclass(eq=False)
class StoredTokens:
    """The tokens of all heads of a layer.

    Args:
        form: How they are stored.
        codes: uint8 `[batch, heads, blocks, block_bytes]`.
        scale: bfloat16 `[batch, heads, blocks, groups, 16]`; 0 for tokens that are not stored yet.
        channels: float32 `[batch, heads, 2, columns]`, means and magnitudes of columns; None where they are 0 and 1.
    """

    form: TokenFormat
    codes: Tensor
    scale: Tensor
    channels: Tensor | None = None

    @classmethod
    def empty(
        cls, form: TokenFormat, batch: int, heads: int, blocks: int = 0, device: torch.device | str = "cpu"
    ) -> StoredTokens:
        """Return room for `blocks` blocks of each head."""
        # A tensor that is made in inference mode can never be written to outside it.
        with torch.inference_mode(False):
            # Zeros, so that equal tokens are equal bytes in a file. Scales must be 0 where no token is: a token without
            # weight still multiplies its scale, and memory may hold NaN.
            codes = torch.zeros(batch, heads, blocks, form.block_bytes, dtype=torch.uint8, device=device)
            scale = torch.zeros(batch, heads, blocks, form.groups, BLOCK_TOKENS, dtype=torch.bfloat16, device=device)
        return cls(form, codes, scale)

    @property
    def heads(self) -> int:
        """The heads of all sequences of the batch."""
        return self.codes.shape[0] * self.codes.shape[1]

    @property
    def capacity(self) -> int:
        """The blocks that a head has room for."""
        return self.codes.shape[2]

    def describe(self) -> tuple[int, ...]:
        """Return the numbers of `DESCRIPTION`: three addresses, 0 for no channels, and sizes."""
        addresses = self.codes.data_ptr(), self.scale.data_ptr(), address_of(self.channels) or 0
        return (*addresses, *self.codes.shape[:2], self.capacity, self.form.columns, self.form.bits)

    def store(self, x: Tensor, at: int) -> None:
        """Write tokens x `[batch, heads, n, columns]` as tokens `at` to `at + n`."""
        x, library = x.detach().contiguous(), compiled.loaded_library()
        if library is None or x.dtype not in DTYPES or not x.is_cpu:
            self._store_by_ops(x.float(), at)
            return
        form = self.form
        library.store_tokens(
            *(x.data_ptr(), DTYPES[x.dtype], self.heads, x.shape[2], form.columns, form.bits, form.is_key),
            *(address_of(self.channels), self.codes.data_ptr(), self.scale.data_ptr(), self.capacity, at),
            torch.get_num_threads() if x.numel() >= THREADED_NUMBERS else 1,
        )

    def clear(self, first: int, stop: int) -> None:
        """Make tokens `first` to `stop` as if they had never been stored; none behind them is."""
        block, end = first // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)
        if block < end:
            start = first - block * BLOCK_TOKENS
            codes = unpack(self.codes[:, :, block : block + 1], self.form)
            # These codes are packed as bytes of 0, which `empty` fills blocks with.
            codes[:, :, start:] = -8 if self.form.bits == 4 else 0
            self.codes[:, :, block : block + 1] = pack(codes, self.form)
            self.codes[:, :, block + 1 : end] = 0
            self.scale[:, :, block, :, start:] = 0
            self.scale[:, :, block + 1 : end] = 0

    def load(self, first: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return the tokens from `first` on as floats `[batch, heads, count, columns]`."""
        library = compiled.loaded_library()
        if library is None or dtype not in DTYPES or not self.codes.is_cpu:
            return self._load_by_ops(first, count).to(dtype)
        form, (batch, heads) = self.form, self.codes.shape[:2]
        out = torch.empty(batch, heads, count, form.columns, dtype=dtype, device="cpu")
        library.load_tokens(
            *(self.codes.data_ptr(), self.scale.data_ptr(), self.heads, first, count, form.columns, form.bits),
            *(form.is_key, address_of(self.channels), self.capacity, out.data_ptr(), DTYPES[dtype]),
            torch.get_num_threads() if out.numel() >= THREADED_NUMBERS else 1,
        )
        return out

    def _store_by_ops(self, x: Tensor, at: int) -> None:
        """Do as the compiled function does, to the last bit: unpack the blocks of these tokens, and pack them again."""
        if self.channels is not None:
            mean, magnitude = self.channels.split(1, 2)
            x = (x - mean) / magnitude
        x = torch.nn.functional.pad(x, (0, self.form.stored_columns - self.form.columns))
        codes, scale = _quantize(x, self.form.bits)
        first, last = at // BLOCK_TOKENS, -(-(at + x.shape[2]) // BLOCK_TOKENS)
        tokens = slice(at - first * BLOCK_TOKENS, at - first * BLOCK_TOKENS + x.shape[2])
        blocks = unpack(self.codes[:, :, first:last], self.form)
        blocks[:, :, tokens] = codes
        self.codes[:, :, first:last] = pack(blocks, self.form)
        scales = self.scale[:, :, first:last].transpose(3, 4).flatten(2, 3)
        scales[:, :, tokens] = scale
        self.scale[:, :, first:last] = scales.unflatten(2, (-1, BLOCK_TOKENS)).transpose(3, 4)

    def _load_by_ops(self, first: int, count: int) -> Tensor:
        block, end = first // BLOCK_TOKENS, -(-(first + count) // BLOCK_TOKENS)
        codes = unpack(self.codes[:, :, block:end], self.form).unflatten(-1, (self.form.groups, -1))
        scale = self.scale[:, :, block:end].transpose(3, 4).flatten(2, 3).float()
        start = first - block * BLOCK_TOKENS
        tokens = (codes * scale[..., None]).flatten(-2)[:, :, start : start + count, : self.form.columns]
        if self.channels is None:
            return tokens
        mean, magnitude = self.channels.split(1, 2)
        return torch.addcmul(mean, tokens, magnitude)


def _quantize(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the codes of tokens x `[*, n, D]`, and their scales `[*, n, groups]`."""
    groups = x.unflatten(-1, (-1, _GROUP_COLUMNS if bits == 4 else x.shape[-1]))
    fault = (groups * 0).sum(-1)  # NaN where a number is not finite
    if bits == 8:
        exact = (groups.abs().amax(-1).clamp(min=_SMALLEST_TOP) + fault) / 127
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        longer = torch.where(-low >= high, low / -8, high / -8)
        shorter = torch.where(-low >= high, high, -low)
        exact = torch.where(shorter > 7.5 * longer.abs(), (shorter / 7.5).copysign(longer), longer) + fault
    scale = exact.to(torch.bfloat16)
    magnitude = scale.float().abs()
    is_usable = (magnitude >= _SMALLEST_SCALE) & (magnitude <= _LARGEST_SCALE)
    inverse = torch.where(is_usable, 1 / scale.float(), 0.0)
    smallest, largest = (-127, 127) if bits == 8 else (-8, 7)
    codes = (groups * inverse[..., None]).round().nan_to_num(0.0).clamp(smallest, largest)
    return codes.flatten(-2).to(torch.int8), scale


def pack(codes: Tensor, form: TokenFormat) -> Tensor:
    """Pack int8 codes `[batch, heads, blocks * 16, D]` into blocks, uint8 `[batch, heads, blocks, block_bytes]`."""
    blocks = codes.unflatten(2, (-1, BLOCK_TOKENS))
    if form.bits == 8:
        if form.is_key:
            words = blocks.unflatten(-1, (-1, 4)).transpose(3, 4)
        else:
            words = blocks.unflatten(3, (-1, 4)).transpose(4, 5)
        return words.contiguous().view(torch.uint8).flatten(3)
    nibbles = (blocks + 8).view(torch.uint8)
    if form.is_key:
        low, high = nibbles.unflatten(-1, (-1, 2, 4)).unbind(-2)
        return (low | high << 4).transpose(3, 4).flatten(3)
    low, high = nibbles.unflatten(3, (-1, 2, 4)).unbind(4)
    return (low | high << 4).transpose(4, 5).flatten(3)


def unpack(stored: Tensor, form: TokenFormat) -> Tensor:
    """Return the int8 codes that `pack` has packed."""
    D = form.stored_columns
    if form.bits == 8:
        words = stored.view(torch.int8)
        if form.is_key:
            return words.unflatten(3, (D // 4, BLOCK_TOKENS, 4)).transpose(3, 4).flatten(4).flatten(2, 3)
        return words.unflatten(3, (-1, D, 4)).transpose(4, 5).flatten(2, 4)
    halves = torch.stack([stored & 15, stored >> 4]).view(torch.int8) - 8
    if form.is_key:
        low, high = halves.unflatten(4, (D // 8, BLOCK_TOKENS, 4)).transpose(4, 5)
        return torch.stack([low, high], -2).flatten(4).flatten(2, 3)
    low, high = halves.unflatten(4, (-1, D, 4)).transpose(5, 6)
    return torch.stack([low, high], 4).flatten(2, 5)
