"""`Base`: which weights outside a run its checkpoints are stored against; as JSON, checked before it is believed.

    {"files": {"model.safetensors": "<sha256>"},
     "repository": "sentence-transformers/all-MiniLM-L6-v2",
     "commit": "<40 hexadecimal digits>"}

Weights that are not in the Hub's cache have `path` in the place of the last two: where they lay, for people to read. A
reader never opens it (base_weights.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_trainweights.checkpoint.encoded.storages import corrupt
from hf_trainweights.files.reading import is_safe_name, is_sha256

_COMMIT = re.compile(r"[0-9a-f]{40}")
# The Hub's own rule, with at most one slash; it allows no name that is or begins with a full stop.
_REPOSITORY = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]{0,95}/)?[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
_SUFFIXES = (".safetensors", ".bin")


@dataclass(frozen=True)
class Base:
    """Weights outside a run that its checkpoints are stored against: SHA-256 by name of each file of weights.

    Weights of the Hub have a repository and a commit of 40 hexadecimal digits. Others have the path where they lay,
    which is shown in errors and never opened.
    """

    files: Mapping[str, str]
    repository: str | None = None
    commit: str | None = None
    path: str | None = None

    @property
    def sha256(self) -> str:
        """The digest of all files together: of the text that `sha256sum` prints, sorted by name."""
        lines = (f"{sha256}  {name}\n" for name, sha256 in sorted(self.files.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @property
    def next_step(self) -> str:
        """What a reader should do where it is not found, or has changed."""
        if self.repository is not None:
            return f"Download it: hf download {self.repository} --revision {self.commit}"
        return (
            "Put the same files there again and call hf_trainweights.checkpoint.register_base with their directory, or "
            "pass --base on the command line."
        )

    def __str__(self) -> str:
        return f"weights of {self.path}" if self.repository is None else f"{self.repository} at commit {self.commit}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON, without what is None."""
        return {key: dict(value) if key == "files" else value for key, value in vars(self).items() if value is not None}

    @classmethod
    def from_dict(cls, where: str, value: object) -> Base:
        """Read what `to_dict` returned, or anything that pretends to be it; CorruptFileError says where it is wrong."""
        if not isinstance(value, Mapping) or not value.keys() <= {"files", "repository", "commit", "path"}:
            raise corrupt(where, "the files, repository and commit, or path, of a base", value)
        files, repository, commit, path = (value.get(key) for key in ("files", "repository", "commit", "path"))
        if not isinstance(files, Mapping) or not files or not all(map(_is_file, files, files.values())):
            raise corrupt(f"{where}, its files", "names of .safetensors or .bin files and their SHA-256", files)
        if path is None and is_repository(repository, commit):
            return cls(dict(files), repository, commit)
        if type(path) is str and repository is None and commit is None:
            return cls(dict(files), path=path)
        found = {key: each for key, each in value.items() if key != "files"}
        raise corrupt(where, "a repository and a commit of 40 hexadecimal digits, or a path", found)


def is_repository(name: object, commit: object) -> bool:
    """Return whether these can be the name of a repository on the Hub, and a commit in it."""
    return _matches(_REPOSITORY, name) and ".." not in str(name) and _matches(_COMMIT, commit)


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return type(value) is str and pattern.fullmatch(value) is not None


def _is_file(name: object, sha256: object) -> bool:
    is_name = type(name) is str and "/" not in name and is_safe_name(name) and name.endswith(_SUFFIXES)
    return is_name and is_sha256(sha256)
