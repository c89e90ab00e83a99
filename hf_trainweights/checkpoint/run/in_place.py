"""Rewriting a checkpoint in its directory: the listing of its files, and the lock and the manifest around the changes.

All files are listed and read once before any of them changes. While they change, the checkpoint has no manifest: the
old one is removed first, and a new one is written last.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_trainweights.checkpoint.encoded.reader import (
    anchor_digests,
    anchor_digests_in,
    register_anchor_directory,
    report_of,
)
from hf_trainweights.checkpoint.encoded.structure import ANCHOR_SUFFIX
from hf_trainweights.checkpoint.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    with_earlier_rounding,
    write_manifest,
)
from hf_trainweights.checkpoint.run.anchors import needed_files
from hf_trainweights.checkpoint.run.checkpoints import (
    READ_BY_A_RESUME,
    RNG_PREFIX,
    TRAINER_STATE_NAME,
    list_files,
)
from hf_trainweights.checkpoint.run.file_checks import (
    DamagedFileError,
    FileContent,
    read_content,
    read_verified,
    require_anchor,
)
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files import disk
from hf_trainweights.files.atomic import keeping_permissions, remove_files, save_errors
from hf_trainweights.files.disk import lock_directory
from hf_trainweights.files.reading import file_sha256, is_torch_file
from hf_trainweights.files.staging import remove_abandoned

# Keys in a manifest's metadata that say how the directory was rewritten.
_CHOICES = ("policy", "keep_weights", "anchor")

_UNCHANGED = "Nothing was changed."


@dataclass(frozen=True)
class ListedFile:
    """A file of a listing, its status at that time, and the facts that were read then."""

    path: Path
    status: os.stat_result
    content: FileContent

    def is_unchanged(self, status: os.stat_result) -> bool:
        """Return whether a file of the same name, as its `status` shows it now, is still the one that was read."""
        same_file = os.path.samestat(status, self.status)
        return same_file and (status.st_size, status.st_mtime_ns) == (self.status.st_size, self.status.st_mtime_ns)

    @property
    def anchors(self) -> Collection[str]:
        """The digests of the anchors that the file refers to."""
        return anchor_digests_in(self.content.structure or {})

    def entry(self) -> FileEntry:
        """Return an entry of the file for a manifest; the report on an encoded file is rebuilt from its structure."""
        structure = self.content.structure if is_torch_file(self.path) else None
        report = {} if structure is None else report_of(structure)
        return FileEntry(self.status.st_size, self.content.sha256 or file_sha256(self.path), report)


@dataclass(frozen=True)
class Listing:
    """The undamaged files of a checkpoint by relative name, as they were before a rewriting changed any of them.

    It answers questions about the old files only. `write_manifest` compares the status of each file with the disk, and
    reads a file again that has changed since. `previous` is the manifest by which the caller has verified the files, or
    None if there was no manifest.
    """

    directory: Path
    previous: Manifest | None
    files: Mapping[str, ListedFile]

    @classmethod
    def read(cls, directory: Path, previous: Manifest | None = None, leave_out: Collection[str] = ()) -> Listing:
        """Check and list all files, except those to `leave_out` and the ranks' files of random number generators.

        CorruptFileError: checksums or structure show that a file is not as it was written. MissingAnchorError: an
        encoded file needs an anchor that is not there. SaveError: the disk refuses to read a file.
        """
        register_anchor_directory(directory)
        files = {}
        for name, status in list_files(directory).items():
            is_listed = stat.S_ISREG(status.st_mode) and name not in leave_out and name != MANIFEST_NAME
            if is_listed and not name.startswith(RNG_PREFIX):  # each rank writes one, and may still be writing it
                entry = previous.files.get(name) if previous else None
                files[name] = ListedFile(directory / name, status, _content(directory / name, entry))
        return cls(directory, previous, files)

    def structure(self, file: Path) -> Mapping[str, Any] | None:
        """Return the structure of a file; None if it is not encoded."""
        name = file.relative_to(self.directory).as_posix()
        return self.files[name].content.structure if name in self.files else None

    def manifest_fields(
        self, metrics: Mapping[str, Any] | None = None, choices: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the fields of a manifest other than its list of files.

        Step and epoch come from the previous manifest, or from trainer_state.json if there is no previous one. Metrics
        are by default the previous ones. `choices` become metadata; their keys are among `_CHOICES`.
        """
        fields: dict[str, Any] = {}
        metadata: dict[str, Any] = {}
        if self.previous is not None:
            fields = {"step": self.previous.step, "epoch": self.previous.epoch, "metrics": self.previous.metrics}
            metadata = {key: value for key, value in self.previous.metadata.items() if key not in _CHOICES}
        elif TRAINER_STATE_NAME in self.files:
            state = self.files[TRAINER_STATE_NAME].content.trainer_state
            with contextlib.suppress(ValueError, TypeError, KeyError):
                fields = {"step": int(state["global_step"]), "epoch": float(state["epoch"])}
        if metrics is not None:
            fields["metrics"] = dict(metrics)
        return {**fields, "metadata": {**metadata, **(choices or {})}}

    def write_manifest(
        self, manifest: Manifest, *, carries_rounding: bool = True, kept: Collection[str] = ()
    ) -> Manifest:
        """Remove the anchors that no file needs any more, and write a manifest of all files in the directory.

        Args:
            manifest: The new manifest. Its files are those that were written since the listing, and the `kept` ones;
                this method adds the others.
            carries_rounding: Whether to take the reports and the earlier rounding of the other files from the previous
                manifest. False if the caller has put all earlier rounding into `manifest` already.
            kept: Files that ranks did not encode again, because an earlier call has rounded them. Their errors stay in
                their reports; those of the old reports of encoded files become earlier rounding.

        Returns:
            The manifest that was written.

        Raises:
            CorruptFileError: Another program has written a damaged file meanwhile.
        """
        previous = self.previous if carries_rounding else None
        listed = self._now(manifest.files)
        anchors = {name for name in listed if name.endswith(ANCHOR_SUFFIX) and "/" not in name}
        unneeded = anchors - self._needed(anchors, listed, manifest.files) if anchors else anchors
        remove_files(self.directory / name for name in sorted(unneeded))
        files = dict(manifest.files)
        for name in listed.keys() - unneeded:
            is_unchanged = listed[name] is self.files.get(name)
            entry = previous.files.get(name) if previous is not None and is_unchanged else None
            files[name] = entry or listed[name].entry()
        encoded = manifest.files.keys() - {*kept}
        manifest = with_earlier_rounding(replace(manifest, files=files), previous, encoded)
        write_manifest(self.directory, manifest)
        return manifest

    def _needed(self, anchors: Collection[str], listed: Mapping[str, ListedFile], written: Collection[str]) -> set[str]:
        """Return the names of those anchors that the `listed` files need, or those that were `written` since."""

        def digests_of(name: str) -> Collection[str]:
            return listed[name].anchors if name in listed else anchor_digests(self.directory / name)

        readers = {name for name in (*listed, *written) if "/" not in name}
        return needed_files(anchors, readers.difference(anchors), digests_of)

    def _now(self, written: Collection[str]) -> dict[str, ListedFile]:
        """Return all files of the directory but those `written` since; a file that is new or has changed is read."""
        files = {}
        for name, status in list_files(self.directory).items():
            if name in written or name == MANIFEST_NAME or not stat.S_ISREG(status.st_mode):
                continue
            if name in self.files and self.files[name].is_unchanged(status):
                files[name] = self.files[name]
                continue
            path, is_of_a_rank = self.directory / name, name.startswith(RNG_PREFIX)
            try:
                content = read_content(path, is_torch=is_of_a_rank or path.name in READ_BY_A_RESUME)
            except DamagedFileError as error:
                if is_of_a_rank:  # it is still writing the file
                    continue
                raise _damaged(path, error, "Every other file is whole.") from error
            files[name] = ListedFile(path, status, content)
        return files


