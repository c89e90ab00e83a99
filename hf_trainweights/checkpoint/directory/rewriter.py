"""Turns an existing checkpoint directory into a small one where it is, and back, one atomic file at a time.

The manifest goes first and comes back last, so between the two the directory is a plain one: at every moment each file
is whole, old or new, and Transformers loads it. A weights file is written before the ones it replaces go, because
loaders prefer those: `model.safetensors`, the index of shards, the shards.
"""

from __future__ import annotations

import contextlib
import json
import stat
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.directory.anchor_choice import ANCHOR_EVERY_SAVES, find_anchor_source
from hf_trainweights.checkpoint.directory.buffers import find_buffers
from hf_trainweights.checkpoint.directory.discovery import STATE_NAME, zip_problem
from hf_trainweights.checkpoint.directory.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    list_files,
    require_intact,
    write_manifest,
)
from hf_trainweights.checkpoint.directory.plain_weights import load_if_possible, read_weights, weight_files
from hf_trainweights.checkpoint.directory.writer import (
    WEIGHTS_NAME,
    Weights,
    abandoned_files,
    saving,
    unused_anchors,
    write_encoded,
    write_weights,
)
from hf_trainweights.checkpoint.encoded.anchor_files import register_anchor_directory
from hf_trainweights.checkpoint.encoded.encoder import encode_file
from hf_trainweights.checkpoint.encoded.key_paths import UnstorableError
from hf_trainweights.checkpoint.encoded.plan import Plan, TensorPlan
from hf_trainweights.checkpoint.encoded.reader import is_encoded, load_file, read_report, read_structure
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.errors import ConfigError, UnsupportedError
from hf_trainweights.files import atomic
from hf_trainweights.files.atomic import create_file, move_file, replace_file
from hf_trainweights.files.digests import digest_files

OPTIMIZER_NAME = "optimizer.pt"
PLAIN_MODE = "plain"

_RNG_PREFIX = "rng_state"
_ADAPTER_NAME = "adapter_model.bin"
_CHOICES = ("policy", "keep_weights")  # keys in the manifest's metadata
_TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# Smaller ones are left alone: RNG states, schedulers, scalers, training_args.bin.
_MIN_OTHER_BYTES = 64 << 10
_SHARDED_STATE = ("pytorch_model_fsdp*", "optimizer_[0-9]*", "global_step*", "*.distcp", "zero_to_fp32.py")


def compress_directory(
    path: str | Path,
    *,
    mode: str = "lossless",
    rules: Mapping[str, Any] | None = None,
    keep_weights: bool = False,
    buffers: Collection[str] | None = None,
    optimizer_names: Mapping[Any, str] | None = None,
    metrics: Mapping[str, Any] | None = None,
    anchor_every: int = ANCHOR_EVERY_SAVES,
) -> Manifest:
    """Turn a checkpoint directory of the Trainer, or of torch.save, into a small one.

    Weights become one `pytorch_model.bin` (`adapter_model.bin`), other torch files keep their names; what cannot be
    encoded stays as it is, with a warning. Calling it again with the same choices changes nothing.

    Args:
        path: The directory. Others called `checkpoint-<step>` beside it may hold the anchor.
        mode: A mode of `Policy`.
        rules: Rules of `Policy`.
        keep_weights: Leave the weight files as they are, plain.
        buffers: Names of weights that are buffers. Default: what an earlier save recorded, else see `find_buffers`.
        optimizer_names: Names of the optimizer's parameters by their index in `optimizer.pt`.
        metrics: For the manifest.
        anchor_every: The most checkpoints one anchor serves.

    Returns:
        The manifest that was written.

    Raises:
        ConfigError: Mode or rules are wrong, or there is no checkpoint at `path`.
        CorruptFileError: Its manifest does not verify, or its weights cannot be read; nothing has changed.
        UnsupportedError: It is a sharded FSDP or DeepSpeed checkpoint.
        SaveError: The disk is full or refuses; every file is whole, old or new.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp())
        >>> torch.save({"weight": torch.zeros(64, 64)}, path / "pytorch_model.bin")
        >>> compress_directory(path).mode
        'lossless'
    """
    path = Path(path).absolute()
    policy = Policy(mode, rules or {})
    _require_checkpoint(path)
    previous = require_intact(path) if (path / MANIFEST_NAME).exists() else None
    choices = {"policy": policy.to_dict(), "keep_weights": keep_weights}
    if previous and choices.items() <= previous.metadata.items():
        return previous
    register_anchor_directory(path)
    names = optimizer_names or {}
    optimizer = _optimizer_state(path, policy, names)
    job = None if keep_weights else _weights_to_store(path, previous, buffers, optimizer, names)
    with saving(path), _rewriting(path):
        entries, anchor = _compress_weights(path, previous, policy, job, anchor_every)
        entries |= _compress_others(path, policy, names)
        fields = _manifest_fields(path, previous, metrics, choices)
        return _finish(path, previous, Manifest(entries, mode, anchor=anchor, **fields))


