"""`trainweights.json` lists the files of a checkpoint directory with digests, so that readers find damage before use.

The manifest is one JSON object that contains its own digest, see `files.reading`:

    {
      "anchor": null,
      "created": "2026-01-31T12:00:00+00:00",
      "epoch": 1.5,
      "files": {"pytorch_model.bin": {"report": {...}, "sha256": "...", "size_bytes": 123}, ...},
      "format": "trainweights-checkpoint",
      "format_version": 1,
      "metadata": {},
      "metrics": {"loss": 2.5},
      "mode": "lossless",
      "package_version": "...",
      "sha256": "...",
      "step": 100,
      "torch_version": "..."
    }

A file that was rounded stays rounded when it is encoded once more without a loss, and when it is restored. So errors
are in two places: the file's report has the errors of its last encoding, and the optional key `rounded_before` has the
errors from before: file name to role to the largest error of an element. A sharded checkpoint has the optional key
`sharded` (dcp/metadata.py). If weights are stored against a base, weights outside the run, the optional key `base`
names it (encoded/structure.py). Numbers that are not finite stand as `NaN` and `Infinity`, as Python's json writes
them. File names are relative, never absolute. Their parts are joined by `/`, no part is `..`, and readers follow no
links.

Readers check types and ranges as well: a right digest proves that the text is intact, not that it makes sense.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hf_trainweights.checkpoint.encoded.structure import Base, anchor_file_name
from hf_trainweights.checkpoint.encoded.tree import MAX_DEPTH
from hf_trainweights.checkpoint.planning.policy import MODES
from hf_trainweights.errors import ConfigError, CorruptFileError, SaveError
from hf_trainweights.files.atomic import replace_file
from hf_trainweights.files.reading import is_safe_name, is_sha256, is_signed, read_chunks, sign_json

MANIFEST_NAME = "trainweights.json"

_FORMAT = "trainweights-checkpoint"
_FORMAT_VERSION = 1
# Keys that are left out if they are empty.
_OPTIONAL = ("rounded_before", "sharded", "base")
_MAX_MANIFEST_BYTES = 1 << 30  # 500 to 600 bytes a tensor; a 70B model with AdamW has up to 1.3 MB on each rank

PLAIN_MODE = "plain"

# Modes from the one that rounds least to the one that rounds most.
_RANKS = {mode: rank for rank, mode in enumerate((PLAIN_MODE, *MODES))}


_OR_NULL = ", or null"
# The kinds of fields, as errors name them, and a check of a value. File systems count bytes in 64 bits with a sign.
_KINDS: dict[str, Callable[[Any], bool]] = {
    "a text": lambda value: type(value) is str,
    "an object": lambda value: type(value) is dict,
    "a list": lambda value: type(value) is list,
    "an integer": lambda value: type(value) is int,
    "an integer of at least 1": lambda value: type(value) is int and value >= 1,
    "a number": lambda value: type(value) in (int, float),
    "a finite number": lambda value: type(value) in (int, float) and abs(value) <= sys.float_info.max,
    "a finite number of at least 0": lambda value: type(value) in (int, float) and 0 <= value <= sys.float_info.max,
    "a number of bytes": lambda value: type(value) is int and 0 <= value < 1 << 63,
    "a SHA-256 in hexadecimal": is_sha256,
}

_MANIFEST = {
    "files": "an object",
    "mode": "a text",
    "step": "an integer, or null",
    "epoch": "a number, or null",
    "metrics": "an object",
    "metadata": "an object",
    "anchor": "an object, or null",
    "created": "a text",
    "package_version": "a text",
    "torch_version": "a text",
}
_FILE = {"size_bytes": "a number of bytes", "sha256": "a SHA-256 in hexadecimal", "report": "an object"}
_REPORT = {"anchor": "a SHA-256 in hexadecimal, or null", "tensors": "a list"}
_TENSOR = {
    "path": "a text",
    "name": "a text",
    "role": "a text",
    "codec": "a text",
    "params": "an object",
    "bound": "a finite number of at least 0, or null",
    "bytes_in": "a number of bytes",
    "bytes_out": "a number of bytes",
}


def require_fields(where: str, value: object, kinds: Mapping[str, str]) -> Mapping[str, Any]:
    """Return JSON that is an object with fields of these kinds, and maybe others; CorruptFileError: it is not."""
    if not isinstance(value, Mapping):
        raise _corrupt(where, "an object", repr(value))
    for name, kind in kinds.items():
        if name not in value:
            raise _corrupt(f"{where}.{name}", kind, "nothing")
        if not _fits(value[name], kind):
            raise _corrupt(f"{where}.{name}", kind, repr(value[name]))
    return value


def require_amounts(where: str, amounts: object) -> None:
    """Check that JSON is an object whose values are finite numbers of at least 0; else CorruptFileError."""
    kind = "a finite number of at least 0"
    for name, amount in require_fields(where, amounts, {}).items():
        if not _fits(amount, kind):
            raise _corrupt(f"{where}[{name!r}]", kind, repr(amount))


def _fits(value: object, kind: str) -> bool:
    return (value is None and kind.endswith(_OR_NULL)) or _KINDS[kind.removesuffix(_OR_NULL)](value)


def _corrupt(where: object, expected: str, found: str) -> CorruptFileError:
    next_step = "Use another checkpoint, or restore this one from a copy."
    return CorruptFileError(str(where)[:300], expected, found[:200], next_step)


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint.

    Args:
        size_bytes: Its length.
        sha256: Its digest, 64 hexadecimal digits.
        report: For an encoded file `{"tensors": [...], "anchor": sha256 or None}`, with codec, parameters, error bound,
            bytes in and out of each tensor. Empty for a file stored as it is.
    """

    size_bytes: int
    sha256: str
    report: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plain_bytes(self) -> int:
        """The size that the file would have without encoding."""
        tensors = self.report.get("tensors")
        return self.size_bytes if tensors is None else sum(tensor["bytes_in"] for tensor in tensors)


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint directory.

    Args:
        files: Relative file name to its entry.
        mode: How the checkpoint was stored: a mode of the policy, or "plain" for files without any encoding.
        step: Finished steps, or None if unknown.
        epoch: Finished epochs, with a fraction for the current one, or None if unknown.
        metrics: Metrics that the caller logged. JSON; NaN and infinities are allowed.
        metadata: Anything else worth keeping. JSON.
        anchor: State of the anchor that later checkpoints may be stored against, see `AnchorRecord`.
        rounded_before: By file name and role, the largest error of an element from before the file's last encoding.
            The file lacks the key if there was no such rounding.
        sharded: Content of a sharded checkpoint beside its files, see dcp/metadata.py. Others lack the key.
        base: The weights outside the run that `anchor` refers to. Checkpoints without a base lack the key.
        created: Time of writing, ISO 8601 with a time zone.
        package_version: Version of hf_trainweights that wrote it.
        torch_version: Version of torch that wrote it.
    """

    files: dict[str, FileEntry]
    mode: str
    step: int | None = None
    epoch: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    anchor: Mapping[str, Any] | None = None
    rounded_before: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sharded: Mapping[str, Any] = field(default_factory=dict)
    base: Base | None = None
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    package_version: str = field(default_factory=lambda: version("hf_trainweights"))
    torch_version: str = field(default_factory=lambda: str(torch.__version__))

    @property
    def keeps_base(self) -> bool:
        """Whether the directory has the files of `base`, so that reading it takes no files outside."""
        if self.base is None:
            return False
        return all(anchor_file_name(sha256) in self.files for sha256 in self.base.files.values())

    def to_bytes(self) -> bytes:
        """Return the text of the manifest file.

        ConfigError: JSON cannot hold metrics or metadata, or readers would refuse step or epoch.
        """
        require_progress(self.step, self.epoch)
        for name in ("metrics", "metadata"):
            require_json(getattr(self, name), name)
        fields = {name: value for name, value in vars(self).items() if name not in _OPTIONAL or value}
        if self.base is not None:
            fields["base"] = self.base.to_dict()
        return sign_json({"format": _FORMAT, "format_version": _FORMAT_VERSION, **fields})


def require_progress(step: object, epoch: object = None) -> None:
    """Check step and epoch before they are written, as readers will; ConfigError names the wrong one."""
    for name, value in {"step": step, "epoch": epoch}.items():
        if not _fits(value, _MANIFEST[name]):
            next_step = f"Turn it into a number of Python's, or leave {name} out."
            raise ConfigError(name, _MANIFEST[name].replace("null", "None"), repr(value)[:80], next_step)


def require_json(value: object, where: str, levels: int = MAX_DEPTH) -> None:
    """Check that a value survives JSON; a ConfigError names the key, from `where` on.

    Lists and dicts may be nested `levels` deep, which also excludes a list or dict that contains itself.
    """
    if value is None or isinstance(value, str | int | float | bool):
        return
    if levels == 0:
        problem = "deeper ones, or one within itself"
        raise ConfigError(where, f"lists and dicts nested at most {MAX_DEPTH} deep", problem, "Flatten them.")
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            require_json(item, f"{where}[{index}]", levels - 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(where, "strings as keys", repr(key), "Turn the key into a string.")
            require_json(item, f"{where}[{key!r}]", levels - 1)
    else:
        expected = "a string, number, bool, None, list or dict"
        raise ConfigError(where, expected, type(value).__name__, "Turn it into one of these first.")


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `trainweights.json`, durably and in one step; all files that it lists must be durable already.

    SaveError: it is longer than readers allow.
    """
    path, content = directory / MANIFEST_NAME, manifest.to_bytes()
    if len(content) > _MAX_MANIFEST_BYTES:
        next_step = "Save fewer tensors, or the same ones on fewer ranks."
        raise SaveError(str(path), f"at most {_MAX_MANIFEST_BYTES} bytes", f"{len(content)} bytes", next_step)
    with replace_file(path) as file:
        file.write(content)


