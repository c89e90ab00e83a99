"""The inputs of a save: the base of the run, and the job of one checkpoint. Also the frame of rewriting in place.

While a checkpoint is rewritten in its directory, it has no manifest: that is removed first and written again last.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from hf_trainweights.checkpoint.encoded.decoder import BaseWeights
from hf_trainweights.checkpoint.encoded.reader import (
    cached_snapshots,
    identify_base,
    is_encoded,
    read_report,
    register_base,
    require_weights,
)
from hf_trainweights.checkpoint.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    with_earlier_rounding,
    write_manifest,
)
from hf_trainweights.checkpoint.planning.optimizers import recorded_class
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.run.anchors import unused_anchors
from hf_trainweights.checkpoint.run.checkpoints import RNG_PREFIX, file_problem, list_files, step_of, trainer_state
from hf_trainweights.checkpoint.run.ranks import Ranks
from hf_trainweights.errors import ConfigError, TrainWeightsError, UnsupportedError
from hf_trainweights.files import disk
from hf_trainweights.files.atomic import create_file, keeping_permissions, remove_files, replace_file, save_errors
from hf_trainweights.files.disk import lock_directory
from hf_trainweights.files.reading import DigestedFile, file_sha256, is_torch_file
from hf_trainweights.files.staging import remove_abandoned
from hf_trainweights.files.weight_files import may_be_loaded
from hf_trainweights.models.host.models import model_origin

ANCHOR_EVERY_SAVES = 8

# The value of the option `anchor` that means the weights that the model was loaded from.
_OF_THE_MODEL = "base"

# Keys in a manifest's metadata that say how the directory was rewritten.
_CHOICES = ("policy", "keep_weights", "anchor")


def require_count(name: str, value: object) -> int:
    """Return the value of an option if it is an integer of at least 1; ConfigError: it is not."""
    if type(value) is not int or value < 1:
        raise ConfigError(name, "an integer of at least 1", repr(value), "Pass one.")
    return value


@dataclass(frozen=True)
class BaseChoice:
    """The base that a user chose: a directory or file of weights, and whether checkpoints `keep` a copy of it."""

    path: Path
    keep: bool = False

    @classmethod
    def of(cls, anchor: str | Path | None, keep: bool) -> BaseChoice | None:
        """Return the base that two options choose; ConfigError: it has no weights, or `keep` is set without a base."""
        if anchor is not None:
            require_weights(Path(anchor))
            return cls(Path(anchor).absolute(), keep)
        if keep:
            raise ConfigError("keep_base", "an anchor to keep", "none", "Pass an anchor as well, or leave it out.")
        return None

    def is_kept_by(self, checkpoint: Path, files: Iterable[Path]) -> bool:
        """Return whether a checkpoint keeps the files of the base: by choice, or because its run may write over them.

        A Trainer saves its final model in the directory of the run. It also removes or overwrites checkpoints there.
        """
        run, path = checkpoint.parent.resolve(), self.path.resolve()
        folders = {path if path.is_dir() else path.parent, *(file.resolve().parent for file in files)}
        owned = (folder == run or (folder.parent == run and step_of(folder) is not None) for folder in folders)
        return self.keep or any(owned)


class RunBase:
    """The base of a run, found before the first save. `choice` is None before that, and in a run that has no base.

    `anchor` is `"base"` for the weights that the model was loaded from, or a directory or file of weights, or None.
    ConfigError: there are no weights, or `keep` is set without an `anchor`.
    """

    def __init__(self, anchor: str | Path | None, keep: bool):
        self._keep = keep
        self._is_sought = anchor == _OF_THE_MODEL
        # The repository or path, and the commit, of the model whose base was found.
        self._origin: tuple[str | None, str | None] | None = None
        self.choice = None if self._is_sought else BaseChoice.of(anchor, keep)

    def require_whole_files(self, is_sharded: bool) -> None:
        """Check that the checkpoints can have a base; UnsupportedError: they are sharded, which excludes a base."""
        if is_sharded and (self._is_sought or self.choice is not None):
            next_step = "Leave `anchor` out, or have FSDP save FULL_STATE_DICT."
            raise UnsupportedError("anchor", "checkpoints in whole files", "sharded ones", next_step)

    def find(self, model: nn.Module | None) -> None:
        """Find the weights that a model was loaded from (for an adapter: its base model), if they are to be the base.

        A training that begins again, with weights that have moved, keeps the base that it had. The base is registered
        at each call, because an object that was pickled for this process does not bring the registration along.
        ConfigError: the model was not loaded by `from_pretrained`, or its weights are no longer there.
        """
        if self._is_sought and model is not None:
            module = extract_model_from_parallel(model)
            name, commit = model_origin(module)
            if not name:
                source = f"a {type(model).__name__} that was not loaded by from_pretrained"
                raise ConfigError("anchor", "a model with a base", source, "Pass the path of weights, or leave it out.")
            previous = self.choice.path if self.choice and (name, commit) == self._origin else None
            path = Path(name).absolute() if Path(name).exists() else _snapshot_of(name, commit, module, previous)
            if path != previous:
                self.choice, self._origin = BaseChoice.of(path, self._keep), (name, commit)
        if self.choice is not None:
            register_base(self.choice.path)


def _snapshot_of(repository: str, commit: str | None, model: nn.Module, previous: Path | None) -> Path:
    """Return the snapshot in the Hub's cache that a model was loaded from; newer Transformers do not record its commit.

    `previous` is the snapshot that an earlier call returned for the same repository and commit.
    """
    snapshots = cached_snapshots(repository)
    if not snapshots and previous is None:
        next_step = "Pass the directory of the model that the run starts from."
        raise ConfigError("anchor", f"{repository} in the Hub's cache", "no commit of it there", next_step)
    of_commit = [path for path in snapshots if path.name == commit]
    if of_commit or len(snapshots) == 1:
        return [*of_commit, *snapshots][0]
    weights = model.state_dict()
    # Any commit could serve as base, but differences to the commit that the run starts from are the smallest.
    return next((path for path in snapshots if _has_values(path, weights)), previous or snapshots[0])


def _has_values(snapshot: Path, weights: Mapping[str, Any]) -> bool:
    """Return whether a snapshot and a model have the same values in their largest common weight of two dimensions."""
    try:
        base = BaseWeights(identify_base(snapshot), snapshot).named_as(weights)
    except (TrainWeightsError, OSError):
        return False
    shared = [name for name in base if weights[name].dim() == 2 and not weights[name].is_meta]
    if not shared:
        return False
    name = max(shared, key=lambda name: weights[name].numel())
    return torch.equal(base.tensor(name).to(weights[name].dtype), weights[name].cpu())


@dataclass(frozen=True)
class SaveJob:
    """One checkpoint that is being saved: in a `temporary` directory that is renamed to `path`, or in place at `path`.

    `anchor_every` is the most checkpoints that one anchor serves; None if the checkpoint may not need another one. The
    last seven fields are for rewriting in place.
    """

    path: Path
    policy: Policy
    anchor_every: int | None = None
    base: BaseChoice | None = None
    ranks: Ranks = field(default_factory=Ranks)
    temporary: Path | None = None
    keep_weights: bool = False  # the weight files stay as they are
    buffers: Collection[str] | None = None  # None: read their names from the checkpoint
    optimizer_names: Mapping[Any, str] = field(default_factory=dict)  # by the parameter's index in the state
    optimizer_class: str | None = None  # None: unknown
    renamed: Mapping[str, str] = field(default_factory=dict)  # names of weights in modules by those in the files
    metrics: Mapping[str, Any] | None = None  # None: the previous ones stay
    weights_only: bool = False  # a model without training state is accepted, too

    @property
    def directory(self) -> Path:
        """The directory where files are written, and where large payloads are kept until then."""
        return self.temporary or self.path

    def require_own_weights(self, layout: str) -> None:
        """Check that the weights need no base and are not left out; UnsupportedError: this `layout` cannot do so."""
        if self.base is not None or self.keep_weights:
            option = "keep_weights" if self.keep_weights else "anchor"
            expected, next_step = f"a checkpoint in whole files with `{option}`", f"Leave `{option}` out."
            raise UnsupportedError(str(self.path), expected, layout, next_step)

    def is_done(self, previous: Manifest, choices: Mapping[str, Any]) -> bool:
        """Return whether an earlier call compressed the checkpoint by these choices and knew the optimizer's class."""
        is_new_class = self.optimizer_class not in (None, recorded_class(previous.metadata))
        return choices.items() <= previous.metadata.items() and not is_new_class

    def class_after(self, previous: Manifest | None) -> str | None:
        """Return the class of the optimizer: from the job, or as an earlier save recorded it; None if unknown."""
        return self.optimizer_class or (recorded_class(previous.metadata) if previous else None)

    @contextlib.contextmanager
    def open_file(self, name: str) -> Iterator[DigestedFile]:
        """Open a file of the directory for writing; new weight files get the permissions of the files they replace."""
        path = self.directory / name
        weights = (file for file in self.path.glob("*") if may_be_loaded(file.name))
        with create_file(path) if self.temporary else replace_file(path, weights) as file:
            yield DigestedFile(file)


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


