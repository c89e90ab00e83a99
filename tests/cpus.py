"""CPUs as PyTorch describes them, for tests of what a CPU decides: the same on every machine."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import pytest

from hf_trainweights.kernels import compiled, cpu_features

_real_capabilities = cpu_features.capabilities

_AVX2 = dict.fromkeys(("avx2", "fma3", "f16c"), True)
_AVX512 = {**_AVX2, **dict.fromkeys(("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_vnni"), True)}


def _cpu(name: str, **found: bool) -> dict[str, object]:
    return {"architecture": "x86_64", "cpu_name": name, **found}


# As the system describes it to a process that may use AMX, and to one whose compiled products may not.
AMX = _cpu("Intel Xeon", **_AVX512, amx_bf16=True, amx_int8=True, avx512_fp16=True, avx512_bf16=True, avx_vnni=True)
AMX_WITHOUT_TILES = {**AMX, "amx_int8": False}
GENOA = _cpu("AMD EPYC", **_AVX512, avx512_bf16=True, fast_avx512_bf16=True)
COOPER_LAKE = _cpu("Intel Xeon", **_AVX512, avx512_bf16=True)
ICE_LAKE = _cpu("Intel Xeon", **_AVX512)
ALDER_LAKE = _cpu("Intel Core", **_AVX2, avx_vnni=True)
HASWELL = _cpu("Intel Core", **_AVX2)
OLD = _cpu("Intel Core")
GRAVITON = {"architecture": "aarch64", "bf16": True, "dot": True}
OLD_ARM = {"architecture": "aarch64", "dot": False}

CPUS = {
    "AMX": AMX,
    "AMX without tiles": AMX_WITHOUT_TILES,
    "AVX512 with bfloat16": GENOA,
    "AVX512": ICE_LAKE,
    "AVX-VNNI": ALDER_LAKE,
    "AVX2": HASWELL,
    "NEON": GRAVITON,
}


def use_cpu(cpu: dict[str, object], monkeypatch: pytest.MonkeyPatch, is_compiled: bool = True) -> None:
    """Let kernels choose as on this CPU, where all that it runs was compiled, or nothing.

    Products are computed by its library where this machine runs it, else by the fastest one here; where there is none,
    a test that multiplies is skipped, and one of what is chosen is not.
    """
    name = library_of(cpu) if is_compiled else None
    monkeypatch.setattr(cpu_features, "capabilities", lambda: cpu)
    monkeypatch.setattr(compiled, "capabilities", lambda: cpu)
    monkeypatch.setattr(compiled, "instructions", lambda: name)
    use_library(None if name is None else loaded(name) or _fastest_here() or _NOTHING, monkeypatch)


def use_library(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels multiply by this library; None for an installation without a C compiler."""
    monkeypatch.setattr(compiled, "loaded_library", lambda: library)
    # What was found for this machine comes back with the function.
    monkeypatch.setattr(compiled, "find", functools.lru_cache(compiled.find.__wrapped__))


def library_of(cpu: dict[str, object]) -> str | None:
    """Return the library of a CPU."""
    return next((name for name, needed in compiled._LIBRARIES.items() if all(map(cpu.get, needed))), None)


def runs_here(cpu: dict[str, object]) -> bool:
    """Return whether this machine runs the library of a CPU."""
    name = library_of(cpu)
    return name is not None and loaded(name) is not None


@functools.cache
def loaded(name: str) -> ctypes.CDLL | None:
    """Return a library as it is installed; None where this machine does not run it, or it was not compiled."""
    if not all(map(_real_capabilities().get, compiled._LIBRARIES[name])):
        return None
    return compiled._open(compiled._path(name))


def _fastest_here() -> ctypes.CDLL | None:
    return next(filter(None, map(loaded, compiled._LIBRARIES)), None)


class _Nothing:
    def __getattr__(self, function: str) -> Any:
        pytest.skip(f"nothing was compiled for this CPU: {function}")


_NOTHING = _Nothing()