def _content(path: Path, entry: FileEntry | None) -> FileContent:
    """Check and read a file. The caller has compared the digest of one with an `entry`: only its structure is read."""
    if entry is not None:
        return read_verified(path, entry.sha256)
    try:
        with save_errors(path, _UNCHANGED):
            content = read_content(path, is_torch=path.name in READ_BY_A_RESUME)
    except DamagedFileError as error:
        raise _damaged(path, error, _UNCHANGED) from error
    if is_torch_file(path):
        require_anchor(content.structure)
    return content


def _damaged(path: Path, error: DamagedFileError, outcome: str) -> CorruptFileError:
    next_step = f"{outcome} Use another checkpoint, restore the file from a copy, or remove it."
    return CorruptFileError(str(path), "a whole file", str(error), next_step)


@contextlib.contextmanager
def rewriting(path: Path) -> Iterator[None]:
    """Lock a directory for a block that rewrites its files, and remove its manifest and abandoned files.

    The directory's times are restored at the end, because rotation sorts by them. It is locked because an anchor, which
    is linked before the file that refers to it, looks like garbage. SaveError: the disk is full or refuses, also in the
    block.
    """
    outcome = "Every file there is whole, old or new."
    with save_errors(path, outcome), lock_directory(path, wait=True):
        times, manifest = path.stat(), path / MANIFEST_NAME
        try:
            with keeping_permissions(manifest):
                remove_files([manifest])
                remove_abandoned(path)
                yield
        finally:
            with contextlib.suppress(OSError):  # only the owner of a directory may set its times
                disk.file_system.set_times(path, times.st_atime_ns, times.st_mtime_ns)
