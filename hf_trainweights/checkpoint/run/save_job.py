"""`SaveJob`: the facts that all functions need which take part in saving one checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hf_trainweights.checkpoint.encoded.key_paths import UnstorableError
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.files.atomic import create_file, replace_file

ANCHOR_EVERY_SAVES = 8


@dataclass(frozen=True)
class BaseChoice:
    """Weights outside a run that its first checkpoint is stored against, and those after it.

    Args:
        path: A directory or a file of weights.
        keep: Whether checkpoints keep them, so that they need nothing outside the run.
    """

    path: Path
    keep: bool = False


@dataclass(frozen=True)
class SaveJob:
    """One checkpoint that is being saved.

    Args:
        path: Where it lies when it is complete.
        directory: Where its files are written, and large payloads wait: `path` itself, or a temporary directory that
            becomes it.
        policy: Which codec for which tensor.
        anchor_every: The most checkpoints that one anchor serves; None for a checkpoint that needs no other.
        open_file: Opens a file of `directory` for writing.
        base: Weights outside the run that its first checkpoint is stored against; None if there are none.
    """

    path: Path
    directory: Path
    policy: Policy
    anchor_every: int | None
    open_file: Callable[[Path], AbstractContextManager[BinaryIO]]
    base: BaseChoice | None = None

    @classmethod
    def aside(
        cls, path: Path, temporary: Path, policy: Policy, anchor_every: int | None, base: BaseChoice | None = None
    ) -> SaveJob:
        """Return the job of a new checkpoint, whose files are written into a temporary directory."""
        return cls(path, temporary, policy, anchor_every, create_file, base)

    @classmethod
    def in_place(cls, path: Path, policy: Policy, anchor_every: int | None, base: BaseChoice | None = None) -> SaveJob:
        """Return the job of a checkpoint whose files are replaced one by one where they lie."""
        return cls(path, path, policy, anchor_every, replace_file, base)


@contextlib.contextmanager
def file_named_in_errors(name: str) -> Iterator[None]:
    """Put the name of a file before the key that an `UnstorableError` of the block names."""
    try:
        yield
    except UnstorableError as error:
        raise UnstorableError(f"{name}: {error.where}", error.expected, error.found, error.next_step) from error
