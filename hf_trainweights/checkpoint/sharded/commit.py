"""The end of a sharded save: the manifest, and then `.metadata`, which makes a checkpoint of the files.

Files of a save have names that were free before it. So the checkpoint that a directory held stays whole until both
indices have changed, one after the other; then the files that neither lists are removed.
"""

from __future__ import annotations

import hashlib
import pickle
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from hf_trainweights.checkpoint.dcp.description import StoredFile, StoredItem, describe, shard_name
from hf_trainweights.checkpoint.dcp.plain_metadata import ITEM_SUFFIX, METADATA_NAME, stock_metadata
from hf_trainweights.checkpoint.encoded.structure import ANCHOR_SUFFIX, anchor_file_name
from hf_trainweights.checkpoint.manifest import FileEntry, Manifest, write_manifest
from hf_trainweights.checkpoint.run.anchors import AnchorRecord
from hf_trainweights.checkpoint.sharded.anchors import NO_DIGEST, ShardedAnchor
from hf_trainweights.files.atomic import remove_files, replace_file

_ITEM_FILE = re.compile(rf"__\d+_(\d+){re.escape(ITEM_SUFFIX)}")


def free_number(directory: Path) -> int:
    """Return the lowest even number that, with its successor, is in no name `__<rank>_<number>.distcp`."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    numbers = {int(match[1]) // 2 for name in names if (match := _ITEM_FILE.fullmatch(name))}
    return next(2 * number for number in range(len(numbers) + 1) if number not in numbers)


def file_names(rank: int, number: int) -> tuple[str, str]:
    """Return the names of a rank's files, for weights and for everything else; `number` is of `free_number`."""
    return f"__{rank}_{number}{ITEM_SUFFIX}", f"__{rank}_{number + 1}{ITEM_SUFFIX}"


def commit(
    directory: Path,
    dcp_metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
    save_id: str,
    anchor: ShardedAnchor | None = None,
    is_exact: bool = False,
    **manifest_fields: Any,
) -> None:
    """Make a checkpoint of the files that all ranks have written, each a list of `StoredItem`, in the place of another.

    `anchor` is what weights are stored against; `is_exact` says that none may be rounded. ConfigError: fields of the
    manifest (mode, step, metadata, ...) hold what JSON cannot. OSError: the checkpoint that was there is whole.
    """
    items = [item for several in results for item in several if isinstance(item, StoredItem)]
    stock = {each.index: (each.storage_data.file, each.storage_data.start, each.size_in_bytes) for each in items}
    pickled = pickle.dumps(stock_metadata(dcp_metadata, stock, save_id))
    files = _file_entries(directory, items)
    files[METADATA_NAME] = FileEntry(len(pickled), hashlib.sha256(pickled).hexdigest())
    record = _anchor_of(items, anchor, is_exact)
    write_manifest(directory, Manifest(files, sharded=describe(dcp_metadata, record.to_dict()), **manifest_fields))
    with replace_file(directory / METADATA_NAME) as file:
        file.write(pickled)
    # Of earlier saves, and of saves that were killed.
    present = [*directory.glob(f"__*{ITEM_SUFFIX}"), *directory.glob(f"*{ANCHOR_SUFFIX}")]
    remove_files(sorted(path for path in present if path.name not in files))


def _file_entries(directory: Path, items: Sequence[StoredItem]) -> dict[str, FileEntry]:
    rows: dict[StoredFile, list[Mapping[str, Any]]] = defaultdict(list)
    for item in items:
        rows[item.file].append(item.row)
    entries = {
        file.name: FileEntry(file.size_bytes, file.sha256, {"anchor": next(iter(file.anchors), None), "tensors": each})
        for file, each in rows.items()
    }
    for sha256 in sorted({sha256 for item in items for sha256 in item.file.anchors}):
        link = directory / anchor_file_name(sha256)
        entries[link.name] = FileEntry(link.stat().st_size, sha256)  # verified when it was opened
    return entries


def _anchor_of(items: Sequence[StoredItem], previous: ShardedAnchor | None, is_exact: bool) -> ShardedAnchor:
    """Return what the checkpoint says about the anchors of the next one."""
    names: dict[StoredFile, list[str]] = {item.file: [] for item in items}
    bits = elements = 0
    measured = {}
    for item in items:
        if "shard" not in item.row:
            continue
        name = shard_name(item.index.fqn, item.row["shard"])
        names[item.file].append(name)
        if item.delta_rms is not None:
            measured[name] = item.delta_rms
        if item.row["role"] == "weight":
            bits += 8 * item.row["bytes_out"]
            elements += item.elements
    full = {file.sha256: tuple(each) for file, each in names.items() if file.is_anchor}
    used = {sha256 for file in names for sha256 in file.anchors}
    if previous is None or not used:
        return ShardedAnchor(record=AnchorRecord(NO_DIGEST), files=full)
    moved = measured if any(measured.values()) else {}  # the anchor, made small once more, says nothing about drift
    record = previous.after_delta(bits / max(elements, 1), moved, is_exact=is_exact)
    return ShardedAnchor(record=record, files={sha256: previous.files[sha256] for sha256 in sorted(used)} | full)
