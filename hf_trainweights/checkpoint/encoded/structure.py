"""The one layout of an encoded file: a torch zip file that holds a single call and loads as plain tensors.

    data/0     the payload: the pieces that codecs wrote, each at a multiple of 16 bytes, 0 to 2 % padding
    data.pkl   decode_file(payload, structure)

The pickle's last text is `structure`. It begins with a SHA-256 in hexadecimal, so that no key, scalar or shape changes
unnoticed. The digest is that of the rest of the text, as it stands there in UTF-8. The rest is one JSON object:

    {"version": 1,
     "anchor": {"sha256": "...", "path": "/runs/a/checkpoint-5/<sha256>.anchor"},
     "tree": ..., "tensors": [...],
     "storages": [{"codec": "planes-delta", "dtype": "float32", "shape": [2, 2], "sizes": [123, 45],
                   "crc32": 1234567890, "params": {...}, "bound": 0.001, "anchor": "layers.0.weight"}, ...]}

tree.py describes `tree` and `tensors`. `sizes` are the lengths of a storage's pieces of the payload, in order, and
`crc32` is over their bytes. `bound` is the largest error of any element, in a unit that the class of the codec defines:
some errors are absolute, others relative. Rounding before a lossless codec counts, too. A storage without any error has
no `bound`. The other keys are left out if the codec has no use for them: `params`, and two that name decoded tensors:
`anchor`, a name in the anchor, and `exp_avg_sq`, a lower index in `storages`.

No byte of the text, or of the payload's length, is a full stop. Pickle takes a full stop for the end of the file, and a
flipped bit can make pickle look for an instruction in the text or the length. So in the text a middle dot (U+00B7)
replaces each full stop, and JSON escapes other middle dots. Zeros are appended to a payload until no byte of its length
is 46.

The weights of a file may be stored as differences from other weights, its anchor. An anchor is an encoded file of one
flat state dict. Readers find it by its digest (reader.py). Its own weights may be differences from an older anchor;
then both files lie in the same directory, in that of each checkpoint as links.

Instead of an anchor, a file may refer to a base: weights outside the run, as others wrote them. Then `anchor` has one
more key, `base`. In such an `anchor`, `sha256` is that of the text that `sha256sum` prints for all files of the base,
and `path` leads to a directory that may keep these files under their own digests. A storage's `anchor` is a name in
these files:

    "base": {"files": {"model.safetensors": "<sha256>"},
             "repository": "sentence-transformers/all-MiniLM-L6-v2",
             "commit": "<40 hexadecimal digits>"}

A base that is not in the Hub's cache has `path` instead of `repository` and `commit`: the directory where it lay, for
people to read. A reader never opens it.

A file may refer to several anchors, none of which has a name of another one's: each rank writes one of its own. Then
`anchor` has the key `parts`, their digests. `sha256` is that of the text with one of them a line, and `path` leads to
the directory of the anchors.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from zlib_ng import zlib_ng

from hf_trainweights.checkpoint.codecs import CODECS
from hf_trainweights.checkpoint.codecs.base import Json
from hf_trainweights.checkpoint.encoded.tree import (
    DTYPES,
    MAPPING_TYPES,
    MAX_DEPTH,
    KeyPath,
    corrupt,
    path_text,
    require_sizes,
)
from hf_trainweights.errors import CorruptFileError
from hf_trainweights.files.reading import is_safe_name, is_sha256

VERSION = 1
ANCHOR_SUFFIX = ".anchor"
"""The name of an anchor is its SHA-256, in hexadecimal, and this suffix."""
# The itemsize of complex128, the largest dtype: a codec may view its piece as any dtype.
ALIGNMENT_BYTES = 16

# Codecs make zeros smaller by a factor of at most 19,000. A storage that claims a larger factor lies about a size.
_MAX_EXPANSION = 1 << 16
_MIN_DECODED_BYTES = 1 << 16
# How the pickle in an encoded file begins: the name of `decode_file`, which never changes.
DECODE_CALL = b"\x80\x02chf_trainweights\ndecode_file\n"

_FULL_STOP = "\u00b7"

_COMMIT = re.compile(r"[0-9a-f]{40}")
# The Hub's own rule, with at most one slash. It refuses names that are or begin with a full stop.
_REPOSITORY = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]{0,95}/)?[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
_SUFFIXES = (".safetensors", ".bin")


def seal_structure(content: Mapping[str, Any]) -> str:
    """Return the text that the module docstring specifies: digest and JSON, without a full stop."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).replace(".", _FULL_STOP)
    return hashlib.sha256(text.encode()).hexdigest() + text


