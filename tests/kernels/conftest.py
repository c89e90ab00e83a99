"""What tests of compiled products share: each CPU in turn, each library, and one thread or two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import emulated
import pytest
import torch
from cpus import ALDER_LAKE, CPUS, GENOA, GRAVITON, HASWELL, ICE_LAKE, library_of, runs_here, use_cpu, use_library

from hf_trainweights.kernels import compiled


def _emulated(cpu: dict[str, object]) -> str | None:
    """Return the library of a CPU that this machine does not run, if it can be emulated."""
    name = library_of(cpu)
    return name if name in emulated.SOURCES and not runs_here(cpu) else None


def _named(cpus: dict[str, dict[str, object]]) -> list[Any]:
    """Return parameters with these names. What is emulated is slow, because it is compiled first, for seconds."""
    slow = [pytest.mark.slow]
    return [pytest.param(cpu, id=name, marks=slow if _emulated(cpu) else []) for name, cpu in cpus.items()]


def _use(cpu: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    name = _emulated(cpu)
    if name is None and not runs_here(cpu):
        pytest.skip("this machine does not run that CPU's library, or had no C compiler at installation")
    use_cpu(cpu, monkeypatch)
    if name is not None:
        use_library(emulated.library(name), monkeypatch)


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
