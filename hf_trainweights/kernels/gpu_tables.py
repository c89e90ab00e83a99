"""Which kernel multiplies how many rows on a GPU, and with which constants: of these rules the first that fits serves.

`tiles/<compute capability>.json` has the rules that `benchmarks.gpu.tune` measured on GPUs of one kind. Behind them
come those of `DEFAULT`, which hold for every GPU.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_trainweights.errors import CorruptFileError

FOLDER = Path(__file__).parent / "tiles"
"""Holds the rules that were measured, a file for each compute capability."""

_TRITON = {"BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages"}
# The constants that shape a kernel's tile. `few_rows.cu` explains those of `few_rows`; those in small letters are
# Triton's. One after the other, GROUP_M tiles of x meet one tile of the weight.
WAYS: Mapping[str, frozenset[str]] = {
    "few_rows": frozenset({"ROW_TILES", "COLUMN_TILES", "WARPS", "STAGES", "BLOCKS"}),
    "row": frozenset({"BLOCK_N", "BLOCK_K", "num_warps"}),
    "tiles": frozenset(_TRITON),
    "integers": frozenset(_TRITON | {"GROUP_M"}),
    "float8": frozenset(),
    "dequantize": frozenset(),
}
_ROUNDING = ("integers", "float8")
# No larger value of a constant is accepted from a file of rules.
_LARGEST = 4096
_NEXT_STEP = "Write it anew with python -m benchmarks.gpu.tune, or remove it: then the rules of every GPU hold."


@dataclass(frozen=True)
class Rule:
    """One kernel with its tile, for products that it suits.

    Args:
        way: The kernel, one of `WAYS`.
        tile: Its constants.
        bits: Bits of a code, or None for any.
        groups: Whether groups share scales, or None for both.
        rows: The most rows of x, or None for any number.
        N: The most rows of the weight, or None for any number.
    """

    way: str
    tile: Mapping[str, int]
    bits: int | None = None
    groups: bool | None = None
    rows: int | None = None
    N: int | None = None

    def fits(self, bits: int, groups: bool, M: int, N: int) -> bool:
        """Return whether the rule holds for products of M rows with a weight of N rows."""
        fits_weight = self.bits in (None, bits) and self.groups in (None, groups) and (self.N is None or self.N >= N)
        return fits_weight and (self.rows is None or self.rows >= M)


# All tiles fit the 99 kB of shared memory of the smallest GPUs. Those for one row and for up to 64 rows were measured
# on an H200. Not measured on any GPU are: the rules of `few_rows`, whose machine code has half the instructions of
# `row`; tiles for 128 rows, which by their machine code keep the tensor cores busy; and the limit of 512 rows, beyond
# which it is less work to dequantize.
_TILE_64 = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}
DEFAULT = (
    Rule("float8", {}),
    Rule(
        "integers",
        {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3, "GROUP_M": 8},
        rows=64,
    ),
    Rule("integers", {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "num_warps": 8, "num_stages": 3, "GROUP_M": 8}),
    Rule("few_rows", {"ROW_TILES": 1, "COLUMN_TILES": 1, "WARPS": 8, "STAGES": 2, "BLOCKS": 3}, rows=8),
    Rule("few_rows", {"ROW_TILES": 1, "COLUMN_TILES": 2, "WARPS": 8, "STAGES": 2, "BLOCKS": 2}, rows=16),
    Rule("row", {"BLOCK_N": 2, "BLOCK_K": 2048, "num_warps": 4}, bits=8, rows=1),
    Rule("row", {"BLOCK_N": 8, "BLOCK_K": 1024, "num_warps": 4}, bits=4, rows=1),
    Rule("tiles", {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 256, "num_warps": 4, "num_stages": 3}, rows=16),
    Rule("tiles", {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}, rows=32),
    Rule("tiles", _TILE_64, rows=64),
    # Scales of groups of bytes take registers, which 128 rows do not leave.
    Rule("tiles", _TILE_64, bits=8, groups=True, rows=512),
    Rule("tiles", {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}, rows=512),
    Rule("dequantize", {}),
)


def rules_for(capability: tuple[int, int], bits: int, groups: bool, M: int, N: int) -> list[Rule]:
    """Return the rules that hold for a product: those that round x, then the others, the fastest first.

    M and N are the rows of x and of the weight. `bits` are those of a code; `groups` tells whether groups share scales.
    """
    rules = [rule for rule in (*_measured(capability), *DEFAULT) if rule.fits(bits, groups, M, N)]
    # Rules that round x hold only for formats that ask for it (`cuda._takes`), and then no other rule may come first.
    return sorted(rules, key=lambda rule: rule.way not in _ROUNDING)


@functools.cache
def _measured(capability: tuple[int, int]) -> tuple[Rule, ...]:
    path = FOLDER / "{}{}.json".format(*capability)
    return read(path) if path.exists() else ()


def read(path: Path) -> tuple[Rule, ...]:
    """Return the rules of a file; CorruptFileError: it is no such file, or a rule has a value that no kernel takes."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptFileError(f"{path}", "JSON", f"{error}", _NEXT_STEP) from error
    entries = table.get("rules") if isinstance(table, dict) else None
    if not isinstance(entries, list):
        raise CorruptFileError(f"{path}", "an object with a list called rules", f"{table!r}"[:80], _NEXT_STEP)
    return tuple(_rule(f"{path}, rule {number}", entry) for number, entry in enumerate(entries))


def _rule(where: str, entry: Any) -> Rule:
    expected, names = "an object with way and tile, and perhaps bits, groups, rows and N", set(Rule.__annotations__)
    if not (isinstance(entry, dict) and {"way", "tile"} <= set(entry) <= names):
        raise CorruptFileError(where, expected, f"{entry!r}"[:200], _NEXT_STEP)
    way, tile = entry["way"], entry["tile"]
    if not (isinstance(way, str) and way in WAYS and isinstance(tile, dict) and set(tile) == WAYS[way]):
        ways = ", ".join(f"{name} with {', '.join(sorted(constants)) or 'nothing'}" for name, constants in WAYS.items())
        raise CorruptFileError(where, f"a way and its tile: {ways}", f"{way!r} with {tile!r}"[:200], _NEXT_STEP)
    if not all(
        _is_size(value) and (not name.startswith("BLOCK_") or value.bit_count() == 1) for name, value in tile.items()
    ):
        raise CorruptFileError(where, "sizes of 1 to 4096, powers of two for blocks", f"{tile!r}"[:200], _NEXT_STEP)
    limits = [entry.get(name) for name in ("rows", "N")]
    if entry.get("bits") not in (None, 4, 8) or not isinstance(entry.get("groups"), bool | None):
        raise CorruptFileError(where, "bits of 4 or 8, and groups true or false", f"{entry!r}"[:200], _NEXT_STEP)
    if not all(limit is None or (type(limit) is int and limit > 0) for limit in limits):
        raise CorruptFileError(where, "positive numbers for rows and N", f"{limits!r}"[:200], _NEXT_STEP)
    return Rule(**entry)


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _LARGEST
