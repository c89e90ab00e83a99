"""Shows the sizes of a training run's checkpoints and its loss, as sections of a report or as one picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from hf_trainweights.checkpoint.codecs.base import ROLES
from hf_trainweights.checkpoint.encoded.structure import ANCHOR_SUFFIX
from hf_trainweights.checkpoint.manifest import Manifest, read_manifest, shown_mode
from hf_trainweights.checkpoint.run.checkpoints import (
    OPTIMIZER_NAME,
    checkpoint_directories,
    checkpoint_step,
    trainer_state,
)
from hf_trainweights.errors import TrainWeightsError
from hf_trainweights.files.reading import TORCH_SUFFIXES
from hf_trainweights.report.charts import WIDTH, Bar, Curve, bar_chart, line_chart, size, size_unit
from hf_trainweights.report.drawing import Drawing, stack
from hf_trainweights.report.page import Section, Table

PARTS = ("weights", "moments of the optimizer", "anchor", "other")
_WEIGHTS, _MOMENTS, _ANCHOR, _OTHER = PARTS
_PART_OF_ROLE = dict.fromkeys(ROLES, _MOMENTS) | {"weight": _WEIGHTS, "buffer": _WEIGHTS, "other": _OTHER}
_Inode = tuple[int, int]
_MOST_ROWS = 120
_LINKED = "link to an anchor, no bytes"
_BESIDE_WIDTH, _BESIDE_HEIGHT = 440, 160


@dataclass(frozen=True)
class SavedCheckpoint:
    """Sizes and loss of one checkpoint of a run.

    Args:
        step: The number in its name.
        mode: Its mode, or why the mode is unknown.
        part_bytes: Bytes on disk for each of `PARTS`. Weights count as an anchor if other checkpoints store differences
            to them; an anchor counts for the first checkpoint that has it.
        linked_bytes: Bytes of anchors that count for an earlier checkpoint: this one has links, which take no space.
        plain_bytes: Its bytes if no file were encoded.
        loss: The loss that its manifest records, if any.
    """

    step: int
    mode: str
    part_bytes: tuple[int, ...]
    linked_bytes: int
    plain_bytes: int
    loss: float | None


def read_run(root: Path) -> list[SavedCheckpoint]:
    """Read the sizes of a run's checkpoints, the oldest first; this reads manifests and no tensors."""
    directories = checkpoint_directories(root)[::-1]
    # An anchor is a link to the weights of an earlier checkpoint: both names have one inode, and take space once.
    anchors = {_inode(file) for path in directories for file in path.rglob(f"*{ANCHOR_SUFFIX}")}
    seen: set[_Inode] = set()
    return [_saved(path, anchors, seen) for path in directories]


def read_losses(root: Path, checkpoints: Sequence[SavedCheckpoint]) -> dict[str, list[tuple[float, float]]]:
    """Return steps and values of `loss` and `eval_loss` from the newest Trainer's state, else from the manifests."""
    for path in checkpoint_directories(root):
        history = _history(path)
        curves = {name: list(_points(history, name)) for name in ("loss", "eval_loss")}
        if any(curves.values()):
            return {name: points for name, points in curves.items() if points}
    points = [(float(saved.step), saved.loss) for saved in checkpoints if saved.loss is not None]
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
        tuple(stored[name] for name in PARTS),
        linked_bytes,
        plain_bytes,
        float(loss) if _is_number(loss) else None,
    )


def _parts_of(file: Path, size_bytes: int, manifest: Manifest | None) -> tuple[Counter[str], int]:
    """Return the bytes of each of `PARTS` in a file, a path below its checkpoint, and its bytes without encoding."""
    entry = manifest.files.get(file.as_posix()) if manifest else None
    tensors = entry.report.get("tensors") if entry else None
    if entry is None or tensors is None:
        role = _MOMENTS if file.name == OPTIMIZER_NAME else _WEIGHTS if _may_be_weights(file) else _OTHER
        return Counter({role: size_bytes}), size_bytes
    parts: Counter[str] = Counter()
    for tensor in tensors:
        parts[_PART_OF_ROLE.get(tensor["role"], _OTHER)] += tensor["bytes_out"]
    # The bytes around the tensors: names, checksums, the zip archive.
    parts[_OTHER] += max(0, size_bytes - parts.total())
    return parts, entry.plain_bytes


