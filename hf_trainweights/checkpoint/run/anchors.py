"""The anchor that the next checkpoint may be stored against, and the record of it in manifests.

Every checkpoint of a run refers to one earlier weights file, the anchor, by its DECODED values, so errors never add up.
Exact checkpoints form a star: all of them refer to one full checkpoint. Rounded checkpoints first form a short chain:
each is the anchor of the next until reading one takes five files. After that they form a star around the last one.
Every directory holds links to all files that are needed to read it. The manifest of each checkpoint contains the
`AnchorRecord`, so one surviving checkpoint is enough to continue the run after a restart.

The lossy codecs round to steps that follow the drift, which is how far weights move from save to save. Drift is
measured against the anchor, or estimated from Adam's moments.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import LOSSY_DTYPES
from hf_trainweights.checkpoint.codecs.coding.blocks import chunk_ranges
from hf_trainweights.checkpoint.codecs.delta_uniform import rms_difference
from hf_trainweights.checkpoint.encoded.decoder import MOST_ANCHORS, Anchor, BaseWeights
from hf_trainweights.checkpoint.encoded.reader import anchor_digests, read_structure, verify_anchor
from hf_trainweights.checkpoint.encoded.structure import ANCHOR_SUFFIX, anchor_file_name
from hf_trainweights.checkpoint.encoded.workers import in_order, worker_count
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, read_manifest, require_amounts, require_fields
from hf_trainweights.checkpoint.planning.optimizers import adam_states
from hf_trainweights.checkpoint.planning.policy import SIZE_FLOOR
from hf_trainweights.checkpoint.planning.roles import is_number
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.atomic import link_or_copy, remove_files

# The fields of an `AnchorRecord` in JSON.
_RECORD = {
    "sha256": "a SHA-256 in hexadecimal",
    "saves": "an integer of at least 1",
    "first_bits": "a finite number, or null",
    "last_bits": "a finite number, or null",
    "delta_rms": "an object",
    "interval_steps": "an integer of at least 1, or null",
}

# If a delta takes this many bits per weight more than the first one, weights have moved twice as far from the anchor.
# Then the anchor is too old.
_REFRESH_BITS = 1.0
MOST_FILES = 5
"""The most files that are needed to read the weights of a rounded checkpoint, its own among them.

In a language model from scratch a save 150 steps after its anchor takes 4.7 bits a weight, one 50 steps after it 3.2;
each link costs a reader one more decoding of them.
"""
# Adam divides by the root of the second moment plus eps. A root 1,000 times as large as eps makes eps irrelevant.
_IRRELEVANT_EPS = 1000
# Drift is estimated for at most 100 training steps. If saves lie further apart, or the interval is unknown, the
# estimate is too small, which makes the steps of lossy codecs finer than necessary but never too coarse.
_MOST_STEPS = 100


@dataclass(frozen=True)
class AnchorRecord:
    """Facts about an anchor that later checkpoints need. The manifest of each checkpoint that uses the anchor has them.

    Args:
        sha256: Digest of the anchor file.
        saves: How many checkpoints the anchor has served, including the checkpoint that it is itself.
        first_bits: Stored bits per weight of the first delta against the anchor; None before that delta.
        last_bits: The same for the newest delta, corrected to the step of the first (see `fineness`).
        delta_rms: The rms of the first delta by parameter name, from which the lossy codecs take their steps; empty
            as long as all codecs are lossless.
        interval_steps: Training steps between the first delta and the save before it; None if unknown.
    """

    sha256: str
    saves: int = 1
    first_bits: float | None = None
    last_bits: float | None = None
    delta_rms: Mapping[str, float] = field(default_factory=dict)
    interval_steps: int | None = None

    def has_aged(self, bits: float) -> bool:
        """Return whether the newest delta takes over `bits` bits per weight more than the first delta."""
        return self.first_bits is not None and (self.last_bits or 0.0) > self.first_bits + bits

    def is_spent(self, anchor_every: int) -> bool:
        """Return whether the next checkpoint should begin a new anchor, as this one served `anchor_every` or aged."""
        return self.saves >= anchor_every or self.has_aged(_REFRESH_BITS)

    def fineness(self, interval_steps: int | None) -> float:
        """Return the factor from 0 to 1 that makes the steps of the next delta finer than those of the first delta.

        Each resume adds the error of its checkpoint to the run. Steps grow with the square root of the interval between
        saves, so errors add up to the same over the same number of training steps, however often a run is resumed.
        `interval_steps` are the training steps from the last save to the next one; None if unknown.
        """
        if not self.delta_rms or interval_steps is None or self.interval_steps is None:
            return 1.0
        return min(math.sqrt(interval_steps / self.interval_steps), 1.0)

    def step_rms(self, interval_steps: int | None) -> dict[str, float]:
        """Return the rms by name from which lossy codecs take the next delta's steps; empty before the first delta."""
        fineness = self.fineness(interval_steps)
        return {name: rms * fineness for name, rms in self.delta_rms.items()}

    def after_delta(
        self,
        bits_per_weight: float,
        measured_rms: Mapping[str, float],
        interval_steps: int | None,
        *,
        is_exact: bool,
    ) -> AnchorRecord:
        """Return the record after a checkpoint was stored against the anchor.

        `measured_rms` is the drift of the checkpoint by name, as far as it is known. `is_exact` tells that no weight of
        the checkpoint was rounded.
        """
        delta_rms = {**self.delta_rms, **measured_rms}
        record = replace(self, saves=self.saves + 1, delta_rms=delta_rms)
        if is_exact and delta_rms:  # in a rounded run only the best one is exact, and its bits compare with no others
            return record
        if not (is_exact or self.delta_rms):
            record = replace(record, interval_steps=interval_steps)
        bits = bits_per_weight + math.log2(self.fineness(interval_steps))
        return replace(record, first_bits=bits if record.first_bits is None else record.first_bits, last_bits=bits)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> AnchorRecord:
        """Read a record from JSON; CorruptFileError: a field is missing, unknown or of another type."""
        fields = require_fields("anchor", {**asdict(cls("")), **value}, _RECORD)
        require_amounts("anchor.delta_rms", fields["delta_rms"])
        try:
            return cls(**value)
        except TypeError as error:
            next_step = "Use another checkpoint of the run."
            raise CorruptFileError("anchor", "its state", repr(value)[:200], next_step) from error


