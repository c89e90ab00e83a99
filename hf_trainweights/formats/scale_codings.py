"""The ways in which files of other programs store the scales of groups, each decoded to float32 numbers.

| coding | `scale` | other tensors | scale of a group |
|---|---|---|---|
| `plain` | `[*, N, G]`, float | | as stored |
| `e8m0` | `[*, N, G]` uint8 | | `2**(scale - 127)`; 255 is NaN |
| `e4m3` | `[*, N, G]` float8_e4m3fn | `global_scale` `[*, N, 1]` float32 | `scale * global_scale` |
| `e4m3_divided` | `[*, N, G]` float8_e4m3fn | `global_scale` `[*, N, 1]` float32 | `scale / global_scale` |
| `nested` | `[*, N, G]` uint8 | see `_nested_columns` | `nested_values[scale] * outer + nested_offset` |
| `k4` | `[*, N, 2 * S]` float16 | `group_scale` `[*, N, 12 * S]` | 6 bits times a number, and so the minimum |
| `k2` | `[*, N, 2 * S]` float16 | `group_scale` `[*, N, 16 * S]` | 4 bits times a number, and so the minimum |
| `k3` | `[*, N, S]` float16 | `group_scale` `[*, N, 12 * S]` | (6 bits - 32) times `scale` |
| `k6` | `[*, N, S]` float16 | `group_scale` `[*, N, 16 * S]` | int8 times `scale` |
| `iq4_xs` | `[*, N, S]` float16 | `group_scale` `[*, N, 6 * S]` | (6 bits - 32) times `scale` |

G is the number of groups of a row, and S = K // 256 its number of superblocks. If a superblock has two numbers in
`scale`, the second one is that of the minima. Files have one `global_scale` and one `nested_offset` for a weight; here
each row has them, so that rows of several weights can be put together. The bytes of `group_scale` are those of GGUF's
blocks, in their order. Every product of a float16 number and a small integer is exact in float32. Every exporter of
PyTorch can write all ops. Sizes are read by `size(-1)`, because TorchScript records `shape[-1]` as the number that it
is in its example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_trainweights.errors import ConfigError
from hf_trainweights.formats.arithmetic import as_bytes
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.unpacked import constant, fields_of, look_up_by_matrix

SUPERBLOCK = 256
"""The number of columns of a superblock of GGUF."""
OUTER_GROUPS = 256
"""The number of groups that share an outer scale in the coding `nested`."""

# Groups are whole words: the codes of 8 columns or more share one.
_GROUP_STEP = 8
# The value of each byte as float8_e4m3fn and as an exponent.
E4M3 = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
_E8M0 = torch.tensor([*(2.0 ** (code - 127) for code in range(255)), math.nan], dtype=torch.float32, device="cpu")

# Last dimension and dtype of each stored tensor.
Columns = dict[str, tuple[int, torch.dtype]]


class GroupScales(NamedTuple):
    """The float32 scales of the groups of rows, `[*, N, G]`, and the minima to be subtracted, if the coding has any."""

    scale: Tensor
    minimum: Tensor | None = None


@dataclass(frozen=True)
class ScaleCoding:
    """One way to store the scales of groups.

    Args:
        columns: A function from the number of groups of a row, and the dtype of plain scales, to the stored tensors.
        decode: A function from the stored tensors and the number of groups of a row to the scales.
        group_size: The only group size of the coding; None for any.
        superblock_groups: The number of groups of a superblock, which share numbers; 1 if there are no superblocks.
        shared_names: Names of the stored tensors that all rows share.
        has_minima: Whether each group has a minimum.
    """

    columns: Callable[[int, torch.dtype], Columns]
    decode: Callable[[Mapping[str, Tensor], int], GroupScales]
    group_size: int | None = None
    superblock_groups: int = 1
    shared_names: tuple[str, ...] = ()
    has_minima: bool = False


def check_group_size(form: Format, scales: str, or_none: bool) -> None:
    """Check the parameter `group_size` of a format; ConfigError: these scales have no groups of that size."""
    group_size, only = getattr(form, "group_size", None), SCALE_CODINGS[scales].group_size
    is_multiple = type(group_size) is int and group_size > 0 and group_size % _GROUP_STEP == 0
    if group_size == only if only else is_multiple or (or_none and group_size is None):
        return
    expected = f"{only}" if only else f"a multiple of {_GROUP_STEP}{' or None' * or_none}"
    advice = f"Write group_size={only}." if only else "32 to 128 are usual."
    raise ConfigError("group_size", f"{expected} for {form.name} with {scales} scales", repr(group_size), advice)


def _decode_plain(tensors: Mapping[str, Tensor], groups: int) -> GroupScales:
    del groups
    return GroupScales(tensors["scale"].to(torch.float32))


def _decode_e8m0(tensors: Mapping[str, Tensor], groups: int) -> GroupScales:
    del groups
    return GroupScales(look_up_by_matrix(_E8M0, tensors["scale"]))


def _octets(scale: Tensor) -> Tensor:
    """Return float8 as bytes, and bytes unchanged: TorchScript records no view as the same dtype."""
    return scale if scale.dtype == torch.uint8 else as_bytes(scale)


def _decode_e4m3(tensors: Mapping[str, Tensor], groups: int) -> GroupScales:
    del groups
    return GroupScales(look_up_by_matrix(E4M3, _octets(tensors["scale"])) * tensors["global_scale"])


def _decode_e4m3_divided(tensors: Mapping[str, Tensor], groups: int) -> GroupScales:
    del groups
    return GroupScales(look_up_by_matrix(E4M3, _octets(tensors["scale"])) / tensors["global_scale"])


def outer_count(groups: int) -> int:
    """Return how many outer scales the groups of a row can have at most, if all groups of a weight lie in one run.

    Examples:
        >>> [outer_count(groups) for groups in (64, 96, 256, 300)]
        [1, 2, 1, 3]
    """
    # The first group of a row lies at a multiple of this in its run of 256.
    step = math.gcd(groups, OUTER_GROUPS)
    return (OUTER_GROUPS - step + max(groups, 1) - 1) // OUTER_GROUPS + 1


def _nested_columns(groups: int, scale_dtype: torch.dtype) -> Columns:
    """Return the tensors of bitsandbytes' nested scales, which are quantized themselves.

    The scales of all groups of a weight are one run. 256 of them share an outer scale, also across rows, and `phase` is
    the position of a row's first group among its 256.
    """
    del scale_dtype
    return {
        "scale": (groups, torch.uint8),
        "nested_values": (256, torch.float32),
        "outer_scale": (outer_count(groups), torch.float32),
        "phase": (1, torch.uint8),
        "nested_offset": (1, torch.float32),
    }


def _decode_nested(tensors: Mapping[str, Tensor], groups: int) -> GroupScales:
    outer = tensors["outer_scale"]
    count = constant(outer.size(-1))
    if count > 1:
        places = torch.arange(groups, device=outer.device) + tensors["phase"].to(torch.int64)
        outer = outer.gather(-1, torch.floor_divide(places, OUTER_GROUPS).clamp(max=count - 1))
    blocks = look_up_by_matrix(tensors["nested_values"], tensors["scale"])
    return GroupScales(blocks * outer + tensors["nested_offset"])


def _superblocks(
    group_size: int, numbers: int, octets: int, decode: Callable[[Tensor], tuple[Tensor, ...]]
) -> ScaleCoding:
    """Return a coding of superblocks with some float16 numbers and bytes each.

    `decode` unpacks bytes `[*, S, octets]` as float32 integers `[*, S, groups]`: one tensor for each number.
    """
    groups = SUPERBLOCK // group_size

    def columns(count: int, scale_dtype: torch.dtype) -> Columns:
        del scale_dtype
        blocks = count // groups
        return {"scale": (blocks * numbers, torch.float16), "group_scale": (blocks * octets, torch.uint8)}

    def decode_blocks(tensors: Mapping[str, Tensor], count: int) -> GroupScales:
        blocks = count // groups
        factors = tensors["scale"].to(torch.float32).unflatten(-1, [blocks, numbers])
        integers = decode(tensors["group_scale"].to(torch.float32).unflatten(-1, [blocks, octets]))
        scales = [torch.flatten(values * factors.narrow(-1, index, 1), -2) for index, values in enumerate(integers)]
        return GroupScales(*scales)

    return ScaleCoding(columns, decode_blocks, group_size, groups, has_minima=numbers == 2)


def _decode_k4(octets: Tensor) -> tuple[Tensor, Tensor]:
    first, second, last = octets.narrow(-1, 0, 4), octets.narrow(-1, 4, 4), octets.narrow(-1, 8, 4)
    scales = [fields_of(first, 0, 6), fields_of(last, 0, 4) + 16 * fields_of(first, 6, 2)]
    minima = [fields_of(second, 0, 6), fields_of(last, 4, 4) + 16 * fields_of(second, 6, 2)]
    return torch.cat(scales, -1), torch.cat(minima, -1)


def _decode_k2(octets: Tensor) -> tuple[Tensor, Tensor]:
    return fields_of(octets, 0, 4), fields_of(octets, 4, 4)


def _decode_k3(octets: Tensor) -> tuple[Tensor]:
    low, high = octets.narrow(-1, 0, 8), octets.narrow(-1, 8, 4)
    lows = torch.cat([fields_of(low, 0, 4), fields_of(low, 4, 4)], -1)
    highs = torch.cat([fields_of(high, start, 2) for start in (0, 2, 4, 6)], -1)
    return (lows + 16 * highs - 32,)


def _decode_k6(octets: Tensor) -> tuple[Tensor]:
    return (octets - 256 * fields_of(octets, 7, 1),)


def _decode_iq4_xs(octets: Tensor) -> tuple[Tensor]:
    high, low = octets.narrow(-1, 0, 2), octets.narrow(-1, 2, 4)
    lows = torch.flatten(torch.stack([fields_of(low, 0, 4), fields_of(low, 4, 4)], -1), -2)
    highs = torch.flatten(torch.stack([fields_of(high, start, 2) for start in (0, 2, 4, 6)], -1), -2)
    return (lows + 16 * highs - 32,)


def _with_global_scale(decode: Callable[[Mapping[str, Tensor], int], GroupScales]) -> ScaleCoding:
    def columns(groups: int, scale_dtype: torch.dtype) -> Columns:
        del scale_dtype
        return {"scale": (groups, torch.float8_e4m3fn), "global_scale": (1, torch.float32)}

    return ScaleCoding(columns, decode)


SCALE_CODINGS: dict[str, ScaleCoding] = {
    "plain": ScaleCoding(lambda groups, scale_dtype: {"scale": (groups, scale_dtype)}, _decode_plain),
    "e8m0": ScaleCoding(lambda groups, _: {"scale": (groups, torch.uint8)}, _decode_e8m0),
    "e4m3": _with_global_scale(_decode_e4m3),
    "e4m3_divided": _with_global_scale(_decode_e4m3_divided),
    "nested": ScaleCoding(_nested_columns, _decode_nested, shared_names=("nested_values",)),
    "k4": _superblocks(32, 2, 12, _decode_k4),
    "k2": _superblocks(16, 2, 16, _decode_k2),
    "k3": _superblocks(16, 1, 12, _decode_k3),
    "k6": _superblocks(16, 1, 16, _decode_k6),
    "iq4_xs": _superblocks(32, 1, 6, _decode_iq4_xs),
}