def padded_length(length: int) -> int:
    """Return the smallest length of a payload, >= `length`, no byte of which is 46, a full stop."""
    for shift in range(56, -8, -8):
        if length >> shift & 0xFF == ord("."):
            return (length >> shift) + 1 << shift
    return length


def open_structure(text: object) -> dict[str, Any]:
    """Read a structure, and check all of it except `tree` and `tensors`, which `unflatten` checks.

    CorruptFileError: the digest is wrong, or this version does not write such content.
    """
    if type(text) is not str:
        raise corrupt("the structure", "a text", type(text))
    digest, rest = text[:64], text[64:]
    actual_digest = hashlib.sha256(rest.encode("utf-8", "surrogatepass")).hexdigest()
    if actual_digest != digest:
        raise corrupt("the structure", f"SHA-256 {digest}", actual_digest)
    try:
        structure = json.loads(rest.replace(_FULL_STOP, "."))
    except (ValueError, RecursionError) as error:
        raise corrupt("the structure", "JSON", error) from error
    version = structure.get("version") if type(structure) is dict else None
    if version != VERSION:
        next_step = "Upgrade hf_trainweights if the file is newer, else restore it from a copy."
        raise CorruptFileError("the structure", f"version {VERSION}", repr(version)[:80], next_step)
    if type(structure.get("storages")) is not list:
        raise corrupt("the storages", "a list", structure.get("storages"))
    if "anchor" in structure:
        _check_anchor(structure["anchor"])
    for index, entry in enumerate(structure["storages"]):
        try:
            _check_storage(entry, index, "anchor" in structure)
        except CorruptFileError as error:
            where = f"{storage_name(structure, index)}, {error.where}"
            raise CorruptFileError(where, error.expected, error.found, error.next_step) from None
    return structure


def _check_anchor(anchor: Any) -> None:
    if type(anchor) is not dict or type(anchor.get("path")) is not str:
        raise corrupt("the anchor", "a digest and a path", anchor)
    sha256, path = anchor.get("sha256"), anchor["path"]
    if not is_sha256(sha256):
        raise corrupt("the anchor", "a SHA-256 in hexadecimal", sha256)
    parts = path.replace("\\", "/").split("/")
    if parts[-1] != anchor_file_name(sha256) or ".." in parts or "\0" in path:
        raise corrupt("the anchor's path", f"one without `..` that ends in {anchor_file_name(sha256)}", path)
    parts = anchor.get("parts")
    if "parts" in anchor and not (type(parts) is list and all(map(is_sha256, parts)) and parts_sha256(parts) == sha256):
        raise corrupt("the anchor's parts", f"anchors of the digest {sha256}", parts)
    base = Base.from_dict("the anchor's base", anchor["base"]) if "base" in anchor else None
    if base is not None and base.sha256 != sha256:
        raise corrupt("the anchor's base", f"files of the digest {sha256}", base.sha256)


