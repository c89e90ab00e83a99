"""`planes-delta`: as `planes`, but where it is smaller a chunk holds the difference to the anchor.

The difference is the wrapping integer difference of the bit patterns, tensor minus anchor, zigzag coded
(0, -1, 1, -2, ... become 0, 1, 2, 3, ...; one-byte components are not), so that small differences leave the
high bytes zero. It is exact, which a difference of floats is not, and half a bit to one bit smaller than an
exclusive or, whose carries reach high bits.

| payload | content |
|---|---|
| 0 | chunks x itemsize blocks as in `planes`, then one block of a byte per chunk: 1 = difference, 0 = plain |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import Json, References
from hf_trainweights.checkpoint.codecs.coding.entropy import (
    BlockReader,
    BlockWriter,
    ChunkedCodec,
    Chunks,
    chunk_count,
    chunk_ranges,
)
from hf_trainweights.checkpoint.codecs.coding.tiles import empty
from hf_trainweights.checkpoint.codecs.planes import (
    CACHED,
    plane_bits,
    read_planes,
    sample_step,
    unzigzag_,
    write_plain,
    write_planes,
    zigzag_,
)
from hf_trainweights.files.byte_planes import WORDS, fold, unfold_, word_layout, words_of


@dataclass(frozen=True)
class PlanesDelta(ChunkedCodec):
    """Codes byte planes of the tensor or of its difference to the anchor, whichever a sample says is smaller.

    Without an anchor it codes every chunk plain.

    Examples:
        >>> import torch
        >>> anchor = torch.randn(256, 256)
        >>> weight = anchor + 1e-6
        >>> encoded = PlanesDelta().encode(weight, {"anchor": anchor})
        >>> encoded.payload_bytes < weight.nbytes / 3
        True
    """

    codec_id: ClassVar[str] = "planes-delta"
    lossless: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = ("weight",)
    references: ClassVar[tuple[str, ...]] = ("anchor",)

    def _chunks(self, tensor: Tensor, references: References) -> Chunks:
        words, dtype = words_of(tensor), tensor.dtype
        anchor = words_of(references["anchor"]) if "anchor" in references else None

        def write(writer: BlockWriter, chunk: slice) -> bool:
            is_delta = anchor is not None and _delta_is_smaller(words[chunk], anchor[chunk], dtype)
            if anchor is not None and is_delta:
                differences = _differences(words[chunk], anchor[chunk])
                write_planes(writer, words.itemsize, len(words[chunk]), differences)
            else:
                write_plain(writer, words[chunk], dtype)
            return is_delta

        return Chunks(tensor.nbytes, [*chunk_ranges(len(words))], write, has_flags=True)

    @classmethod
    def _decode(
        cls,
        payloads: Sequence[Tensor],
        params: Mapping[str, Json],
        shape: torch.Size,
        dtype: torch.dtype,
        references: References,
    ) -> Tensor:
        cls.check_count(payloads, 1)
        itemsize, count = word_layout(shape, dtype)
        chunks = chunk_count(count)
        reader = BlockReader(cls, payloads[0], chunks * itemsize + 1)
        is_delta = reader.read(chunks * itemsize, chunks)
        anchor = words_of(cls.needed(references, "anchor")) if is_delta.any() else None
        decoded = empty([count], WORDS[itemsize])
        for index, chunk in enumerate(chunk_ranges(count)):
            out = decoded.numpy()[chunk]
            for part in read_planes(reader, index * itemsize, out):
                if anchor is not None and is_delta[index]:
                    words = unzigzag_(out[part])
                    np.add(words, anchor[chunk][part], out=words)
                else:
                    unfold_(out[part], dtype)
        return decoded.view(dtype).view(shape)


def _differences(words: np.ndarray, anchor: np.ndarray) -> Iterator[np.ndarray]:
    for part in chunk_ranges(len(words), CACHED):
        yield zigzag_(words[part] - anchor[part])


def _delta_is_smaller(words: np.ndarray, anchor: np.ndarray, dtype: torch.dtype) -> bool:
    step = sample_step(len(words))
    sample = words[::step]
    return plane_bits(zigzag_(sample - anchor[::step])) < plane_bits(fold(sample, dtype))
