"""The process that reads the golden files."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
from golden.reader import AFresh


@pytest.fixture(scope="session")
def afresh() -> Iterator[AFresh]:
    """Return a function that calls one of `reader` in a process that has imported nothing but this module.

    One process serves all tests: starting it takes longer than all reading.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result(timeout=120)
