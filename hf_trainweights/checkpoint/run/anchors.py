"""The anchor that the next checkpoint may be stored against, and the record of it in manifests.

Every checkpoint of a run refers to one earlier weights file, the anchor, by its DECODED values, so errors never add up.
Exact checkpoints form a star around a full one. Rounded ones form a short chain: each is the next one's anchor until
reading takes `MOST_FILES`, then they form a star around the last. Every directory holds links to all files that reading
it takes. The manifest of each checkpoint carries the `AnchorRecord`, so the run goes on after a restart, and any one
surviving checkpoint is enough to continue it.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_trainweights.checkpoint.encoded.anchor import MOST_ANCHORS, Anchor
from hf_trainweights.checkpoint.encoded.anchor_files import anchor_file_name, verify_anchor
from hf_trainweights.checkpoint.encoded.base_identity import Base
from hf_trainweights.checkpoint.encoded.reader import read_structure
from hf_trainweights.checkpoint.manifest.fields import require_anchor
from hf_trainweights.checkpoint.manifest.manifest import read_manifest
from hf_trainweights.checkpoint.run.discovery import checkpoint_directories, checkpoint_step
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
        last_bits: The same of the newest delta, corrected to the step of the first (see `fineness`).
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
        """Tell whether the next checkpoint should begin a new anchor: after so many, or when this one has aged."""
        return self.saves >= anchor_every or self.has_aged(_REFRESH_BITS)

    def has_aged(self, bits: float) -> bool:
        """Tell whether deltas have become that many bits per weight more expensive than the first."""
        return self.first_bits is not None and (self.last_bits or 0.0) > self.first_bits + bits

    def fineness(self, interval_steps: int | None) -> float:
        """Return how much finer than the first delta's the steps of the next one must be, from 0 to 1.

        Each resume adds the error of its checkpoint to the run. With the square root of the interval between saves in
        the step, errors add up to the same over as many training steps, however often a run is saved and resumed.
        """
        if interval_steps is None or self.interval_steps is None:
            return 1.0
        return min(math.sqrt(interval_steps / self.interval_steps), 1.0)

    def step_rms(self, interval_steps: int | None) -> dict[str, float]:
        """Return by name the rms from which the lossy codecs take the next delta's steps; empty before the first."""
        return {name: rms * self.fineness(interval_steps) for name, rms in self.delta_rms.items()}

    def after_delta(self, bits_per_weight: float, fineness: float, *, is_exact: bool) -> AnchorRecord:
        """Return the record once another checkpoint is stored against the anchor, in steps so fine."""
        if is_exact and self.delta_rms:  # the best checkpoint of a rounded run: its bits say nothing of the next one's
            return replace(self, saves=self.saves + 1)
        bits = bits_per_weight + math.log2(fineness)
        first_bits = bits if self.first_bits is None else self.first_bits
        return replace(self, saves=self.saves + 1, first_bits=first_bits, last_bits=bits)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> AnchorRecord:
        """Read what `to_dict` returned; CorruptFileError: a field is missing, unknown or of another type."""
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
        """Tell whether the next checkpoint should begin a new anchor; a base serves any number of them."""
        if self.base is None:
            return self.record.is_spent(anchor_every)
        return self.record.has_aged(_BASE_REFRESH_BITS)

    @property
    def fineness(self) -> float:
        """How much finer than the first delta's the steps of the next one must be, from 0 to 1."""
        return self.record.fineness(self.interval_steps)

    @property
    def step_rms(self) -> dict[str, float]:
        """By parameter name the rms from which the lossy codecs take the next delta's steps; empty before the first."""
        return self.record.step_rms(self.interval_steps)


def find_anchor_candidate(path: Path, weights_name: str) -> AnchorCandidate | None:
    """Return the anchor, or base, of the newest other checkpoint of a run whose manifest reads and that has one.

    `weights_name` is that of the weights file in each, which may be the anchor itself. Digests are checked when it is
    opened.
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
    """Return the training steps since the save before a checkpoint; None without an earlier one in its run."""
    try:
        step = checkpoint_step(path)
    except ValueError:
        return None
    # Later ones are of a run that was resumed from before them.
    newest_first = map(checkpoint_step, checkpoint_directories(path.parent))
    return next((step - saved for saved in newest_first if saved < step), None)


def link_anchor(candidate: AnchorCandidate, directory: Path) -> Anchor | None:
    """Link an anchor and all files that reading it takes into a checkpoint directory, and open it there, verified.

    None, with a warning, if a file is damaged or gone. Then there are no new links either.
    """
    made: list[Path] = []
    source, sha256 = candidate.path, candidate.record.sha256
    first = directory / anchor_file_name(sha256)
    try:
        for _ in range(MOST_ANCHORS):
            link = directory / anchor_file_name(sha256)
            if not link.exists():
                made.append(link)
                link_or_copy(source, link)
                if link.stat().st_nlink == 1:
                    _say_that_anchors_are_copied(candidate.path.parent.parent)
            verify_anchor(link)
            sha256 = read_structure(link).get("anchor", {}).get("sha256")
            if sha256 is None:
                break
            source = candidate.path.with_name(anchor_file_name(sha256))
        return Anchor(first)
    except (CorruptFileError, FileNotFoundError) as error:
        warnings.warn(f"The next checkpoint is stored without reference: {error}", stacklevel=2)
        unlink_anchor(made)
        return None


@functools.cache  # once per run
def _say_that_anchors_are_copied(run: Path) -> None:
    what = "each checkpoint has its own copies of the anchors that it needs, and takes their size as well"
    warnings.warn(f"The disk of {run} has no hard links: {what}.", stacklevel=3)


def unlink_anchor(links: Iterable[Path]) -> None:
    """Remove links to anchors that are of no use, as far as they are there."""
    for link in links:
        if link.exists():
            disk.file_system.unlink(link)
