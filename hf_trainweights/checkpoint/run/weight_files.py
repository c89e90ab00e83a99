"""Lists and reads the weight files of a checkpoint, plain or encoded, and makes encoded files plain again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.encoded.objects import missing_packages
from hf_trainweights.checkpoint.encoded.reader import load_file, report_of
from hf_trainweights.checkpoint.manifest import FileEntry, reported_rounding
from hf_trainweights.errors import CorruptFileError, UnsupportedError
from hf_trainweights.files import disk
from hf_trainweights.files.atomic import replace_file
from hf_trainweights.files.reading import DigestedFile, require_regular_file
from hf_trainweights.files.weight_files import ENTRY_POINTS, shard_names


def weight_files(path: Path) -> list[Path]:
    """List the weight files of an adapter or a model: first the file that loaders open first, indices before shards.

    CorruptFileError: an index cannot be read.
    """
    # A directory may hold an adapter beside its model. Only the files of the one count that loaders would open first.
    present = [name for name in ENTRY_POINTS if (path / name).is_file()]
    family = [name for name in present if name.startswith("adapter") == present[0].startswith("adapter")]
    files = [path / name for name in family]
    for index in [file for file in files if file.name.endswith(".index.json")]:
        files += [path / shard for shard in shard_names(index) if (path / shard).is_file()]
    return files


def read_weights(path: Path) -> dict[str, Any]:
    """Return the state dict in a weight file, or in the shards of an index, on the CPU, mapped where it can be."""
    next_step = "Use another checkpoint, or restore this one from a copy."
    if path.name.endswith(".index.json"):
        shards = [read_weights(path.parent / name) for name in shard_names(path)]
        return {name: tensor for shard in shards for name, tensor in shard.items()}
    if path.suffix == ".safetensors":
        require_regular_file(path)
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
                # safetensors writes a shared tensor under one name; its metadata maps the other names to that name.
                written_names = {name: other for name, other in (file.metadata() or {}).items() if other in tensors}
                return tensors | {name: tensors[other] for name, other in written_names.items()}
        except SafetensorError as error:
            raise CorruptFileError(str(path), "readable weights", str(error)[:300], next_step) from error
    state = load_file(path, mmap=True)
    if not isinstance(state, dict):
        raise CorruptFileError(str(path), "a state dict", type(state).__name__, next_step)
    return state


def is_lossy(structure: Mapping[str, Any] | None) -> bool:
    """Return whether a file of this structure was encoded with a loss; False for a plain file, which has none.

    Encoding it again would add to its error, or hide the error.
    """
    storages = structure["storages"] if structure is not None else ()
    # A tensor that was rounded first and then stored by a lossless codec has a bound, too.
    return any("bound" in storage or not CODECS[storage["codec"]].lossless for storage in storages)


def require_packages(path: Path, structures: Iterable[Mapping[str, Any]]) -> None:
    """Check that plain files can hold the objects of encoded ones; UnsupportedError: their package is not installed."""
    missing = set[str]().union(*(missing_packages(structure["tree"]) for structure in structures))
    if missing:
        actual = f"no {' and no '.join(sorted(missing))}, and its files hold some of its objects"
        next_step = f"Install it: pip install {' '.join(sorted(missing))}."
        raise UnsupportedError(str(path), "the packages of its objects", actual, next_step)


def restore_file(file: Path, structure: Mapping[str, Any]) -> tuple[FileEntry, dict[str, float]]:
    """Replace an encoded file of this structure by a plain one; return its manifest entry, and its rounding.

    The rounding is the largest error that encoding made, for each role of tensors (weight, exp_avg, ...). A plain file
    cannot tell that its values were rounded before, so the caller keeps this in the manifest.
    """
    tree, status = load_file(file), file.stat()
    with replace_file(file) as stream:
        plain: Any = DigestedFile(stream)
        torch.save(tree, plain)
    # A resume uses the newer of two files with an optimizer's state, so the time must stay.
    disk.file_system.set_times(file, status.st_atime_ns, status.st_mtime_ns)
    return FileEntry(plain.size_bytes, plain.sha256()), reported_rounding(report_of(structure))