def read_manifest(directory: str | Path) -> Manifest:
    """Read and check `trainweights.json`, not the files that it lists. Their names are safe to append to `directory`.

    CorruptFileError names the key whose value has a wrong type or range. FileNotFoundError: there is no manifest.
    """
    path = Path(directory) / MANIFEST_NAME
    if path.lstat().st_size > _MAX_MANIFEST_BYTES:
        raise _corrupt(path, f"at most {_MAX_MANIFEST_BYTES} bytes", f"{path.lstat().st_size} bytes")
    content = b"".join(read_chunks(path))
    try:
        value = json.loads(content)
        is_intact, kind = is_signed(content, value), (value.get("format"), value.get("format_version"))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _corrupt(path, "a manifest", f"{type(error).__name__}: {error}") from error
    if not is_intact:
        raise _corrupt(path, "the text and digest that were written", "something else")
    if kind != (_FORMAT, _FORMAT_VERSION):
        raise _corrupt(path, f"{_FORMAT!r} version {_FORMAT_VERSION}", f"{kind[0]!r} version {kind[1]!r}")
    try:
        return _parse(value)
    except CorruptFileError as error:
        raise CorruptFileError(f"{path}, {error.where}", error.expected, error.found, error.next_step) from error


def _parse(value: dict[str, Any]) -> Manifest:
    require_fields("the manifest", value, _MANIFEST)
    files = {}
    for name, entry in value["files"].items():
        if not is_safe_name(name):
            raise _corrupt("files", "relative file names inside the directory", repr(name))
        where = f"files[{name!r}]"
        require_fields(where, entry, _FILE)
        if entry["report"]:  # it is empty for a file stored as it is
            report = require_fields(f"{where}.report", entry["report"], _REPORT)
            for index, tensor in enumerate(report["tensors"]):
                require_fields(f"{where}.report.tensors[{index}]", tensor, _TENSOR)
        files[name] = FileEntry(entry["size_bytes"], entry["sha256"], entry["report"])
    rounded_before = require_fields("rounded_before", value.get("rounded_before", {}), {})
    for name, amounts in rounded_before.items():
        require_amounts(f"rounded_before[{name!r}]", amounts)
    sharded = require_fields("sharded", value.get("sharded", {}), {})
    base = Base.from_dict("base", value["base"]) if "base" in value else None
    fields = {name: value[name] for name in _MANIFEST}
    return Manifest(**{**fields, "files": files, "rounded_before": rounded_before, "sharded": sharded, "base": base})


