"""The checkpoints of a run on the disk: a list of them, and checks whether one is intact and safe to resume from.

A checkpoint is compared with the digests in its manifest. If it has no manifest, checksums and structure are checked.

A model's files may use other names for weights than its modules do. A stock Trainer leaves such weights at their
starting values when it resumes from files that it has written itself. The callback replaces these files in every
checkpoint, but the process may die before that. So the run's directory has a mark from the start: a file with names of
weights that only the Trainer's own files use. Training is not resumed from a checkpoint that has one of these names.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hf_trainweights.checkpoint.encoded.reader import find_base
from hf_trainweights.checkpoint.encoded.structure import ANCHOR_SUFFIX
from hf_trainweights.checkpoint.encoded.workers import in_order, worker_count
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, read_manifest
from hf_trainweights.errors import CorruptFileError, MissingAnchorError
from hf_trainweights.files.atomic import SHOWN_PREFIXES, replace_file, save_errors
from hf_trainweights.files.disk import TEMPORARY_PREFIX
from hf_trainweights.files.reading import file_sha256, read_json_object
from hf_trainweights.files.safetensors_file import read_safetensors_header
from hf_trainweights.files.weight_files import ENTRY_POINTS, safetensors_files

# Clean-up takes this name for no temporary one, and a Trainer pushes no file whose name begins with an underscore.
MARK_NAME = "_trainweights_run.json"
_KEY = "converted_names"

_CHECKPOINT_NAME = re.compile(r"checkpoint-\d+")

# Progress and extras of a plain loop, written by `save_checkpoint`.
STATE_NAME = "trainweights_state.pt"
TRAINER_STATE_NAME = "trainer_state.json"
# Each of these files records how far training had come.
PROGRESS_NAMES = (STATE_NAME, TRAINER_STATE_NAME, MANIFEST_NAME)
# Each rank writes a file with this prefix, not all at the same time.
RNG_PREFIX = "rng_state"

OPTIMIZER_NAME = "optimizer.pt"
# Under FSDP with FULL_STATE_DICT a Trainer writes optimizer.bin and the next file, and resumes from them.
OPTIMIZER_NAMES = (OPTIMIZER_NAME, "optimizer.bin")
FSDP_WEIGHTS_NAME = "pytorch_model_fsdp.bin"

# A Trainer loads these files when it resumes; other readers of the weights do not.
RESUMED_FROM = (*OPTIMIZER_NAMES, FSDP_WEIGHTS_NAME)
READ_BY_A_RESUME = frozenset({STATE_NAME, *RESUMED_FROM, *ENTRY_POINTS})
# Loaders open these before pytorch_model.bin and adapter_model.bin, so an unlisted one would be loaded instead.
_PREFERRED_BY_LOADERS = frozenset(name for name in ENTRY_POINTS if ".safetensors" in name)

# A key among file names: it stands for the base that a checkpoint needs, which lies outside its directory.
BASE_PROBLEM = "its base"


def checkpoint_directories(root: str | Path, *, links: bool = False) -> list[Path]:
    """List the `checkpoint-<step>` directories in `root`, newest first: by step, then by modification time.

    Symbolic links are left out unless `links` is true. The list is empty if `root` is not a directory.
    """
    root = Path(root)
    if not root.is_dir():
        return []
    entries = []
    for path in root.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process removes it
            status = path.lstat()
            is_listed = stat.S_ISDIR(status.st_mode) or (links and stat.S_ISLNK(status.st_mode))
            if is_listed and _CHECKPOINT_NAME.fullmatch(path.name):
                entries.append((checkpoint_step(path), status.st_mtime_ns, path))
    return [path for *_, path in sorted(entries, reverse=True)]


def checkpoint_step(path: Path) -> int:
    """Return the step in the name of a directory that `checkpoint_directories` lists."""
    return int(path.name.removeprefix("checkpoint-"))


def step_of(path: Path) -> int | None:
    """Return the step in the name of a directory; None if it is not called `checkpoint-<step>`."""
    return checkpoint_step(path) if _CHECKPOINT_NAME.fullmatch(path.name) else None


def steps_since_last_save(path: Path) -> int | None:
    """Return the training steps between a checkpoint and the save before it; None if its run has no earlier one."""
    step = step_of(path)
    if step is None:
        return None
    # Checkpoints with later steps may be there if the run was resumed from one before them.
    newest_first = map(checkpoint_step, checkpoint_directories(path.parent))
    return next((step - saved for saved in newest_first if saved < step), None)


def entry_points(directory: Path) -> list[Path]:
    """Return the weight files that a loader may open first, including those in the folders of further adapters."""
    folders = [directory, *sorted(path for path in directory.iterdir() if path.is_dir())]
    return [folder / name for folder in folders for name in ENTRY_POINTS if (folder / name).is_file()]


def trainer_state(directory: Path) -> Mapping[str, Any]:
    """Return the content of a checkpoint's trainer_state.json; empty if that file is missing or damaged."""
    try:
        return read_json_object(directory / TRAINER_STATE_NAME)
    except (CorruptFileError, OSError):
        return {}


