"""The searches of uint and codebook4 in C: to the last bit what PyTorch's ops find, in a fifth of the time."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hf_trainweights.native_library import load_library

_LIBRARY = Path(__file__).parent / "native" / "search.so"
_ABI = 1
_FUNCTIONS = {"search_uint": "-pllpppiffplpp", "search_codebook": "-plpppppp"}


@functools.cache
def _load() -> ctypes.CDLL | None:
    return load_library(_LIBRARY, _FUNCTIONS, _ABI)


def serves(groups: Tensor) -> bool:
    """Return whether there is a compiled search of these groups; none of tensors without memory of their own."""
    return type(groups) is Tensor and groups.device.type == "cpu" and _load() is not None


def search_uint(
    groups: Tensor,
    covering: Tensor,
    middle: Tensor,
    importance: Tensor | None,
    units: tuple[int, int, int],
    clippings: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Return group scales and zero points `[n]` of groups `[group_size, n]`; see `uint_search.search`.

    `covering` and `middle` are `[n]`, `units` the bits of a code, `code_units` and `zero_units`.
    """
    library = _load()
    assert library
    groups, fractions = groups.contiguous(), torch.tensor(clippings, device="cpu")
    scale, zero = torch.empty_like(covering), torch.empty_like(covering)
    given = [_at(tensor) for tensor in (covering, middle, importance)]
    library.search_uint(
        _at(groups), *groups.shape, *given, *units, _at(fractions), len(fractions), _at(scale), _at(zero)
    )
    return scale, zero


def search_codebook(
    groups: Tensor, codes: Tensor, doubled: Tensor, squares: Tensor, table: Tensor, importance: Tensor | None
) -> Tensor:
    """Return the code of the smallest error, int32 `[n]`, for groups `[32, n]`; see `codebook4`.

    `codes` (int32), `doubled` and `squares` are `[5, n]`: what is tried, twice its inverse scale, its factor squared.
    """
    library = _load()
    assert library
    chosen = codes.new_empty(codes.shape[1])
    given = [tensor.contiguous() for tensor in (groups, codes, doubled, squares, table)]
    first, *others = map(_at, given)
    library.search_codebook(first, groups.shape[1], *others, _at(importance), _at(chosen))
    return chosen


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