def write_weights_aside(path: str | Path, weights: Mapping[str, Any]) -> Path:
    """Write weights into a checkpoint directory under a temporary name, plain and as fast as torch.save.

    Args:
        path: The directory.
        weights: A flat state dict under module names; it may change afterwards.

    Returns:
        The file, for `adopt_weights`. Nobody waited for the disk.

    Raises:
        SaveError: The disk is full or refuses; nothing is left behind.
    """
    path = Path(path).absolute()
    aside = atomic.temporary_path(path)
    with saving(path), create_file(aside, durable=False) as file:
        torch.save(dict(weights), file)
    return aside


def adopt_weights(path: str | Path, aside: Path) -> None:
    """Put weights that were written aside in the place of a checkpoint's weight files.

    For a Trainer's files that name weights otherwise than the modules do: from the module's names it resumes exactly.

    Args:
        path: The directory.
        aside: What `write_weights_aside` returned; it is moved.

    Raises:
        ConfigError: There is no checkpoint at `path`.
        UnsupportedError: It is a sharded FSDP or DeepSpeed checkpoint.
        CorruptFileError: An index of shards cannot be read; nothing has changed.
        SaveError: The disk refuses; the old weights are there, or the new ones.
    """
    path = Path(path).absolute()
    _require_checkpoint(path)
    with saving(path), _rewriting(path):
        replaced = _replaced_by(path / WEIGHTS_NAME)
        move_file(aside, path / WEIGHTS_NAME)
        _remove(replaced)


def restore_directory(path: str | Path) -> Manifest:
    """Turn a small checkpoint directory back into plain files that torch.load reads without this package.

    Args:
        path: The directory. It may have been moved.

    Returns:
        The manifest that was written, its mode "plain".

    Raises:
        ConfigError: There is no checkpoint at `path`.
        CorruptFileError: Something in it is damaged; nothing has changed where the manifest shows it.
        MissingAnchorError: It was moved without the anchor it needs.
        SaveError: The disk is full or refuses; every file is whole, small or plain.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp())
        >>> torch.save({"weight": torch.zeros(64, 64)}, path / "pytorch_model.bin")
        >>> compress_directory(path).mode, restore_directory(path).mode
        ('lossless', 'plain')
    """
    path = Path(path).absolute()
    _require_checkpoint(path)
    previous = require_intact(path) if (path / MANIFEST_NAME).exists() else None
    register_anchor_directory(path)
    with saving(path), _rewriting(path):
        for file in _torch_files(path):
            if is_encoded(file):
                tree = load_file(file)
                with replace_file(file) as plain:
                    torch.save(tree, plain)
        return _finish(path, None, Manifest({}, PLAIN_MODE, **_manifest_fields(path, previous)))


