"""The anchor that the next checkpoint may be stored against, and the record of it in manifests.

Every checkpoint of a run refers to one earlier weights file, the anchor, by its DECODED values, so errors never add up.
Exact checkpoints form a star around a full one. Rounded ones form a short chain: each is the next one's anchor until
reading takes `MOST_FILES`, then they form a star around the last. Every directory holds links to all files that reading
it takes. The manifest of each checkpoint carries the `AnchorRecord`, so the run goes on after a restart, and any one
surviving checkpoint is enough to continue it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_trainweights.checkpoint.directory.discovery import checkpoint_directories, checkpoint_step
from hf_trainweights.checkpoint.directory.manifest import read_manifest
from hf_trainweights.checkpoint.directory.manifest_fields import require_anchor
from hf_trainweights.checkpoint.encoded.anchor import MOST_ANCHORS, Anchor
from hf_trainweights.checkpoint.encoded.anchor_files import anchor_file_name
from hf_trainweights.checkpoint.encoded.base_identity import Base
from hf_trainweights.checkpoint.encoded.reader import read_structure
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files import disk
from hf_trainweights.files.atomic import link_or_copy

# How many files reading weights takes at most. In a language model from scratch a save 150 steps after its anchor takes
# 4.7 bits a weight, one 50 steps after it 3.2; each link costs a reader the time to decode the weights once more.
MOST_FILES = 5
# A delta that costs one bit per weight more than the first one did is twice as large: the anchor has aged.
_REFRESH_BITS = 1.0
# Of a base, see base_anchor.py.
_BASE_REFRESH_BITS = 2.0


@dataclass(frozen=True)
class AnchorRecord:
    """What later checkpoints must know about an anchor; the manifest of each that uses it records it.

    Args:
        sha256: Digest of the anchor file.
        saves: How many checkpoints it has served, including the one that it is itself.
        first_bits: Stored bits per weight of the first delta against it; None before that.
        last_bits: The same of the newest delta, less the bits that a finer step cost (see `AnchorCandidate.fineness`).
        delta_rms: By parameter name the rms of the first delta, from which the lossy codecs take their steps; empty
            as long as all codecs are lossless.
        interval_steps: Training steps from the save before that delta to it; None where unknown.
    """

    sha256: str
    saves: int = 1
    first_bits: float | None = None
    last_bits: float | None = None
    delta_rms: Mapping[str, float] = field(default_factory=dict)
    interval_steps: int | None = None

    def is_spent(self, anchor_every: int) -> bool:
        """Tell whether the next checkpoint should begin a new anchor.

        Args:
            anchor_every: The most checkpoints one anchor serves.

        Returns:
            True after that many, or when deltas have become one bit per weight more expensive than the first.
        """
        return self.saves >= anchor_every or self.has_aged(_REFRESH_BITS)

    def has_aged(self, bits: float) -> bool:
        """Tell whether deltas have become that many bits per weight more expensive than the first."""
        return self.first_bits is not None and (self.last_bits or 0.0) > self.first_bits + bits

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> AnchorRecord:
        """Read what `to_dict` returned.

        Raises:
            CorruptFileError: A field is missing, unknown or of another type.
        """
        require_anchor("anchor", {**asdict(cls("")), **value})
        try:
            return cls(**value)
        except TypeError as error:
            next_step = "Use another checkpoint of the run."
            raise CorruptFileError("anchor", "its state", repr(value)[:200], next_step) from error


@dataclass(frozen=True)
class AnchorCandidate:
    """An anchor on disk that the next checkpoint may use.

    Args:
        path: The file, under the name that it has in the checkpoint that holds it; of a base the checkpoint directory
            that may keep its files.
        record: What that checkpoint's manifest says about it.
        interval_steps: Training steps from the save before the next checkpoint to that; None where unknown.
        base: The weights outside the run that it is; None for a file of the run.
        keep_base: Whether the next checkpoint keeps them.
    """

    path: Path
    record: AnchorRecord
    interval_steps: int | None = None
    base: Base | None = None
    keep_base: bool = False

    def is_spent(self, anchor_every: int) -> bool:
        """Tell whether the next checkpoint should begin a new anchor; a base serves any number of them.

        Args:
            anchor_every: The most checkpoints that an anchor of the run serves.
        """
        if self.base is None:
            return self.record.is_spent(anchor_every)
        return self.record.has_aged(_BASE_REFRESH_BITS)

    @property
    def fineness(self) -> float:
        """How much finer than the first delta's the steps of the next one must be, from 0 to 1.

        Each resume adds the error of its checkpoint to the run. With the square root of the interval between saves in
        the step, errors add up to the same over as many training steps, however often a run is saved and resumed.
        """
        if self.interval_steps is None or self.record.interval_steps is None:
            return 1.0
        return min(math.sqrt(self.interval_steps / self.record.interval_steps), 1.0)

    @property
    def step_rms(self) -> dict[str, float]:
        """By parameter name the rms from which the lossy codecs take the next delta's steps; empty before the first."""
        return {name: rms * self.fineness for name, rms in self.record.delta_rms.items()}


