"""The instructions of this CPU, and up to how many rows of x a compiled product is the fastest there.

A library is the C of `native/` compiled for one instruction set, and has its name (`compiled.instructions`). It
multiplies few rows of x in one way and many rows in another: it copies these rows into a *panel*, in the order in which
vectors, or the *tiles* of AMX, take them, and multiplies the panel with one block of rows of the weight after the
other. A product by panels is faster than PyTorch's for any number of rows. But not every library has panels for every
format and dtype, and then PyTorch is faster from some number of rows on. The functions below know the cases, which
native/tiles/ways.c and native/floats.c decide. thresholds.json has the numbers, and how they were measured.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from hf_trainweights.formats.affine import Affine
from hf_trainweights.formats.base import Format
from hf_trainweights.formats.codebook4 import Codebook4
from hf_trainweights.formats.float8_e4m3 import Float8E4M3
from hf_trainweights.formats.int4 import Int4
from hf_trainweights.formats.int8 import Int8
from hf_trainweights.formats.table4 import Table4
from hf_trainweights.formats.uint import UInt
from hf_trainweights.kernels.thresholds import THRESHOLDS

# The user may limit oneDNN to an instruction set. For each instruction: it is allowed if the name of the limit contains
# one of these texts.
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
# Maps names of Linux to PyTorch's, as far as they differ.
_FLAGS = {
    **{f"avx512{extension}": f"avx512_{extension}" for extension in ("f", "bw", "vl", "dq")},
    "fma": "fma3",
    "asimddp": "dot",
}

ALL = sys.maxsize

# The libraries that have panels of float32 for every format (native/floats.c).
_LIBRARIES_OF_ANY_FORMAT = ("avx2", "avx_vnni")
# The libraries whose attention is the fastest for any number of rows. PyTorch's attention is fast by AMX, too; AVX-VNNI
# and NEON were not measured.
_LIBRARIES_OF_ANY_ATTENTION = ("avx512", "avx512_bf16")


@functools.cache
def capabilities() -> dict[str, Any]:
    """Return PyTorch's description of the CPU, without the instructions that `ONEDNN_MAX_CPU_ISA` forbids oneDNN."""
    features = dict(getattr(torch.cpu, "get_capabilities", _read_cpuinfo)())
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    if limit not in ("ALL", "DEFAULT"):
        for name, limits in _ALLOWED.items():
            features[name] = bool(features.get(name)) and any(text in limit for text in limits)
    # Bytes are twice as fast as bfloat16 on AMD's CPUs and four times as fast on Intel's, so that Intel's multiply as
    # bytes although they have the instruction for bfloat16.
    is_intel = str(features.get("cpu_name", "")).startswith("Intel")
    features["fast_avx512_bf16"] = bool(features.get("avx512_bf16")) and not is_intel
    return features


def _read_cpuinfo() -> dict[str, Any]:
    """Return Linux's description of the CPU under PyTorch's names, for PyTorch before 2.11; {} on other systems."""
    if not _CPUINFO.exists():
        return {}
    entries = dict(line.split(":", 1) for line in _CPUINFO.read_text(encoding="utf-8").splitlines() if ":" in line)
    entries = {name.strip(): text.strip() for name, text in entries.items()}
    flags = entries.get("flags", entries.get("Features", "")).split()
    names = (_FLAGS.get(flag, flag) for flag in flags)
    return {"architecture": platform.machine(), "cpu_name": entries.get("model name", "")} | dict.fromkeys(names, True)


def product_dtype(dtype: torch.dtype, M: int) -> torch.dtype:
    """Return the faster dtype, `dtype` or float32, for a product of M rows with a dequantized weight.

    If the CPU has no instructions for a 16-bit dtype, PyTorch takes 4 to 9 times as long in it as in float32.
    """
    features = capabilities()
    # One row needs no such instructions: PyTorch is fast because the weights that it sums up lie side by side.
    if M == 1 or features.get("architecture") != "x86_64":
        return dtype
    few = features.get("avx512_bf16") and THRESHOLDS["BFLOAT16_ROWS"] >= M
    fast = {
        torch.bfloat16: features.get("amx_bf16") or features.get("fast_avx512_bf16") or few,
        torch.float16: features.get("avx512_fp16") or features.get("amx_fp16"),
    }
    return dtype if fast.get(dtype, True) else torch.float32


