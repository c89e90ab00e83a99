"""The instructions of this CPU, from which the kernels choose their way, and up to how many rows each takes least time.

The numbers are measured: docs/performance.md, "Thresholds".
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from hf_trainweights.formats.base import Format
from hf_trainweights.formats.codebook4 import Codebook4
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.uint import UInt

# By instruction: what the name of a limit on oneDNN holds where that leaves the instruction in use.
_ALLOWED = {
    "amx_bf16": ("AMX",),
    "amx_fp16": ("AMX_FP16",),
    "amx_int8": ("AMX",),
    "avx_vnni": ("VNNI", "BF16", "FP16", "AMX", "AVX10"),
    "avx512_vnni": ("AVX512_CORE_VNNI", "BF16", "FP16", "AMX", "AVX10"),
    "avx512_bf16": ("BF16", "FP16", "AMX", "AVX10"),
    "avx512_fp16": ("FP16", "AMX", "AVX10"),
}

_CPUINFO = Path("/proc/cpuinfo")
# What Linux calls otherwise than PyTorch does.
_FLAGS = {
    **{f"avx512{part}": f"avx512_{part}" for part in ("f", "bw", "vl", "dq")},
    "fma": "fma3",
    "asimddp": "dot",
}

# A CPU without AMX whose AVX512_BF16 is slow multiplies float32 faster from here on: docs/performance.md, "Thresholds".
_BFLOAT16_ROWS = 48

ALL = sys.maxsize

# Integer codes in a 16-bit dtype that the CPU multiplies fast, without panels; the scales of codebook4 take longer.
_SHORT_ROWS = 256
_CODEBOOK_ROWS = 64
# Integer codes with NEON, where nothing was measured.
_WIDENED_ROWS = 16
# Float8 and uint where products of many rows do not serve.
_FLOAT8_ROWS, _UINT_ROWS = 8, 16


@functools.cache
def capabilities() -> dict[str, Any]:
    """Return what PyTorch tells of the CPU, less what `ONEDNN_MAX_CPU_ISA` keeps oneDNN from using."""
    found = dict(getattr(torch.cpu, "get_capabilities", _read_cpuinfo)())
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    if limit not in ("ALL", "DEFAULT"):
        for name, parts in _ALLOWED.items():
            found[name] = bool(found.get(name)) and any(part in limit for part in parts)
    # Intel multiplies four times as many bytes in the time of one vector of bfloat16, AMD twice as many.
    is_intel = str(found.get("cpu_name", "")).startswith("Intel")
    found["fast_avx512_bf16"] = bool(found.get("avx512_bf16")) and not is_intel
    return found


def _read_cpuinfo() -> dict[str, Any]:
    """Return what Linux tells of the CPU, by PyTorch's names: before 2.11 PyTorch does not; {} on other systems."""
    if not _CPUINFO.exists():
        return {}
    entries = dict(line.split(":", 1) for line in _CPUINFO.read_text(encoding="utf-8").splitlines() if ":" in line)
    entries = {name.strip(): text.strip() for name, text in entries.items()}
    flags = entries.get("flags", entries.get("Features", "")).split()
    names = (_FLAGS.get(flag, flag) for flag in flags)
    return {"architecture": platform.machine(), "cpu_name": entries.get("model name", "")} | dict.fromkeys(names, True)


def product_dtype(dtype: torch.dtype, M: int) -> torch.dtype:
    """Return the dtype, as it is or float32, in which M rows times a dequantized weight take the least time.

    Without instructions for a dtype of 16 bits PyTorch takes 4 to 9 times as long in it as in float32.
    """
    found = capabilities()
    if M == 1 or found.get("architecture") != "x86_64":
        return dtype
    few = found.get("avx512_bf16") and M <= _BFLOAT16_ROWS
    fast = {
        torch.bfloat16: found.get("amx_bf16") or found.get("fast_avx512_bf16") or few,
        torch.float16: found.get("avx512_fp16") or found.get("amx_fp16"),
    }
    return dtype if fast.get(dtype, True) else torch.float32


def most_rows(form: Format, dtype: torch.dtype, library: str) -> int:
    """Return up to how many rows of x the functions of a library serve a weight; `ALL` for any number."""
    is_fast = product_dtype(dtype, _SHORT_ROWS + 1) == dtype
    if _takes_panels(form, dtype, library) or (library != "neon" and (dtype == torch.float32 or not is_fast)):
        return ALL
    if isinstance(form, (UInt, Float8E4M3)):
        return _UINT_ROWS if isinstance(form, UInt) else _FLOAT8_ROWS
    if is_rounding(form) and (library != "neon" or dtype == torch.float32):
        return ALL
    if library == "neon":
        return _WIDENED_ROWS
    return _CODEBOOK_ROWS if isinstance(form, Codebook4) else _SHORT_ROWS


def _takes_panels(form: Format, dtype: torch.dtype, library: str) -> bool:
    """Return whether products of many rows of a 16-bit x take panels: `way_of` in native/tiles/ways.c."""
    group_size = getattr(form, "group_size", None) or 0
    if library in ("amx", "avx512_bf16") and dtype == torch.bfloat16:
        return isinstance(form, UInt) or group_size % 32 == 0
    return library == "amx" and isinstance(form, (Int8, Int4)) and group_size % 64 == 0


def is_rounding(form: Format) -> bool:
    """Return whether x is rounded to 8 bits, so that a product takes the fewest instructions."""
    return isinstance(form, Int8) and form.activations is not None
