"""Checkpoint directories made small where they are, and plain again, whatever their layout."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from hf_trainweights.checkpoint.dcp.contents import dcp_directories
from hf_trainweights.checkpoint.manifest.manifest import Manifest
from hf_trainweights.checkpoint.planning.modes import ModeName
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.run.ranks import Ranks
from hf_trainweights.checkpoint.run.save_job import ANCHOR_EVERY_SAVES, BaseChoice, SaveJob
from hf_trainweights.checkpoint.sharded.in_place import compress_sharded, restore_sharded
from hf_trainweights.checkpoint.whole.rewriting import compress_whole, restore_whole
from hf_trainweights.errors import UnsupportedError


def compress_directory(
    path: str | Path,
    *,
    mode: ModeName = "lossless",
    rules: Mapping[str, Any] | None = None,
    keep_weights: bool = False,
    buffers: Collection[str] | None = None,
    optimizer_names: Mapping[Any, str] | None = None,
    metrics: Mapping[str, Any] | None = None,
    anchor_every: int = ANCHOR_EVERY_SAVES,
    anchor: str | Path | None = None,
    keep_base: bool = False,
    weights_only: bool = False,
) -> Manifest:
    """Turn a checkpoint directory of the Trainer, or of torch.save, into a small one.

    Weights become one `pytorch_model.bin` (`adapter_model.bin`), other torch files keep their names; a file that
    cannot be encoded stays as it is, with a warning. Calling it again with the same choices changes nothing.

    Args:
        path: The directory. Others called `checkpoint-<step>` beside it may hold the anchor.
        mode: A mode of `Policy`.
        rules: Rules of `Policy`.
        keep_weights: Leave the weight files as they are, plain.
        buffers: Names of weights that are buffers. Default: what an earlier save recorded, else see `find_buffers`.
        optimizer_names: Names of the optimizer's parameters by their index in `optimizer.pt`.
        metrics: For the manifest.
        anchor_every: The most checkpoints one anchor serves.
        anchor: Plain weights outside the run, a directory or a file, that its first checkpoint is stored against.
        keep_base: Keep those weights in the run, linked or copied, so that the checkpoint needs nothing outside.
        weights_only: Take a model without training state as well. `restore_directory` gives it back its safetensors.

    Returns:
        The manifest that was written.

    Raises:
        ConfigError: Mode or rules are wrong, a rule names nothing there, there is nothing at `path` or `anchor`,
            or there is a model without training state and not `weights_only`.
        CorruptFileError: A file is damaged or does not fit the manifest, or two files hold different states and nothing
            tells which one is newer; nothing has changed.
        UnsupportedError: It is of DeepSpeed, or of FSDP with LOCAL_STATE_DICT, or sharded and there is an `anchor`.
        SaveError: The disk is full or refuses; every file is whole, old or new.

    Examples:
        >>> import tempfile, torch
        >>> path = Path(tempfile.mkdtemp())
        >>> torch.save({"weight": torch.zeros(64, 64)}, path / "pytorch_model.bin")
        >>> compress_directory(path).mode
        'lossless'
    """
    path = Path(path).absolute()
    base = None if anchor is None else BaseChoice(Path(anchor).absolute(), keep_base)
    job = SaveJob.in_place(path, Policy(mode, rules or {}), anchor_every, base)
    if dcp_directories(path):
        return _compress_sharded(job, buffers, metrics)
    return compress_whole(job, keep_weights, buffers, optimizer_names or {}, metrics, weights_only=weights_only)


def restore_directory(path: str | Path) -> Manifest:
    """Turn a small checkpoint directory back into plain files that torch.load reads without this package.

    Args:
        path: The directory. It may have been moved.

    Returns:
        The manifest that was written, its mode "plain".

    Raises:
        ConfigError: There is no checkpoint at `path`.
        CorruptFileError: Something in it is damaged; nothing has changed unless only decoding shows it.
        MissingAnchorError: It was moved without the anchor it needs.
        SaveError: The disk is full or refuses; every file is whole, small or plain.

    Examples:
        >>> import tempfile, torch
        >>> path = Path(tempfile.mkdtemp())
        >>> torch.save({"weight": torch.zeros(64, 64)}, path / "pytorch_model.bin")
        >>> compress_directory(path).mode, restore_directory(path).mode
        ('lossless', 'plain')
    """
    path = Path(path).absolute()
    if dcp_directories(path):
        return restore_sharded(path)
    return restore_whole(path)


def _compress_sharded(job: SaveJob, buffers: Collection[str] | None, metrics: Mapping[str, Any] | None) -> Manifest:
    """Do in this process what the ranks of a sharded checkpoint would do."""
    if job.base is not None:
        next_step = "Leave `anchor` out: its first checkpoint is stored in full."
        raise UnsupportedError(str(job.path), "a checkpoint in whole files with `anchor`", "a sharded one", next_step)
    options: dict[str, Any] = {"buffers": buffers, "metrics": metrics, "anchor_every": job.anchor_every}
    return cast("Manifest", compress_sharded(job.path, job.policy, Ranks(), **options))  # it is the coordinator
