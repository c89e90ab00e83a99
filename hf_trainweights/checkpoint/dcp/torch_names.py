"""The private names of torch.distributed.checkpoint that its own reader needs in `.metadata`, in this one module."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from hf_trainweights.errors import UnsupportedError

METADATA_NAME = ".metadata"
ITEM_SUFFIX = ".distcp"

_StorageInfo = getattr(filesystem, "_StorageInfo", None)
_DCP_VERSION = getattr(filesystem, "CURRENT_DCP_VERSION", None)


def stock_metadata(metadata: Metadata, places: dict[MetadataIndex, tuple[str, int, int]], save_id: str) -> Metadata:
    """Change metadata so that a stock `FileSystemReader` finds the items: file, first byte and length of each."""
    if _StorageInfo is None:
        expected = "torch.distributed.checkpoint.filesystem._StorageInfo"
        raise UnsupportedError("TrainWeightsWriter", expected, "none", "Use a version of torch from 2.8 to 2.13.")
    info: Any = _StorageInfo
    metadata.storage_data = {index: info(*place) for index, place in places.items()}
    metadata.storage_meta = StorageMeta(save_id=save_id)
    if _DCP_VERSION is not None:
        metadata.version = _DCP_VERSION
    return metadata
