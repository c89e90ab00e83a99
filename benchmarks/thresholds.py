"""The constants of `kernels/thresholds.json`, and up to how many rows of x compiled products serve on each CPU."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.markdown import table
from hf_trainweights.formats import FORMATS, get_format
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.kernels import compiled, cpu_features
from hf_trainweights.kernels.thresholds import THRESHOLDS_FILE

_FLOAT16 = {"amx_fp16": True, "avx512_fp16": True}
# The library that serves each kind of CPU, and the instructions by which PyTorch's products are fast beside it.
_CPUS: dict[str, tuple[str, dict[str, bool]]] = {
    "AMX": ("amx", {"amx_bf16": True, **_FLOAT16}),
    "AMX, whose library is missing or not permitted": ("avx512", {"amx_bf16": True, **_FLOAT16}),
    "AVX512_BF16 of AMD": ("avx512_bf16", {"avx512_bf16": True, "fast_avx512_bf16": True}),
    "AVX512_BF16 of Intel": ("avx512", {"avx512_bf16": True}),
    "AVX512_VNNI": ("avx512", {}),
    "AVX-VNNI": ("avx_vnni", {}),
    "AVX2": ("avx2", {}),
    "NEON, not measured": ("neon", {}),
}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def thresholds() -> str:
    """Return a table of the most rows, a line for each kind of CPU, a column for formats that it treats alike."""
    columns: dict[tuple[str, ...], list[str]] = {}
    for form in _formats():
        columns.setdefault(tuple(_cell(form, *cpu) for cpu in _CPUS.values()), []).append(str(form))
    rows = [[name, *cells] for name, cells in zip(_CPUS, zip(*columns, strict=True), strict=True)]
    return table(["CPU", *(", ".join(names) for names in columns.values())], rows)


def constants() -> str:
    """Return a table of all constants, their meaning and the measurements behind them."""
    rows = [
        [f"`{name}` = {constant['value']}", constant["meaning"], constant["measured"]]
        for section in _file().values()
        for name, constant in section.items()
    ]
    return table(["constant", "meaning", "measured"], rows)


def amx_ways() -> str:
    """Return a list of the products that tiles of AMX multiply, each from its first row on."""
    first = {name: constant["value"] + 1 for name, constant in _file()["native"].items()}
    return f"""- int8, int8 in groups of a multiple of 64, and int4 in every dtype, from {first["FEW_ROWS"]} tokens on;
- in bfloat16 all formats: uint from {first["ROWS_WITHOUT_PANELS"]} tokens on, codebook4 from \
{first["DIGIT_ROWS_OF_INT4"]} on, and int8 in groups of 32 from {first["DIGIT_ROWS_OF_GROUPS_IN_TILES"]} on;
- in float32 uint and float8 from {first["ROWS_WITHOUT_PANELS"]} tokens on, as \
[pieces of bfloat16](#compiled-products). That was not measured."""


def _file() -> dict[str, dict[str, dict[str, Any]]]:
    return json.loads(THRESHOLDS_FILE.read_text(encoding="utf-8"))


def _formats() -> list[Format]:
    formats = [get_format({"format": name}) for name, kind in FORMATS.items() if issubclass(kind, compiled.FORMATS)]
    return [*formats, *map(Int8, (16, 32, 64)), Int4(32), Int8(activations="int8")]


def _cell(form: Format, library: str, features: dict[str, bool]) -> str:
    """Return the most rows of x in float32, bfloat16 and float16; one number if they agree."""
    description: dict[str, Any] = {"architecture": "aarch64" if library == "neon" else "x86_64", **features}
    with patch.object(cpu_features, "capabilities", lambda: description):
        counts = [cpu_features.most_rows(form, dtype, library) for dtype in _DTYPES]
    shown = ["any" if count == cpu_features.ALL else str(count) for count in counts]
    return shown[0] if len(set(shown)) == 1 else " / ".join(shown)
