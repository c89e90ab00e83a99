"""What the directory of a run holds: checkpoints called `checkpoint-<step>`, and maybe a mark beside them.

A model's files may name weights otherwise than its modules do. A stock Trainer leaves such weights at their starting
values when it resumes from files that it has written itself. The callback replaces these files in every checkpoint, but
the process may die first. So the mark is there from the start: it names weights that only the Trainer's own files have,
and a checkpoint that has one of them is not resumed from.
"""

from __future__ import annotations

import contextlib
import json
import re
import stat
from collections.abc import Set
from pathlib import Path

from hf_trainweights.files.atomic import replace_file, save_errors
from hf_trainweights.files.safetensors_file import read_safetensors_header
from hf_trainweights.files.weight_files import safetensors_files

# No cleaner takes this name for a temporary one, and a Trainer pushes nothing that begins with an underscore.
MARK_NAME = "_trainweights_run.json"
_KEY = "converted_names"

_CHECKPOINT_NAME = re.compile(r"checkpoint-\d+")


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
    """Return the step in the name of a directory that `checkpoint_directories` lists."""
    return int(path.name.removeprefix("checkpoint-"))


def step_of(path: Path) -> int | None:
    """Return the step in the name of a directory; None where it is not called `checkpoint-<step>`."""
    return checkpoint_step(path) if _CHECKPOINT_NAME.fullmatch(path.name) else None


def steps_since_last_save(path: Path) -> int | None:
    """Return the training steps since the save before a checkpoint; None without an earlier one in its run."""
    step = step_of(path)
    if step is None:
        return None
    # Later ones are of a run that was resumed from before them.
    newest_first = map(checkpoint_step, checkpoint_directories(path.parent))
    return next((step - saved for saved in newest_first if saved < step), None)


def mark_run(root: str | Path, name: str) -> None:
    """Note in a run durably the name of a weight by which files show that no Trainer may resume from them."""
    mark = Path(root) / MARK_NAME
    try:
        names = _marked_names(Path(root))
    except (OSError, ValueError):
        names = frozenset()
    if name in names:
        return
    with save_errors(mark, "No checkpoint was changed."), replace_file(mark) as file:
        file.write(json.dumps({_KEY: sorted({*names, name})}, indent=2).encode() + b"\n")


def converted_weights_problem(checkpoint: str | Path, names: Set[str] | None = None) -> str | None:
    """Say why a Trainer would resume wrongly from a checkpoint; None if its weights are safe, or nothing is known.

    `names` are weights that only the Trainer's own files have; default: those of the mark beside the checkpoint.
    """
    checkpoint = Path(checkpoint).absolute()
    try:
        names = _marked_names(checkpoint.parent) if names is None else names
        files = safetensors_files(checkpoint) if names else []
        found = {name for file in files for name in read_safetensors_header(file) if name in names}
    except (OSError, ValueError) as error:
        return f"{MARK_NAME} or the weights cannot be read: {error}"
    if not found:
        return None
    return (
        f"its weight files name weights otherwise than the model's modules do ({min(found)}), "
        "and a Trainer that resumes from them leaves these at their starting values"
    )


def _marked_names(root: Path) -> frozenset[str]:
    """Return the names in the mark of a run, none if it has no mark; ValueError if it is damaged."""
    try:
        content = json.loads((root / MARK_NAME).read_bytes())
    except FileNotFoundError:
        return frozenset()
    names = content.get(_KEY) if isinstance(content, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("it holds no list of names")
    return frozenset(names)