def _check_storage(entry: Any, index: int, has_anchor: bool) -> None:
    if type(entry) is not dict or type(entry.get("codec")) is not str or type(entry.get("dtype")) is not str:
        raise corrupt("its storage", "a codec and a dtype", entry)
    if entry["codec"] not in CODECS:
        next_step = (
            "Upgrade hf_trainweights if the file is newer, import the package that registers the codec, or restore the "
            "file from a copy."
        )
        raise CorruptFileError("codec", ", ".join(CODECS), entry["codec"][:80], next_step)
    if entry["dtype"] not in DTYPES:
        raise corrupt("dtype", ", ".join(DTYPES), entry["dtype"])
    stored_bytes = sum(require_sizes("sizes", entry.get("sizes")))
    require_sizes("shape", entry.get("shape"))
    if decoded_bytes(entry) > max(stored_bytes * _MAX_EXPANSION, _MIN_DECODED_BYTES):
        raise corrupt("shape", f"no more than {stored_bytes} stored bytes can hold", entry["shape"])
    if type(entry.get("crc32")) is not int or type(entry.get("params", {})) is not dict:
        raise corrupt("its storage", "a crc32 and parameters", entry)
    bound = entry.get("bound", 0.0)
    if type(bound) not in (int, float) or not 0 <= bound <= sys.float_info.max:
        raise corrupt("bound", "a finite number of at least 0", bound)
    if "anchor" in entry and not (has_anchor and type(entry["anchor"]) is str):
        raise corrupt("anchor", "a name in the file's anchor", entry["anchor"])
    if "exp_avg_sq" in entry and not (type(entry["exp_avg_sq"]) is int and 0 <= entry["exp_avg_sq"] < index):
        raise corrupt("exp_avg_sq", f"a storage below {index}", entry["exp_avg_sq"])


@dataclass(frozen=True)
class TensorReport:
    """How one tensor was stored. Tied tensors, and views of the same memory, count as one.

    `path` is the key path of the first of them, e.g. `state.0.exp_avg`. `name` is its parameter's name if the plan has
    one, else the path. `bound` is the largest error of a decoded element in the codec's unit, None for an exact tensor.
    """

    path: str
    name: str
    role: str
    codec: str
    params: dict[str, Json]
    bound: float | None
    bytes_in: int
    bytes_out: int

    @classmethod
    def of(cls, entry: Mapping[str, Any], path: str, name: str, role: str) -> TensorReport:
        """Return the report on a storage, given its entry in a structure, and name and role from its plan."""
        codec, params, bound = entry["codec"], entry.get("params", {}), entry.get("bound")
        return cls(path, name, role, codec, params, bound, decoded_bytes(entry), sum(entry["sizes"]))


def decoded_bytes(entry: Mapping[str, Any]) -> int:
    """Return the size of a decoded storage, given its entry in a structure."""
    return math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize


def cut_payload(structure: Mapping[str, Any], payload: Tensor) -> list[list[Tensor]]:
    """Cut a payload into the pieces of each storage, 1-D uint8 views; CorruptFileError: lengths do not fit."""
    pieces: list[list[Tensor]] = []
    stop = 0
    for index, entry in enumerate(structure["storages"]):
        pieces.append([])
        for size in entry["sizes"]:
            start = stop + -stop % ALIGNMENT_BYTES
            stop = start + size
            if stop > len(payload):
                where = f"{storage_name(structure, index)}, from byte {start} of the payload on"
                raise corrupt(where, f"{size} bytes", f"{max(len(payload) - start, 0)} bytes")
            pieces[-1].append(payload[start:stop])
    if len(payload) != padded_length(stop):
        raise corrupt("the payload", f"{padded_length(stop)} bytes", f"{len(payload)} bytes")
    return pieces


def payload_crc32(pieces: Iterable[Tensor]) -> int:
    """Return the CRC-32 of the bytes of 1-D uint8 CPU tensors, one after the other."""
    value = 0
    for piece in pieces:
        value = zlib_ng.crc32(piece.numpy().data, value)
    return value


def empty_storages(structure: Mapping[str, Any]) -> list[Tensor]:
    """Return a tensor on "meta" for each storage, of its shape and dtype."""
    entries = structure["storages"]
    return [torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device="meta") for entry in entries]


def anchor_file_name(sha256: str) -> str:
    """Return the name of the anchor with this digest."""
    return f"{sha256}{ANCHOR_SUFFIX}"


def parts_sha256(digests: Iterable[str]) -> str:
    """Return the digest of several anchors together: that of their digests, one a line."""
    return hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()


def storage_name(structure: Mapping[str, Any], index: int) -> str:
    """Return the name of a storage in messages, e.g. `tensor state.0.exp_avg`, or `storage 3` if no tensor views it."""
    path = storage_paths(structure).get(index)
    return f"storage {index}" if path is None else f"tensor {path_text(path)}"