def reported_rounding(report: Mapping[str, Any]) -> dict[str, float]:
    """Return by role the largest error from encoding a file, in the codec's unit; exact roles have no entry."""
    largest: dict[str, float] = {}
    for tensor in report.get("tensors", ()):
        if tensor["bound"]:
            largest[tensor["role"]] = max(tensor["bound"], largest.get(tensor["role"], 0.0))
    return largest


def add_rounding(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Return the largest errors by role of values that were rounded twice: the sums."""
    return {role: first.get(role, 0.0) + second.get(role, 0.0) for role in {**first, **second}}


def total_rounding(manifest: Manifest) -> dict[str, float]:
    """Return by role the largest error of an element of a checkpoint, from all roundings; exact roles have no entry."""
    totals: dict[str, float] = {}
    for name, entry in manifest.files.items():
        bounds = add_rounding(manifest.rounded_before.get(name, {}), reported_rounding(entry.report))
        for role, bound in bounds.items():
            totals[role] = max(bound, totals.get(role, 0.0))
    return totals


def with_earlier_rounding(manifest: Manifest, previous: Manifest | None, encoded: Collection[str]) -> Manifest:
    """Carry the rounding that the previous manifest records into a new one, as `rounded_before` and mode.

    `encoded` are the files that were encoded since the previous manifest: `rounded_before` gets the errors of their old
    reports. If a file that was not encoded since had been rounded, the new mode is the lossier one of both manifests,
    or that of the previous one if no file was encoded.
    """
    if previous is None:
        return manifest
    before: dict[str, dict[str, float]] = {}
    mode = manifest.mode
    for name in previous.files.keys() & manifest.files.keys():
        reported = reported_rounding(previous.files[name].report)
        if bounds := add_rounding(previous.rounded_before.get(name, {}), reported if name in encoded else {}):
            before[name] = bounds
        if reported and name not in encoded:
            mode = lossiest([mode, previous.mode]) if encoded else previous.mode
    return replace(manifest, mode=mode, rounded_before=before)


def lossiest(modes: Iterable[str]) -> str:
    """Return the mode that may round most. Unknown modes count as rounding most of all."""
    return max(modes, key=lambda mode: _RANKS.get(mode, len(_RANKS)))


def shown_mode(manifest: Manifest) -> str:
    """Return the mode of a checkpoint as people read it, e.g. `lossless (weights off by up to 1.1e-03)`."""
    totals, is_exact_mode = total_rounding(manifest), manifest.mode in (PLAIN_MODE, MODES[0])
    if not totals or not (is_exact_mode or manifest.rounded_before):
        return manifest.mode
    weights = totals.get("weight")
    rounding = "optimizer states rounded" if weights is None else f"weights off by up to {weights:.1e}"
    return f"{manifest.mode} ({rounding})"