def find_anchor_candidate(path: Path, weights_name: str) -> AnchorCandidate | None:
    """Look through the other checkpoints of a run, newest first, for an anchor to continue with.

    Args:
        path: The checkpoint that is being saved; the others of the run lie beside it.
        weights_name: Name of the weights file in each, which may be the anchor itself.

    Returns:
        The first one whose manifest reads and whose anchor is there, or outside the run; its digest is checked when it
        is opened.

    Raises:
        OSError: The directory of the run cannot be read.
    """
    others = [each for each in checkpoint_directories(path.parent) if each.absolute() != path.absolute()]
    for directory in others:
        try:
            manifest = read_manifest(directory)
            record = AnchorRecord.from_dict(manifest.anchor) if manifest.anchor else None
        except (CorruptFileError, OSError):
            continue
        if record is None:
            continue
        if manifest.base is not None and manifest.base.sha256 == record.sha256:
            return AnchorCandidate(directory, record, steps_since_last_save(path), manifest.base, manifest.keeps_base)
        weights = manifest.files.get(weights_name)
        is_anchor_itself = weights is not None and weights.sha256 == record.sha256
        anchor = directory / (weights_name if is_anchor_itself else anchor_file_name(record.sha256))
        if anchor.is_file() and not anchor.is_symlink():
            return AnchorCandidate(anchor, record, steps_since_last_save(path))
    return None


def steps_since_last_save(path: Path) -> int | None:
    """Return the training steps from the save before a checkpoint to it.

    Args:
        path: The checkpoint; the others of the run lie beside it.

    Returns:
        None where no earlier one is there, or the directory is no run's.

    Raises:
        OSError: The directory of the run cannot be read.
    """
    try:
        step = checkpoint_step(path)
    except ValueError:
        return None
    # Later ones are of a run that was resumed from before them.
    newest_first = map(checkpoint_step, checkpoint_directories(path.parent))
    return next((step - saved for saved in newest_first if saved < step), None)


def link_anchor(candidate: AnchorCandidate, directory: Path) -> Anchor | None:
    """Link an anchor and all files that reading it takes into a checkpoint directory, and open it there.

    Args:
        candidate: The anchor.
        directory: Where the link is made.

    Returns:
        The anchor, verified; None, with a warning, if a file is damaged or gone. Then there are no links either.

    Raises:
        OSError: The disk is full or refuses.
    """
    links: list[Path] = []
    source, sha256 = candidate.path, candidate.record.sha256
    try:
        while sha256 and len(links) < MOST_ANCHORS:
            links.append(directory / anchor_file_name(sha256))
            if not links[-1].exists():
                link_or_copy(source, links[-1])
            sha256 = read_structure(links[-1]).get("anchor", {}).get("sha256")
            source = candidate.path.with_name(anchor_file_name(sha256 or ""))
        return Anchor(links[0])
    except (CorruptFileError, FileNotFoundError) as error:
        warnings.warn(f"The next checkpoint is stored without reference: {error}", stacklevel=2)
        unlink_anchor(links)
        return None


def unlink_anchor(links: Iterable[Path]) -> None:
    """Remove the links to an anchor that is of no use, as far as they are there.

    Args:
        links: Those that `link_anchor` made.

    Raises:
        OSError: The disk refuses.
    """
    for link in links:
        if link.exists():
            disk.file_system.unlink(link)
