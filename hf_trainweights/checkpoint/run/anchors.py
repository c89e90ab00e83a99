"""The anchor that the next checkpoint may be stored against, and the record of it in manifests.

Every checkpoint of a run refers to one earlier weights file, the anchor, by its DECODED values, so errors never add up.
Exact checkpoints form a star around a full one. Rounded ones form a short chain: each is the next one's anchor until
reading takes five files, then they form a star around the last. Every directory holds links to all files that reading
it takes. The manifest of each checkpoint carries the `AnchorRecord`, so the run goes on after a restart, and any one
surviving checkpoint is enough to continue it.

Steps follow how far weights move from save to save: measured against the anchor, or estimated from Adam's moments.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Mapping
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

# A delta that costs one bit per weight more than the first one did is twice as large: the anchor has aged.
_REFRESH_BITS = 1.0
# A root of a second moment that is so many times as large as Adam's eps makes it irrelevant.
_IRRELEVANT_EPS = 1000
# Where saves lie further apart, or nobody knows how far, the estimate is too small: steps get finer, never too coarse.
_MOST_STEPS = 100


@dataclass(frozen=True)
class AnchorRecord:
    """What later checkpoints must know about an anchor; the manifest of each that uses it records it.

    Args:
        sha256: Digest of the anchor file.
        saves: How many checkpoints it has served, including the one that it is itself.
        first_bits: Stored bits per weight of the first delta against it; None before that.
        last_bits: The same of the newest delta, corrected to the step of the first (see `AnchorCandidate.fineness`).
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

    def has_aged(self, bits: float) -> bool:
        """Tell whether deltas have become that many bits per weight more expensive than the first."""
        return self.first_bits is not None and (self.last_bits or 0.0) > self.first_bits + bits

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> AnchorRecord:
        """Read it from JSON; CorruptFileError: a field is missing, unknown or of another type."""
        fields = require_fields("anchor", {**asdict(cls("")), **value}, _RECORD)
        require_amounts("anchor.delta_rms", fields["delta_rms"])
        try:
            return cls(**value)
        except TypeError as error:
            next_step = "Use another checkpoint of the run."
            raise CorruptFileError("anchor", "its state", repr(value)[:200], next_step) from error


@dataclass(frozen=True, kw_only=True)
class AnchorCandidate:
    """What a checkpoint of the run says about the anchor that the next one may use, so many training steps later."""

    record: AnchorRecord
    interval_steps: int | None = None

    def is_spent(self, anchor_every: int) -> bool:
        """Tell whether the next checkpoint should begin a new anchor: after so many, or when this one has aged."""
        return self.record.saves >= anchor_every or self.record.has_aged(_REFRESH_BITS)

    @property
    def fineness(self) -> float:
        """How much finer than the first delta's the steps of the next one must be, from 0 to 1.

        Each resume adds the error of its checkpoint to the run. With the square root of the interval between saves in
        the step, errors add up to the same over as many training steps, however often a run is saved and resumed.
        """
        if not self.record.delta_rms or self.interval_steps is None or self.record.interval_steps is None:
            return 1.0
        return min(math.sqrt(self.interval_steps / self.record.interval_steps), 1.0)

    @property
    def step_rms(self) -> dict[str, float]:
        """By name the rms from which the lossy codecs take the next delta's steps; empty before the first."""
        return {name: rms * self.fineness for name, rms in self.record.delta_rms.items()}

    def after_delta(self, bits_per_weight: float, measured_rms: Mapping[str, float], *, is_exact: bool) -> AnchorRecord:
        """Return the record once the next checkpoint is stored against the anchor, which may have measured drift."""
        delta_rms = {**self.record.delta_rms, **measured_rms}
        record = replace(self.record, saves=self.record.saves + 1, delta_rms=delta_rms)
        if is_exact and delta_rms:  # the best one of a rounded run: its bits say nothing of the next one's
            return record
        if not (is_exact or self.record.delta_rms):
            record = replace(record, interval_steps=self.interval_steps)
        bits = bits_per_weight + math.log2(self.fineness)
        return replace(record, first_bits=bits if record.first_bits is None else record.first_bits, last_bits=bits)


