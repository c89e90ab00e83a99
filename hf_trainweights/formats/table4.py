"""table4: four bits a weight, sixteen values that the file gives, a scale for each group of a row.

| tensor | shape | dtype |
|---|---|---|
| `qdata` | `[*, N, K // 8]` | int32 words of eight indices 0 to 15, packed as in `packing` |
| `scale` and others | as the coding `scales` stores them (`scale_codings`) | |
| `table` | `[*, 1, 16]`, shared by all rows | float32 |

`weight = table[index] * scale`, rounded to float32 and then to the dtype. MXFP4, NVFP4, NF4, FP4 and GGUF's IQ4 types
are of this kind. Such weights come from files: this package does not quantize to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_trainweights.formats.affine import Affine
from hf_trainweights.formats.base import Format, Specs
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.packing import CODES_PER_WORD, look_up_nibbles
from hf_trainweights.formats.scale_codings import SCALE_CODINGS, ScaleCoding, check_group_size
from hf_trainweights.formats.unpacked import Unpacked, nibbles_of, octets_of

CODINGS = ("plain", "e8m0", "e4m3", "e4m3_divided", "nested", "iq4_xs")
TABLE_SIZE = 16


@dataclass(frozen=True)
class Table4(Format):
    """Sixteen values of the file's own with a scale per group of `group_size` weights along K.

    Args:
        group_size: Weights that share a scale: a multiple of 8.
        scales: How scales are stored: "plain", "e8m0" (MXFP4), "e4m3" or "e4m3_divided" (NVFP4), "nested"
            (bitsandbytes) or "iq4_xs" (GGUF).

    Raises:
        ConfigError: A parameter is none of these.
    """

    name: ClassVar[str] = "table4"
    is_import_only: ClassVar[bool] = True
    # `scale_codings` describes those between `qdata` and `table`.
    tensor_names: ClassVar[tuple[str, ...]] = (
        *("qdata", "scale", "global_scale", "nested_values", "outer_scale", "phase", "nested_offset", "group_scale"),
        "table",
    )
    group_size: int = 32
    scales: str = "plain"

    def __post_init__(self) -> None:
        self.check_choice("scales", CODINGS)
        check_group_size(self, self.scales, or_none=False)
        # On the class, `tensor_names` are all names that a weight may have.
        names = ("qdata", *self.coding.columns(1, torch.float32), "table")
        object.__setattr__(self, "tensor_names", names)

    def __str__(self) -> str:
        return f"{super().__str__()} {self.scales}"

    @property
    def coding(self) -> ScaleCoding:
        """How the scales are stored."""
        return SCALE_CODINGS[self.scales]

    def for_new_values(self) -> Format:
        """Return `affine` of 4 bits with groups of the same size."""
        return Affine(4, self.group_size)

    @property
    def shared_names(self) -> tuple[str, ...]:  # type: ignore[override]  (an attribute of the class in Format)
        """The table, and tensors of the coding that all rows share."""
        return (*self.coding.shared_names, "table")

    @property
    def column_step(self) -> int:
        """The columns of a word, of whole groups, and of a superblock."""
        return math.lcm(self.group_size * self.coding.superblock_groups, CODES_PER_WORD)

    def fallback(self, shape: Sequence[int]) -> Format:
        """Return this format, or int8 with one scale a row if groups do not divide K, or N or K is at most 1."""
        *_, N, K = shape
        return self if N > 1 and K > 1 and K % (self.group_size * self.coding.superblock_groups) == 0 else Int8()

    def tensor_specs(self, shape: Sequence[int], scale_dtype: torch.dtype) -> Specs:
        """Return indices, the tensors of the scales, and `table`."""
        *lead, N, K = shape
        columns = {"qdata": (K // CODES_PER_WORD, torch.int32)}
        columns |= self.coding.columns(K // self.group_size, scale_dtype) | {"table": (TABLE_SIZE, torch.float32)}
        return {
            name: ((*lead, 1 if name in self.shared_names else N, size), dtype)
            for name, (size, dtype) in columns.items()
        }

    def shape_of(self, qdata: Tensor) -> tuple[int, ...]:
        """Return `[*, N, K]`, eight columns for each word."""
        return (*qdata.shape[:-1], qdata.shape[-1] * CODES_PER_WORD)

    def quantize_rows(self, rows: Tensor, amax: Tensor, out: Mapping[str, Tensor]) -> None:
        """Not called, because `check_weight` refuses an import-only format."""
        raise NotImplementedError

    def unpack(self, tensors: Mapping[str, Tensor]) -> Unpacked:
        """Return the indices, their values, and the scales of groups."""
        indices, table = nibbles_of(octets_of(tensors["qdata"])), tensors["table"]
        scale = tensors["scale"]
        if self.scales != "plain":
            scale, _ = self.coding.decode(tensors, indices.size(-1) // self.group_size)
        return Unpacked(indices, scale, None, table=table)

    def dequantize_rows(self, tensors: Mapping[str, Tensor], K: int, dtype: torch.dtype) -> Tensor:
        """Return value times scale, rounded to float32, then to `dtype`."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        values = look_up_nibbles(tensors["qdata"], tensors["table"].to(wide))
        scale, _ = self.coding.decode(tensors, K // self.group_size)
        values.unflatten(-1, (scale.shape[-1], self.group_size)).mul_(scale.to(wide).unsqueeze(-1))
        return values.to(dtype)
