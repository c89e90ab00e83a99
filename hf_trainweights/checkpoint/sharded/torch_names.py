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
    """Return metadata that a stock `FileSystemReader` finds the items by.

    Args:
        metadata: What DCP's planner made; changed in place.
        places: File name, first byte and length in bytes of each item.
        save_id: Identifies the save.

    Returns:
        The same object.

    Raises:
        UnsupportedError: This version of torch has no such class.
    """
    if _StorageInfo is None:
        expected = "torch.distributed.checkpoint.filesystem._StorageInfo"
        raise UnsupportedError("TrainWeightsWriter", expected, "none", "Use a version of torch from 2.8 to 2.13.")
    info: Any = _StorageInfo
    metadata.storage_data = {index: info(*place) for index, place in places.items()}
    metadata.storage_meta = StorageMeta(save_id=save_id)
    if _DCP_VERSION is not None:
        metadata.version = _DCP_VERSION
    return metadata