def _may_be_weights(file: Path) -> bool:
    return file.suffix == ".safetensors" or (file.suffix in TORCH_SUFFIXES and "model" in file.name)


def _inode(file: Path) -> _Inode:
    status = file.lstat()
    return status.st_dev, status.st_ino


def _history(checkpoint: Path) -> list[object]:
    """Return the entries that a Trainer logged; an empty list if its file is missing or not readable."""
    history = trainer_state(checkpoint).get("log_history")
    return history if isinstance(history, list) else []


def _points(history: list[object], name: str) -> Iterator[tuple[float, float]]:
    for entry in history:
        if isinstance(entry, dict) and _is_number(entry.get("step")) and _is_number(entry.get(name)):
            yield float(entry["step"]), float(entry[name])


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def run_sections(
    checkpoints: Sequence[SavedCheckpoint], losses: Mapping[str, Sequence[tuple[float, float]]]
) -> list[Section]:
    """Return the sections of a report on a run; `losses` has steps and values by the name of the loss."""
    rows = [
        (f"step {saved.step}", saved.mode, *map(size, (*saved.part_bytes, saved.linked_bytes, saved.plain_bytes)))
        for saved in checkpoints
    ]
    head = ("checkpoint", "mode", *PARTS, "linked", "without encoding")
    table = Table(head, rows, f"{len(rows)} checkpoints")
    sections = [Section("Checkpoints", [_sizes_chart(checkpoints), table])]
    if losses:
        sections.append(Section("Loss", [_loss_chart(losses, WIDTH, 220)]))
    return sections


def run_picture(
    title: str, checkpoints: Sequence[SavedCheckpoint], losses: Mapping[str, Sequence[tuple[float, float]]]
) -> Drawing:
    """Draw a run as one picture: the size of each checkpoint and beside it the loss, if one was logged."""
    charts = [_sizes_chart(checkpoints)] + ([_loss_chart(losses, _BESIDE_WIDTH, _BESIDE_HEIGHT)] if losses else [])
    return stack(title, [charts], f"{title}: {describe_run(checkpoints)}")


def describe_run(checkpoints: Sequence[SavedCheckpoint]) -> str:
    """Summarize in one line the sizes of a run's checkpoints."""
    stored, plain = sum(sum(saved.part_bytes) for saved in checkpoints), sum(saved.plain_bytes for saved in checkpoints)
    return f"{len(checkpoints)} checkpoints, {size(plain)} without encoding, {size(stored)} on disk"


def _sizes_chart(checkpoints: Sequence[SavedCheckpoint]) -> Drawing:
    shown = checkpoints[-_MOST_ROWS:]
    unit, unit_name = size_unit(max(sum(saved.part_bytes) for saved in shown))
    bars = [
        Bar(
            f"step {saved.step}",
            tuple(count / unit for count in saved.part_bytes),
            _show_ratio(saved),
            framed=saved.linked_bytes / unit,
        )
        for saved in shown
    ]
    left_out = len(checkpoints) - len(shown)
    title = "Bytes of each checkpoint" + (f" (the first {left_out} are left out)" if left_out else "")
    frame = _LINKED if any(saved.linked_bytes for saved in shown) else ""
    return bar_chart(title, bars, unit_name, PARTS, frame=frame)


def _loss_chart(losses: Mapping[str, Sequence[tuple[float, float]]], width: float, height: float) -> Drawing:
    curves = [Curve(name, tuple(points), color) for color, (name, points) in enumerate(losses.items())]
    return line_chart("Loss", curves, "step", "loss", width=width, height=height)


def _show_ratio(saved: SavedCheckpoint) -> str:
    stored = sum(saved.part_bytes)
    ratio = saved.plain_bytes / stored if stored else 1.0
    return size(stored) + (f", {ratio:.2f}x smaller" if ratio >= 1.005 else "")