def link_anchor(source: Path, sha256: str, directory: Path) -> Anchor | None:
    """Link an anchor and all files needed to read it into a checkpoint directory, verify them, and open the anchor.

    If a file is damaged or gone, warn, remove the new links and return None.
    """
    new_links: list[Path] = []
    first, run = directory / anchor_file_name(sha256), source.parent.parent
    try:
        for _ in range(MOST_ANCHORS):
            link = directory / anchor_file_name(sha256)
            if not link.exists():
                with contextlib.suppress(FileExistsError):  # another rank was faster
                    link_or_copy(source, link)
                    new_links.append(link)
                if link.stat().st_nlink == 1:
                    _warn_of_copied_anchors(run.parent if run.name.startswith("checkpoint-") else run)
            verify_anchor(link)
            sha256 = read_structure(link).get("anchor", {}).get("sha256")
            if sha256 is None:
                break
            source = source.with_name(anchor_file_name(sha256))
        return Anchor(first)
    except (CorruptFileError, FileNotFoundError) as error:
        warnings.warn(f"Weights are stored without reference: {error}", stacklevel=2)
        remove_files(new_links)
        return None


@functools.cache  # once per run
def _warn_of_copied_anchors(run: Path) -> None:
    consequence = "each checkpoint has its own copies of the anchors that it needs, and takes their size as well"
    warnings.warn(f"The disk of {run} has no hard links: {consequence}.", stacklevel=3)


def unused_anchors(directory: Path) -> list[Path]:
    """List the anchors in a directory that are not in its manifest and that no encoded file there needs.

    Return an empty list if a file cannot be read, because that file may need any of the anchors.
    """
    anchors = {path.name for path in directory.glob(f"*{ANCHOR_SUFFIX}")}
    if not anchors:
        return []
    try:
        listed_names = read_manifest(directory).files if (directory / MANIFEST_NAME).exists() else ()
        others = {path.name for path in directory.iterdir()} - anchors
        needed = needed_files(anchors, others, lambda name: anchor_digests(directory / name)).union(listed_names)
    except (CorruptFileError, OSError):
        return []
    return sorted(directory / name for name in anchors - needed)


def needed_files(
    anchors: Collection[str], readers: Collection[str], digests_of: Callable[[str], Collection[str]]
) -> set[str]:
    """Return the names of those `anchors` that the files `readers` need to be decoded, in turn over other anchors."""
    needed: set[str] = set()
    while readers:  # an anchor may itself be a difference to another anchor
        names = {anchor_file_name(sha256) for reader in readers for sha256 in digests_of(reader)}
        readers = names.intersection(anchors) - needed
        needed |= readers
    return needed


def measure_delta_rms(weights: Mapping[str, Any], anchor: Anchor | BaseWeights) -> dict[str, float]:
    """Return the rms of the difference between each weight and its decoded anchor, by name, for the lossy steps.

    Weights that are small, not finite or of another shape are left out. One tensor is decoded at a time.
    """
    rms_by_name = {}
    for name, tensor in weights.items():
        if isinstance(tensor, Tensor) and tensor.numel() >= SIZE_FLOOR and tensor.dtype in LOSSY_DTYPES:
            rms_by_name[name] = delta_rms(tensor.cpu(), name, anchor)
    return {name: rms for name, rms in rms_by_name.items() if rms is not None}