def most_rows(form: Format, dtype: torch.dtype, library: str) -> int:
    """Return up to how many rows of x a library's product with a weight is the fastest; `ALL` for any number.

    The library competes with PyTorch's product of many rows, for which the weight is dequantized first.
    """
    # Whether PyTorch's product is one of float32, for x of float32 or because the CPU has no fast 16-bit instructions.
    is_against_floats = product_dtype(dtype, THRESHOLDS["SHORT_ROWS"] + 1) == torch.float32
    if is_imported(form):
        has_panels = _takes_imported_panels(form, dtype, library, is_against_floats)
        return ALL if has_panels else THRESHOLDS["IMPORTED_ROWS"]
    # For this package's own formats the libraries of x86 beat float32 by panels of floats or by products of bytes.
    if _takes_panels(form, dtype, library) or (is_against_floats and library != "neon"):
        return ALL
    if isinstance(form, (UInt, Float8E4M3)):
        return THRESHOLDS["UINT_ROWS"] if isinstance(form, UInt) else THRESHOLDS["FLOAT8_ROWS"]
    # An x of one byte takes the fewest products of bytes. NEON was not measured, and is trusted against float32 alone.
    if is_rounding(form) and (library != "neon" or dtype == torch.float32):
        return ALL
    if library == "neon":
        return THRESHOLDS["NEON_ROWS"]
    return THRESHOLDS["CODEBOOK_ROWS"] if isinstance(form, Codebook4) else THRESHOLDS["SHORT_ROWS"]


def most_attention_rows(library: str) -> int:
    """Return up to how many query rows of a head of keys a library attends faster to codes than PyTorch to floats."""
    return ALL if library in _LIBRARIES_OF_ANY_ATTENTION else THRESHOLDS["ATTENTION_ROWS"]


def _takes_panels(form: Format, dtype: torch.dtype, library: str) -> bool:
    """Return whether a library has panels for a format and a 16-bit x, as `way_of` of native/tiles/ways.c decides."""
    group_size = getattr(form, "group_size", None) or 0
    if library in ("amx", "avx512_bf16") and dtype == torch.bfloat16:
        return isinstance(form, UInt) or group_size % 32 == 0
    return library == "amx" and isinstance(form, (Int8, Int4)) and group_size % 64 == 0


def _takes_imported_panels(form: Format, dtype: torch.dtype, library: str, is_against_floats: bool) -> bool:
    """Return whether a library has panels for a format of other programs by which it is faster than PyTorch.

    native/tiles/ways.c has panels of bfloat16 in some libraries and of float32 in others, and native/floats.c of
    float32. Panels of float32 are faster than a product of float32 alone.
    """
    if library in _LIBRARIES_OF_ANY_FORMAT:
        return is_against_floats
    has_bfloat16 = library in ("amx", "avx512_bf16") and dtype == torch.bfloat16
    has_floats = library in ("avx512", "avx512_bf16") and is_against_floats
    return (getattr(form, "group_size", None) or 0) % 16 == 0 and (has_bfloat16 or has_floats)


def is_imported(form: Format) -> bool:
    """Return whether native/imported.c reads a format: affine, table4, or float8 in groups."""
    in_groups = isinstance(form, Float8E4M3) and (form.group_size is not None or form.scales != "plain")
    return isinstance(form, (Affine, Table4)) or in_groups


def is_rounding(form: Format) -> bool:
    """Return whether a format rounds x to 8 bits, so that a product takes the fewest instructions."""
    return isinstance(form, Int8) and form.activations is not None
