"""What a Hub keeps: repositories with branches, commits and files, in memory; weights in Xet mode on the disk."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# What the Hub takes as large files by its default .gitattributes, as far as our pushes have them.
LARGE_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth"}


class ConflictError(Exception):
    """A commit was made since the one that this one was to follow."""


@dataclass(frozen=True)
class StoredFile:
    """A file of a commit: its bytes, or where Xet keeps them."""

    oid: str
    size_bytes: int
    content: bytes = b""
    sha256: str | None = None
    xet_hash: str | None = None

    @classmethod
    def of(cls, content: bytes) -> StoredFile:
        oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return cls(oid, len(content), content)

    @classmethod
    def in_xet(cls, sha256: str, size_bytes: int, xet_hash: str) -> StoredFile:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size_bytes}\n"
        return cls(cls.of(pointer.encode()).oid, size_bytes, b"", sha256, xet_hash)

    def to_dict(self, path: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": path, "oid": self.oid, "size": self.size_bytes}
        if self.xet_hash:
            entry["lfs"] = {"oid": self.sha256, "size": self.size_bytes, "pointerSize": 134}
            entry["xetHash"] = self.xet_hash
        return entry


@dataclass(frozen=True)
class Commit:
    sha: str
    title: str
    description: str
    files: dict[str, StoredFile]


@dataclass
class Repository:
    """One repository; `commits` in the order in which they were made."""

    name: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def find(self, revision: str) -> Commit | None:
        return self.commits.get(self.branches.get(revision, revision))

    def add(self, branch: str, title: str, description: str, files: dict[str, StoredFile]) -> Commit:
        state = json.dumps([self.name, title, len(self.commits), sorted((name, f.oid) for name, f in files.items())])
        commit = Commit(hashlib.sha1(state.encode()).hexdigest(), title, description, files)
        self.commits[commit.sha] = commit
        self.branches[branch] = commit.sha
        return commit

    def apply(self, branch: str, lines: bytes, xet: Path) -> Commit:
        """Make a commit from the lines that a client sends, one JSON object each."""
        head = self.commits[self.branches[branch]]
        files, title, description = dict(head.files), "", ""
        for operation in map(json.loads, lines.splitlines()):
            key, value = operation["key"], operation["value"]
            if key == "header":
                title, description = value["summary"], value.get("description", "")
                if value.get("parentCommit") not in (None, head.sha):
                    raise ConflictError
            elif key == "file":
                files[value["path"]] = StoredFile.of(base64.b64decode(value["content"]))
            elif key == "lfsFile":
                files[value["path"]] = StoredFile.in_xet(value["oid"], value["size"], find_xet_hash(xet, value["oid"]))
            elif key == "deletedFile":
                del files[value["path"]]
        return self.add(branch, title, description, files)


def find_xet_hash(xet: Path, sha256: str) -> str:
    """Return the Xet hash of a file that was uploaded to a `local://` store.

    A commit names files by SHA-256 alone. The shards that hf_xet 1.8 wrote list both: blocks of 48-byte records, a
    header with the Xet hash first and the SHA-256 last, each as four little-endian words.
    """
    wanted = struct.pack("<4Q", *(int(sha256[start : start + 16], 16) for start in range(0, 64, 16)))
    for shard in xet.rglob("*.mdb"):
        data = shard.read_bytes()
        found = data.find(wanted)
        position = 48
        while found > 0 and position + 48 <= len(data) and data[position : position + 32] != b"\xff" * 32:
            flags, segments = struct.unpack_from("<II", data, position + 32)
            records = 1 + segments * (2 if flags >> 31 else 1) + (flags >> 30 & 1)
            if position < found < position + 48 * records:
                return "".join(f"{word:016x}" for word in struct.unpack_from("<4Q", data, position))
            position += 48 * records
    raise KeyError(sha256)