def delta_rms(tensor: Tensor, name: str, anchor: Anchor | BaseWeights) -> float | None:
    """Return the rms of the difference of a weight or shard to the anchor's; None if that is missing or not finite."""
    reference = anchor.tensor(name) if name in anchor else None
    if reference is None or reference.shape != tensor.shape:
        return None
    rms = rms_difference(tensor, reference)
    return rms if math.isfinite(rms) else None


def expected_drift_rms(
    optimizer: Mapping[str, Any],
    names: Mapping[Any, str],
    interval_steps: int | None = None,
    optimizer_class: str | None = None,
) -> dict[str, float]:
    """Estimate the drift of each weight from Adam's moments: by name the rms of its movement between two saves.

    Gradients count as independent. One gradient g moves a weight by lr * (1 - beta1**k) * g / sqrt(exp_avg_sq) within k
    steps, because Adam spreads it over the following ones. The root mean square of exp_avg is that of g times sqrt((1 -
    beta1) / (1 + beta1)). Measured in a language model from scratch and in a fine-tune, weights move 0.4 to 1.3 times
    as far as estimated, and less while the learning rate falls. `interval_steps` are the training steps between two
    saves, by default those since the start. At most 100 of them count. Parameters without a name are left out, as are
    parameters that an optimizer other than Adam moves; `optimizer_class` is the class, None if it is unknown.
    """
    most_steps = min(interval_steps or _MOST_STEPS, _MOST_STEPS)
    tasks: dict[str, tuple[int, Callable[[], float]]] = {}
    for name, state, group in adam_states(optimizer, names, optimizer_class):
        if is_number(state.get("step")):
            tasks[name] = state["exp_avg"].nbytes, partial(_adam_drift_rms, state, group, most_steps)
    workers = worker_count(sum(size_bytes for size_bytes, _ in tasks.values()))
    return dict(zip(tasks, in_order(tasks.values(), workers, lambda _: 0), strict=True))


def second_moments(
    optimizer: Mapping[str, Any], names: Mapping[Any, str], optimizer_class: str | None = None
) -> dict[str, Tensor]:
    """Return each parameter's `exp_avg_sq` by name, as a hint for codecs; only parameters that Adam moves have one.

    `optimizer_class` is the class of the optimizer, or None if it is unknown.
    """
    states = adam_states(optimizer, names, optimizer_class)
    moments = {name: state["exp_avg_sq"] for name, state, _ in states}
    return {name: moment for name, moment in moments.items() if moment.dtype in LOSSY_DTYPES}


def _adam_drift_rms(state: Mapping[str, Any], group: Mapping[str, Any], most_steps: int) -> float:
    steps, (beta1, beta2) = float(state["step"]), map(float, group["betas"])
    # Adam with amsgrad divides updates by the largest second moment so far.
    first, second = state["exp_avg"], state.get("max_exp_avg_sq", state["exp_avg_sq"])
    if steps < 1 or not first.numel() or first.shape != second.shape:
        return 0.0
    eps = float(group.get("eps", 0.0)) * math.sqrt(1 - beta2**steps)
    moments, total = (first.flatten(), second.flatten()), 0.0
    for chunk in chunk_ranges(first.numel()):
        mean, square = (moment[chunk].float() for moment in moments)
        total += mean.square().div_(_divisors(square, eps)).nan_to_num_(0.0, 0.0, 0.0).mean().item() * len(mean)
    correction = (1 - beta2**steps) / (1 - beta1**steps) ** 2
    squares = max(total / first.numel(), 0.0)  # a damaged second moment may be negative
    return float(group["lr"]) * math.sqrt(squares * correction * _independent_updates(min(steps, most_steps), beta1))


def _divisors(square: Tensor, eps: float) -> Tensor:
    """Return the squares of Adam's divisors; `eps` is added only if it changes one of them by a thousandth or more."""
    largest = (_IRRELEVANT_EPS * eps) ** 2
    return square if square.amin() >= largest else torch.where(square < largest, (square.sqrt() + eps) ** 2, square)


def _independent_updates(steps: float, beta: float) -> float:
    """Return the number of independent updates of equal size that move a weight as far as `steps` with momentum do."""
    updates = steps - 2 * beta * (1 - beta**steps) / (1 - beta) + beta**2 * (1 - beta ** (2 * steps)) / (1 - beta**2)
    return updates * (1 + beta) / (1 - beta)
