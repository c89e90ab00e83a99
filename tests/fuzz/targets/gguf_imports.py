"""GGUF files, changed: the reader stays inside the file, and an import writes a model that verifies or nothing."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gguf
from imports.gguf.architectures import write_architecture
from imports.gguf.files import all_of, mixture, write_gguf

from hf_trainweights.imports.gguf.file import GgufFile
from tests.fuzz.directories import write_tree
from tests.fuzz.mutate_bytes import change_bytes, damage
from tests.fuzz.target import BrokenPromiseError, Outcome, Target
from tests.fuzz.targets.imports import import_whole_or_not_at_all

_FILE = "model.gguf"
_SOURCES: dict[str, Callable[[Path], object]] = {
    "llama": partial(write_gguf, name="llama", kinds=mixture),
    "tied": partial(write_gguf, name="llama_tied", kinds=all_of("Q4_0")),
    "experts": partial(write_gguf, name="qwen3_moe", kinds=all_of("Q4_K")),
    **{name: partial(write_gguf, name=name, kinds=mixture) for name in ("t5_untied", "mamba", "gemma4_experts")},
    **{name: partial(write_architecture, name=name) for name in ("qwen3_5", "qwen3_next", "lfm2_moe", "glm4_moe")},
}
_COUNTS = (0, 1, 2, 255, 2**16, 2**31, 2**32, 2**60, 2**63, 2**64 - 1)


class _GgufTarget(Target):
    """Files of a few models, and changes of their headers."""

    def prepare(self, directory: Path) -> None:
        self.files: dict[str, tuple[bytes, int]] = {}
        for name, write in _SOURCES.items():
            path = directory / name / _FILE
            path.parent.mkdir(parents=True)
            write(path)
            start = min(int(tensor.data_offset) for tensor in gguf.GGUFReader(path).tensors)
            self.files[name] = path.read_bytes(), start

    def mutate(self, rng: random.Random) -> tuple[str, bytes]:
        name = rng.choice(sorted(self.files))
        data, start = self.files[name]
        header, rest = bytearray(data[:start]), data[start:]
        kind = rng.random()
        if kind < 0.3:  # a length, a count, a size or an offset
            position = rng.randrange(len(header) - 8)
            header[position : position + 8] = struct.pack("<Q", rng.choice(_COUNTS))
        elif kind < 0.6:  # values, types, names
            header[:] = change_bytes(rng, bytes(header), 1)
        elif kind < 0.8:
            return name, bytes(header) + change_bytes(rng, rest)
        else:
            return name, damage(rng, data, self.files[rng.choice(sorted(self.files))][0])
        return name, bytes(header) + rest


class GgufFiles(_GgufTarget):
    """The reader gives tensors that lie in the file, without overlaps, or a typed error."""

    name = "gguf-files"
    inputs_in_suite = 2000

    def run(self, given: tuple[str, bytes]) -> Outcome:
        path = self.directory / _FILE
        path.write_bytes(given[1])
        tensors = GgufFile(path).tensors.values()
        if sum(tensor.data.numel() for tensor in tensors) > len(given[1]):
            raise BrokenPromiseError("tensors take more bytes than the file has")
        return Outcome.ACCEPTED


class GgufImports(_GgufTarget):
    """`import_directory` of a changed file writes a model that verifies, or refuses it and leaves nothing."""

    name = "gguf-imports"
    share = 1.5
    limit_seconds = 30.0
    inputs_in_suite = 100

    def run(self, given: tuple[str, bytes]) -> Outcome:
        source = write_tree(self.directory / "source", {_FILE: given[1]})
        return import_whole_or_not_at_all(source, self.directory / "made")
