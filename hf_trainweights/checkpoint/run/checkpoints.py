"""The checkpoints of a run: directories called `checkpoint-<step>`."""

from __future__ import annotations

import contextlib
import re
import stat
from pathlib import Path

_CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")


def checkpoint_directories(root: str | Path) -> list[Path]:
    """List the `checkpoint-<step>` directories in `root`, newest first: by step, then by modification time.

    Links are left out; without `root` there are none.
    """
    root = Path(root)
    if not root.is_dir():
        return []
    found = []
    for path in root.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process removes it
            status = path.lstat()
            if _CHECKPOINT_NAME.fullmatch(path.name) and stat.S_ISDIR(status.st_mode):
                found.append((checkpoint_step(path), status.st_mtime_ns, path))
    return [path for *_, path in sorted(found, reverse=True)]


def checkpoint_step(path: Path) -> int:
    """Return the step in the name of a checkpoint directory; ValueError: it has another name."""
    match = _CHECKPOINT_NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not called checkpoint-<step>")
    return int(match[1])


def steps_since_last_save(path: Path) -> int | None:
    """Return the training steps since the save before a checkpoint; None without an earlier one in its run."""
    try:
        step = checkpoint_step(path)
    except ValueError:
        return None
    # Later ones are of a run that was resumed from before them.
    newest_first = map(checkpoint_step, checkpoint_directories(path.parent))
    return next((step - saved for saved in newest_first if saved < step), None)