@dataclass(frozen=True)
class CheckpointReport:
    """The result of comparing a checkpoint directory with its manifest.

    Args:
        path: The directory.
        manifest: The manifest, which lists the files that were written; None if it is missing or damaged.
        problems: The problem of each damaged file by its name; `its base` if the base is gone or has changed.
        foreign: Names of files that the manifest does not list; they are not used and do no harm.
    """

    path: Path
    manifest: Manifest | None
    problems: Mapping[str, str]
    foreign: tuple[str, ...]

    @property
    def intact(self) -> bool:
        """Whether every listed file is there and unchanged, and no other file would be loaded instead."""
        return not self.problems

    @property
    def ok(self) -> bool:
        """Whether the directory holds exactly the files that were written, and each is unchanged."""
        return not self.problems and not self.foreign


def verify_checkpoint(path: str | Path) -> CheckpointReport:
    """Read every file of a checkpoint and compare it with the manifest, which shows even a single flipped bit.

    Args:
        path: A checkpoint directory.

    Returns:
        The report; `report.ok` if nothing is damaged, missing or foreign.

    Raises:
        OSError: The directory itself cannot be read. Problems of files in it are reported, not raised.

    Examples:
        >>> import torch
        >>> from hf_trainweights.checkpoint import CheckpointManager, latest
        >>> with CheckpointManager("run", every_steps=1) as manager:
        ...     for step, batch in manager.steps([1, 2], torch.nn.Linear(2, 1)):
        ...         pass
        >>> verify_checkpoint(latest("run")).ok
        True
    """
    directory = Path(path)
    present = list_files(directory)
    try:
        manifest = read_manifest(directory)
    except (CorruptFileError, OSError) as error:
        return CheckpointReport(directory, None, {MANIFEST_NAME: str(error)}, ())
    tasks = [
        (entry.size_bytes, partial(_file_problem, directory / name, entry, present.get(name)))
        for name, entry in manifest.files.items()
    ]
    sentences = in_order(tasks, worker_count(sum(size_bytes for size_bytes, _ in tasks)), lambda _: 0)
    problems = {name: problem for name, problem in zip(manifest.files, sentences, strict=True) if problem}
    foreign = sorted(set(present) - set(manifest.files) - {MANIFEST_NAME})
    if manifest.base is not None:
        try:
            find_base(manifest.base, directory.absolute())
        except (CorruptFileError, MissingAnchorError) as error:
            problems[BASE_PROBLEM] = f"cannot be read: {error}"
    for name in _PREFERRED_BY_LOADERS.intersection(foreign):
        problems[name] = "is not part of the checkpoint, but would be loaded instead of it"
    return CheckpointReport(directory, manifest, problems, tuple(foreign))


