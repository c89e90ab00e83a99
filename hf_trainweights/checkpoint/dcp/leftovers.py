"""What an interrupted save or rewriting left in a DCP directory."""

from __future__ import annotations

from pathlib import Path

from hf_trainweights.checkpoint.dcp.contents import ShardedContents, encoded_manifest
from hf_trainweights.checkpoint.dcp.torch_names import ITEM_SUFFIX
from hf_trainweights.checkpoint.encoded.anchor_files import anchor_file_name
from hf_trainweights.errors import CorruptFileError


def unlisted_files(directory: Path) -> list[Path]:
    """List the files of items that a DCP directory does not consist of, and the anchors that it does not need, sorted.

    None where it holds no whole checkpoint, since what is missing may be put back.
    """
    try:
        contents = ShardedContents(directory)
        contents.require_complete()
        manifest = encoded_manifest(directory)
    except (CorruptFileError, OSError):
        return []
    listed = {place.file for place in contents.places.values()}
    files = [path for path in directory.glob(f"__*{ITEM_SUFFIX}") if path.name not in listed]
    # Without a manifest only the items themselves know their anchors.
    anchors = directory.glob(anchor_file_name("*")) if manifest is not None else ()
    return sorted([*files, *(path for path in anchors if manifest is not None and path.name not in manifest.files)])
