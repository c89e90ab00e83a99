"""One checkpoint that is being saved: what each step must know, and one that is rewritten where it lies.

There its manifest goes first and comes back last.
"""

from __future__ import annotations

import contextlib
import json
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_trainweights.checkpoint.encoded.reader import is_encoded, read_report
from hf_trainweights.checkpoint.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    with_earlier_rounding,
    write_manifest,
)
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.run.anchors import unused_anchors
from hf_trainweights.checkpoint.run.ranks import Ranks
from hf_trainweights.checkpoint.run.verification import RNG_PREFIX, TRAINER_STATE_NAME, file_problem, list_files
from hf_trainweights.errors import ConfigError
from hf_trainweights.files import disk
from hf_trainweights.files.atomic import create_file, remove_files, replace_file, save_errors
from hf_trainweights.files.disk import lock_directory
from hf_trainweights.files.reading import DigestedFile, is_torch_file, open_regular_file
from hf_trainweights.files.staging import remove_abandoned

ANCHOR_EVERY_SAVES = 8

# Keys in a manifest's metadata that say how the directory was rewritten.
_CHOICES = ("policy", "keep_weights", "anchor")


def require_count(name: str, value: object) -> int:
    """Return an option's value that is an integer of at least 1; ConfigError: it is not."""
    if type(value) is not int or value < 1:
        raise ConfigError(name, "an integer of at least 1", repr(value), "Pass one.")
    return value


@dataclass(frozen=True)
class BaseChoice:
    """Weights outside a run, a directory or a file, and whether checkpoints stored against them keep them."""

    path: Path
    keep: bool = False


@dataclass(frozen=True)
class SaveJob:
    """One checkpoint that is being saved: in a `temporary` directory that becomes `path`, or else where it lies.

    `anchor_every` is the most checkpoints that one anchor serves; None for a checkpoint that needs no other. The last
    five serve where it lies: `buffers` is None if the checkpoint itself tells, `optimizer_names` are by their index in
    the optimizer's state, and `weights_only` takes a model without training state as well.
    """

    path: Path
    policy: Policy
    anchor_every: int | None
    base: BaseChoice | None = None
    ranks: Ranks = field(default_factory=Ranks)
    temporary: Path | None = None
    keep_weights: bool = False
    buffers: Collection[str] | None = None
    optimizer_names: Mapping[Any, str] = field(default_factory=dict)
    metrics: Mapping[str, Any] | None = None
    weights_only: bool = False

    @property
    def directory(self) -> Path:
        """Where its files are written, and large payloads wait."""
        return self.temporary or self.path

    @contextlib.contextmanager
    def open_file(self, name: str) -> Iterator[DigestedFile]:
        """Open a file of the directory for writing."""
        with (create_file if self.temporary else replace_file)(self.directory / name) as file:
            yield DigestedFile(file)


@contextlib.contextmanager
def rewriting(path: Path) -> Iterator[None]:
    """Remove the manifest and files of dead processes, and keep the directory's times: rotation sorts by them.

    The directory is locked, because an anchor that is linked before the file that refers to it looks like garbage.
    SaveError: the disk is full or refuses, also in the block.
    """
    outcome = "Every file there is whole, old or new."
    with save_errors(path, outcome), lock_directory(path, wait=True):
        times = path.stat()
        try:
            remove_files([path / MANIFEST_NAME])
            remove_abandoned(path)
            yield
        finally:
            with contextlib.suppress(OSError):  # whoever may write in a directory of others may not set its times
                disk.file_system.set_times(path, times.st_atime_ns, times.st_mtime_ns)


def manifest_fields(
    path: Path,
    previous: Manifest | None,
    metrics: Mapping[str, Any] | None = None,
    choices: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the fields of a manifest beside its files; step and epoch are the previous one's, or the Trainer's own.

    Metrics are by default the previous ones. `choices` are metadata under the keys `_CHOICES`.
    """
    fields: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    if previous is not None:
        fields = {"step": previous.step, "epoch": previous.epoch, "metrics": previous.metrics}
        metadata = {key: value for key, value in previous.metadata.items() if key not in _CHOICES}
    else:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            with open_regular_file(path / TRAINER_STATE_NAME) as file:
                state = json.load(file)
            fields = {"step": int(state["global_step"]), "epoch": float(state["epoch"])}
    if metrics is not None:
        fields["metrics"] = dict(metrics)
    return {**fields, "metadata": {**metadata, **(choices or {})}}


def write_complete_manifest(path: Path, previous: Manifest | None, manifest: Manifest) -> Manifest:
    """Remove the anchors that no file needs any more, and write a manifest of all that is there.

    `manifest` has the files that were rewritten; reports of the others, and what they had lost, come from `previous`.
    """
    remove_files(unused_anchors(path))
    files = dict(manifest.files)
    for name, status in list_files(path).items():
        if name in files or name == MANIFEST_NAME or not stat.S_ISREG(status.st_mode):
            continue
        if name.startswith(RNG_PREFIX) and file_problem(path / name):
            continue  # another rank is still writing it
        files[name] = FileEntry.of(path / name, _known_report(path, name, previous))
    manifest = with_earlier_rounding(replace(manifest, files=files), previous, manifest.files)
    write_manifest(path, manifest)
    return manifest


def _known_report(directory: Path, name: str, previous: Manifest | None) -> Mapping[str, Any] | None:
    """Return the report of a file that was not rewritten, also where an interruption left no manifest."""
    if previous is not None and name in previous.files:
        return previous.files[name].report
    path = directory / name
    return read_report(path) if is_torch_file(path) and is_encoded(path) else None
