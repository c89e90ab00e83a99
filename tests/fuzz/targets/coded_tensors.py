"""Coded tensors: damaged bytes, which a checksum must find, and headers that lie under a checksum that is right."""

from __future__ import annotations

import json
import random
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.files.coded_tensors import CodedTensors, encode_tensors
from hf_trainweights.formats import get_format
from tests.fuzz.mutate_bytes import change_bytes
from tests.fuzz.target import BrokenPromiseError, Outcome, Target

_SHAPES = [(16, 128), (3, 8, 128), (1, 7), (0, 64)]
_MOST_ELEMENTS = 1 << 20
_SIZES = [-1, 0, 1, 2, 127, 1 << 18, 1 << 31, 1 << 40, 1 << 62, 1.5, None, "8"]


@dataclass(frozen=True)
class CodedBytes:
    """Bytes that may be those of coded tensors.

    Args:
        data: The bytes.
        original: Number of the tensors that they were made from, where nothing but damage was done to them.
    """

    data: bytes
    original: int | None


class CodedArrays(Target):
    """`CodedTensors` of bytes from anywhere: the tensors that were coded, or a `CorruptFileError`."""

    name = "coded-tensors"

    def prepare(self, directory: Path) -> None:
        """Code a few weights."""
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(shape, generator=generator).bfloat16() for shape in _SHAPES]
        form = get_format({"format": "coded", "bits": 3.5})
        self.tensors: list[dict[str, Tensor]] = [form.quantize(weight) for weight in weights]
        self.tensors += [{"values": weight} for weight in weights]
        self.coded = [encode_tensors(tensors).numpy().tobytes() for tensors in self.tensors]

    def mutate(self, rng: random.Random) -> CodedBytes:
        """Return damaged bytes, or bytes whose header says something else and has its checksum."""
        number = rng.randrange(len(self.coded))
        if rng.random() < 0.6:
            return CodedBytes(change_bytes(rng, self.coded[number]), number)
        return CodedBytes(_with_another_header(rng, self.coded[number]), None)

    def run(self, given: CodedBytes) -> Outcome:
        """Decode them."""
        reader = CodedTensors(torch.from_numpy(np.frombuffer(given.data, np.uint8).copy()), "weight")
        decoded = {name: reader.read(name) for name in reader.specs}
        if sum(tensor.numel() for tensor in decoded.values()) > _MOST_ELEMENTS:
            raise BrokenPromiseError("few bytes became many elements")
        if given.original is not None:
            whole = self.tensors[given.original]
            if decoded.keys() != whole.keys() or not all(torch.equal(t, whole[key]) for key, t in decoded.items()):
                raise BrokenPromiseError("damaged bytes became another weight")
        return Outcome.ACCEPTED


def _with_another_header(rng: random.Random, data: bytes) -> bytes:
    (length,) = struct.unpack_from("<I", data, 8)
    listed: Any = json.loads(data[12 : 12 + length])
    entry = rng.choice(listed)
    kind = rng.random()
    if kind < 0.5 and entry[2]:
        entry[2][rng.randrange(len(entry[2]))] = rng.choice(_SIZES)
    elif kind < 0.7:
        entry[1] = rng.choice(["int8", "float32", "bfloat16", "int32", "complex64", "x", None])
    elif kind < 0.8:
        entry[0] = rng.choice(["qdata", "scale", "", None, 3])
    elif kind < 0.9:
        listed.append(rng.choice([entry, 3, [], "ab"]))
    else:
        entry[2] = rng.choice([[], [1] * 70, {}, "12", [[1]]])
    text = json.dumps(listed).encode()
    # The checksum covers the table, whose end only some of the inputs get right.
    table_bytes = 8 * rng.choice([1, 2, 2, 3, 4, 6])
    rest = struct.pack("<I", len(text)) + text + data[12 + length :]
    crc32 = zlib.crc32(rest[: 4 + len(text) + table_bytes])
    return data[:4] + struct.pack("<I", crc32) + rest
