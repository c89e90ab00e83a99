"""What tests of compiled products share: each CPU in turn, each library, and one thread or two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cpus import ALDER_LAKE, CPUS, GENOA, GRAVITON, HASWELL, ICE_LAKE, runs_here, use_cpu, use_library
from emulated_neon import library as emulated_neon

from hf_trainweights.kernels import compiled


def _use(cpu: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    is_emulated = cpu is GRAVITON and not runs_here(cpu)
    if not is_emulated and not runs_here(cpu):
        pytest.skip("this machine does not run that CPU's library, or had no C compiler at installation")
    use_cpu(cpu, monkeypatch)
    if is_emulated:
        use_library(emulated_neon(), monkeypatch)


@pytest.fixture(params=CPUS)
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Multiply as each CPU does: by its library, for as many rows as that serves there."""
    _use(CPUS[request.param], monkeypatch)
    return request.param


@pytest.fixture(
    params=[GENOA, ICE_LAKE, ALDER_LAKE, HASWELL, GRAVITON], ids=["avx512_bf16", "avx512", "avx_vnni", "avx2", "neon"]
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
