"""Which anchor the weights of the next checkpoint are stored against, and when a new anchor begins.

A star, not a chain: every checkpoint of a run refers to one earlier weights file, the anchor, by its DECODED values, so
errors never add up and reading takes two files. The manifest of each checkpoint carries the `AnchorState`, so the star
goes on after a restart, and any one surviving checkpoint is enough to continue it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.checkpoint.directory.discovery import checkpoint_directories, checkpoint_step
from hf_trainweights.checkpoint.directory.manifest import read_manifest
from hf_trainweights.checkpoint.encoded.anchor import Anchor
from hf_trainweights.checkpoint.encoded.anchor_files import anchor_file_name
from hf_trainweights.checkpoint.encoded.encoder import EncodedFile, encode_file
from hf_trainweights.checkpoint.planning.policy import Policy, measure_delta_rms
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files import atomic
from hf_trainweights.files.atomic import link_or_copy

ANCHOR_EVERY_SAVES = 8

# A delta that costs one bit per weight more than the first one did is twice as large: the anchor has aged.
_REFRESH_BITS = 1.0
# near-lossless errs by rms / (4 * sqrt(12)) = rms / 13.9 of a delta at every save; rounding an anchor errs less.
_ROUNDING_SHARE = 1 / 16


@dataclass(frozen=True)
class AnchorState:
    """What later checkpoints must know about an anchor; kept in the manifest of each that uses it.

    Args:
        sha256: Digest of the anchor file.
        saves: How many checkpoints it has served, the one that it is included.
        first_bits: Stored bits per weight of the first delta against it; None before that.
        last_bits: The same of the newest delta, without the bits that a finer step cost (see `AnchorSource.fineness`).
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
        aged = self.first_bits is not None and (self.last_bits or 0.0) > self.first_bits + _REFRESH_BITS
        return self.saves >= anchor_every or aged

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> AnchorState:
        """Read what `to_dict` returned.

        Raises:
            CorruptFileError: A field is missing, unknown or of another type.
        """
        try:
            state = cls(**value)
            valid = len(state.sha256) == 64 and state.saves >= 1
            valid = valid and all(isinstance(bits, float | None) for bits in (state.first_bits, state.last_bits))
            valid = valid and all(rms >= 0 for rms in state.delta_rms.values())
            valid = valid and (state.interval_steps is None or state.interval_steps >= 1)
        except (TypeError, AttributeError) as error:
            raise _corrupt_state(value) from error
        if not valid:
            raise _corrupt_state(value)
        return state


@dataclass(frozen=True)
class AnchorSource:
    """An anchor on disk that the next checkpoint may use.

    Args:
        path: The file, under whatever name the checkpoint that holds it has for it.
        state: What is known about it.
        interval_steps: Training steps from the save before the next checkpoint to that; None where unknown.
    """

    path: Path
    state: AnchorState
    interval_steps: int | None = None

    @property
    def fineness(self) -> float:
        """How much finer than the first delta's the steps of the next one must be, from 0 to 1.

        Each resume adds the error of its checkpoint to the run. With the square root of the interval between saves in
        the step, errors add up to the same over as many training steps, however often a run is saved and resumed.
        """
        if self.interval_steps is None or self.state.interval_steps is None:
            return 1.0
        return min(math.sqrt(self.interval_steps / self.state.interval_steps), 1.0)

    @property
    def step_rms(self) -> dict[str, float]:
        """By parameter name the rms from which the lossy codecs take the next delta's steps; empty before the first."""
        return {name: rms * self.fineness for name, rms in self.state.delta_rms.items()}


@dataclass(frozen=True)
class EncodedWeights:
    """The weights of a checkpoint, encoded.

    Args:
        encoded: The file.
        anchor: The state to store with it, or None if this file refers to no other and is the next anchor itself.
    """

    encoded: EncodedFile
    anchor: AnchorState | None


