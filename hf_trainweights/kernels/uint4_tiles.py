"""uint4 weights in groups of 32 in the tiles of int4: PyTorch's op for these adds a zero to each group's product.

| tensor | shape | dtype |
|---|---|---|
| `qdata` | as in `int4_tiles` | uint8 |
| `scale` | `[*, N, 1]`, as stored | bfloat16 |
| `group_scale` | `[*, K // 32, N, 2]`: the step of each group, and what code 8 stands for | bfloat16 |
| `zero_point` | `[*, N, K // 32]`: the stored `group_scale`, then the stored `zero_point` | uint8 |

Step and zero are exact in bfloat16 for the scales that `formats.uint` chooses, up to a product of 256.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_trainweights.formats.base import Format
from hf_trainweights.formats.packing import pack_int4, unpack_int4
from hf_trainweights.formats.planes import pack_planes, unpack_planes
from hf_trainweights.formats.uint import UInt4, unpack_pairs
from hf_trainweights.kernels.int4_tiles import Int4Tiles, find_tiles
from hf_trainweights.kernels.layouts import Layout

# The smallest groups that PyTorch's op takes.
GROUP_SIZE = 32

_BITS = 4


@dataclass(frozen=True)
class UInt4Tiles(Layout):
    """The tensors of `UInt4(32)` in another order, beside what PyTorch's op reads of them.

    Args:
        tile_rows: As for `Int4Tiles`.
    """

    name: ClassVar[str] = "uint4_tiles"
    tile_rows: int

    @property
    def codes(self) -> Int4Tiles:
        """The layout of the codes."""
        return Int4Tiles(self.tile_rows)

    def take_rows(self, held: Mapping[str, Tensor], indices: Tensor) -> dict[str, Tensor]:
        """Return `UInt4`'s tensors of some rows."""
        words = self.codes.take_rows(for_int4(held), indices)["qdata"]
        numbers = held["zero_point"].index_select(0, indices)
        return {"qdata": _planes(words), "scale": held["scale"].index_select(0, indices), **_numbers(numbers)}

    def from_canonical(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `UInt4`'s tensors as tiles, and the steps and zeros of its groups."""
        codes = unpack_planes(tensors["qdata"], _BITS).view(torch.int8).sub_(8)
        row_scale = tensors["scale"].float()
        steps = (unpack_pairs(tensors["group_scale"]).float() + 1) * row_scale
        zeros = (8 - unpack_pairs(tensors["zero_point"]).float()) * steps
        tiles = self.codes.from_canonical({"qdata": pack_int4(codes), "scale": steps.to(tensors["scale"].dtype)})
        tiles["scale"][..., 1] = zeros.mT
        numbers = torch.cat((tensors["group_scale"], tensors["zero_point"]), dim=-1)
        scale = tensors["scale"].contiguous()
        return {"qdata": tiles["qdata"], "scale": scale, "group_scale": tiles["scale"], "zero_point": numbers}

    def to_canonical(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `UInt4`'s tensors from tiles."""
        words = self.codes.to_canonical(for_int4(held))["qdata"]
        return {"qdata": _planes(words), "scale": held["scale"], **_numbers(held["zero_point"])}


def for_int4(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that `Int4Tiles` would hold of such a weight.

    Args:
        held: Tensors in `UInt4Tiles`.
    """
    return {"qdata": held["qdata"], "scale": held["group_scale"]}


def choose_layout(form: Format, shape: Sequence[int], dtype: torch.dtype) -> UInt4Tiles | None:
    """Return the tiles that this CPU has an op for, or None.

    Args:
        form: The format of the weight.
        shape: Its shape on the CPU, as stored.
        dtype: Dtype of its scales and of the activations.
    """
    tiles = find_tiles(shape, dtype) if form == UInt4(GROUP_SIZE) else None
    return None if tiles is None else UInt4Tiles(tiles.tile_rows)


def _planes(words: Tensor) -> Tensor:
    """Return words of `pack_int4` as those of `pack_planes`."""
    return pack_planes(unpack_int4(words).add_(8).view(torch.uint8), _BITS)


def _numbers(both: Tensor) -> dict[str, Tensor]:
    first, second = both.chunk(2, dim=-1)
    return {"group_scale": first.contiguous(), "zero_point": second.contiguous()}