def link_anchor(source: Path, sha256: str, directory: Path) -> Anchor | None:
    """Link an anchor and all files that reading it takes into a checkpoint directory, and open it there, verified.

    None, with a warning, if a file is damaged or gone. Then there are no new links either.
    """
    made: list[Path] = []
    first, run = directory / anchor_file_name(sha256), source.parent.parent
    try:
        for _ in range(MOST_ANCHORS):
            link = directory / anchor_file_name(sha256)
            if not link.exists():
                with contextlib.suppress(FileExistsError):  # another rank was faster
                    link_or_copy(source, link)
                    made.append(link)
                if link.stat().st_nlink == 1:
                    _say_that_anchors_are_copied(run.parent if run.name.startswith("checkpoint-") else run)
            verify_anchor(link)
            sha256 = read_structure(link).get("anchor", {}).get("sha256")
            if sha256 is None:
                break
            source = source.with_name(anchor_file_name(sha256))
        return Anchor(first)
    except (CorruptFileError, FileNotFoundError) as error:
        warnings.warn(f"Weights are stored without reference: {error}", stacklevel=2)
        remove_files(made)
        return None


@functools.cache  # once per run
def _say_that_anchors_are_copied(run: Path) -> None:
    what = "each checkpoint has its own copies of the anchors that it needs, and takes their size as well"
    warnings.warn(f"The disk of {run} has no hard links: {what}.", stacklevel=3)


def unused_anchors(directory: Path) -> list[Path]:
    """List anchors that neither the manifest lists nor reading an encoded file beside them takes.

    Nothing is listed if a file cannot be read: it may still need any of the anchors.
    """
    anchors = set(directory.glob(f"*{ANCHOR_SUFFIX}"))
    if not anchors:
        return []
    try:
        listed = read_manifest(directory).files if (directory / MANIFEST_NAME).exists() else ()
        needed = {directory / name for name in listed}
        readers = set(directory.iterdir()) - anchors
        while readers:  # an anchor may be a difference to another one
            names = {anchor_file_name(sha256) for path in readers for sha256 in anchor_digests(path)}
            readers = anchors.intersection(directory / name for name in names) - needed
            needed |= readers
    except (CorruptFileError, OSError):
        return []
    return sorted(anchors - needed)


def measure_delta_rms(weights: Mapping[str, Any], anchor: Anchor | BaseWeights) -> dict[str, float]:
    """Return by name the rms of the difference of weights to their decoded anchor, which fixes lossy steps.

    Weights that are small, not finite or of another shape are left out. One tensor is decoded at a time.
    """
    measured = {}
    for name, tensor in weights.items():
        if isinstance(tensor, Tensor) and tensor.numel() >= SIZE_FLOOR and tensor.dtype in LOSSY_DTYPES:
            measured[name] = delta_rms(tensor.cpu(), name, anchor)
    return {name: rms for name, rms in measured.items() if rms is not None}


def delta_rms(tensor: Tensor, name: str, anchor: Anchor | BaseWeights) -> float | None:
    """Return the rms of the difference of a weight or shard to the anchor's; None where it is none, or no number."""
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
    """Estimate from Adam's moments by name the rms of how far each weight moves between two saves.

    Gradients count as independent. One gradient g moves a weight by lr * (1 - beta1**k) * g / sqrt(exp_avg_sq) within k
    steps, because Adam spreads it over the following ones. The root mean square of exp_avg is that of g times sqrt((1 -
    beta1) / (1 + beta1)). Measured in a language model from scratch and in a fine-tune, weights move 0.4 to 1.3 times
    as far: less while the learning rate falls. Of `interval_steps`, the training steps between two saves, at most 100
    count; default: those since the start. Parameters without a name are left out, and those that another rule than
    Adam's moves.
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
    """Return each parameter's `exp_avg_sq` by name, a hint for codecs, as far as the optimizer is Adam."""
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
        mean, square = (each[chunk].float() for each in moments)
        total += mean.square().div_(_divisors(square, eps)).nan_to_num_(0.0, 0.0, 0.0).mean().item() * len(mean)
    correction = (1 - beta2**steps) / (1 - beta1**steps) ** 2
    squares = max(total / first.numel(), 0.0)  # a damaged second moment may be negative
    return float(group["lr"]) * math.sqrt(squares * correction * _independent_updates(min(steps, most_steps), beta1))


def _divisors(square: Tensor, eps: float) -> Tensor:
    """Return the squares of the numbers by which Adam divides; `eps` counts where it changes one by a thousandth."""
    largest = (_IRRELEVANT_EPS * eps) ** 2
    return square if square.amin() >= largest else torch.where(square < largest, (square.sqrt() + eps) ** 2, square)


def _independent_updates(steps: float, beta: float) -> float:
    """Return how many independent updates of the same size move a weight as far as so many steps with momentum."""
    within = steps - 2 * beta * (1 - beta**steps) / (1 - beta) + beta**2 * (1 - beta ** (2 * steps)) / (1 - beta**2)
    return within * (1 + beta) / (1 - beta)
