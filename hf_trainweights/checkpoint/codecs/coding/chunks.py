"""Codecs that encode a tensor chunk by chunk, so that a large one takes little memory, and several threads.

Their first payload is one of blocks (see `entropy`): those of the chunks one after the other, and where chunks have
flags a last block of these, a byte for each.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import Codec, EncodedTensor, References
from hf_trainweights.checkpoint.codecs.coding.entropy import BlockWriter


@dataclass(frozen=True)
class Chunks:
    """A tensor that is about to be encoded.

    Args:
        size_bytes: Of the tensor.
        parts: What `write` takes for each chunk.
        write: Writes the blocks of a chunk, and returns its flag.
        has_flags: Whether flags are stored.
        others: The other payloads.
    """

    size_bytes: int
    parts: Sequence[Any]
    write: Callable[[BlockWriter, Any], bool]
    has_flags: bool = False
    others: tuple[Tensor, ...] = ()

    def encode(self, parts: Sequence[Any], most_bytes: float = math.inf) -> tuple[BlockWriter, list[bool]]:
        """Return the blocks of some chunks, and their flags; of fewer chunks if these take more bytes than that."""
        writer = BlockWriter(self.size_bytes * len(parts) // max(len(self.parts), 1))
        flags: list[bool] = []
        for part in parts:
            if writer.size_bytes > most_bytes:
                break
            flags.append(self.write(writer, part))
        return writer, flags

    def all(self, writer: BlockWriter, flags: Sequence[bool]) -> EncodedTensor:
        """Return the tensor, given what `encode` returned for all of its chunks."""
        return EncodedTensor([self.complete(writer, flags), *self.others], {})

    def complete(self, writer: BlockWriter, flags: Sequence[bool], earlier_sizes: Sequence[int] = ()) -> Tensor:
        """Return the rest of the payload: the writer's blocks and what comes behind those of the last chunk.

        `flags` are those of all chunks, `earlier_sizes` those of blocks that are not in the writer.
        """
        if self.has_flags:
            writer.write(np.array(flags, np.uint8))
        return writer.payload(earlier_sizes)


class ChunkedCodec(Codec):
    """A codec whose chunks do not depend on each other."""

    def chunks(self, tensor: Tensor, references: References | None = None) -> Chunks:
        """Do as `encode` does up to the point where chunks are encoded."""
        return self._chunks(*self._checked(tensor, references))

    def _encode(self, tensor: Tensor, references: References) -> EncodedTensor:
        chunks = self._chunks(tensor, references)
        return chunks.all(*chunks.encode(chunks.parts))

    @abstractmethod
    def _chunks(self, tensor: Tensor, references: References) -> Chunks:
        """Cut a checked, contiguous CPU tensor into chunks."""