def manifest_fields(
    path: Path,
    previous: Manifest | None,
    metrics: Mapping[str, Any] | None = None,
    choices: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the fields of a manifest other than its list of files.

    Step and epoch come from the `previous` manifest, or from trainer_state.json if there is no previous one. Metrics
    are by default the previous ones. `choices` become metadata; their keys are among `_CHOICES`.
    """
    fields: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    if previous is not None:
        fields = {"step": previous.step, "epoch": previous.epoch, "metrics": previous.metrics}
        metadata = {key: value for key, value in previous.metadata.items() if key not in _CHOICES}
    else:
        state = trainer_state(path)
        with contextlib.suppress(ValueError, TypeError, KeyError):
            fields = {"step": int(state["global_step"]), "epoch": float(state["epoch"])}
    if metrics is not None:
        fields["metrics"] = dict(metrics)
    return {**fields, "metadata": {**metadata, **(choices or {})}}


def write_complete_manifest(path: Path, previous: Manifest | None, manifest: Manifest) -> Manifest:
    """Remove the anchors that no file needs any more, and write a manifest of all files in the directory.

    `manifest` lists the rewritten files; `previous` has the reports and earlier rounding of the others.
    """
    remove_files(unused_anchors(path))
    files = dict(manifest.files)
    for name, status in list_files(path).items():
        if name in files or name == MANIFEST_NAME or not stat.S_ISREG(status.st_mode):
            continue
        file, previous_entry = path / name, previous.files.get(name) if previous else None
        if name.startswith(RNG_PREFIX) and file_problem(file):
            continue  # another rank is still writing it
        report = previous_entry.report if previous_entry else {}
        if previous_entry is None and is_torch_file(file) and is_encoded(file):  # an interruption left no manifest
            report = read_report(file)
        files[name] = FileEntry(file.stat().st_size, file_sha256(file), report)
    manifest = with_earlier_rounding(replace(manifest, files=files), previous, manifest.files)
    write_manifest(path, manifest)
    return manifest
