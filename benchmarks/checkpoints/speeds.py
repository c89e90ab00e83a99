"""How fast checkpoints are made small and read again, beside what else people use, and the memory that it takes.

Speeds are plain bytes over the CPU time of the whole process, which works with one thread: from tensors in memory to
files that are not forced to disk, every digest included; and from these to tensors again, checksums checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import zstandard
from safetensors.torch import load_file as load_safetensors
from safetensors.torch import save_file as save_safetensors
from torch import Tensor

from benchmarks.checkpoints.protocol import INT8_RULES, PLAIN_WEIGHTS_NAME, Experiment, in_new_process, size_bytes
from benchmarks.checkpoints.runs import RUNS
from benchmarks.memory import Peak
from hf_trainweights.checkpoint.encoded.reader import load_file
from hf_trainweights.checkpoint.planning.policy import Policy
from hf_trainweights.checkpoint.run.checkpoints import OPTIMIZER_NAME
from hf_trainweights.checkpoint.run.job import ANCHOR_EVERY_SAVES, SaveJob
from hf_trainweights.checkpoint.run.weights import WEIGHTS_NAME, Weights
from hf_trainweights.checkpoint.whole.writer import save_tree, save_weights

REPEATS = 3
# Row of the report: the options of compress_directory, and whether there is an anchor.
ROWS: dict[str, tuple[dict[str, Any], bool]] = {
    "int8 groups": ({"mode": "lossless", "rules": INT8_RULES}, False),
    "lossless, no anchor": ({"mode": "lossless"}, False),
    "lossless": ({"mode": "lossless"}, True),
    "near-lossless": ({"mode": "near-lossless"}, True),
    "compact": ({"mode": "compact"}, True),
}


def measure_speeds(root: Path) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield speed and size of each way to store the checkpoint of the first delta, by run."""
    torch.set_num_threads(1)
    yield ("sha256_gb_per_second",), _sha256_gb_per_second()
    for name in RUNS:
        experiment = Experiment(name, 0, root)
        experiment.require(experiment.steps[:2])
        rows = {row: _measure_ours(experiment, *options) for row, options in ROWS.items()}
        yield (name,), {**_measure_others(experiment), **rows}


def measure_memory(root: Path) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the memory that making a run's first delta small takes beyond what the process had, by run."""
    for name in RUNS:
        experiment = Experiment(name, 0, root)
        experiment.require(experiment.steps[:2])
        weights = load_safetensors(experiment.checkpoint(experiment.first) / PLAIN_WEIGHTS_NAME)
        largest = max(weight.nbytes for weight in weights.values())
        peaks = {row: in_new_process(_peak_bytes, experiment, *options) for row, options in ROWS.items()}
        yield (name,), {"largest_tensor_bytes": largest, "peak_bytes": peaks}


@dataclass(frozen=True)
class Save:
    """A checkpoint in memory, to be saved and loaded again and again.

    Args:
        path: Its directory.
        plain_bytes: What a Trainer's files of it take.
        job: How it is saved.
        weights: Its weights, and the optimizer.
    """

    path: Path
    plain_bytes: int
    job: SaveJob
    weights: Weights

    @classmethod
    def prepare(cls, experiment: Experiment, options: dict[str, Any], has_anchor: bool) -> Save:
        """Read the checkpoint of the first delta."""
        path = _prepare(experiment, options, has_anchor)
        state = load_safetensors(path / PLAIN_WEIGHTS_NAME)
        optimizer = torch.load(path / OPTIMIZER_NAME, weights_only=True)
        names = experiment.parameter_names()
        job = _Job(path, Policy(**options), ANCHOR_EVERY_SAVES)
        return cls(path, size_bytes(path), job, Weights(state, optimizer=optimizer, optimizer_names=names))

    def encode(self) -> None:
        """Save it."""
        optimizer, names = self.weights.optimizer, self.weights.optimizer_names
        save_weights(self.job, self.weights)
        save_tree(self.job, OPTIMIZER_NAME, optimizer, self.job.policy.plan_optimizer(optimizer, names=names))

    def decode(self) -> None:
        """Load it."""
        load_file(self.path / WEIGHTS_NAME)
        load_file(self.path / OPTIMIZER_NAME)


def _measure_ours(experiment: Experiment, options: dict[str, Any], has_anchor: bool) -> dict[str, float]:
    save = Save.prepare(experiment, options, has_anchor)
    encode_seconds, decode_seconds = [], []
    for _ in range(REPEATS):
        with _timed(encode_seconds):
            save.encode()
        with _timed(decode_seconds):
            save.decode()
    (save.path / PLAIN_WEIGHTS_NAME).unlink()
    stored_bytes = size_bytes(save.path)
    shutil.rmtree(save.path.parent)
    return _row(save.plain_bytes, stored_bytes, encode_seconds, decode_seconds)


class _Job(SaveJob):
    """Opens files that are not forced to disk, as for torch.save."""

    def open_file(self, name: str) -> BinaryIO:
        return (self.directory / name).open("wb")


