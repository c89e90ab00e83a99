"""Where a Trainer keeps a checkpoint, what it knows of it, and what an earlier run left beside it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from hf_trainweights.checkpoint.run.garbage import collect_garbage

_logger = logging.getLogger(__name__)


def remove_leftovers(root: Path) -> None:
    """Remove what killed saves left in a run; a warning says what stays."""
    try:
        collect_garbage(root)
    except OSError as error:
        _logger.warning("What an earlier run has left in %s stays: %s", root, error)


def checkpoint_of(args: Any, state: Any) -> Path:
    """Return the directory of the checkpoint that belongs to the step."""
    return Path(args.output_dir or "") / f"checkpoint-{state.global_step}"


def newest_metrics(state: Any) -> dict[str, float]:
    """Return the newest number of every name that a Trainer logged."""
    merged: dict[str, Any] = {}
    for entry in state.log_history:
        merged |= entry
    return {name: float(value) for name, value in merged.items() if isinstance(value, int | float)}