def intact_manifest(path: Path) -> Manifest | None:
    """Verify a checkpoint and return its manifest, or None if it has no manifest.

    CorruptFileError: the manifest or a file is damaged. MissingAnchorError: all files are intact, but the base that the
    checkpoint needs is gone.
    """
    if not (path / MANIFEST_NAME).exists():
        return None
    report = verify_checkpoint(path)
    if report.manifest is not None and report.manifest.base is not None and [*report.problems] == [BASE_PROBLEM]:
        find_base(report.manifest.base, path.absolute())
    if report.manifest is None or not report.intact:
        name, problem = next(iter(report.problems.items()))
        next_step = "Use another checkpoint, or restore this one from a copy."
        raise CorruptFileError(str(path / name), "what was saved", problem, next_step)
    return report.manifest


def list_files(directory: Path) -> dict[str, os.stat_result]:
    """Return the status of every file below a directory by its relative name.

    Files that are being written are left out, as are removed files that NFS or FUSE shows as long as they are open. A
    symbolic link is listed with its own status and never followed.
    """
    statuses = {}
    for folder, subfolders, names in os.walk(directory, onerror=_raise):
        links = [name for name in subfolders if (Path(folder) / name).is_symlink()]
        for name in names + links:
            path = Path(folder) / name
            relative = path.relative_to(directory).as_posix()
            if not (relative.startswith(TEMPORARY_PREFIX) or name.startswith(SHOWN_PREFIXES)):
                statuses[relative] = path.lstat()
    return statuses


def _raise(error: OSError) -> None:
    raise error


def _file_problem(path: Path, entry: FileEntry, status: os.stat_result | None) -> str | None:
    if status is None:
        return "is missing"
    if not stat.S_ISREG(status.st_mode):
        return "is a link or a special file"
    if status.st_size != entry.size_bytes:
        return f"has {status.st_size} bytes instead of {entry.size_bytes}"
    try:
        same = file_sha256(path) == entry.sha256
    except (CorruptFileError, OSError) as error:
        return f"cannot be read: {error}"
    return None if same else "has other content than when it was saved"


def size_bytes(directory: Path) -> int:
    """Return the bytes that a checkpoint takes on disk, excluding anchors that it shares with other checkpoints."""
    files = ((file, file.stat()) for file in directory.rglob("*") if file.is_file())
    # Links between files of this checkpoint count once. An anchor with one link is a copy: the disk has no hard links.
    own = (status for file, status in files if file.suffix != ANCHOR_SUFFIX or status.st_nlink == 1)
    return sum({(status.st_dev, status.st_ino): status.st_size for status in own}.values())


def mark_run(root: str | Path, name: str) -> None:
    """Add a weight's name to the durable mark of a run; no Trainer may resume from files that have the name."""
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
    """Return why a Trainer would resume wrongly from a checkpoint; None if it would not, or if there is no mark.

    `names` are of weights that only the Trainer's own files use; by default those of the mark beside the checkpoint.
    """
    checkpoint = Path(checkpoint).absolute()
    try:
        names = _marked_names(checkpoint.parent) if names is None else names
        files = safetensors_files(checkpoint) if names else []
        converted = {name for file in files for name in read_safetensors_header(file) if name in names}
    except (OSError, ValueError) as error:
        return f"{MARK_NAME} or the weights cannot be read: {error}"
    if not converted:
        return None
    return (
        f"its weight files name weights otherwise than the model's modules do ({min(converted)}), "
        "and a Trainer that resumes from them leaves these at their starting values"
    )


def _marked_names(root: Path) -> frozenset[str]:
    """Return the names in the mark of a run, an empty set if it has no mark; ValueError: the mark is damaged."""
    try:
        names = read_json_object(root / MARK_NAME).get(_KEY)
    except FileNotFoundError:
        return frozenset()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("it holds no list of names")
    return frozenset(names)
