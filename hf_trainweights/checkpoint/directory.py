"""Find, clean, compress and restore checkpoint directories of any layout: whole files, sharded, or DeepSpeed's ZeRO.

This module alone decides which layout a directory has.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_trainweights.checkpoint.dcp.reader import dcp_directories
from hf_trainweights.checkpoint.encoded.reader import find_base, register_anchor_directory
from hf_trainweights.checkpoint.encoded.structure import ANCHOR_SUFFIX
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, Manifest
from hf_trainweights.checkpoint.planning.optimizers import class_name
from hf_trainweights.checkpoint.planning.policy import ModeName, Policy
from hf_trainweights.checkpoint.run.anchors import unused_anchors
from hf_trainweights.checkpoint.run.base import BaseChoice
from hf_trainweights.checkpoint.run.checkpoints import (
    checkpoint_directories,
    checkpoint_step,
    converted_weights_problem,
    intact_manifest,
    verify_checkpoint,
)
from hf_trainweights.checkpoint.run.file_checks import progress_problem
from hf_trainweights.checkpoint.run.in_place import Listing
from hf_trainweights.checkpoint.run.job import ANCHOR_EVERY_SAVES, RewriteJob, require_count
from hf_trainweights.checkpoint.run.ranks import Ranks, all_ranks
from hf_trainweights.checkpoint.sharded.rewriting import ShardedLayout
from hf_trainweights.checkpoint.whole.rewriting import WholeLayout
from hf_trainweights.checkpoint.zero.files import tag_directories
from hf_trainweights.checkpoint.zero.rewriting import ZeroLayout
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files import disk
from hf_trainweights.files.atomic import remove_tree
from hf_trainweights.files.disk import lock_directory, move_aside
from hf_trainweights.files.staging import remove_abandoned

Layout = WholeLayout | ShardedLayout | ZeroLayout
"""The layout of a checkpoint on the disk. All have the same functions, and `directories`: itself, then those in it."""


def layout_of(path: Path) -> Layout:
    """Return the layout of a checkpoint; a directory that holds no checkpoint counts as whole files."""
    if directories := dcp_directories(path):
        return ShardedLayout(path, directories)
    tags = tag_directories(path)
    return ZeroLayout(path, tags) if tags else WholeLayout(path)


def plain_problem(path: Path) -> str | None:
    """Return why a checkpoint without a manifest cannot be used; None if a resume can read all files that it needs."""
    return progress_problem(path) or layout_of(path).problem()


def register_checkpoint(path: Path) -> None:
    """Register the directories of a checkpoint, so that anchors are found there even if it was moved."""
    for directory in layout_of(path).directories:
        register_anchor_directory(directory)


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


def find_checkpoints(root: str | Path) -> Iterator[FoundCheckpoint]:
    """Check the checkpoints in `root` one after the other, newest first; each is read when the iterator reaches it.

    Args:
        root: The directory in which a run keeps its checkpoints.

    Yields:
        One entry per `checkpoint-<step>` directory; a link to one has a problem, because it is never followed.

    Raises:
        OSError: `root` is no directory, or cannot be read.
    """
    _require_directory(root)
    for path in checkpoint_directories(root, links=True):
        yield check_checkpoint(path)


def _require_directory(root: str | Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # a run without a directory has no checkpoints, which is no error
        os.scandir(root).close()


def check_checkpoint(path: Path) -> FoundCheckpoint:
    """Check a directory called `checkpoint-<step>`: against its manifest, or for completeness if it has none.

    The process of an interrupted run may still compress the directory. So if it looks damaged, it is checked again once
    its lock is free.
    """
    if path.is_symlink():
        problem = "it is a link, not a directory: move what it leads to here"
        return FoundCheckpoint(path, checkpoint_step(path), None, problem)
    checkpoint = _check(path)
    if checkpoint.problem is not None:
        with contextlib.suppress(OSError), lock_directory(path, wait=True):
            return _check(path)
    return checkpoint


def _check(path: Path) -> FoundCheckpoint:
    step = checkpoint_step(path)
    try:
        if not (path / MANIFEST_NAME).exists():
            return FoundCheckpoint(path, step, None, plain_problem(path) or converted_weights_problem(path))
        report = verify_checkpoint(path)
        problem = "; ".join(f"{name} {problem}" for name, problem in report.problems.items())
        return FoundCheckpoint(path, step, report.manifest, problem or converted_weights_problem(path))
    except OSError as error:
        return FoundCheckpoint(path, step, None, f"cannot be read: {error}")


def latest(root: str | Path) -> str | None:
    """Return the newest intact checkpoint.

    A checkpoint is intact if its manifest verifies. A directory without a manifest, such as a Trainer's own, is intact
    if it has a `trainer_state.json` (or `trainweights_state.pt`), weights that open and, if there is an `optimizer.pt`,
    a readable one. Such a plain directory has no digests, so it counts as unverified; `find_checkpoints` tells the two
    apart. A directory from which a Trainer would resume with weights at their starting values is passed over as well.

    Args:
        root: The directory in which a run keeps its `checkpoint-<step>` directories; it may be missing.

    Returns:
        The path, for `Trainer.train(resume_from_checkpoint=...)` or `load_checkpoint`; None if there is none. Each
        newer directory that was passed over is reported as a warning with the reason.

    Raises:
        MissingAnchorError: No checkpoint is intact, and the base that one of them needs is gone. It is an error because
            a run that began anew would overwrite that checkpoint.
        CorruptFileError: No checkpoint is intact, and the base that one of them needs has changed.
        OSError: `root` is no directory, or cannot be read.

    Examples:
        >>> import tempfile
        >>> latest(tempfile.mkdtemp()) is None
        True
    """
    passed_over = []
    for checkpoint in find_checkpoints(root):
        if checkpoint.problem is None:
            register_checkpoint(checkpoint.path)
            return str(checkpoint.path)
        warnings.warn(f"{checkpoint.path} is passed over: {checkpoint.problem}", stacklevel=2)
        passed_over.append(checkpoint)
    for checkpoint in passed_over:
        if checkpoint.manifest is not None and checkpoint.manifest.base is not None:
            find_base(checkpoint.manifest.base, checkpoint.path.absolute())
    return None


def latest_on_all_ranks(root: str | Path, group: Any = None) -> str | None:
    """Return the result of `latest`, the same on every rank; every rank of the group calls this.

    The first rank reads and verifies the checkpoints, so their bytes are read once and not once by each rank.

    Args:
        root: The directory in which a run keeps its `checkpoint-<step>` directories; it may be missing.
        group: The process group. Default: all ranks. In a program of one process this is `latest`.

    Returns:
        The path, or None if there is none.

    Raises:
        OSError: The first rank cannot read `root`; raised on every rank.

    Examples:
        >>> import tempfile
        >>> latest_on_all_ranks(tempfile.mkdtemp()) is None
        True
    """
    path = (Ranks(group) if group else all_ranks()).decide(lambda: latest(root))
    if path is not None:
        register_checkpoint(Path(path))
    return path


def compress_directory(
    path: str | Path,
    *,
    mode: ModeName = "lossless",
    rules: Mapping[str, Any] | None = None,
    keep_weights: bool = False,
    buffers: Collection[str] | None = None,
    optimizer_names: Mapping[Any, str] | None = None,
    optimizer: Any = None,
    metrics: Mapping[str, Any] | None = None,
    anchor_every: int = ANCHOR_EVERY_SAVES,
    anchor: str | Path | None = None,
    keep_base: bool = False,
    weights_only: bool = False,
) -> Manifest:
    """Compress a checkpoint directory of the Trainer, or of torch.save, in place.

    Weights become one `pytorch_model.bin` (`adapter_model.bin`), and other torch files keep their names. A file that
    cannot be encoded stays as it is, with a warning. So do safetensors of accelerate's `save_state`, which loads tied
    weights from no other file. A second call with the same choices changes nothing.

    Args:
        path: The directory. Others called `checkpoint-<step>` beside it may hold the anchor.
        mode: A mode of `Policy`.
        rules: Rules of `Policy`.
        keep_weights: Leave the weight files as they are, plain.
        buffers: Names of weights that are buffers. Default: the names recorded earlier, else see `find_buffers`.
        optimizer_names: Names of the optimizer's parameters by their index in `optimizer.pt`.
        optimizer: The optimizer, or its class by name: lossy modes round states of torch's Adam and AdamW alone.
            Default: the recorded class, else one of these if the groups have exactly its settings.
        metrics: Metrics for the manifest.
        anchor_every: The most checkpoints one anchor serves, at least 1.
        anchor: Plain weights outside the run, a directory or a file, that its first checkpoint is stored against.
        keep_base: Keep those weights in the run, linked or copied, so that the checkpoint needs no file outside.
        weights_only: Accept a model without training state as well. `restore_directory` writes its safetensors again.

    Returns:
        The manifest that was written.

    Raises:
        ConfigError: An option is wrong, a rule fits nothing in the checkpoint, `path` or `anchor` has no weights, or
            `path` is a model without training state and `weights_only` is not set.
        CorruptFileError: A file is damaged or does not fit the manifest, or two files with different states have the
            same time; nothing has changed.
        UnsupportedError: It is of FSDP with LOCAL_STATE_DICT, or several ranks wrote it and there is `anchor` or
            `keep_weights`.
        SaveError: The disk is full or refuses; every file is intact, old or new.

    Examples:
        >>> import tempfile, torch
        >>> path = Path(tempfile.mkdtemp())
        >>> torch.save({"weight": torch.zeros(64, 64)}, path / "pytorch_model.bin")
        >>> compress_directory(path).mode
        'lossless'
    """
    path, base = Path(path).absolute(), BaseChoice.of(anchor, keep_base)
    options: dict[str, Any] = {"keep_weights": keep_weights, "weights_only": weights_only, "metrics": metrics}
    training = {"optimizer_names": optimizer_names or {}, "optimizer_class": class_name(optimizer), "buffers": buffers}
    saves = require_count("anchor_every", anchor_every)
    return layout_of(path).compress(RewriteJob(path, Policy(mode, rules or {}), saves, base, **options, **training))


def restore_directory(path: str | Path) -> Manifest:
    """Replace the files of a compressed checkpoint directory by plain ones that torch.load reads without this package.

    Args:
        path: The directory. It may have been moved.

    Returns:
        The manifest that was written, its mode "plain".

    Raises:
        ConfigError: There is no checkpoint at `path`.
        CorruptFileError: A file is damaged. Nothing has changed, unless the damage shows only when it is decoded.
        MissingAnchorError: The directory was moved without the anchor it needs.
        UnsupportedError: It is DeepSpeed's, which is not installed: its objects cannot be pickled.
        SaveError: The disk is full or refuses; every file is intact, encoded or plain.

    Examples:
        >>> import tempfile, torch
        >>> path = Path(tempfile.mkdtemp())
        >>> torch.save({"weight": torch.zeros(64, 64)}, path / "pytorch_model.bin")
        >>> compress_directory(path).mode, restore_directory(path).mode
        ('lossless', 'plain')
    """
    return layout_of(Path(path).absolute()).restore()


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint directory in one step, then its files; other checkpoints keep their links to its anchors."""
    claim = move_aside(path)
    try:
        remove_tree(claim.path)
    finally:
        claim.release()