def _require_checkpoint(path: Path) -> None:
    if not path.is_dir() or not (weight_files(path) or _torch_files(path)):
        found = "a directory without any" if path.is_dir() else "no directory"
        next_step = "Pass one checkpoint, e.g. out/checkpoint-500, not the run."
        raise ConfigError(str(path), "a directory with weights or other torch files", found, next_step)
    for pattern in _SHARDED_STATE:
        found = next(path.glob(pattern), None)
        if found is not None:
            next_step = "Leave FSDP and DeepSpeed checkpoints as they are, or have the Trainer save full ones."
            raise UnsupportedError(str(path), "a checkpoint in whole files", found.name, next_step)


def _optimizer_state(path: Path, policy: Policy, names: Mapping[Any, str]) -> dict[str, Any]:
    """Return the optimizer's state, empty if there is none, after checking that the policy can plan it."""
    state = load_if_possible(path / OPTIMIZER_NAME) if (path / OPTIMIZER_NAME).exists() else None
    state = state if isinstance(state, dict) else {}
    policy.plan_optimizer(state, names=names or None)  # a rule that needs names fails before anything changes
    return state


def _weights_to_store(
    path: Path,
    previous: Manifest | None,
    buffers: Collection[str] | None,
    optimizer: Mapping[str, Any],
    optimizer_names: Mapping[Any, str],
) -> Weights | None:
    """Return the weights that are to be written, or None where there are none, or none without a further loss."""
    sources = weight_files(path)
    if not sources or _is_lossy(sources[0]):
        return None
    file_name = _ADAPTER_NAME if sources[0].name.startswith("adapter") else WEIGHTS_NAME
    weights = read_weights(sources[0])
    buffers = _recorded_buffers(path, previous, file_name) if buffers is None else buffers
    buffers = find_buffers(weights, optimizer) if buffers is None else buffers
    return Weights(weights, buffers, optimizer, optimizer_names, file_name)


def _recorded_buffers(path: Path, previous: Manifest | None, file_name: str) -> set[str] | None:
    """Return the buffers that a plain loop's checkpoint names, or the manifest; None where neither knows."""
    if (path / STATE_NAME).is_file():
        return set(load_file(path / STATE_NAME).get("names", {}).get("buffers", ()))
    entry = previous.files.get(file_name) if previous else None
    tensors = entry.report.get("tensors", ()) if entry else ()
    return {tensor["name"] for tensor in tensors if tensor["role"] == "buffer"} if tensors else None


def _compress_weights(
    path: Path, previous: Manifest | None, policy: Policy, weights: Weights | None, anchor_every: int
) -> tuple[dict[str, FileEntry], Mapping[str, Any] | None]:
    """Write the weights and removes the files they replace; returns manifest entries and the anchor's state."""
    if weights is None:
        return {}, previous and previous.anchor
    replaced = _replaced_by(path / weights.file_name)
    source = find_anchor_source(path.parent, weights.file_name, exclude=path)
    entries, anchor = write_weights(
        path, policy, weights, anchor=source, anchor_every=anchor_every, final=path, open_file=replace_file
    )
    _remove(replaced)
    return entries, anchor and anchor.to_dict()


def _replaced_by(weights_file: Path) -> list[Path]:
    """List the files that a new weights file makes wrong or idle."""
    others = [file for file in weight_files(weights_file.parent) if file.name != weights_file.name]
    # Digests of a quantized model's weight files go with these; the manifest has those of the new ones.
    return others + digest_files(weights_file.parent)


def _is_lossy(path: Path) -> bool:
    """Tell whether a file was encoded with a loss: encoding it once more would add to its error, or hide it."""
    if path.suffix not in _TORCH_SUFFIXES or not is_encoded(path):
        return False
    # What is rounded and then stored losslessly has a bound, too.
    storages = read_structure(path)["storages"]
    return any("bound" in storage or not CODECS[storage["codec"]].lossless for storage in storages)


def _torch_files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.suffix in _TORCH_SUFFIXES and file.is_file())


