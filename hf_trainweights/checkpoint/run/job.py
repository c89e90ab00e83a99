"""The inputs of a save: of a new checkpoint, or of one that is rewritten in its directory."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_trainweights.checkpoint.manifest import Manifest
from hf_trainweights.checkpoint.planning.optimizers import recorded_class
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.run.base import BaseChoice
from hf_trainweights.checkpoint.run.ranks import Ranks
from hf_trainweights.errors import ConfigError, UnsupportedError
from hf_trainweights.files.atomic import create_file, replace_file
from hf_trainweights.files.reading import DigestedFile
from hf_trainweights.files.weight_files import may_be_loaded

ANCHOR_EVERY_SAVES = 8


def require_count(name: str, value: object) -> int:
    """Return the value of an option if it is an integer of at least 1; ConfigError: it is not."""
    if type(value) is not int or value < 1:
        raise ConfigError(name, "an integer of at least 1", repr(value), "Pass one.")
    return value


@dataclass(frozen=True)
class SaveJob:
    """One checkpoint that is being saved: in a `temporary` directory that is renamed to `path`, or in place at `path`.

    `anchor_every` is the most checkpoints that one anchor serves; None if the checkpoint may not need another one.
    """

    path: Path
    policy: Policy
    anchor_every: int | None = None
    base: BaseChoice | None = None
    temporary: Path | None = None

    @property
    def directory(self) -> Path:
        """The directory where files are written, and where large payloads are kept until then."""
        return self.temporary or self.path

    @contextlib.contextmanager
    def open_file(self, name: str) -> Iterator[DigestedFile]:
        """Open a file of the directory for writing; new weight files get the permissions of the files they replace."""
        path = self.directory / name
        weights = (file for file in self.path.glob("*") if may_be_loaded(file.name))
        with create_file(path) if self.temporary else replace_file(path, weights) as file:
            yield DigestedFile(file)


@dataclass(frozen=True)
class RewriteJob(SaveJob):
    """A checkpoint that is rewritten in its directory, and facts about the training that its files may not contain."""

    ranks: Ranks = field(default_factory=Ranks)
    keep_weights: bool = False  # the weight files stay as they are
    buffers: Collection[str] | None = None  # None: read their names from the checkpoint
    optimizer_names: Mapping[Any, str] = field(default_factory=dict)  # by the parameter's index in the state
    optimizer_class: str | None = None  # None: unknown
    renamed: Mapping[str, str] = field(default_factory=dict)  # names of weights in modules by those in the files
    metrics: Mapping[str, Any] | None = None  # None: the previous ones stay
    weights_only: bool = False  # a model without training state is accepted, too

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