def collect_garbage(root: str | Path, *, dry_run: bool = False) -> list[Path]:
    """Remove the leftovers of interrupted saves in a run: temporary files, and anchors that no file refers to.

    If any checkpoint of the run has a file that is damaged or cannot be read, all anchors stay, because that file may
    need any of them once it is repaired. A warning names the file.

    Args:
        root: The directory in which the run keeps its `checkpoint-<step>` directories, or one of these.
        dry_run: Return the paths, but remove nothing.

    Returns:
        The removed paths, sorted. Files that a living process writes stay.

    Raises:
        OSError: `root` is no directory, or a file cannot be read or removed.

    Examples:
        >>> import tempfile
        >>> collect_garbage(tempfile.mkdtemp())
        []
    """
    _require_directory(root)
    root = Path(root)
    removed: list[Path] = []
    checkpoints = checkpoint_directories(root)
    is_damaged = functools.cache(lambda: _is_damaged(checkpoints or [root]))
    for checkpoint in (root, *checkpoints):
        with contextlib.suppress(FileNotFoundError):  # another process removes the checkpoint
            layout = layout_of(checkpoint)
            for directory in layout.directories:
                removed += _collect(layout, directory, is_damaged, dry_run=dry_run)
    return sorted(removed)


def _collect(layout: Layout, directory: Path, is_damaged: Callable[[], bool], *, dry_run: bool) -> list[Path]:
    """Remove the leftovers in one directory, unless another process holds its lock."""
    if not directory.is_dir():
        return []
    with lock_directory(directory) as is_free:
        if not is_free:
            return []
        unused = layout.unlisted(directory)
        if any(path.suffix == ANCHOR_SUFFIX for path in unused) and is_damaged():
            unused = [path for path in unused if path.suffix != ANCHOR_SUFFIX]
        for path in () if dry_run else unused:
            disk.file_system.unlink(path)
        return [*unused, *remove_abandoned(directory, dry_run=dry_run)]


def _is_damaged(checkpoints: Sequence[Path]) -> bool:
    """Return whether a checkpoint of a run has a damaged file, and name the file in a warning."""
    for directory in checkpoints:
        try:
            if intact_manifest(directory) is None:
                Listing.read(directory, leave_out=[anchor.name for anchor in unused_anchors(directory)])
        except (CorruptFileError, OSError) as error:
            if directory.is_dir():  # otherwise another process has removed it
                warnings.warn(f"All anchors stay, because a damaged file may need them: {error}", stacklevel=4)
                return True
    return False
