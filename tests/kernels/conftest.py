"""What tests of compiled products share: each library in turn, on one thread and on two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hf_trainweights.kernels import compiled


def forget() -> None:
    for cached in (compiled._load, compiled.find, compiled.most_rows):
        cached.cache_clear()


@pytest.fixture(params=compiled._LIBRARIES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Take the products of each library that this CPU runs."""
    if not all(map(compiled.capabilities().get, compiled._LIBRARIES[request.param])):
        pytest.skip(f"this CPU does not run the library for {request.param}")
    monkeypatch.setattr(compiled, "instructions", lambda: request.param)
    forget()
    if not compiled.is_available():
        pytest.skip("there was no C compiler when the package was installed")
    yield request.param
    monkeypatch.undo()
    forget()


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(compiled, "_THREADED", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
