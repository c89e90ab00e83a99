"""The searches for group scales of uint and codebook4 in C, and the codes of uint.

Each result is equal to that of PyTorch's ops to the last bit.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hf_trainweights.native_library import address_of, load_library

_LIBRARY = Path(__file__).parent / "native" / "search.so"
_ABI = 1
# The types of each function's result and arguments, in the letters of `load_library`.
_FUNCTIONS = {
    "lay_side_by_side": "-pllpp",
    "search_uint": "-pllpppiffplpp",
    "encode_uint": "-pllppiffp",
    "search_codebook": "-plpppppp",
}


@functools.cache
def _load() -> ctypes.CDLL | None:
    return load_library(_LIBRARY, _FUNCTIONS, _ABI)


def serves(values: Tensor) -> bool:
    """Return whether these functions can read the values: plain CPU tensors, not subclasses, if C was compiled."""
    return type(values) is Tensor and values.device.type == "cpu" and _load() is not None


def _functions() -> ctypes.CDLL:
    library = _load()
    assert library is not None
    return library


def lay_side_by_side(values: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return groups as `[group_size, n]`, and the least and largest value of each; see `uint_search.side_by_side`."""
    values = values.contiguous()
    n = values.numel() // group_size
    groups, ends = values.new_empty(group_size, n), values.new_empty(2, n)
    _functions().lay_side_by_side(address_of(values), *groups.shape, address_of(groups), address_of(ends))
    return groups, ends


def search_uint(
    groups: Tensor,
    covering: Tensor,
    middle: Tensor,
    importance: Tensor | None,
    units: tuple[int, int, int],
    clippings: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Return group scales and zero points `[n]` of groups `[group_size, n]`; see `uint_search.search`.

    All three are in units of the row's scale. `covering` `[n]` is the group scale whose codes cover a group's range,
    `middle` `[n]` the middle of that range. `units` is that of `uint_search.Grid`: the bits of a code, and the
    distances of neighbouring codes and of neighbouring zero points.
    """
    groups, fractions = groups.contiguous(), torch.tensor(clippings, dtype=torch.float32, device="cpu")
    scale, zero = torch.empty_like(covering), torch.empty_like(covering)
    inputs, outputs = map(address_of, (covering, middle, importance)), map(address_of, (scale, zero))
    clipped = address_of(fractions), len(fractions)
    _functions().search_uint(address_of(groups), *groups.shape, *inputs, *units, *clipped, *outputs)
    return scale, zero


def encode_uint(groups: Tensor, scale: Tensor, zero: Tensor, units: tuple[int, int, int]) -> Tensor:
    """Return the packed codes of groups `[group_size, n]`, int32 `[n * group_size // 32, bits]`."""
    groups, scale, zero = (tensor.contiguous() for tensor in (groups, scale, zero))
    qdata = groups.new_empty(groups.numel() // 32, units[0], dtype=torch.int32)
    inputs = map(address_of, (scale, zero))
    _functions().encode_uint(address_of(groups), *groups.shape, *inputs, *units, address_of(qdata))
    return qdata


def search_codebook(
    groups: Tensor, codes: Tensor, doubled: Tensor, squares: Tensor, table: Tensor, importance: Tensor | None
) -> Tensor:
    """Return the code of the smallest error, int32 `[n]`, for groups `[32, n]`; see `codebook4`.

    The search tries five factors for each group, with both signs. `codes` (int32), `doubled` and `squares` `[5, n]` are
    the code of a factor, 2 / (scale * factor) and factor**2. `table` has twice the nearest value of the codebook.
    """
    chosen = codes.new_empty(codes.shape[1])
    contiguous = [tensor.contiguous() for tensor in (groups, codes, doubled, squares, table)]
    first, *others = map(address_of, contiguous)
    _functions().search_codebook(first, groups.shape[1], *others, address_of(importance), address_of(chosen))
    return chosen
