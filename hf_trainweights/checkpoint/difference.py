"""By how much two checkpoints differ, tensor by tensor: what a mode costs, or how far training has come."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file as load_safetensors
from torch import Tensor

from hf_trainweights.checkpoint.anchors import register_anchor_directory
from hf_trainweights.checkpoint.discovery import WEIGHT_FILES, shard_names, weights_problem
from hf_trainweights.checkpoint.encoded import is_encoded, load_file
from hf_trainweights.checkpoint.inplace import OPTIMIZER_NAME
from hf_trainweights.checkpoint.manifest import MANIFEST_NAME, read_manifest
from hf_trainweights.checkpoint.storages import path_text
from hf_trainweights.errors import ConfigError, CorruptFileError

_PIECE_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Difference:
    """How two tensors a and b differ, as sums over their elements, so that differences add up.

    Args:
        key: The tensor's name: of a weight its own, of an optimizer's state `optimizer: ` and its key path.
        sum_a: Sum of a.
        sum_error: Sum of a - b.
        squares_a: Sum of the squares of a.
        squares_error: Sum of the squares of a - b.
        largest: Largest |a - b|.
        bytes_a: What a takes on disk; None where no manifest says it.
        bytes_b: What b takes on disk; None where no manifest says it.
        comparable: Whether shapes and dtypes are the same; the sums are 0 if not.
    """

    key: str
    sum_a: float = 0.0
    sum_error: float = 0.0
    squares_a: float = 0.0
    squares_error: float = 0.0
    largest: float = 0.0
    bytes_a: int | None = 0
    bytes_b: int | None = 0
    comparable: bool = True

    @property
    def relative_mean(self) -> float:
        """mean(a - b) / mean(a), 0 where nothing differs."""
        return _ratio(self.sum_error, self.sum_a)

    @property
    def relative_l2(self) -> float:
        """|a - b| / |a| in the L2 norm, 0 where nothing differs."""
        return _ratio(math.sqrt(self.squares_error), math.sqrt(self.squares_a))

    def __add__(self, other: Difference) -> Difference:
        names = ("sum_a", "sum_error", "squares_a", "squares_error", "bytes_a", "bytes_b")
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        sums: dict[str, Any] = {name: None if None in pair else sum(pair) for name, pair in pairs.items()}
        largest = math.nan if math.isnan(other.largest) else max(other.largest, self.largest)
        return replace(self, **sums, largest=largest)

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON, but for NaN and infinities; errors are None where there is nothing to compare."""
        errors = {"relative_mean": self.relative_mean, "relative_l2": self.relative_l2, "largest": self.largest}
        shown = errors if self.comparable else dict.fromkeys(errors)
        return {"key": self.key, **shown, "bytes_a": self.bytes_a, "bytes_b": self.bytes_b}


