"""Attention to stored tokens on NVIDIA GPUs: chosen, checked before its first use, and launched.

The CPU never waits for the GPU, but for the check.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_trainweights.kernels import cuda, triton_launch
from hf_trainweights.kernels.thresholds import THRESHOLDS
from hf_trainweights.kernels.tokens import BLOCK_TOKENS, StoredTokens, TokenFormat

# The tokens of a head are divided into sections until there are `_PROGRAMS` programs, two for each processor of a large
# GPU. But a section has two blocks of tokens or more, and a head at most `_MOST_SECTIONS`.
_PROGRAMS, _LEAST_BLOCKS, _MOST_SECTIONS = 256, 2, 64
# Tensor cores take at least 16 rows. A program holds 8192 numbers of rows, or of tokens, at a time.
_LEAST_ROWS, _HELD_NUMBERS, _MOST_TOKENS = 16, 8192, 128
# A warp has registers for this many numbers of rows.
_NUMBERS_OF_WARP = 1024
# The error of attention in float32, relative to its norm: that of the GPU's exponentials.
_FLOAT32_ERROR = 1e-5


class Case(NamedTuple):
    """An attention whose kernels are checked: formats of keys and values, the block of rows, dtypes and device."""

    keys: TokenFormat
    values: TokenFormat
    block_rows: int
    dtype: torch.dtype
    mask: torch.dtype | None
    is_equalized: bool
    device: torch.device

    def __str__(self) -> str:
        return f"`attend_to_section` for {self.keys}, {self.values}, {self.dtype} and {self.block_rows} rows"

    @property
    def limit(self) -> float:
        """The largest error."""
        return max(torch.finfo(self.dtype).eps, _FLOAT32_ERROR)

    def difference(self) -> float:
        """Return the error of attention to a few blocks of tokens, relative to its norm."""
        heads, shared, first = 2, self.block_rows // 2, 3
        count = 2 * _block_tokens(self.keys, self.values) + 5
        # The sines of squares are as good as random, as in `cuda`.
        size = heads * max(count, 2 * shared) * max(self.keys.columns, self.values.columns)
        squares = torch.arange(size, dtype=torch.float64, device=self.device).square_()

        def numbers(factor: float, heads: int, rows: int, columns: int) -> Tensor:
            return squares.mul(factor).sin_()[: heads * rows * columns].view(1, heads, rows, columns)

        stores, exact = [], []
        for form, factor in ((self.keys, 0.7), (self.values, 0.9)):
            stored = StoredTokens.empty(form, 1, heads, -(-count // BLOCK_TOKENS), self.device)
            if form.is_key and self.is_equalized:
                stored.channels = numbers(0.6, heads, 2, form.columns).float().abs_().add_(0.5)
            stored.store(numbers(factor, heads, count, form.columns).float(), 0)
            stores.append(stored)
            exact.append(stored.load(first, count - first, torch.float64).repeat_interleave(shared, 1))
        query = numbers(0.3, heads * shared, 2, self.keys.columns).to(self.dtype)
        mask = None if self.mask is None else (numbers(0.2, 1, 1, count - first) > 0).to(self.mask)
        result = _launch(query, stores[0], stores[1], slice(first, count), 1.0, mask).double()
        mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
        expected = F.scaled_dot_product_attention(query.double(), exact[0], exact[1], mask, scale=1.0)
        return ((result - expected).norm() / expected.norm()).item()


def attend(
    query: Tensor, keys: StoredTokens, values: StoredTokens, tokens: slice, scaling: float, mask: Tensor | None
) -> Tensor | None:
    """Do as `kernels.attention.attend` on a GPU; None if the kernels are not right there, or hold fewer rows."""
    shared, rows = query.shape[1] // keys.codes.shape[1], query.shape[2]
    block_rows = _block_rows(shared * rows)
    is_small = block_rows * _block_columns(keys.form, values.form) <= _HELD_NUMBERS
    is_small = is_small and block_rows <= THRESHOLDS["ATTENTION_ROWS"]
    has_work = query.numel() > 0 and tokens.start < tokens.stop
    if not (is_small and has_work and query.dtype in cuda.DTYPES and cuda.has_triton(query.device.index)):
        return None
    mask_dtype = None if mask is None else mask.dtype
    is_equalized = keys.channels is not None
    case = Case(keys.form, values.form, block_rows, query.dtype, mask_dtype, is_equalized, query.device)
    with torch.cuda.device_of(query):
        return _launch(query, keys, values, tokens, scaling, mask) if cuda.is_right(case) else None


def _launch(
    query: Tensor, keys: StoredTokens, values: StoredTokens, tokens: slice, scaling: float, mask: Tensor | None
) -> Tensor:
    (batch, query_heads, rows, _), heads, form = query.shape, keys.codes.shape[1], values.form
    shared, count = query_heads // heads, tokens.stop - tokens.start
    sizes = _block_sizes(keys.form, form, shared * rows)
    first, blocks = tokens.start // sizes["BLOCK_T"], -(-tokens.stop // sizes["BLOCK_T"])
    most = min(_PROGRAMS // (batch * heads), (blocks - first) // _LEAST_BLOCKS, _MOST_SECTIONS)
    section_blocks = -(-(blocks - first) // max(1, most))
    sections = -(-(blocks - first) // section_blocks)
    lines = batch * heads, sections, shared * rows
    sums, tops, totals = (
        query.new_empty(*lines, *columns, dtype=torch.float32) for columns in ((form.stored_columns,), (), ())
    )
    mask, steps = _expanded(mask, (batch, query_heads, rows, count))
    kernels = triton_launch.kernels("triton_attention")
    kernels.attend_to_section[(batch * heads, sections)](
        *(query.contiguous(), keys.codes.view(torch.int32), keys.scale, keys.channels),
        *(values.codes.view(torch.int32), values.scale, mask, sums, tops, totals),
        *(scaling, tokens.start, tokens.stop, keys.capacity, section_blocks, heads, shared, rows, *steps),
        **sizes,
    )
    out = query.new_empty(batch, query_heads, rows, form.columns)
    columns = {"COLUMNS": form.columns, "STORED_COLUMNS": form.stored_columns, "BLOCK_V": sizes["BLOCK_V"]}
    kernels.add_attended_sections[(batch * heads, shared * rows)](
        *(sums, tops, totals, out, sections, shared * rows), **columns, BLOCK_S=_MOST_SECTIONS
    )
    return out


def _block_sizes(keys: TokenFormat, values: TokenFormat, rows: int) -> dict[str, Any]:
    """Return the constants of `attend_to_section`."""
    block_rows = _block_rows(rows)
    return {
        "KEY_BITS": keys.bits,
        "VALUE_BITS": values.bits,
        "KEY_COLUMNS": keys.columns,
        "STORED_KEY_COLUMNS": keys.stored_columns,
        "STORED_VALUE_COLUMNS": values.stored_columns,
        "BLOCK_M": block_rows,
        "BLOCK_T": _block_tokens(keys, values),
        "BLOCK_K": _power_of_two(keys.stored_columns),
        "BLOCK_V": _power_of_two(values.stored_columns),
        "num_warps": max(4, block_rows * _block_columns(keys, values) // _NUMBERS_OF_WARP),
    }


def _block_rows(rows: int) -> int:
    return max(_LEAST_ROWS, _power_of_two(rows))


def _block_tokens(keys: TokenFormat, values: TokenFormat) -> int:
    return min(_MOST_TOKENS, _HELD_NUMBERS // _block_columns(keys, values))


def _block_columns(keys: TokenFormat, values: TokenFormat) -> int:
    return _power_of_two(max(keys.stored_columns, values.stored_columns))


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is not smaller."""
    return 1 << (number - 1).bit_length()


def _expanded(mask: Tensor | None, shape: tuple[int, ...]) -> tuple[Tensor | None, tuple[int, ...]]:
    """Return a mask whose bools are bytes, and its steps from one batch, head, row and token to the next."""
    if mask is None:
        return None, (0, 0, 0, 0)
    mask = mask.expand(shape)
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask, mask.stride()
