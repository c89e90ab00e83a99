"""What lies in a training run: the size of each checkpoint in parts, and the loss."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from hf_trainweights.checkpoint.encoded.structure import ANCHOR_SUFFIX
from hf_trainweights.checkpoint.manifest import Manifest, read_manifest, shown_mode
from hf_trainweights.checkpoint.run.checkpoints import checkpoint_directories, checkpoint_step
from hf_trainweights.checkpoint.run.verification import OPTIMIZER_NAME
from hf_trainweights.errors import TrainWeightsError
from hf_trainweights.files.reading import TORCH_SUFFIXES, open_regular_file

PARTS = ("weights", "moments of the optimizer", "anchor", "other")
_WEIGHTS, _MOMENTS, _ANCHOR, _OTHER = PARTS
_PART_OF_ROLE = {"weight": _WEIGHTS, "buffer": _WEIGHTS, "exp_avg": _MOMENTS, "exp_avg_sq": _MOMENTS}
_STATE_NAME = "trainer_state.json"
_Inode = tuple[int, int]


@dataclass(frozen=True)
class SavedCheckpoint:
    """How a checkpoint of a run is stored.

    Args:
        step: The number in its name.
        mode: How it is stored, or why that is not known.
        part_bytes: Bytes on disk for each of `PARTS`. Weights that other checkpoints are differences to are an anchor;
            it counts for the first checkpoint that has it.
        linked_bytes: Bytes of anchors that count for an earlier checkpoint, so this one's links to them take no space.
        plain_bytes: What it would take without encoding.
        loss: The loss that its manifest records, if any.
    """

    step: int
    mode: str
    part_bytes: tuple[int, ...]
    linked_bytes: int
    plain_bytes: int
    loss: float | None


def read_run(root: Path) -> list[SavedCheckpoint]:
    """Return how the checkpoints of a run are stored, the first one first; no tensor is read."""
    directories = checkpoint_directories(root)[::-1]
    anchors = {_inode(file) for path in directories for file in path.rglob(f"*{ANCHOR_SUFFIX}")}
    seen: set[_Inode] = set()
    return [_saved(path, anchors, seen) for path in directories]


def read_losses(root: Path, checkpoints: Sequence[SavedCheckpoint]) -> dict[str, list[tuple[float, float]]]:
    """Return `loss` and `eval_loss` as steps and values: from the newest Trainer's state, else from the manifests."""
    for path in checkpoint_directories(root):
        history = _history(path / _STATE_NAME)
        curves = {name: list(_points(history, name)) for name in ("loss", "eval_loss")}
        if any(curves.values()):
            return {name: points for name, points in curves.items() if points}
    points = [(float(each.step), each.loss) for each in checkpoints if each.loss is not None]
    return {"loss": points} if points else {}


def _saved(path: Path, anchors: set[_Inode], seen: set[_Inode]) -> SavedCheckpoint:
    manifest, mode = None, "plain"
    try:
        manifest = read_manifest(path)
        mode = shown_mode(manifest)
    except FileNotFoundError:
        pass
    except (TrainWeightsError, OSError) as error:
        mode = f"its manifest cannot be read: {error}"
    stored: Counter[str] = Counter()
    linked_bytes = plain_bytes = 0
    for file in path.rglob("*"):
        if not file.is_file() or file.is_symlink():
            continue
        inode, size_bytes = _inode(file), file.stat().st_size
        if file.suffix == ANCHOR_SUFFIX:
            linked_bytes += size_bytes if inode in seen else 0
            stored[_ANCHOR] += 0 if inode in seen else size_bytes
        else:
            parts, plain = _parts_of(file.relative_to(path), size_bytes, manifest)
            plain_bytes += plain
            if inode in anchors:
                parts[_ANCHOR] = parts.pop(_WEIGHTS, 0)
            stored += parts
        seen.add(inode)
    loss = manifest.metrics.get("loss") if manifest else None
    return SavedCheckpoint(
        checkpoint_step(path),
        mode,
        tuple(stored[part] for part in PARTS),
        linked_bytes,
        plain_bytes,
        float(loss) if _is_number(loss) else None,
    )


def _parts_of(file: Path, size_bytes: int, manifest: Manifest | None) -> tuple[Counter[str], int]:
    """Return the bytes of each part of a file, named from its checkpoint, and what it would take without encoding."""
    entry = manifest.files.get(file.as_posix()) if manifest else None
    tensors = entry.report.get("tensors") if entry else None
    if entry is None or tensors is None:
        part = _MOMENTS if file.name == OPTIMIZER_NAME else _WEIGHTS if _may_be_weights(file) else _OTHER
        return Counter({part: size_bytes}), size_bytes
    parts: Counter[str] = Counter()
    for tensor in tensors:
        parts[_PART_OF_ROLE.get(tensor["role"], _OTHER)] += tensor["bytes_out"]
    # What lies around the tensors: names, checksums, the zip archive.
    parts[_OTHER] += max(0, size_bytes - parts.total())
    return parts, entry.plain_bytes


def _may_be_weights(file: Path) -> bool:
    return file.suffix == ".safetensors" or (file.suffix in TORCH_SUFFIXES and "model" in file.name)


def _inode(file: Path) -> _Inode:
    status = file.lstat()
    return status.st_dev, status.st_ino


def _history(file: Path) -> list[object]:
    """Return what a Trainer logged; nothing where the file is missing or makes no sense."""
    try:
        with open_regular_file(file) as stream:
            state = json.load(stream)
    except (TrainWeightsError, OSError, ValueError, RecursionError):
        return []
    history = state.get("log_history") if isinstance(state, dict) else None
    return history if isinstance(history, list) else []


def _points(history: list[object], name: str) -> Iterator[tuple[float, float]]:
    for entry in history:
        if isinstance(entry, dict) and _is_number(entry.get("step")) and _is_number(entry.get(name)):
            yield float(entry["step"]), float(entry[name])


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