@dataclass(frozen=True)
class Comparison:
    """What comparing two checkpoints showed.

    Args:
        tensors: One entry per key that both have, weights first.
        totals: Over all weights, and over all of the optimizer's states.
        problems: Keys, shapes and dtypes that one has and the other has not, as sentences.
    """

    tensors: tuple[Difference, ...]
    totals: tuple[Difference, ...]
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON, but for NaN and infinities."""
        tensors, totals = ([each.to_dict() for each in part] for part in (self.tensors, self.totals))
        return {"tensors": tensors, "totals": totals, "problems": list(self.problems)}


def compare_checkpoints(a: str | Path, b: str | Path) -> Comparison:
    """Compares the weights and the optimizer's states of two checkpoints, each plain or small.

    Args:
        a: A checkpoint directory, or one file of it.
        b: What it is compared with.

    Returns:
        The differences.

    Raises:
        ConfigError: A directory holds neither.
        CorruptFileError: A file is damaged, or holds more than data.
        MissingAnchorError: A checkpoint was moved without the anchor it needs.
        OSError: A file cannot be read.

    Example:
        >>> compare_checkpoints("runs/a/checkpoint-100", "runs/b/checkpoint-100").totals  # doctest: +SKIP
    """
    files = _files(Path(a)), _files(Path(b))
    tensors: list[Difference] = []
    totals: list[Difference] = []
    problems: list[str] = []
    for part in dict.fromkeys([*files[0], *files[1]]):
        of_a, of_b = (_read(each.get(part, []), part) for each in files)
        problems += [f"{key} is only in {a}" for key in of_a if key not in of_b]
        problems += [f"{key} is only in {b}" for key in of_b if key not in of_a]
        found = [_difference(key, of_a[key], of_b[key]) for key in of_a if key in of_b]
        problems += [f"{each.key} has another shape or dtype" for each in found if not each.comparable]
        tensors += found
        totals.append(sum(found, Difference(f"all of {part}")))
    return Comparison(tuple(tensors), tuple(totals), tuple(problems))


@dataclass(frozen=True)
class _Stored:
    tensor: Tensor
    stored_bytes: int | None


def _files(path: Path) -> dict[str, list[Path]]:
    """Returns the files that hold weights, those that a loader would open, and the one of the optimizer."""
    if path.is_file():
        return {"optimizer" if path.name == OPTIMIZER_NAME else "weights": [path]}
    found = {}
    weights = [path / name for name in WEIGHT_FILES if (path / name).is_file()][:1]
    if weights:
        is_index = weights[0].suffix == ".json"
        _require_readable(weights[0])
        found["weights"] = [path / name for name in shard_names(weights[0])] if is_index else weights
    if (path / OPTIMIZER_NAME).is_file():
        found["optimizer"] = [path / OPTIMIZER_NAME]
    if not found:
        raise ConfigError(str(path), "a checkpoint with weights or an optimizer.pt", "neither", "Choose another path.")
    return found


def _require_readable(path: Path) -> None:
    problem = weights_problem(path)
    if problem:
        next_step = "Use another checkpoint, or restore this one from a copy."
        raise CorruptFileError(str(path), "a whole file", problem, next_step)


def _read(files: list[Path], part: str) -> dict[str, _Stored]:
    found = {}
    for file in files:
        for path, tensor, stored_bytes in _read_file(file):
            found[path_text(path) if part == "weights" else f"{part}: {path_text(path)}"] = _Stored(
                tensor, stored_bytes
            )
    return found


def _read_file(file: Path) -> Iterator[tuple[tuple[Any, ...], Tensor, int | None]]:
    if file.suffix == ".safetensors":
        _require_readable(file)
        yield from (((name,), tensor, tensor.nbytes) for name, tensor in load_safetensors(file).items())
        return
    register_anchor_directory(file.parent)
    if not is_encoded(file):
        yield from ((path, tensor, tensor.nbytes) for path, tensor in _leaves(load_file(file, mmap=True), ()))
        return
    stored_bytes = _reported_bytes(file)
    for path, tensor in _leaves(load_file(file), ()):
        # The report counts tied tensors once, under the name of the first.
        yield path, tensor, stored_bytes.get(path_text(path), 0) if stored_bytes else None


def _reported_bytes(file: Path) -> dict[str, int]:
    if not (file.parent / MANIFEST_NAME).exists():
        return {}
    entry = read_manifest(file.parent).files.get(file.name)
    return {each["path"]: each["bytes_out"] for each in entry.report.get("tensors", ())} if entry else {}


def _leaves(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(value, (*path, key))


def _difference(key: str, a: _Stored, b: _Stored) -> Difference:
    total = Difference(key, bytes_a=a.stored_bytes, bytes_b=b.stored_bytes)
    if a.tensor.shape != b.tensor.shape or a.tensor.dtype != b.tensor.dtype:
        return replace(total, comparable=False)
    pieces = (each.tensor.detach().reshape(-1).split(_PIECE_ELEMENTS) for each in (a, b))
    for piece_a, piece_b in zip(*pieces, strict=True):
        if piece_a.numel():
            total += _piece_difference(_as_float64(piece_a), _as_float64(piece_b))
    return total


def _piece_difference(a: Tensor, b: Tensor) -> Difference:
    # Without this, infinities and NaN at the same place would differ.
    same = (a == b) | (a.isnan() & b.isnan())
    error = torch.where(same, 0.0, a - b)
    return Difference(
        "",
        sum_a=a.sum().item(),
        sum_error=error.sum().item(),
        squares_a=a.square().sum().item(),
        squares_error=error.square().sum().item(),
        largest=error.abs().max().item(),
    )


def _as_float64(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.to(torch.float64)


def _ratio(part: float, whole: float) -> float:
    if part == 0:
        return 0.0
    return part / whole if whole else math.inf
