"""One storage of an encoded file -> a tensor, checked before it is believed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.encoded.key_paths import corrupt
from hf_trainweights.checkpoint.encoded.storage_paths import storage_name
from hf_trainweights.checkpoint.encoded.storages import DTYPES
from hf_trainweights.checkpoint.encoded.structure import payload_crc32
from hf_trainweights.errors import CorruptFileError


def decode_storage(
    structure: Mapping[str, Any], index: int, pieces: Sequence[Tensor], references: Mapping[str, Tensor]
) -> Tensor:
    """Decode a storage of what `open_structure` returned, given its pieces and references, to a new CPU tensor.

    CorruptFileError names the tensor: its bytes have another checksum, or do not fit the structure.
    """
    entry = structure["storages"][index]
    if payload_crc32(pieces) != entry["crc32"]:
        start = pieces[0].storage_offset() if pieces else 0
        where = f"{storage_name(structure, index)}, from byte {start} of the payload on"
        raise corrupt(where, f"crc32 {entry['crc32']}", payload_crc32(pieces))
    codec, dtype = CODECS[entry["codec"]], DTYPES[entry["dtype"]]
    try:
        return codec.decode(pieces, entry.get("params", {}), entry["shape"], dtype, references)
    except CorruptFileError as error:
        where = f"{storage_name(structure, index)}, {error.where}"
        raise CorruptFileError(where, error.expected, error.found, error.next_step) from error


def empty_storages(structure: Mapping[str, Any]) -> list[Tensor]:
    """Return a tensor on "meta" for each storage, of its shape and dtype."""
    entries = structure["storages"]
    return [torch.empty(each["shape"], dtype=DTYPES[each["dtype"]], device="meta") for each in entries]
