"""The process that reads the golden files."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
from fork_server import CONTEXT
from golden.reader import AFresh


@pytest.fixture(scope="session")
def afresh() -> Iterator[AFresh]:
    """Return a function that calls one of `reader` in a process that knows nothing of what tests have written."""
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result(timeout=120)