def find_anchor_source(root: Path, weights_name: str, *, exclude: Path) -> AnchorSource | None:
    """Look through a run's checkpoints, newest first, for an anchor to continue with.

    Args:
        root: Where the `checkpoint-<step>` directories are.
        weights_name: Name of the weights file in each, which may be the anchor itself.
        exclude: The checkpoint that is being written.

    Returns:
        The first one whose manifest reads and whose anchor is there; its digest is checked when it is opened.

    Raises:
        OSError: `root` cannot be read.
    """
    others = [path for path in checkpoint_directories(root) if path.absolute() != exclude.absolute()]
    for directory in others:
        try:
            manifest = read_manifest(directory)
            state = AnchorState.from_dict(manifest.anchor) if manifest.anchor else None
        except (CorruptFileError, OSError):
            continue
        if state is None:
            continue
        weights = manifest.files.get(weights_name)
        is_anchor_itself = weights is not None and weights.sha256 == state.sha256
        path = directory / (weights_name if is_anchor_itself else anchor_file_name(state.sha256))
        if path.is_file() and not path.is_symlink():
            return AnchorSource(path, state, _interval_steps(others, exclude))
    return None


def _interval_steps(newest_first: Sequence[Path], path: Path) -> int | None:
    try:
        step = checkpoint_step(path)
    except ValueError:  # a directory that is no run's
        return None
    # Later ones are of a run that was resumed from before them.
    return next((step - saved for saved in map(checkpoint_step, newest_first) if saved < step), None)


def link_anchor(source: AnchorSource, directory: Path) -> Anchor | None:
    """Link an anchor into a checkpoint directory under its digest's name and opens it there.

    Args:
        source: The anchor.
        directory: Where the link is made.

    Returns:
        The anchor, verified; None, with a warning, if it is damaged or gone. Then there is no link either.

    Raises:
        OSError: The disk is full or refuses.
    """
    link = directory / anchor_file_name(source.state.sha256)
    try:
        if not link.exists():
            link_or_copy(source.path, link)
        return Anchor(link)
    except (CorruptFileError, FileNotFoundError) as error:
        warnings.warn(f"The next checkpoint is stored without reference: {error}", stacklevel=2)
        if link.exists():
            atomic.file_system.unlink(link)
        return None


def encode_against(
    weights: Mapping[str, Any],
    policy: Policy,
    anchor: Anchor,
    source: AnchorSource,
    *,
    buffers: Collection[str] = (),
    anchor_link: Path,
    spool_directory: Path | None = None,
) -> EncodedWeights | None:
    """Encode weights as a difference against an anchor, tensor by tensor where that is smaller.

    Args:
        weights: A flat state dict under module names.
        policy: Which codec for which tensor.
        anchor: The opened anchor.
        source: Where it came from, and what is known about it.
        buffers: Names in `weights` that are buffers.
        anchor_link: Where the anchor's link will lie when the checkpoint is complete.
        spool_directory: For payloads too large for memory.

    Returns:
        The file and the anchor's next state; None if the policy has no use for an anchor.

    Raises:
        UnstorableError: A value cannot be stored; the error names its key.
        OSError: The disk is full or refuses.
    """
    moved = dict.fromkeys(weights, 1.0)
    plan = policy.plan_weights(weights, buffers=buffers, anchor=anchor, delta_rms=moved)
    codecs = [codec for each in plan.values() for codec in each.candidates]
    if not any("anchor" in codec.references for codec in codecs):
        return None
    state = source.state
    # To measure takes as long as to decode the anchor, and only lossy codecs have a use for it.
    if not state.delta_rms and not all(codec.lossless for codec in codecs):
        delta_rms = measure_delta_rms(weights, anchor)
        # The anchor itself, made small once more, says nothing about how far weights move.
        delta_rms = delta_rms if any(delta_rms.values()) else {}
        state = replace(state, delta_rms=delta_rms, interval_steps=source.interval_steps)
        source = replace(source, state=state)
    plan = policy.plan_weights(weights, buffers=buffers, anchor=anchor, delta_rms=source.step_rms)
    encoded = encode_file(weights, plan, anchor=anchor, anchor_link=anchor_link, spool_directory=spool_directory)
    if encoded.anchor_sha256 is None:
        return EncodedWeights(encoded, None)
    bits = _bits_per_weight(encoded, weights) + math.log2(source.fineness)
    first_bits = bits if state.first_bits is None else state.first_bits
    return EncodedWeights(encoded, replace(state, saves=state.saves + 1, first_bits=first_bits, last_bits=bits))


