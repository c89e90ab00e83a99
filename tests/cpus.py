"""What PyTorch tells of some CPUs, for tests of what a CPU decides."""

from __future__ import annotations

import pytest

from hf_trainweights.kernels import cpu_features as instructions
from hf_trainweights.kernels.digits import has_integer_products

needs_integer_products = pytest.mark.skipif(
    not has_integer_products(), reason="without VNNI sums of two products of integers are cut off at 16 bits"
)


def _cpu(name: str, **found: bool) -> dict[str, object]:
    return {"architecture": "x86_64", "cpu_name": name, **found}


AMX = _cpu("Intel Xeon", amx_bf16=True, avx512_fp16=True, avx512_bf16=True, avx512_vnni=True, avx_vnni=True)
GENOA = _cpu("AMD EPYC", avx512_bf16=True)
COOPER_LAKE = _cpu("Intel Xeon", avx512_bf16=True)
ICE_LAKE = _cpu("Intel Xeon")
GRAVITON = {"architecture": "aarch64", "bf16": True}


def use_cpu(cpu: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels choose as on this CPU."""
    monkeypatch.setattr(instructions, "capabilities", lambda: cpu)
