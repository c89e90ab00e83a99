"""Encoded checkpoint files: damaged as bytes, and with right digests but wrong contents."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.codecs.coding import blocks
from hf_trainweights.checkpoint.encoded.decoder import decode_file
from hf_trainweights.checkpoint.encoded.reader import is_encoded, load_file, read_report, read_structure
from hf_trainweights.checkpoint.encoded.structure import cut_payload, payload_crc32
from hf_trainweights.checkpoint.encoded.tree import DTYPES
from hf_trainweights.errors import TrainWeightsError
from tests.fuzz.encoded_corpus import Sample, as_payload, build_samples, seal, touch
from tests.fuzz.mutate_bytes import change_bytes, damage
from tests.fuzz.mutate_json import change_json
from tests.fuzz.target import BrokenPromiseError, Outcome, Target

_KEYS = (
    *("tensor", "dict", "ordered_dict", "counter", "tuple", "size", "device", "dtype", "float", "metadata"),
    *("anchor", "exp_avg_sq", "params", "bound", "step", "shift", "format", "group_size", "sizes", "shape", "codec"),
    *("stride", "offset", "requires_grad", "parameter", "storage", "crc32"),
)
_VALUES = (*CODECS, *DTYPES, {"tensor": 0}, {"tuple": []}, {"format": "int4", "group_size": 32}, [0, 0], [1] * 65)


class _EncodedTarget(Target):
    """Begins with the corpus of encoded files."""

    samples: list[Sample]

    def prepare(self, directory: Path) -> None:
        self.samples = build_samples(directory)


class EncodedBytes(_EncodedTarget):
    """A damaged file holds what it held, or is refused, by every function that reads it."""

    name = "encoded-bytes"
    share = 3.0
    inputs_in_suite = 8000

    def prepare(self, directory: Path) -> None:
        super().prepare(directory)
        self.prints = {repr(sample.print) for sample in self.samples}

    def mutate(self, rng: random.Random) -> tuple[str, bytes]:
        sample, other = rng.choice(self.samples), rng.choice(self.samples)
        reader = rng.choice(("load_file", "load_file", "torch.load", "is_encoded", "read_structure", "read_report"))
        return reader, damage(rng, sample.file, other.file)

    def run(self, given: tuple[str, bytes]) -> Outcome:
        reader, data = given
        path = self.directory / "file.pt"
        path.write_bytes(data)
        if reader in ("load_file", "torch.load"):
            loaded = load_file(path) if reader == "load_file" else torch.load(io.BytesIO(data), weights_only=True)
            if repr(touch(loaded)) not in self.prints:
                raise BrokenPromiseError(f"{reader} returned other values than were saved")
            return Outcome.ACCEPTED
        if reader == "is_encoded":
            return Outcome.ACCEPTED if is_encoded(path) else Outcome.REFUSED
        read_structure(path) if reader == "read_structure" else read_report(path)
        return Outcome.ACCEPTED


class EncodedStructures(_EncodedTarget):
    """A structure that someone wrote by hand is refused or decoded, and never believed about a size."""

    name = "encoded-structures"
    share = 3.0
    inputs_in_suite = 8000

    def mutate(self, rng: random.Random) -> tuple[Any, bytes, str]:
        sample = rng.choice(self.samples)
        structure = change_json(rng, json.loads(sample.structure), _KEYS, _VALUES)
        if rng.random() < 0.5:
            set_checksums(structure, sample.payload)
        return structure, sample.payload, rng.choice(("cpu", "cpu", "cpu", "meta"))

    def run(self, given: tuple[Any, bytes, str]) -> Outcome:
        structure, payload, device = given
        loaded = decode_file(as_payload(payload).to(device), seal(structure))
        if device == "cpu":
            touch(loaded)
        return Outcome.ACCEPTED


@dataclass(frozen=True)
class HostilePayload:
    """A payload with right checksums.

    Args:
        structure: The structure.
        payload: The payload.
        block_seed: Seed of the changes of blocks behind the entropy coder.
        block_share: How many of these blocks are changed.
    """

    structure: Any
    payload: bytes
    block_seed: int
    block_share: float


class EncodedPayloads(_EncodedTarget):
    """No bytes make a codec fail in its own way, neither coded ones nor those that come out of the entropy coder."""

    name = "encoded-payloads"
    share = 3.0
    inputs_in_suite = 8000

    def mutate(self, rng: random.Random) -> HostilePayload:
        sample = rng.choice(self.samples)
        structure, payload = json.loads(sample.structure), sample.payload
        block_share = rng.choice((0.0, 0.0, 0.3, 1.0))
        if not block_share or rng.random() < 0.2:
            payload = _change_tables(rng, structure, change_bytes(rng, payload))
        if rng.random() < 0.1:
            change_json(rng, structure["storages"], _KEYS, _VALUES)
        set_checksums(structure, payload)
        return HostilePayload(structure, payload, rng.getrandbits(32), block_share)

    def run(self, given: HostilePayload) -> Outcome:
        with _changed_blocks(random.Random(given.block_seed), given.block_share):
            touch(decode_file(as_payload(given.payload), seal(given.structure)))
        return Outcome.ACCEPTED


def set_checksums(structure: Any, payload: bytes) -> None:
    """Give each storage the checksum of its pieces, where it can be told which they are."""
    try:
        pieces = cut_payload(structure, as_payload(payload))
        for entry, its_pieces in zip(structure["storages"], pieces, strict=True):
            entry["crc32"] = payload_crc32(its_pieces)
    except (TrainWeightsError, TypeError, KeyError, ValueError, AttributeError, OverflowError, IndexError):
        return


def _change_tables(rng: random.Random, structure: Any, payload: bytes) -> bytes:
    """Change a number in the table of sizes at the end of a piece, now and then."""
    pieces = [piece for each in cut_payload(structure, as_payload(payload)) for piece in each if piece.numel() > 4]
    if not pieces or rng.random() < 0.7:
        return payload
    piece = rng.choice(pieces)
    numbers = min(8, piece.numel() // 4)
    start = int(piece.storage_offset()) + piece.numel() - 4 * rng.randrange(1, numbers + 1)
    number = int.from_bytes(payload[start : start + 4], "little") + rng.choice((-1, 1, 2, -8, 8, 1000, 1 << 31))
    return payload[:start] + (number % (1 << 32)).to_bytes(4, "little") + payload[start + 4 :]


@contextmanager
def _changed_blocks(rng: random.Random, share: float) -> Iterator[None]:
    """Let the entropy coder return other bytes than were coded, as an encoder of one's own could make it do."""
    read = blocks.BlockReader.read

    def read_changed(self: blocks.BlockReader, index: int, size: int) -> np.ndarray:
        block = read(self, index, size)
        if not len(block) or rng.random() >= share:
            return block
        kind = rng.random()
        if kind < 0.15:
            return np.full(len(block), rng.randrange(256), np.uint8)
        data = rng.randbytes(len(block)) if kind < 0.3 else change_bytes(rng, block.tobytes())
        return np.frombuffer(data, np.uint8)

    blocks.BlockReader.read = read_changed
    try:
        yield
    finally:
        blocks.BlockReader.read = read