def encode_full(
    weights: Mapping[str, Any],
    policy: Policy,
    *,
    buffers: Collection[str] = (),
    drift_rms: Mapping[str, float],
    spool_directory: Path | None = None,
) -> EncodedWeights:
    """Encode weights without reference, so that the file can be the next anchor.

    Where the policy is lossy, a weight is rounded to bfloat16 if that errs less than near-lossless errs at every save:
    as in training from scratch, and not in a fine-tune.

    Args:
        weights: A flat state dict under module names.
        policy: Which codec for which tensor.
        buffers: Names in `weights` that are buffers.
        drift_rms: By name how far a weight moves between two saves; one without an entry is stored exactly.
        spool_directory: For payloads too large for memory.

    Returns:
        The file; its anchor is None.

    Raises:
        UnstorableError: A value cannot be stored; the error names its key.
        OSError: The disk is full or refuses.
    """
    plan = dict(policy.plan_weights(weights, buffers=buffers))
    for path, each in policy.plan_anchor(weights, buffers=buffers).items():
        drift = drift_rms.get(each.name, 0.0)
        if each.round_to and drift and _rounding_rms(weights[each.name], each.round_to) <= drift * _ROUNDING_SHARE:
            plan[path] = each
    return EncodedWeights(encode_file(weights, plan, spool_directory=spool_directory), None)


def expected_drift_rms(optimizer: Mapping[str, Any], names: Mapping[Any, str]) -> dict[str, float]:
    """Estimate from Adam's moments how far each weight moves between two saves: as far as since the start of the run.

    The last update, sqrt(steps) times over: what independent steps add up to, and less than a trend does.

    Args:
        optimizer: `optimizer.state_dict()`.
        names: Its parameters' names by their index in it.

    Returns:
        Root mean square by name; without parameters that have no name or no Adam state.
    """
    drift = {}
    for group in optimizer.get("param_groups", ()):
        for index in group["params"]:
            state = optimizer["state"].get(index, {})
            if index in names and {"step", "exp_avg", "exp_avg_sq"} <= state.keys() and "betas" in group:
                drift[names[index]] = _adam_drift_rms(state, float(group["lr"]), group["betas"])
    return drift


def _adam_drift_rms(state: Mapping[str, Any], lr: float, betas: tuple[float, float]) -> float:
    steps = float(state["step"])
    first, second = state["exp_avg"], state["exp_avg_sq"]
    if steps < 1 or not first.numel():
        return 0.0
    squares = (first.float().square() / second.float()).nan_to_num_(0.0, 0.0, 0.0).mean().item()
    correction = (1 - betas[1] ** steps) / (1 - betas[0] ** steps) ** 2
    return lr * math.sqrt(squares * correction * steps)


def _rounding_rms(weight: Tensor, dtype: torch.dtype) -> float:
    error = weight.detach().float() - weight.detach().to(dtype).float()
    return error.square().mean().sqrt().item()


def _bits_per_weight(encoded: EncodedFile, weights: Mapping[str, Any]) -> float:
    reports = [report for report in encoded.report if report.role == "weight"]
    elements = sum(weights[report.name].numel() for report in reports)
    return 8 * sum(report.bytes_out for report in reports) / max(elements, 1)


def _corrupt_state(value: object) -> CorruptFileError:
    return CorruptFileError("anchor", "its state", repr(value)[:200], "Use another checkpoint of the run.")