def _prepare(experiment: Experiment, options: dict[str, Any], has_anchor: bool) -> Path:
    """Return a plain copy of the checkpoint, beside it the one that it may be stored against."""
    directory = experiment.directory / "speed"
    shutil.rmtree(directory, ignore_errors=True)
    if has_anchor:
        experiment.compress(experiment.copy(experiment.steps[0], directory.name), **options)
    return experiment.copy(experiment.first, directory.name)


def _measure_others(experiment: Experiment) -> dict[str, dict[str, float]]:
    plain = experiment.checkpoint(experiment.first)
    weights = load_safetensors(plain / PLAIN_WEIGHTS_NAME)
    optimizer = torch.load(plain / OPTIMIZER_NAME, weights_only=True)
    tensors = [*weights.values(), *_tensors(optimizer)]
    files = [(plain / name).read_bytes() for name in (PLAIN_WEIGHTS_NAME, OPTIMIZER_NAME)]
    return {
        "torch.save": _measure_torch(plain, weights, optimizer),
        "zstd -3": _measure_bytes(plain, files, *_zstandard()),
        "ZipNN": _measure_bytes(plain, [tensor.numpy().tobytes() for tensor in tensors], *_zipnn()),
    }


def _sha256_gb_per_second() -> float:
    """Return how fast this machine digests: the share of it in all other speeds."""
    data, seconds = bytes(100_000_000), []
    for _ in range(REPEATS):
        with _timed(seconds):
            hashlib.sha256(data)
    return round(len(data) / 1e9 / statistics.median(seconds), 3)


def _tensors(optimizer: dict[str, Any]) -> Iterator[Tensor]:
    for state in optimizer["state"].values():
        yield from (value for value in state.values() if value.dim())


def _measure_torch(plain: Path, weights: dict[str, Tensor], optimizer: dict[str, Any]) -> dict[str, float]:
    """Measure what a Trainer does, to files."""
    encode_seconds, decode_seconds = [], []
    directory = plain.parent.parent / "torch"
    directory.mkdir(exist_ok=True)
    for _ in range(REPEATS):
        with _timed(encode_seconds):
            save_safetensors(weights, directory / PLAIN_WEIGHTS_NAME)
            torch.save(optimizer, directory / OPTIMIZER_NAME)
        with _timed(decode_seconds):
            # Cloned, because safetensors maps the file and reads nothing yet.
            _ = [weight.clone() for weight in load_safetensors(directory / PLAIN_WEIGHTS_NAME).values()]
            torch.load(directory / OPTIMIZER_NAME, weights_only=True)
    row = _row(size_bytes(plain), size_bytes(directory), encode_seconds, decode_seconds)
    shutil.rmtree(directory)
    return row


def _zstandard() -> tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]:
    return zstandard.ZstdCompressor(level=3).compress, zstandard.ZstdDecompressor().decompress


def _zipnn() -> tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]:
    from zipnn import ZipNN  # of the bench extra

    coder = ZipNN(bytearray_dtype="float32", threads=1)
    return lambda data: bytes(coder.compress(data)), coder.decompress


def _measure_bytes(
    plain: Path, pieces: list[bytes], encode: Callable[[bytes], bytes], decode: Callable[[bytes], bytes]
) -> dict[str, float]:
    """Measure a coder of bytes, in memory and without digests."""
    encode_seconds, decode_seconds = [], []
    encoded: list[bytes] = []
    for _ in range(REPEATS):
        # Copies: ZipNN writes into what it is given.
        copies = [bytes(bytearray(piece)) for piece in pieces]
        with _timed(encode_seconds):
            encoded = [encode(piece) for piece in copies]
        with _timed(decode_seconds):
            decoded = [decode(piece) for piece in encoded]
        if any(bytes(piece) != original for piece, original in zip(decoded, pieces, strict=True)):
            raise ValueError(f"{encode}: what was decoded is not what was encoded")
    return _row(size_bytes(plain), sum(map(len, encoded)), encode_seconds, decode_seconds)


@contextlib.contextmanager
def _timed(seconds: list[float]) -> Iterator[None]:
    start = time.process_time()
    yield
    seconds.append(time.process_time() - start)


def _row(plain_bytes: int, stored_bytes: int, encode: list[float], decode: list[float]) -> dict[str, float]:
    return {
        "ratio": round(plain_bytes / stored_bytes, 4),
        "encode_gb_per_second": round(plain_bytes / 1e9 / statistics.median(encode), 3),
        "decode_gb_per_second": round(plain_bytes / 1e9 / statistics.median(decode), 3),
    }


def _peak_bytes(experiment: Experiment, options: dict[str, Any], has_anchor: bool) -> int:
    """Return the most anonymous memory in use meanwhile."""
    torch.set_num_threads(1)
    path = _prepare(experiment, options, has_anchor)
    with Peak() as peak:
        experiment.compress(path, **options)
    shutil.rmtree(path.parent)
    return peak.increase_bytes
