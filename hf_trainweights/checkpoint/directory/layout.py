"""The two layouts of a checkpoint on the disk, which are used alike, and a checkpoint of either made small or plain.

Here alone is asked which one it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hf_trainweights.checkpoint.dcp.contents import dcp_directories
from hf_trainweights.checkpoint.encoded.reader import register_anchor_directory
from hf_trainweights.checkpoint.manifest import Manifest
from hf_trainweights.checkpoint.planning.policy import ModeName, Policy
from hf_trainweights.checkpoint.run.job import ANCHOR_EVERY_SAVES, BaseChoice, SaveJob, require_count
from hf_trainweights.checkpoint.run.verification import progress_problem
from hf_trainweights.checkpoint.sharded.rewriting import ShardedLayout
from hf_trainweights.checkpoint.whole.rewriting import WholeLayout

Layout = WholeLayout | ShardedLayout
"""How a checkpoint lies on the disk. Both have the same functions, and `directories`: itself, then those in it."""


def layout_of(path: Path) -> Layout:
    """Return the layout of a checkpoint; of a directory that holds none, that of whole files."""
    parts = dcp_directories(path)
    return ShardedLayout(path, parts) if parts else WholeLayout(path)


def plain_problem(path: Path) -> str | None:
    """Say why a checkpoint without a manifest cannot be used; None if all that a resume needs can be read."""
    return progress_problem(path) or layout_of(path).problem()


def register_checkpoint(path: Path) -> None:
    """Look for anchors in a checkpoint, wherever it was when it was written."""
    for directory in layout_of(path).directories:
        register_anchor_directory(directory)


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
        anchor_every: The most checkpoints one anchor serves, at least 1.
        anchor: Plain weights outside the run, a directory or a file, that its first checkpoint is stored against.
        keep_base: Keep those weights in the run, linked or copied, so that the checkpoint needs nothing outside.
        weights_only: Take a model without training state as well. `restore_directory` gives it back its safetensors.

    Returns:
        The manifest that was written.

    Raises:
        ConfigError: An option is wrong, a rule names nothing there, there is nothing at `path` or `anchor`,
            or there is a model without training state and not `weights_only`.
        CorruptFileError: A file is damaged or does not fit the manifest, or two files hold different states and nothing
            tells which one is newer; nothing has changed.
        UnsupportedError: It is of DeepSpeed, or of FSDP with LOCAL_STATE_DICT, or it is sharded and there is an
            `anchor` or `keep_weights`.
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
    wanted: dict[str, Any] = {"keep_weights": keep_weights, "weights_only": weights_only}
    known: dict[str, Any] = {"buffers": buffers, "optimizer_names": optimizer_names or {}, "metrics": metrics}
    saves = require_count("anchor_every", anchor_every)
    return layout_of(path).compress(SaveJob(path, Policy(mode, rules or {}), saves, base, **wanted, **known))


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
    return layout_of(Path(path).absolute()).restore()
