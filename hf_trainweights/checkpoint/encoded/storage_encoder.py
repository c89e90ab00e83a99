"""One storage of a tree -> bytes, by the codec of its plan that gives the fewest."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from hf_trainweights.checkpoint.codecs import get_codec
from hf_trainweights.checkpoint.codecs.base import Codec, EncodedTensor, References
from hf_trainweights.checkpoint.codecs.coding.entropy import ChunkedCodec, Chunks
from hf_trainweights.checkpoint.encoded.anchor import Anchor
from hf_trainweights.checkpoint.encoded.base_weights import BaseWeights
from hf_trainweights.checkpoint.encoded.key_paths import path_text
from hf_trainweights.checkpoint.encoded.plan import TensorPlan
from hf_trainweights.checkpoint.encoded.storages import Storage
from hf_trainweights.errors import QuantizationError, UnsupportedError

# With fewer elements than the first number a coder's headers outweigh its gain, with more than the second never.
_RAW_ELEMENTS = (64, 4096)


def anchor_reference(anchor: Anchor | BaseWeights | None, name: str | None, tensor: Tensor) -> dict[str, Tensor]:
    """Return the anchor's tensor of that name, in the tensor's dtype, as references; none where there is no such."""
    if anchor is None or name is None or name not in anchor:
        return {}
    reference = anchor.tensor(name)
    # What a float out of range becomes as an integer depends on the machine.
    if reference.dtype != tensor.dtype and not (reference.is_floating_point() and tensor.is_floating_point()):
        return {}
    return {"anchor": reference.to(tensor.dtype)}


def encode_storage(
    tensor: Tensor, storage: Storage, plan: TensorPlan, references: References
) -> tuple[Codec, EncodedTensor]:
    """Encode a storage by the codec of its plan with the smallest result; if none can be used, by an exact one.

    UnsupportedError: no codec takes the dtype; it names the key path.
    """
    usable, exact, references = _candidates(tensor, storage, plan, references)
    best = _smallest(tensor, usable, references) or _smallest(tensor, exact, {})
    if best is None:
        raise UnsupportedError(path_text(storage.paths[0]), "a dtype that planes takes", str(tensor.dtype), "Cast it.")
    return best


def chunks_of(
    tensor: Tensor, storage: Storage, plan: TensorPlan, references: References
) -> tuple[ChunkedCodec, Chunks] | None:
    """Return what `encode_storage` would do, chunk by chunk; None if it has to choose, or its codec knows no chunks."""
    usable, exact, references = _candidates(tensor, storage, plan, references)
    codecs = usable or exact
    if len(codecs) != 1 or not isinstance(codecs[0], ChunkedCodec) or tensor.dtype not in codecs[0].dtypes:
        return None
    return codecs[0], codecs[0].chunks(tensor, references)


def _candidates(
    tensor: Tensor, storage: Storage, plan: TensorPlan, references: References
) -> tuple[list[Codec], list[Codec], References]:
    """Return the codecs of the plan that can be used, exact ones if none of them can, and the references that fit."""
    references = {name: each for name, each in references.items() if each.shape == tensor.shape}
    missing = {name for name in ("anchor", "exp_avg_sq") if getattr(plan, name) is not None} - references.keys()
    usable = [
        codec
        for codec in plan.candidates
        if not missing.intersection(codec.references) and (storage.exclusive or codec.lossless)
    ]
    exact = [get_codec("raw")()] if tensor.numel() < _RAW_ELEMENTS[1] else []
    if tensor.numel() >= _RAW_ELEMENTS[0]:
        exact.append(get_codec("planes")())
    return usable, exact, references


def _smallest(tensor: Tensor, codecs: Sequence[Codec], references: References) -> tuple[Codec, EncodedTensor] | None:
    best: tuple[int, EncodedTensor] | None = None
    # Codecs with chunks come last: they give up once they have written more than another one needs.
    for place, codec in sorted(enumerate(codecs), key=lambda each: isinstance(each[1], ChunkedCodec)):
        most_bytes = math.inf if best is None else best[1].payload_bytes - (place > best[0])
        try:
            encoded = _encode_within(codec, tensor, references, most_bytes)
        except (QuantizationError, UnsupportedError):
            continue
        if encoded is not None and encoded.payload_bytes <= most_bytes:
            best = place, encoded
    return best and (codecs[best[0]], best[1])


def _encode_within(codec: Codec, tensor: Tensor, references: References, most_bytes: float) -> EncodedTensor | None:
    """Encode a tensor; None if chunks show early that it takes more bytes."""
    if not isinstance(codec, ChunkedCodec):
        return codec.encode(tensor, references)
    chunks = codec.chunks(tensor, references)
    writer, flags = chunks.encode(chunks.parts, most_bytes)
    return chunks.all(writer, flags) if len(flags) == len(chunks.parts) else None


def decoded_tensor(codec: Codec, encoded: EncodedTensor, tensor: Tensor, references: References) -> Tensor:
    """Return the tensor that decoding will give, without decoding where the codec or its result has it already."""
    if codec.lossless:
        return tensor
    if encoded.decoded is not None:
        return encoded.decoded
    return codec.decode(encoded.payloads, encoded.params, tensor.shape, tensor.dtype, references)
