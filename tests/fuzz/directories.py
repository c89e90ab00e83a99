"""Directories as values: the contents of files by name, and what can lie in the place of a file."""

from __future__ import annotations

import os
import random
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

# Contents of a file, or one of SPECIAL.
Content = bytes | str
Tree = Mapping[str, Content]

SPECIAL = (
    *("missing", "directory", "fifo", "socket", "empty"),
    *("link:/dev/zero", "link:/etc/passwd", "link:nowhere", "link:.", "link:itself"),
)


def read_tree(directory: Path) -> dict[str, Content]:
    """Return the files below a directory."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def write_tree(directory: Path, tree: Tree) -> Path:
    """Put a tree in the place of whatever the directory holds, and return the directory."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for name, content in tree.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            _make_special(path, content)
    return directory


def put_special(rng: random.Random, tree: dict[str, Content], name: str) -> None:
    """Put something that is no file into the place of one."""
    tree[name] = rng.choice(SPECIAL)


def _make_special(path: Path, kind: str) -> None:
    if kind == "directory":
        path.mkdir()
        (path / "x").write_text("x")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))  # the address of a socket must be short
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind.startswith("link:"):
        target = kind.partition(":")[2]
        path.symlink_to(path.name if target == "itself" else target)
