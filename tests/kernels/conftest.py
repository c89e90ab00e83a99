"""What tests of compiled products share: each CPU in turn, each library, and one thread or two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cpus import ALDER_LAKE, CPUS, GENOA, GRAVITON, HASWELL, ICE_LAKE, runs_here, use_cpu, use_library
from emulated_neon import library as emulated_neon

from hf_trainweights.kernels import compiled


def _is_emulated(cpu: dict[str, object]) -> bool:
    return cpu is GRAVITON and not runs_here(cpu)


def _named(cpus: dict[str, dict[str, object]]) -> list[Any]:
    """Return parameters with these names. What is emulated is slow, because it is compiled first, for seconds."""
    slow = [pytest.mark.slow]
    return [pytest.param(cpu, id=name, marks=slow if _is_emulated(cpu) else []) for name, cpu in cpus.items()]


def _use(cpu: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    if not _is_emulated(cpu) and not runs_here(cpu):
        pytest.skip("this machine does not run that CPU's library, or had no C compiler at installation")
    use_cpu(cpu, monkeypatch)
    if _is_emulated(cpu):
        use_library(emulated_neon(), monkeypatch)


@pytest.fixture(params=_named(CPUS))
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply as each CPU does: by its library, for as many rows as that serves there."""
    _use(request.param, monkeypatch)


@pytest.fixture(
    params=_named({"avx512_bf16": GENOA, "avx512": ICE_LAKE, "avx_vnni": ALDER_LAKE, "avx2": HASWELL, "neon": GRAVITON})
)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply by each library."""
    _use(request.param, monkeypatch)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(compiled, "_THREADED", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
