"""`Anchor`: the weights that other files are stored against, found by their digest and decoded one at a time.

An anchor is a file of weights. It is hard-linked into every checkpoint directory that needs it as
`<sha256 of the file>.anchor`, so any link is as good as another: at a recorded path or in a registered directory.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_trainweights.checkpoint.codecs.base import OwnAnchor
from hf_trainweights.checkpoint.encoded.reader import load_undecoded
from hf_trainweights.checkpoint.encoded.storages import DTYPES, build_tensors, corrupt
from hf_trainweights.checkpoint.encoded.structure import anchor_file_name, cut_payload, decode_storage, empty_storages
from hf_trainweights.checkpoint.encoded.tree import unflatten
from hf_trainweights.checkpoint.encoded.workers import default_device_cpu
from hf_trainweights.errors import CorruptFileError, MissingAnchorError
from hf_trainweights.files.reading import file_sha256

MOST_ANCHORS = 8
"""How many files reading one anchor may take, itself among them; writers are content with fewer."""
# A file that was written just now may change again within one tick of the file system's clock.
_SETTLED_SECONDS = 2.0

_directories: dict[Path, None] = {}  # in the order of registration
_kept: tuple[Anchor, list[os.stat_result]] | None = None
_digests: dict[tuple[int, int, int, int], str] = {}


def register_anchor_directory(path: str | Path) -> None:
    """Add a directory, which need not exist, in which this process looks for anchors that are not where they were."""
    _directories[Path(path).absolute()] = None


def find_anchor(sha256: str, recorded_path: str) -> Path:
    """Return the path of an anchor, a regular file with this digest; `recorded_path` is where it lay before.

    MissingAnchorError: it is neither there nor in a registered directory, nor in a checkpoint beside one.
    CorruptFileError: it is there, and damaged. OSError: it is there, and the disk does not let it be read.
    """
    refused: Exception | None = None
    for path in anchor_paths(sha256, Path(recorded_path)):
        try:
            verify_anchor(path)
        except FileNotFoundError:
            continue
        except (CorruptFileError, OSError) as error:
            refused = refused or error
            continue
        return path
    for path in _files_in_runs(anchor_file_name(sha256)):
        with contextlib.suppress(CorruptFileError, OSError):
            if sha256_once(path) == sha256:
                return path
    if refused is not None:
        raise refused
    raise MissingAnchorError(
        f"anchor {anchor_file_name(sha256)}",
        f"a file at {recorded_path}",
        "none there, nor in a registered directory, nor in a checkpoint beside one",
        "Call hf_trainweights.latest(run) first: it looks through all checkpoints of a run. One outside of a run "
        "is looked through by `trainweights checkpoint restore PATH`.",
    )


def verify_anchor(path: Path, sha256: str | None = None) -> str:
    """Return the digest of an anchor after comparing its bytes with it (default: with its name), once per process.

    CorruptFileError: it differs, or `path` is no regular file. OSError: it is missing or cannot be read.
    """
    found = sha256_once(path)
    if (path.name != anchor_file_name(found)) if sha256 is None else (found != sha256):
        raise CorruptFileError(
            str(path),
            "an anchor named by its SHA-256",
            found,
            "It is damaged or renamed: restore it from another checkpoint of the same run, they share it.",
        )
    return found


def sha256_once(path: Path) -> str:
    """Return the SHA-256 of a regular file in hexadecimal; its bytes are read once per process.

    CorruptFileError: it is no regular file; links are not followed.
    """
    status = os.stat(path, follow_symlinks=False)
    # All links of a file have one inode, so that its bytes are read once and not once per checkpoint.
    identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    if identity not in _digests or not stat.S_ISREG(status.st_mode):
        _digests[identity] = file_sha256(path)
    return _digests[identity]


def anchor_paths(sha256: str, recorded_path: Path) -> Iterator[Path]:
    """Yield where an anchor may lie; its recorded path is believed if it is absolute, local and ends in its name."""
    name = anchor_file_name(sha256)
    # What begins with two slashes is on any host of the network, where Windows would log in.
    is_local = not str(recorded_path).startswith(("//", r"\\"))
    if recorded_path.is_absolute() and is_local and recorded_path.name == name:
        yield recorded_path
    for directory in _directories:
        yield directory / name


def _files_in_runs(name: str) -> Iterator[Path]:
    """Yield what may be a lost anchor: files of its name beside registered checkpoints, then the weights of each.

    The checkpoint that wrote an anchor has it as its weights, and nothing says which one that was.
    """
    runs = dict.fromkeys(directory.parent for directory in _directories)
    for pattern in (name, "*_model.bin"):
        for run in runs:
            yield from sorted(run.glob(f"checkpoint-*/{pattern}"))


class Anchor:
    """The weights that files are stored against, decoded one at a time; `files` are all that reading them takes.

    An anchor may be a difference to another one, which lies beside it. Its file stays memory-mapped as long as this
    object lives. CorruptFileError: its digest, by default the one in its name, or its content is wrong, or it takes
    more than `most_files`. MissingAnchorError: the anchor that it is a difference to is not beside it, nor in a
    registered directory.
    """

    def __init__(self, path: str | Path, *, sha256: str | None = None, most_files: int = MOST_ANCHORS):
        self.path = Path(path).absolute()
        self.sha256 = verify_anchor(self.path, sha256)
        loaded = load_undecoded(self.path)
        self._structure = loaded.structure
        self._pieces = cut_payload(loaded.structure, loaded.payload)
        self._views = _views_by_name(loaded.structure, str(self.path))
        self._next = self._open_next(most_files)
        self.files: tuple[Path, ...] = (self.path, *(self._next.files if self._next else ()))

    def __contains__(self, name: object) -> bool:
        return name in self._views

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def stored_name(self, name: str) -> str:
        """Return the name that a tensor has in the file: its own."""
        return name

    def tensor(self, name: str) -> Tensor:
        """Decode one tensor to a new CPU tensor; CorruptFileError: there is none of that name, or it is damaged."""
        if name not in self._views:
            raise corrupt(str(self.path), f"an anchor that holds {name}", "others only")
        view = self._views[name]
        index = view["storage"]
        with torch.no_grad(), default_device_cpu():
            entry, following = self._structure["storages"][index], self._next
            references = following.references(entry) if following is not None and "anchor" in entry else {}
            storage = decode_storage(self._structure, index, self._pieces[index], references)
            return build_tensors([{**view, "storage": 0}], [storage])[0].detach()

    def _open_next(self, most_files: int) -> Anchor | None:
        """Open the anchor that this one is a difference to: each directory with a link to this one has a link to it."""
        if "anchor" not in self._structure:
            return None
        if most_files <= 1:
            raise corrupt(str(self.path), f"an anchor that takes at most {MOST_ANCHORS} files", "one that takes more")
        sha256 = self._structure["anchor"]["sha256"]
        beside = self.path.with_name(anchor_file_name(sha256))
        return Anchor(find_anchor(sha256, str(beside)), sha256=sha256, most_files=most_files - 1)

    def references(self, entry: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return what decoding a storage takes that is stored against this anchor, given its entry in the structure."""
        return OwnAnchor(anchor=self.tensor(entry["anchor"]).to(DTYPES[entry["dtype"]]))


