"""The fixture of tests that save sharded checkpoints without ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from checkpoint.sharded.states import without_process_group


@pytest.fixture
def alone() -> Iterator[None]:
    """Let torch.distributed.checkpoint save and load without ranks."""
    with without_process_group():
        yield
