"""Finds the newest checkpoint that is whole: `latest(root)`, for a resume that does not fall over a broken one."""

from __future__ import annotations

import json
import re
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from hf_trainweights.checkpoint.directory.manifest import MANIFEST_NAME, Manifest, verify_checkpoint
from hf_trainweights.checkpoint.encoded.anchor_files import register_anchor_directory

# In the order in which transformers and peft look for them.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)

# Progress and extras of a plain loop, written by `save_checkpoint`.
STATE_NAME = "trainweights_state.pt"

_CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint directory and whether it can be used.

    Args:
        path: The directory.
        step: The number in its name.
        manifest: Its manifest; None for a plain directory or a damaged manifest.
        problem: Why it cannot be used, or None.
    """

    path: Path
    step: int
    manifest: Manifest | None
    problem: str | None

    @property
    def verified(self) -> bool:
        """Whether every file was compared with a digest; a plain directory is only checked for completeness."""
        return self.manifest is not None and self.problem is None


def checkpoint_directories(root: str | Path) -> list[Path]:
    """List the `checkpoint-<step>` directories in `root`, newest first: by step, then by modification time.

    Args:
        root: Where a run keeps its checkpoints; it may be missing.

    Returns:
        Paths of directories; links are left out.

    Raises:
        OSError: `root` cannot be read.
    """
    root = Path(root)
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _CHECKPOINT_NAME.fullmatch(path.name)]
    directories = [path for path in found if path.is_dir() and not path.is_symlink()]
    return sorted(directories, key=lambda path: (checkpoint_step(path), path.stat().st_mtime_ns), reverse=True)


def checkpoint_step(path: Path) -> int:
    """Return the step in the name of a checkpoint directory.

    Args:
        path: A path whose last part is `checkpoint-<step>`.

    Raises:
        ValueError: It has another name.
    """
    match = _CHECKPOINT_NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not called checkpoint-<step>")
    return int(match[1])


def find_checkpoints(root: str | Path) -> Iterator[FoundCheckpoint]:
    """Check the checkpoints in `root` one after the other, newest first; each is read when it is asked for.

    Args:
        root: Where a run keeps its checkpoints.

    Yields:
        One entry per `checkpoint-<step>` directory.

    Raises:
        OSError: `root` cannot be read.
    """
    for path in checkpoint_directories(root):
        yield check_checkpoint(path)


def check_checkpoint(path: Path) -> FoundCheckpoint:
    """Check one checkpoint: against its manifest, or for completeness where it has none.

    Args:
        path: A directory called `checkpoint-<step>`.

    Returns:
        What was found.

    Raises:
        OSError: The directory cannot be read.
    """
    step = checkpoint_step(path)
    if not (path / MANIFEST_NAME).exists():
        return FoundCheckpoint(path, step, None, _plain_problem(path))
    report = verify_checkpoint(path)
    problem = None if report.intact else "; ".join(f"{name} {what}" for name, what in report.problems.items())
    return FoundCheckpoint(path, step, report.manifest, problem)


def latest(root: str | Path) -> str | None:
    """Return the newest checkpoint that is whole.

    That is one whose manifest verifies, or a directory without a manifest, a Trainer's own for example, that has a
    `trainer_state.json` (or `trainweights_state.pt`), weights that open and, if there is an `optimizer.pt`, a readable
    one. Such a plain directory has no digests, so it counts as unverified; `find_checkpoints` tells the two apart.

    Args:
        root: Where a run keeps its `checkpoint-<step>` directories; it may be missing.

    Returns:
        The path, for `Trainer.train(resume_from_checkpoint=...)` or `load_checkpoint`; None if there is none. Each
        newer directory that was passed over is reported as a warning with the reason.

    Raises:
        OSError: `root` cannot be read.

    Example:
        >>> import tempfile
        >>> latest(tempfile.mkdtemp()) is None
        True
    """
    for found in find_checkpoints(root):
        if found.problem is None:
            register_anchor_directory(found.path)
            return str(found.path)
        warnings.warn(f"{found.path} is passed over: {found.problem}", stacklevel=2)
    return None


def _plain_problem(directory: Path) -> str | None:
    state = directory / STATE_NAME
    problem = zip_problem(state) if state.is_file() else _trainer_state_problem(directory / "trainer_state.json")
    if problem:
        return problem
    folders = [directory, *sorted(path for path in directory.iterdir() if path.is_dir())]  # one per further adapter
    weights = [folder / name for folder in folders for name in WEIGHT_FILES if (folder / name).is_file()]
    if not weights:
        return "no weight file is there"
    optimizer = directory / "optimizer.pt"
    return weights_problem(weights[0]) or (zip_problem(optimizer) if optimizer.exists() else None)


def _trainer_state_problem(path: Path) -> str | None:
    try:
        if isinstance(json.loads(path.read_bytes()), dict):
            return None
    except (OSError, ValueError, RecursionError) as error:
        return f"{path.name} cannot be read: {error}"
    return f"{path.name} is not a JSON object"


def weights_problem(path: Path) -> str | None:
    """Say why a weight file cannot be loaded, as far as a look at its structure shows.

    Args:
        path: A file whose name is in `WEIGHT_FILES`.

    Returns:
        The reason, or None.
    """
    if path.suffix == ".bin":
        return zip_problem(path)
    if path.suffix == ".safetensors":
        return _safetensors_problem(path)
    try:
        names = shard_names(path)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"{path.name} cannot be read: {error!r}"
    return next(filter(None, (weights_problem(path.parent / name) for name in names)), None)


def shard_names(index: Path) -> list[str]:
    """Return the shards that an index file lists.

    Args:
        index: A `*.index.json` file.

    Returns:
        File names in the index's directory, each once, sorted.

    Raises:
        ValueError: It is no JSON, or names something that is no plain `.safetensors` or `.bin` file name.
        OSError: It cannot be read.
    """
    names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    for name in names:
        if Path(name).name != name or Path(name).suffix not in (".safetensors", ".bin"):
            raise ValueError(f"{name!r} is not the name of a shard")
    return names


def zip_problem(path: Path) -> str | None:
    """Say why a torch file cannot be loaded, as far as its zip structure and checksums show.

    Args:
        path: A file that torch.save wrote.

    Returns:
        The reason, or None.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                # torch writes a zero where its checksums are switched off, see torch.serialization.set_crc32_options.
                if member.CRC != 0:
                    with archive.open(member) as file:
                        while file.read(_READ_BYTES):
                            pass
    except (OSError, EOFError, ValueError, NotImplementedError, RuntimeError, zipfile.BadZipFile) as error:
        return f"{path.name} cannot be read: {error}"
    return None


def _safetensors_problem(path: Path) -> str | None:
    try:
        with safe_open(path, framework="pt") as file:
            file.keys()
    except (OSError, SafetensorError) as error:
        return f"{path.name} cannot be read: {error}"
    return None
