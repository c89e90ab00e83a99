"""One process that reads exported checkpoints without this package, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stock_reader import StockReader, stock_reader


@pytest.fixture(scope="session")
def reader() -> Iterator[StockReader]:
    with stock_reader() as reader:
        yield reader