def keep_open(path: Path, sha256: str) -> Anchor:
    """Return an anchor that `find_anchor` found, the same object until another one is asked for or a file changes.

    Each item of a sharded checkpoint asks for it, and opening one takes the longer the more weights it has. Meanwhile
    its bytes stay on the disk even if its last link goes. Windows removes no open file, so none is kept there.
    """
    global _kept
    kept = _kept  # another thread may keep another one meanwhile
    if kept is not None and kept[0].sha256 == sha256 and all(map(_is_unchanged, kept[0].files, kept[1])):
        return kept[0]
    anchor = Anchor(path, sha256=sha256)
    found = [os.stat(each) for each in anchor.files]
    is_settled = time.time() - max(each.st_mtime for each in found) > _SETTLED_SECONDS
    _kept = (anchor, found) if is_settled and os.name != "nt" else None
    return anchor


def _is_unchanged(path: Path, before: os.stat_result) -> bool:
    now = os.stat(path) if path.exists() else None
    return now is not None and os.path.samestat(now, before) and now.st_mtime_ns == before.st_mtime_ns


def _views_by_name(structure: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Return the views of a flat state dict, every one of them checked by building it on "meta"."""
    tree = unflatten(structure, empty_storages(structure))
    is_flat = isinstance(tree, dict) and all(isinstance(value, Tensor) for value in tree.values())
    if not is_flat or any("exp_avg_sq" in each for each in structure["storages"]):
        raise corrupt(where, "an anchor: one flat state dict of weights", "another file")
    items = next(iter(structure["tree"].values()))
    return {name: structure["tensors"][node["tensor"]] for name, node in items}
