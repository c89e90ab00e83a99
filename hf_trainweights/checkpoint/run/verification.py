"""A checkpoint directory compared with its manifest: damaged, missing and foreign files."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hf_trainweights.checkpoint.encoded.anchor_files import MissingAnchorError
from hf_trainweights.checkpoint.encoded.base_files import find_base
from hf_trainweights.checkpoint.manifest.manifest import MANIFEST_NAME, FileEntry, Manifest, read_manifest
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.sha256 import file_sha256
from hf_trainweights.files.temporary import TEMPORARY_PREFIX
from hf_trainweights.files.weight_files import ENTRY_POINTS

# Loaders open these before pytorch_model.bin and adapter_model.bin, so one that is not listed changes what is loaded.
_PREFERRED_BY_LOADERS = frozenset(name for name in ENTRY_POINTS if ".safetensors" in name)

# Stands among the names of files for the weights outside the run that a checkpoint needs.
BASE_PROBLEM = "its base"


@dataclass(frozen=True)
class CheckpointReport:
    """The result of comparing a checkpoint directory with its manifest.

    Args:
        path: The directory.
        manifest: What it should hold; None if the manifest is missing or damaged.
        problems: File name to what is wrong with it; `its base` if that is gone or has changed.
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
        """Whether the directory holds exactly what was written."""
        return not self.problems and not self.foreign


def verify_checkpoint(path: str | Path) -> CheckpointReport:
    """Read every file of a checkpoint and compare it with the manifest; a single flipped bit is found.

    Args:
        path: A checkpoint directory.

    Returns:
        The report; `report.ok` if nothing is damaged, missing or foreign.

    Raises:
        OSError: The directory itself cannot be read. What is wrong in it is reported, not raised.

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
    problems = {}
    for name, entry in manifest.files.items():
        problem = _file_problem(directory / name, entry, present.get(name))
        if problem:
            problems[name] = problem
    foreign = sorted(set(present) - set(manifest.files) - {MANIFEST_NAME})
    if manifest.base is not None:
        try:
            find_base(manifest.base, directory.absolute())
        except (CorruptFileError, MissingAnchorError) as error:
            problems[BASE_PROBLEM] = f"cannot be read: {error}"
    for name in _PREFERRED_BY_LOADERS.intersection(foreign):
        problems[name] = "is not part of the checkpoint, but would be loaded instead of it"
    return CheckpointReport(directory, manifest, problems, tuple(foreign))


def require_intact(path: str | Path) -> Manifest:
    """Verify a checkpoint and return its manifest; CorruptFileError: something is damaged or missing.

    MissingAnchorError: it is whole, but the base that it needs is gone.
    """
    report = verify_checkpoint(path)
    if report.manifest is not None and report.manifest.base is not None and [*report.problems] == [BASE_PROBLEM]:
        find_base(report.manifest.base, Path(path).absolute())
    if report.manifest is None or not report.intact:
        name, problem = next(iter(report.problems.items()))
        next_step = "Use another checkpoint, or restore this one from a copy."
        raise CorruptFileError(str(Path(path) / name), "what was saved", problem, next_step)
    return report.manifest


def list_files(directory: Path) -> dict[str, os.stat_result]:
    """Return the status of every file below a directory by its relative name, without those that are being written.

    A link is listed with its own status and never followed.
    """
    found = {}
    for folder, subfolders, names in os.walk(directory, onerror=_raise):
        links = [name for name in subfolders if (Path(folder) / name).is_symlink()]
        for name in names + links:
            path = Path(folder) / name
            relative = path.relative_to(directory).as_posix()
            if not relative.startswith(TEMPORARY_PREFIX):
                found[relative] = path.lstat()
    return found


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