def storage_paths(structure: Mapping[str, Any]) -> dict[int, KeyPath]:
    """Return the key path of the first tensor that views a storage, by its number; `structure` may be malformed."""
    views = structure.get("tensors")
    table = dict(enumerate(views)) if type(views) is list else {}
    paths: dict[int, KeyPath] = {}
    for tensor, path in _tensor_paths(structure.get("tree"), ()):
        view = table.get(tensor) if type(tensor) is int else None
        # A tensor of several storages names them by `joined` (tree.py).
        numbers = (view.get("joined") or [view.get("storage")]) if type(view) is dict else ()
        for number in numbers if type(numbers) is list else ():
            if type(number) is int:
                paths.setdefault(number, path)
    return paths


def _tensor_paths(node: Any, path: KeyPath) -> Iterator[tuple[Any, KeyPath]]:
    kind, content = next(iter(node.items()), (None, None)) if type(node) is dict else ("tuple", node)
    if kind == "tensor":
        yield content, path
    if type(content) is not list or len(path) >= MAX_DEPTH:
        return
    for index, item in enumerate(content):
        if kind == "tuple":
            yield from _tensor_paths(item, (*path, index))
        elif kind in MAPPING_TYPES and type(item) is list and len(item) == 2:
            yield from _tensor_paths(item[1], (*path, item[0]))


@dataclass(frozen=True)
class Base:
    """Weights outside a run that its checkpoints are stored against. `files` has the SHA-256 of each file by name.

    Weights of the Hub have a repository and a commit of 40 hexadecimal digits. Others have the path of the directory
    where they lay, which errors show and no reader opens.
    """

    files: Mapping[str, str]
    repository: str | None = None
    commit: str | None = None
    path: str | None = None

    @property
    def sha256(self) -> str:
        """The digest of all files together: that of the text that `sha256sum` prints for them, sorted by name."""
        lines = (f"{sha256}  {name}\n" for name, sha256 in sorted(self.files.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @property
    def next_step(self) -> str:
        """The advice in an error if a file of the base is missing or has changed."""
        if self.repository is not None:
            return f"Download it: hf download {self.repository} --revision {self.commit}"
        return (
            "Put the same files there again and call hf_trainweights.checkpoint.register_base with their directory, or "
            "pass --base on the command line."
        )

    def __str__(self) -> str:
        return f"weights of {self.path}" if self.repository is None else f"{self.repository} at commit {self.commit}"

    def to_dict(self) -> dict[str, Any]:
        """Return the base as JSON, without fields that are None."""
        return {key: dict(value) if key == "files" else value for key, value in vars(self).items() if value is not None}

    @classmethod
    def from_dict(cls, where: str, value: object) -> Base:
        """Read JSON that `to_dict` returned, or check JSON that anyone wrote; CorruptFileError begins with `where`."""
        if not isinstance(value, Mapping) or not value.keys() <= {"files", "repository", "commit", "path"}:
            raise corrupt(where, "the files, repository and commit, or path, of a base", value)
        files, repository, commit, path = (value.get(key) for key in ("files", "repository", "commit", "path"))
        if not isinstance(files, Mapping) or not files or not all(map(_is_file, files, files.values())):
            raise corrupt(f"{where}, its files", "names of .safetensors or .bin files and their SHA-256", files)
        if path is None and is_repository(repository, commit):
            return cls(dict(files), repository, commit)
        if type(path) is str and repository is None and commit is None:
            return cls(dict(files), path=path)
        origin = {key: field for key, field in value.items() if key != "files"}
        raise corrupt(where, "a repository and a commit of 40 hexadecimal digits, or a path", origin)


def is_repository(name: object, commit: object) -> bool:
    """Return whether `name` can be a repository on the Hub, and `commit` the digest of a commit in it."""
    if type(name) is not str or type(commit) is not str or ".." in name:
        return False
    return bool(_REPOSITORY.fullmatch(name) and _COMMIT.fullmatch(commit))


def _is_file(name: object, sha256: object) -> bool:
    is_name = type(name) is str and "/" not in name and is_safe_name(name) and name.endswith(_SUFFIXES)
    return is_name and is_sha256(sha256)
