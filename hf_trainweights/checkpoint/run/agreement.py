"""The newest checkpoint of a run, looked for by one rank on behalf of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from hf_trainweights.checkpoint.dcp.contents import register_checkpoint
from hf_trainweights.checkpoint.run.discovery import latest
from hf_trainweights.checkpoint.run.ranks import Ranks


def latest_on_all_ranks(root: str | Path, group: Any = None) -> str | None:
    """Return what `latest` finds, on every rank the same; every rank of the group calls it.

    The first rank reads and verifies the checkpoints, so their bytes are read once and not once by each rank.

    Args:
        root: Where a run keeps its `checkpoint-<step>` directories; it may be missing.
        group: The process group. Default: all ranks. Without a process group this is `latest`.

    Returns:
        The path, or None if there is none.

    Raises:
        OSError: `root` cannot be read by the first rank; on every rank.

    Examples:
        >>> import tempfile
        >>> latest_on_all_ranks(tempfile.mkdtemp()) is None
        True
    """
    if not (dist.is_available() and dist.is_initialized()):
        return latest(root)
    found = Ranks(group or dist.group.WORLD).decide(lambda: latest(root))
    if found is not None:
        register_checkpoint(Path(found))
    return found
