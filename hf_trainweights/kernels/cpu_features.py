"""The instructions of this CPU, from which the kernels choose their way."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

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

# A CPU without AMX whose AVX512_BF16 is slow multiplies float32 faster from here on: docs/performance.md, "Thresholds".
_BFLOAT16_ROWS = 48


@functools.cache
def capabilities() -> dict[str, Any]:
    """Return what PyTorch tells of the CPU, less what `ONEDNN_MAX_CPU_ISA` keeps oneDNN from using."""
    found = dict(getattr(torch.cpu, "get_capabilities", dict)())
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    if limit not in ("ALL", "DEFAULT"):
        for name, parts in _ALLOWED.items():
            found[name] = bool(found.get(name)) and any(part in limit for part in parts)
    # Intel multiplies four times as many bytes in the time of one vector of bfloat16, AMD twice as many.
    is_intel = str(found.get("cpu_name", "")).startswith("Intel")
    found["fast_avx512_bf16"] = bool(found.get("avx512_bf16")) and not is_intel
    return found


def has_amx() -> bool:
    """Return whether bfloat16 is multiplied by AMX, several times as fast as anything else."""
    return bool(capabilities().get("amx_bf16"))


def product_dtype(dtype: torch.dtype, M: int) -> torch.dtype:
    """Return the dtype, as it is or float32, in which M rows times a dequantized weight take the least time.

    Without instructions for a dtype of 16 bits PyTorch takes 4 to 9 times as long in it as in float32.
    """
    found = capabilities()
    if M == 1 or found.get("architecture") != "x86_64":
        return dtype
    few = found.get("avx512_bf16") and M <= _BFLOAT16_ROWS
    fast = {
        torch.bfloat16: has_amx() or found.get("fast_avx512_bf16") or few,
        torch.float16: found.get("avx512_fp16") or found.get("amx_fp16"),
    }
    return dtype if fast.get(dtype, True) else torch.float32