def _compress_others(path: Path, policy: Policy, optimizer_names: Mapping[Any, str]) -> dict[str, FileEntry]:
    """Write what is no weight file anew, unless it is small or that would lose something."""
    entries = {}
    done = weight_files(path)
    for file in _torch_files(path):
        is_optimizer = file.name == OPTIMIZER_NAME
        is_worth_it = is_optimizer or file.stat().st_size >= _MIN_OTHER_BYTES
        if file in done or not is_worth_it or _is_lossy(file):
            continue
        tree = load_if_possible(file)
        if tree is None:
            warnings.warn(f"{file} stays as it is: it holds more than plain data", stacklevel=3)
            continue
        try:
            plan = _plan_tree(tree, policy, optimizer_names if is_optimizer else None)
            encoded = encode_file(tree, plan, spool_directory=path)
        except UnstorableError as error:
            warnings.warn(f"{file} stays as it is: {error}", stacklevel=3)
            continue
        entries[file.name] = write_encoded(file, encoded, replace_file)
    return entries


def _plan_tree(tree: Any, policy: Policy, optimizer_names: Mapping[Any, str] | None = None) -> Plan:
    """Plan a file by what it looks like: an optimizer's state, a module's, or a dict of those; the rest is exact."""
    if not isinstance(tree, dict):
        return {}
    if tree.keys() >= {"state", "param_groups"}:
        return policy.plan_optimizer(tree, names=optimizer_names or None)
    if tree and all(isinstance(value, Tensor) for value in tree.values()):
        return policy.plan_weights(tree)
    plan: dict[Any, TensorPlan] = {}
    for key, value in tree.items():
        for path, each in _plan_tree(value, policy).items():
            moment = (key, *each.exp_avg_sq) if each.exp_avg_sq else None
            plan[(key, *path)] = replace(each, exp_avg_sq=moment)
    return plan


@contextlib.contextmanager
def _rewriting(path: Path) -> Iterator[None]:
    """Take the manifest away, and keeps the directory's times: rotation sorts by them."""
    times = path.stat()
    try:
        _remove([path / MANIFEST_NAME, *(file for file in abandoned_files(path) if file.is_file())])
        yield
    finally:
        atomic.file_system.set_times(path, times.st_atime_ns, times.st_mtime_ns)


def _remove(files: list[Path]) -> None:
    """Remove what is there of `files`, for good and in this order: an index of shards before its shards."""
    for file in files:
        if file.exists():
            atomic.file_system.unlink(file)
            atomic.file_system.sync_directory(file.parent)


def _manifest_fields(
    path: Path,
    previous: Manifest | None,
    metrics: Mapping[str, Any] | None = None,
    choices: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what a manifest says beside the files: from the last one, or from the Trainer's own state."""
    fields: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    if previous is not None:
        fields = {"step": previous.step, "epoch": previous.epoch, "metrics": previous.metrics}
        metadata = {key: value for key, value in previous.metadata.items() if key not in _CHOICES}
    else:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            state = json.loads((path / "trainer_state.json").read_bytes())
            fields = {"step": int(state["global_step"]), "epoch": float(state["epoch"])}
    if metrics is not None:
        fields["metrics"] = metrics
    return {**fields, "metadata": {**metadata, **(choices or {})}}


def _finish(path: Path, previous: Manifest | None, manifest: Manifest) -> Manifest:
    """Remove what the files no longer need and writes the manifest over all that is there."""
    _remove(unused_anchors(path))
    files = dict(manifest.files)
    for name, status in list_files(path).items():
        if name in files or name == MANIFEST_NAME or not stat.S_ISREG(status.st_mode):
            continue
        if name.startswith(_RNG_PREFIX) and zip_problem(path / name):
            continue  # another rank is still writing it
        files[name] = FileEntry.of(path / name, _kept_report(path / name, previous))
    manifest = replace(manifest, files=files)
    write_manifest(path, manifest)
    return manifest


def _kept_report(path: Path, previous: Manifest | None) -> Mapping[str, Any] | None:
    """Return what is known about a file that was not written now, also where an interruption left no manifest."""
    if previous is not None and path.name in previous.files:
        return previous.files[path.name].report
    return read_report(path) if path.suffix in _TORCH_SUFFIXES and is_encoded(path) else None
